"""Functions that CuTe-DSL exported with TVM-FFI's calling convention, run on the CPU.

cutlass is not needed for it: the object file, its PTX and TVM-FFI are enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from fa4.emulator.errors import LaunchError
from fa4.emulator.host.arguments import is_array, replace_leaves
from fa4.emulator.host.dlpack import KDL_CPU, KDL_CUDA, DeviceView
from fa4.emulator.host.program import HostProgram
from fa4.emulator.machine.launch_record import Launch


@runtime_checkable
class Exported(Protocol):
    """An exported function, of whatever class: `launch` takes anything that has these.

    host_object: the bytes that `export_to_c(path, function_name)` writes. ptx: of its kernels.
    parameters: names of the arguments, for messages.
    """

    @property
    def function_name(self) -> str:
        """The name it was exported under."""

    @property
    def host_object(self) -> bytes:
        """ELF object for this machine."""

    @property
    def ptx(self) -> str:
        """PTX text."""

    @property
    def parameters(self) -> Sequence[str]:
        """Argument names, in order."""


@dataclass(frozen=True)
class Export:
    """The parts of an exported function."""

    function_name: str
    host_object: bytes
    ptx: str
    parameters: Sequence[str] = ()


class ExportedProgram(HostProgram):
    """With TVM-FFI's calling convention: TVM-FFI hands over the arguments and checks them."""

    def __init__(self, exported: Exported) -> None:
        try:
            import tvm_ffi
        except ImportError:
            raise LaunchError(
                f"{exported.function_name} needs TVM-FFI: pip install apache-tvm-ffi"
            ) from None
        super().__init__(exported, exported.ptx, exported.host_object)
        entry = self._code.address(f"__tvm_ffi_{exported.function_name}")
        self._function = tvm_ffi.Function.__from_extern_c__(entry)
        self._names = list(exported.parameters)
        # Compiled from CPU tensors it accepts only these.
        on_gpu = b"device_type=cuda" in exported.host_object
        self._device = KDL_CUDA if on_gpu else KDL_CPU

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name, as far as they can be told; the call itself checks them."""
        positional = self._positional(args, kwargs)
        extra = [f"argument {index}" for index in range(len(self._names), len(positional))]
        return dict(zip([*self._names, *extra], positional, strict=False))

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Launch]:
        """Runs the host code through TVM-FFI, with all arrays on the device it expects."""
        return self._call_positional(self._positional(args, kwargs))

    def _call_positional(self, positional: Sequence[Any]) -> list[Launch]:
        converted = [replace_leaves("argument", value, self._as_ffi) for value in positional]
        self._begin()
        try:
            self._function(*converted)
        except Exception as error:
            if self._runtime.error is None:
                raise LaunchError(f"{self.name} refuses its arguments: {error}") from error
        return self._launches()

    def close(self) -> None:
        """Unloads the host code."""
        del self._function
        super().close()

    def _positional(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        if kwargs:
            raise LaunchError(f"{self.name} takes no keyword arguments: {', '.join(kwargs)}")
        return tuple(args)

    def _as_ffi(self, name: str, value: Any) -> Any:
        import tvm_ffi

        value = getattr(value, "_tvm_ffi_tensor", value)
        if is_array(value) or isinstance(value, tvm_ffi.Tensor):
            return tvm_ffi.from_dlpack(DeviceView(value, self._device, self.shift_of(value)))
        return value
