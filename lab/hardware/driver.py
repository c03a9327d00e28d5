"""The CUDA driver, through ctypes: modules, memory, launches. Needs NumPy and a driver alone."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Kernel = ctypes.c_void_p

NOT_READY = 600
MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class CudaError(RuntimeError):
    """A call of the driver failed."""


class CudaLibrary:
    """The driver's functions by name."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        """Loads and starts the driver. Raises OSError without one, CudaError without a GPU."""
        self._library = ctypes.CDLL(library)
        self.call("cuInit", 0)

    def call(self, function: str, *arguments: Any) -> None:
        """Calls one. Raises CudaError with its name and the error's."""
        code = getattr(self._library, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(f"{function}: {code} {(text.value or b'').decode()}")


class Geometry(NamedTuple):
    """How a kernel is launched."""

    grid: Sequence[int]
    block: Sequence[int]
    smem_bytes: int = 0
    cluster: Sequence[int] = (1, 1, 1)


class _Attribute(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_uint * 16),
    ]


class _Configuration(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


class Gpu(CudaLibrary):
    """Device 0 and its primary context; all work goes to the default stream."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        """As of CudaLibrary."""
        super().__init__(library)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        name = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", name, 128, device)
        self.name = name.value.decode()

    def load(self, image: bytes, kernel_name: str, smem_bytes: int = 0) -> Kernel:
        """A kernel of a cubin, or of PTX that ends with a zero byte."""
        module, kernel = ctypes.c_void_p(), Kernel()
        self.call("cuModuleLoadData", ctypes.byref(module), image)
        self.call("cuModuleGetFunction", ctypes.byref(kernel), module, kernel_name.encode())
        size = ctypes.c_int(smem_bytes)
        self.call("cuFuncSetAttribute", kernel, MAX_DYNAMIC_SHARED_SIZE, size)
        return kernel

    def allocate(self, size_bytes: int) -> int:
        """The address of new memory, with any contents."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        return address.value

    def free(self, address: int) -> None:
        """Gives back what `allocate` gave."""
        self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def upload(self, array: Array) -> int:
        """The address of new memory with the contents of an array."""
        source = np.ascontiguousarray(array)
        address = self.allocate(source.nbytes)
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address),
                  ctypes.c_void_p(source.ctypes.data), ctypes.c_size_t(source.nbytes))  # fmt: skip
        return address

    def read(self, address: int, size_bytes: int) -> Array:
        """Bytes of the GPU's memory."""
        array = np.empty(size_bytes, np.uint8)
        target, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(size_bytes)
        self.call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), size)
        return array

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Copies within the GPU's memory; does not wait."""
        addresses = ctypes.c_uint64(target), ctypes.c_uint64(source)
        self.call("cuMemcpyDtoDAsync_v2", *addresses, ctypes.c_size_t(size_bytes), None)

    def launch(self, kernel: Kernel, geometry: Geometry, parameters: Sequence[bytes]) -> None:
        """Launches a kernel on the bytes of its parameters; does not wait."""
        values = [ctypes.create_string_buffer(part, len(part)) for part in parameters]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(x) for x in values))
        attribute = _Attribute(id=CLUSTER_DIMENSION)
        attribute.value[:3] = tuple(geometry.cluster)
        configuration = _Configuration(
            (ctypes.c_uint * 3)(*geometry.grid), (ctypes.c_uint * 3)(*geometry.block),
            geometry.smem_bytes, None, ctypes.pointer(attribute),
            int(tuple(geometry.cluster) != (1, 1, 1)),
        )  # fmt: skip
        self.call("cuLaunchKernelEx", ctypes.byref(configuration), kernel, pointers, None)

    def wait(self, limit_s: float) -> None:
        """Until all is done. Raises TimeoutError after `limit_s` seconds; the process must then
        end, since the kernel goes on."""
        deadline = time.monotonic() + limit_s
        while self._library.cuStreamQuery(None) == NOT_READY:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done after {limit_s} s")
            time.sleep(0.0005)
        self.call("cuCtxSynchronize")

    def seconds(self, work: Callable[[], None], *, warm_ups: int = 10, times: int = 20) -> float:
        """Mean time on the GPU of what a function launches."""
        for _ in range(warm_ups):
            work()
        start, end = ctypes.c_void_p(), ctypes.c_void_p()
        for event in (start, end):
            self.call("cuEventCreate", ctypes.byref(event), 0)
        self.call("cuEventRecord", start, None)
        for _ in range(times):
            work()
        self.call("cuEventRecord", end, None)
        self.call("cuEventSynchronize", end)
        milliseconds = ctypes.c_float()
        self.call("cuEventElapsedTime", ctypes.byref(milliseconds), start, end)
        return milliseconds.value / 1e3 / times
