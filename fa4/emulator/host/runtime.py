"""The CUDA runtime as the compiled host code sees it: it records launches instead of making them.

CuTe-DSL compiles the host half of a program to an object file that reaches the driver through a
dozen thin functions (`_cudaLaunchKernelEx`, `_cudaLibraryLoadData`, ...). Each is bound here to a
method of `HostRuntime`, with the signature of the CUDA runtime function of that name.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable, Iterable
from typing import Any

from fa4.emulator.errors import LaunchError
from fa4.emulator.host.device import device_attribute
from fa4.emulator.host.launches import (
    I32,
    I64,
    LaunchConfig,
    P,
    find_kernel,
    read_attributes,
    read_launch,
    static_smem_bytes,
)
from fa4.emulator.host.tensor_maps import encode_tiled
from fa4.emulator.machine.launch_record import Launch

_FAILED = 999  # cudaErrorUnknown
_LIBRARY = 1  # the handle of the only library
_SHARED_SIZE_BYTES = 1  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES

# Symbol -> (method of HostRuntime, argument types, does it return a cudaError_t).
_SYMBOLS: dict[str, tuple[str, tuple[Any, ...], bool]] = {
    "_cudaGetDevice": ("_get_device", (P,), True),
    "_cudaSetDevice": ("_set_device", (I32,), True),
    "_cudaDeviceGetAttribute": ("_get_device_attribute", (P, I32, I32), True),
    "_cudaLibraryLoadData": ("_load_library", (P, P, P, P, I32, P, P, I32), True),
    "_cudaLibraryGetKernel": ("_get_kernel", (P, P, P), True),
    "_cuKernelGetAttribute": ("_get_kernel_attribute", (P, I32, P, I32), True),
    "_cudaFuncSetAttribute": ("_set_attribute", (P, I32, I32), True),
    "_cudaKernelSetAttributeForDevice": ("_set_attribute", (P, I32, I32, I32), True),
    "_cudaLaunchKernelEx": ("_launch_with_attributes", (P, P, P), True),
    "_cudaLaunchKernel": ("_launch", (P, *(I32,) * 6, P, I64, P), True),
    "_cuTensorMapEncodeTiled": ("_encode_map", (P, I32, I32, *(P,) * 5, *(I32,) * 4), True),
    "cuda_dialect_assert_success": ("_assert_success", (I32,), False),
    "cuda_dialect_init_library_once": ("_load_once", (P, P, P, P), True),
    "cuda_dialect_unload_library_once": ("_unload_once", (P,), False),
    "CuteDSLRT_TVMFFISetRaisedCudaError": ("_raise_in_tvm_ffi", (P, I32), False),
}


def _store(pointer: int, ctype: Any, value: int) -> None:
    ctype.from_address(pointer).value = value


class HostRuntime:
    """The runtime of one compiled host function; `launches` grows as the host code runs.

    The first exception inside a callback is kept in `error`: ctypes cannot raise it through the
    host code, which gets an error code instead. `stream`: handle of the current stream.
    """

    def __init__(self, ptx: str) -> None:
        self.ptx = ptx
        self.launches: list[Launch] = []
        self.error: BaseException | None = None
        self.stream = 0
        self._kernels: list[str] = []
        self._callbacks: list[Any] = []

    def addresses(self, symbols: Iterable[str]) -> dict[str, int]:
        """Addresses of callbacks for those symbols that belong to the CUDA runtime.

        Raises LaunchError naming the symbols of the runtime that are not provided.
        """
        names = sorted(symbols)
        runtime = [name for name in names if name.lstrip("_").startswith(("cu", "CuteDSLRT"))]
        if missing := [name for name in runtime if name not in _SYMBOLS]:
            raise LaunchError(
                f"the host code calls {', '.join(missing)}, which the emulator does not provide"
            )
        bound = {name: self._bind(*_SYMBOLS[name]) for name in runtime}
        if "TVMFFIEnvGetStream" in names:
            bound["TVMFFIEnvGetStream"] = self._callback(P, (I32, I32), lambda *_: self.stream)
        return bound

    def close(self) -> None:
        """Frees the callbacks; the host code must not run any more."""
        self._callbacks.clear()

    def _bind(self, method: str, arguments: tuple[Any, ...], returns_error: bool) -> int:
        handler = getattr(self, method)

        def guarded(*values: Any) -> int:
            try:
                handler(*(value or 0 for value in values))
            except BaseException as error:
                self.error = self.error or error
                return _FAILED
            return 0

        return self._callback(I32 if returns_error else None, arguments, guarded)

    def _callback(
        self, result: Any, arguments: tuple[Any, ...], function: Callable[..., Any]
    ) -> int:
        callback = C.CFUNCTYPE(result, *arguments)(function)
        self._callbacks.append(callback)
        address = C.cast(callback, P).value
        assert address is not None
        return address

    # Device

    def _get_device(self, result: int) -> None:
        _store(result, I32, 0)

    def _set_device(self, device: int) -> None:
        if device != 0:
            raise LaunchError(f"the host code selects device {device}; the only one is 0")

    def _get_device_attribute(self, result: int, attribute: int, device: int) -> None:
        _store(result, I32, device_attribute(attribute))

    def _encode_map(self, result: int, element: int, rank: int, address: int, *rest: int) -> None:
        raw = encode_tiled(element, rank, address, rest[:4], rest[4:])
        C.memmove(result, raw, len(raw))

    def _assert_success(self, code: int) -> None:
        """NVIDIA's ends the process; here the call fails, with the first error if there is one."""
        if code:
            raise LaunchError(f"the host code's assertion failed with CUDA error {code}")

    # Libraries and kernels

    def _load_library(self, library: int, *_: int) -> None:
        _store(library, P, _LIBRARY)

    def _get_kernel(self, result: int, library: int, name: int) -> None:
        self._kernels.append(C.string_at(name).decode())
        _store(result, P, len(self._kernels))

    def _get_kernel_attribute(self, result: int, attribute: int, kernel: int, device: int) -> None:
        if attribute != _SHARED_SIZE_BYTES:
            raise LaunchError(f"the host code asks for kernel attribute {attribute}, not known")
        entry = find_kernel(self.ptx, self._kernels[kernel - 1])
        _store(result, I32, static_smem_bytes(self.ptx, entry))

    def _set_attribute(self, kernel: int, attribute: int, value: int, device: int = 0) -> None:
        """Limits that the launch itself shows again (dynamic shared memory, cluster size)."""

    def _load_once(self, state: int, init: int, load: int, set_error: int) -> None:
        """Loads the library on the first call, as the TVM-FFI entry point expects."""
        if not I64.from_address(state).value:
            library = P()
            C.CFUNCTYPE(I32, P)(init)(C.addressof(library))
            C.CFUNCTYPE(I32, P, I32)(load)(C.addressof(library), 0)
            _store(state, I64, library.value or 0)

    def _unload_once(self, state: int) -> None:
        _store(state, I64, 0)

    def _raise_in_tvm_ffi(self, set_error: int, code: int) -> None:
        """Sets TVM-FFI's pending error; `set_error(kind, parts, count)` is its function."""
        parts = (C.c_char_p * 1)(f"the host code failed with CUDA error {code}".encode())
        C.CFUNCTYPE(None, C.c_char_p, P, I32)(set_error)(b"RuntimeError", C.addressof(parts), 1)

    # Launches

    def _launch_with_attributes(self, config: int, kernel: int, values: int) -> None:
        launch = LaunchConfig.from_address(config)
        extra = read_attributes(self._kernels[kernel - 1], launch)
        shape = (*launch.grid, *launch.block)
        smem = launch.dynamic_smem_bytes
        self._record(kernel, shape, smem, values, stream=launch.stream or 0, **extra)

    def _launch(self, kernel: int, *arguments: int) -> None:
        *shape, values, dynamic_smem_bytes, stream = arguments
        self._record(kernel, tuple(shape), dynamic_smem_bytes, values, stream=stream)

    def _record(
        self, kernel: int, shape: tuple[int, ...], smem: int, values: int, **rest: Any
    ) -> None:
        name = self._kernels[kernel - 1]
        self.launches.append(read_launch(self.ptx, name, shape, smem, values, **rest))
