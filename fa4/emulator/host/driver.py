"""The CUDA driver as programs see it that call it themselves: it records launches.

The functions are those of `cuda.h` (and a few of the runtime's) that loading and launching need.
"""

from __future__ import annotations

import contextlib
import ctypes as C
from collections.abc import Callable, Iterator
from typing import Any

from fa4.emulator.errors import LaunchError
from fa4.emulator.host.device import device_attribute
from fa4.emulator.host.driver_library import driver_libraries
from fa4.emulator.host.launches import (
    I32,
    I64,
    LaunchConfig,
    P,
    find_kernel,
    read_attributes,
    read_launch,
)
from fa4.emulator.host.tensor_maps import encode_im2col, encode_tiled
from fa4.emulator.machine.launch_record import Launch

_FAILED = 999  # CUDA_ERROR_UNKNOWN
_TEXT = C.create_string_buffer(b"the emulator refused it")
_LIMIT_BYTES = 1024  # what cuCtxGetLimit answers, of anything
_SILENT = (
    "cuInit", "cuCtxSetLimit", "cuCtxResetPersistingL2Cache", "cuModuleUnload",
    "cuFuncSetAttribute", "cuStreamSetAttribute", "cudaSetDevice", "cudaStreamSynchronize",
    "cudaDeviceSynchronize", "cudaGetLastError", "cudaPeekAtLastError",
)  # fmt: skip
# What programs look for but may not call: it answers that there is no driver.
_REFUSED = tuple(
    f"cuda{name}"
    for name in (
        "GetDeviceProperties", "MemGetInfo", "Malloc", "Free", "MallocHost", "FreeHost", "Memset",
        "MemsetAsync", "Memcpy", "MemcpyAsync", "MemcpyPeerAsync", "StreamCreate",
        "StreamCreateWithFlags", "StreamDestroy", "StreamWaitEvent", "EventCreate", "EventDestroy",
        "EventRecord", "EventSynchronize", "EventElapsedTime", "StreamBeginCapture",
        "StreamEndCapture", "GraphInstantiate", "GraphLaunch", "GraphDestroy", "GraphExecDestroy",
        "IpcGetMemHandle", "IpcOpenMemHandle", "IpcCloseMemHandle",
    )
)  # fmt: skip
# Symbol -> (method of EmulatedDriverCalls, argument types).
_SYMBOLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "cuGetErrorName": ("_error_text", (I32, P)),
    "cuGetErrorString": ("_error_text", (I32, P)),
    "cuCtxGetDevice": ("_device", (P,)),
    "cudaGetDevice": ("_device", (P,)),
    "cudaGetDeviceCount": ("_count", (P,)),
    "cuCtxGetLimit": ("_limit", (P, I32)),
    "cuDeviceGetName": ("_name", (P, I32, I32)),
    "cuDeviceGetAttribute": ("_attribute", (P, I32, I32)),
    "cudaDeviceGetAttribute": ("_attribute", (P, I32, I32)),
    "cuModuleLoadData": ("_load", (P, P)),
    "cuModuleLoadDataEx": ("_load", (P, P, I32, P, P)),
    "cuModuleGetFunction": ("_function", (P, P, P)),
    **{f"cuModuleGetGlobal{suffix}": ("_variable", (P, P, P, P)) for suffix in ("", "_v2")},
    **{f"cuMemsetD32{suffix}": ("_set_words", (P, I32, I64)) for suffix in ("", "_v2")},
    "cuLaunchKernel": ("_launch", (P, *(I32,) * 7, P, P, P)),
    "cuLaunchCooperativeKernel": ("_launch_cooperative", (P, *(I32,) * 7, P, P)),
    "cuLaunchKernelEx": ("_launch_with_attributes", (P, P, P, P)),
    "cuTensorMapEncodeTiled": ("_encode", (P, I32, I32, *(P,) * 5, *(I32,) * 4)),
    "cuTensorMapEncodeIm2col": (
        "_encode_im2col",
        (P, I32, I32, *(P,) * 5, I32, I32, P, *(I32,) * 4),
    ),
    **{name: ("_nothing", ()) for name in _SILENT},
}


def _store(pointer: int, ctype: Any, value: Any) -> None:
    ctype.from_address(pointer).value = value


class EmulatedDriverCalls:
    """The driver of one `emulate`: `launches` grows as programs call it.

    The first exception inside a function is kept in `error`, and the program gets an error code.
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.error: BaseException | None = None
        self._modules: list[str] = []
        self._kernels: list[tuple[str, str]] = []  # PTX, name
        self._callbacks = {name: self._bind(*how) for name, how in _SYMBOLS.items()}
        text = C.addressof(_TEXT)
        self._callbacks["cudaGetErrorString"] = C.CFUNCTYPE(P, I32)(lambda _: text)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the libraries of the driver's name call this."""
        libraries = driver_libraries((*self._callbacks, *_REFUSED))
        try:
            for library in libraries:
                library.set(self._callbacks)
            yield
        finally:
            for library in libraries:
                library.set({})

    def take_launches(self) -> list[Launch]:
        """The launches since the last time. Raises what a function raised."""
        launches, error = self.launches, self.error
        self.launches, self.error = [], None
        if error is not None:
            raise error
        return launches

    def _bind(self, method: str, arguments: tuple[Any, ...]) -> Any:
        handler: Callable[..., None] = getattr(self, method)

        def guarded(*values: Any) -> int:
            try:
                handler(*(value or 0 for value in values))
            except BaseException as error:
                self.error = self.error or error
                return _FAILED
            return 0

        return C.CFUNCTYPE(I32, *arguments)(guarded)

    def _nothing(self) -> None:
        """There is nothing to do."""

    def _error_text(self, error: int, result: int) -> None:
        _store(result, P, C.addressof(_TEXT))

    # The device.

    def _device(self, result: int) -> None:
        _store(result, I32, 0)

    def _count(self, result: int) -> None:
        _store(result, I32, 1)

    def _limit(self, result: int, which: int) -> None:
        _store(result, I64, _LIMIT_BYTES)

    def _name(self, result: int, size: int, number: int) -> None:
        C.memmove(result, b"GPU emulated by fa4\0"[:size], min(size, 20))

    def _attribute(self, result: int, attribute: int, number: int) -> None:
        _store(result, I32, device_attribute(attribute))

    # Modules.

    def _load(self, result: int, image: int, *_: int) -> None:
        if C.string_at(image, 4) == b"\x7fELF":
            raise LaunchError("the program loads machine code without PTX: compile it to PTX")
        self._modules.append(C.string_at(image).decode())
        _store(result, P, len(self._modules))

    def _function(self, result: int, module: int, name: int) -> None:
        ptx, kernel = self._modules[module - 1], C.string_at(name).decode()
        find_kernel(ptx, kernel)
        self._kernels.append((ptx, kernel))
        _store(result, P, len(self._kernels))

    def _variable(self, result: int, size: int, module: int, name: int) -> None:
        text = C.string_at(name).decode()
        raise LaunchError(
            f"the program asks for the address of the variable {text!r}: not emulated"
        )

    def _set_words(self, address: int, value: int, count: int) -> None:
        (I32 * count).from_address(address)[:] = [value] * count

    def _encode(self, result: int, element: int, rank: int, address: int, *rest: int) -> None:
        raw = encode_tiled(element, rank, address, rest[:4], rest[4:])
        C.memmove(result, raw, len(raw))

    def _encode_im2col(
        self, result: int, element: int, rank: int, address: int, *rest: int
    ) -> None:
        sizes = rest[4] & 0xFFFFFFFF, rest[5] & 0xFFFFFFFF
        raw = encode_im2col(element, rank, address, (*rest[:4], rest[6]), sizes, rest[7:])
        C.memmove(result, raw, len(raw))

    # Launches.

    def _launch(self, kernel: int, *arguments: int) -> None:
        *shape, smem, stream, values, _ = arguments
        self._record(kernel, shape, smem, values, stream=stream)

    def _launch_cooperative(self, kernel: int, *arguments: int) -> None:
        *shape, smem, stream, values = arguments
        self._record(kernel, shape, smem, values, stream=stream, cooperative=True)

    def _launch_with_attributes(self, config: int, kernel: int, values: int, _: int) -> None:
        launch = LaunchConfig.from_address(config)
        extra = read_attributes(self._kernels[kernel - 1][1], launch)
        shape = [*launch.grid, *launch.block]
        smem = launch.dynamic_smem_bytes & 0xFFFFFFFF
        self._record(kernel, shape, smem, values, stream=launch.stream or 0, **extra)

    def _record(self, kernel: int, shape: Any, smem: int, values: int, **rest: Any) -> None:
        ptx, entry = self._kernels[kernel - 1]
        self.launches.append(read_launch(ptx, entry, tuple(shape), smem, values, **rest))
