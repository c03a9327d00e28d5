"""What `emulate` replaces in CuTe-DSL while it is active."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Protocol

from fa4.emulator.host import device
from fa4.emulator.host.arguments import SHIFT, TensorBook, array_allocation, aside, is_array
from fa4.emulator.host.dlpack import DeviceView

_MISSING = object()


class Target(Protocol):
    """What the redirected calls go to: a `Session`."""

    tensors: TensorBook

    def call(self, compiled: Any, args: Any, kwargs: Any) -> None:
        """Calls a compiled function."""

    def call_with_pointers(self, compiled: Any, pointers: Any, arguments: Any) -> None:
        """Calls it with marshalled arguments; `arguments` are the originals by name."""


@contextlib.contextmanager
def redirected(target: Target, arch: str) -> Iterator[None]:
    """Sends every call of a CuTe-DSL function to `target`; undoes all changes at the end."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            *_settings(arch),
            *_tensors(target),
            *_calls(target),
            *_hardware(),
            *_cuda_helpers(),
        ):
            stack.enter_context(replaced(owner, name, value))
        stack.enter_context(_keeping_ptx())
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of an object has another value inside."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


# Attributes to replace, as (owner, name, new value)
Replacements = Iterator[tuple[Any, str, Any]]


@lru_cache(maxsize=1)
def _ptx_folder() -> tempfile.TemporaryDirectory[str]:
    """One folder per process: its path is part of the key under which CuTe-DSL caches."""
    return tempfile.TemporaryDirectory(prefix="fa4-ptx-")


@contextlib.contextmanager
def _keeping_ptx() -> Iterator[None]:
    """Every compilation keeps its PTX.

    The options of `cute.compile` are one object for the whole process, so that what is set in it
    is set back.
    """
    from cutlass.base_dsl.compiler import CompileOptions, DumpDir, KeepPTX

    original = CompileOptions.apply_envar_settings
    changed: list[tuple[Any, Any]] = []

    def apply_envar_settings(self: Any, envar: Any, function_name: str) -> None:
        keep, folder = self.options[KeepPTX], self.options[DumpDir]
        changed.extend((option, option.value) for option in (keep, folder))
        keep.value = True
        folder.value = folder.value or _ptx_folder().name
        original(self, envar, function_name)

    with replaced(CompileOptions, "apply_envar_settings", apply_envar_settings):
        try:
            yield
        finally:
            for option, value in reversed(changed):
                option.value = value


def _settings(arch: str) -> Replacements:
    """Compilations are for `arch` and stay out of CuTe-DSL's cache on disk."""
    from cutlass.base_dsl.dsl import DSLSingletonMeta

    for dsl in DSLSingletonMeta._instances.values():
        yield dsl.envar, "_arch", arch
        yield dsl.envar, "disable_file_caching", True


def _tensors(target: Target) -> Replacements:
    """CPU arrays become CuTe tensors in the global address space."""
    from cutlass.cute import runtime

    original = runtime._Tensor.__init__

    def init(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        # torch's FakeTensor has no memory: it serves compilations only.
        if is_array(tensor) and type(tensor).__name__ != "FakeTensor":
            with aside():
                array_allocation("the tensor for from_dlpack", tensor)
                target.tensors.note(self, tensor)
                shift = target.tensors.shift_of(tensor)
            setattr(self, SHIFT, shift)
            tensor = DeviceView(tensor, shift=shift)
        original(self, tensor, *args, **kwargs)

    make_pointer = runtime._Pointer.__init__

    def init_pointer(self: Any, pointer: int, *args: Any, **kwargs: Any) -> None:
        make_pointer(self, target.tensors.seen_at(int(pointer)), *args, **kwargs)

    yield runtime._Tensor, "__init__", init
    yield runtime._Pointer, "__init__", init_pointer


def _calls(target: Target) -> Replacements:
    """Compiled functions and directly called `@cute.jit` functions run in the emulator."""
    from cutlass.base_dsl.dsl import BaseDSL
    from cutlass.base_dsl.jit_executor import JitCompiledFunction

    if importlib.util.find_spec("tvm_ffi") is not None:
        importlib.import_module("cutlass.cutlass_dsl.tvm_ffi_provider")
    direct: list[dict[str, Any]] = []
    generate = BaseDSL.generate_mlir

    def generate_mlir(self: Any, body: Any, *rest: Any, **kwargs: Any) -> Any:
        _, _, args, keyword_args, signature, *_ = rest
        direct.append(dict(zip(signature.parameters, args, strict=False)) | keyword_args)
        try:
            return generate(self, body, *rest, **kwargs)
        finally:
            direct.pop()

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        target.call(self, args, kwargs)

    def run_compiled_program(self: Any, pointers: Any) -> None:
        target.call_with_pointers(self, pointers, direct[-1] if direct else {})

    yield BaseDSL, "generate_mlir", generate_mlir
    for kind in _with_subclasses(JitCompiledFunction):
        yield kind, "__call__", call
        yield kind, "run_compiled_program", run_compiled_program
        yield kind, "to", lambda self, device=None: self


def _with_subclasses(kind: Any) -> list[Any]:
    return [kind, *(inner for sub in kind.__subclasses__() for inner in _with_subclasses(sub))]


def _hardware() -> Replacements:
    from cutlass.utils import HardwareInfo

    answers = {
        "__init__": lambda self, device_id=0: None,
        "get_max_active_clusters": lambda self, cluster_size, stream=None: (
            device.max_active_clusters(cluster_size)
        ),
        "get_l2_cache_size_in_bytes": lambda self: device.L2_BYTES,
        "get_device_multiprocessor_count": lambda self: device.MULTIPROCESSORS,
    }
    for name, answer in answers.items():
        yield HardwareInfo, name, answer


def _cuda_helpers() -> Replacements:
    """`cutlass.cuda`: contexts and streams without a driver; work is always finished."""
    import cuda.bindings.driver as driver
    from cutlass.base_dsl.runtime import cuda

    handles = itertools.count(1)
    answers = {
        "initialize_cuda_context": lambda device_id=0, flags=0: None,
        "context_destroy": lambda context: None,
        "stream_create": lambda id=0: driver.CUstream(next(handles)),
        "stream_sync": lambda stream: None,
        "stream_destroy": lambda stream: None,
        "get_driver_version": lambda: device.DRIVER_VERSION,
        "get_device_attribute": lambda attribute, device_id=0: device.device_attribute(
            int(attribute)
        ),
        "get_compute_capability_major_minor": lambda device_id=0: device.COMPUTE_CAPABILITY,
    }
    for name, answer in answers.items():
        yield cuda, name, answer
