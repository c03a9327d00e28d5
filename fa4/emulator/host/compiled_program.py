"""What `cute.compile` returns, run on the CPU: arguments in, launches out."""

from __future__ import annotations

import ctypes as C
import inspect
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fa4.emulator.errors import LaunchError
from fa4.emulator.host.arguments import is_array, replace_leaves
from fa4.emulator.host.dlpack import DeviceView
from fa4.emulator.host.exported import Export, Exported, ExportedProgram
from fa4.emulator.host.program import HostProgram, readable_name
from fa4.emulator.host.runtime import I32, P
from fa4.emulator.machine.launch_record import Launch

_KEEP_PTX = (
    "compile it with cute.compile[cute.KeepPTX(True)](...), with options='--keep-ptx' or with "
    "CUTE_DSL_KEEP=ptx in the environment, or compile it inside fa4.emulator's emulate()"
)


def load(compiled: Any) -> HostProgram:
    """Prepares a compiled function. Raises LaunchError if it is not one or kept no PTX."""
    if isinstance(compiled, Exported):
        return ExportedProgram(compiled)
    from cutlass.base_dsl.jit_executor import JitCompiledFunction, JitExecutor

    if isinstance(compiled, JitExecutor):
        raise LaunchError("an executor bound to a GPU: pass the compiled function it came from")
    if not isinstance(compiled, JitCompiledFunction):
        raise LaunchError(
            f"{type(compiled).__name__} is not a compiled function; pass what cute.compile returns"
        )
    flavour = FfiProgram if type(compiled).__name__.startswith("TVMFFI") else PlainProgram
    return flavour(compiled)


class PlainProgram(HostProgram):
    """The ordinary flavour: CuTe-DSL turns arguments into pointers, then calls the host code."""

    _loaded = False

    def __init__(self, compiled: Any) -> None:
        ptx = _kept_ptx(compiled)
        if compiled.ir_module is None or compiled.engine is None:
            raise LaunchError(_no_host_code(compiled))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "host.o"
            compiled.engine.dump_to_object_file(str(path))
            super().__init__(compiled, ptx, path.read_bytes())
        # CuTe-DSL's own check of every argument, otherwise only done when debugging.
        compiled.execution_args._full_arg_check = True

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name. Raises LaunchError if they do not fit the signature."""
        signature: inspect.Signature = self.compiled.execution_args.signature
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            names = ", ".join(signature.parameters)
            raise LaunchError(f"{self.name} takes the arguments ({names}): {error}") from error
        bound.apply_defaults()
        absent = self._absent()
        for name, value in bound.arguments.items():
            if value is not None or name not in absent:
                self._check_kind(name, value, signature.parameters[name].annotation)
        return dict(bound.arguments)

    def _absent(self) -> set[str]:
        """Arguments that were None when the function was compiled, whatever their annotation."""
        execution_args = self.compiled.execution_args
        flags = getattr(execution_args, "_compiled_with_none", ())
        names = execution_args.signature.parameters
        return {name for name, flag in zip(names, flags, strict=False) if flag is True}

    def _check_kind(self, name: str, value: Any, annotation: Any) -> None:
        """A number where the host code expects a tensor or pointer would crash the process."""
        from cutlass.cute.typing import Pointer, Tensor

        if annotation is Tensor and not (isinstance(value, Tensor) or is_array(value)):
            raise LaunchError(f"{self.name}: {name} is a {type(value).__name__}, not a tensor")
        if annotation is Pointer and not isinstance(value, (Pointer, int, C.c_void_p, C._Pointer)):
            raise LaunchError(f"{self.name}: {name} is a {type(value).__name__}, not a pointer")
        if _is_stream_type(annotation) and not _is_stream(value):
            raise LaunchError(f"{self.name}: {name} is {value!r}, not a stream (cuda.CUstream)")

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Launch]:
        """Runs the host code with arguments that CuTe-DSL marshals."""
        converted = [replace_leaves("argument", value, self._as_cute) for value in args]
        named = {k: replace_leaves(k, value, self._as_cute) for k, value in kwargs.items()}
        try:
            pointers, alive = self.compiled.generate_execution_args(*converted, **named)
        except LaunchError:
            raise
        except Exception as error:
            raise LaunchError(f"{self.name} refuses its arguments: {error}") from error
        launches = self.call_with_pointers(pointers)
        del alive  # the pointers are into these
        return launches

    def _as_cute(self, name: str, value: Any) -> Any:
        """What CuTe-DSL itself would make of an array, but over any CPU memory."""
        from cutlass.cute.runtime import TensorAdapter

        if not is_array(value):
            return value
        return TensorAdapter(DeviceView(value, shift=self.shift_of(value)))

    def call_with_pointers(self, pointers: Sequence[Any]) -> list[Launch]:
        """The same with arguments that CuTe-DSL has turned into pointers already."""
        self._begin()
        if not self._loaded and self._code.defines("cuda_init"):
            library = P()
            self._code.call("cuda_init", C.addressof(library))
            self._code.call("cuda_load_to_device", C.addressof(library), I32(0))
            self._loaded = True
        status = I32(0)
        values = [p.value if isinstance(p, P) else C.c_void_p(p).value for p in pointers]
        packed = (P * (len(values) + 1))(*values, C.addressof(status))
        entry = self._code.address(f"_mlir__mlir_ciface_{self.compiled.function_name}")
        C.CFUNCTYPE(None, P)(entry)(C.addressof(packed))
        launches = self._launches()
        if status.value:
            raise LaunchError(f"{self.name}: the host code failed with CUDA error {status.value}")
        return launches


class FfiProgram(ExportedProgram):
    """Compiled with `--enable-tvm-ffi`: exported here, called with its keywords and defaults."""

    def __init__(self, compiled: Any) -> None:
        ptx = _kept_ptx(compiled)
        if compiled.ir_module is None:
            raise LaunchError(_no_host_code(compiled))
        from cutlass.cutlass_dsl import tvm_ffi_provider

        image: bytes = tvm_ffi_provider._aot_support.export_module_to_bytes(
            compiled.ir_module, format="o", opt_level=3, enable_pic=True
        )
        names = tuple(compiled.execution_args.signature.parameters)
        super().__init__(Export(compiled.function_name, image, ptx, names))
        self.compiled = compiled

    def _positional(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The compiled function's own binding of keywords and defaults, without its call."""
        wrapper = getattr(self.compiled, "_kwargs_wrapper", None)
        if wrapper is None:
            return super()._positional(args, kwargs)
        scope = {**wrapper.__globals__, "__i_target_func": lambda *values: values}
        bind = types.FunctionType(wrapper.__code__, scope, wrapper.__name__, wrapper.__defaults__)
        bind.__kwdefaults__ = wrapper.__kwdefaults__
        try:
            positional: tuple[Any, ...] = bind(*args, **kwargs)
        except TypeError as error:
            raise LaunchError(f"{self.name} refuses its arguments: {error}") from error
        return positional

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Launch]:
        """As exported programs do, with pointers as the numbers that TVM-FFI takes."""
        execution_args = self.compiled.execution_args
        if not execution_args.has_pointer_address_arg_specs:
            return super().call(args, kwargs)
        positional = self._positional(args, kwargs)
        converted, _ = execution_args.convert_python_pointer_args_for_tvm_ffi(positional, {})
        return self._call_positional(converted)


def _kept_ptx(compiled: Any) -> str:
    ptx = getattr(compiled.artifacts, "PTX", None) or ""
    if compiled.has_gpu_module and ".version" not in ptx:
        raise LaunchError(
            f"{readable_name(compiled.function_name)} was compiled without its PTX: {_KEEP_PTX}"
        )
    return ptx


def _no_host_code(compiled: Any) -> str:
    name = readable_name(compiled.function_name)
    return f"{name} has no host code for this machine: compile it here"


def _is_stream_type(annotation: Any) -> bool:
    return getattr(annotation, "__name__", "") in ("CUstream", "cudaStream_t")


def _is_stream(value: Any) -> bool:
    return _is_stream_type(type(value)) or hasattr(value, "__cuda_stream__")
