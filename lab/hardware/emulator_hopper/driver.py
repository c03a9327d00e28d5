"""The few calls of the CUDA driver that launch a kernel, through ctypes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from lab.hardware.emulator_hopper.programs import Array, Program, parameters

NOT_READY = 600
MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class CudaError(RuntimeError):
    """A call of the driver failed."""


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
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


class Gpu:
    """Device 0 and its primary context."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        """Loads the driver. Raises CudaError without a GPU."""
        self._library = ctypes.CDLL(library)
        self._call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        name = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", name, 128, device)
        self.name = name.value.decode()

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(f"{function}: {code} {(text.value or b'').decode()}")

    def run(
        self, program: Program, image: bytes, limit_s: float, unwritten: Sequence[int] = ()
    ) -> list[Array]:
        """The arrays after the launch. unwritten: those whose memory nothing is written to before.
        Raises CudaError; TimeoutError after `limit_s` seconds, and the process must then end."""
        module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), image)
        self._call("cuModuleGetFunction", ctypes.byref(kernel), module, b"kernel")
        self._call(
            "cuFuncSetAttribute", kernel, MAX_DYNAMIC_SHARED_SIZE, ctypes.c_int(program.smem_bytes)
        )
        pointers = [
            self._allocate(array.nbytes) if index in unwritten else self._upload(array)
            for index, array in enumerate(program.arrays)
        ]
        self._launch(program, kernel, [pointer.value or 0 for pointer in pointers])
        self._wait(limit_s)
        arrays = [np.empty_like(array) for array in program.arrays]
        for array, pointer in zip(arrays, pointers, strict=True):
            size = ctypes.c_size_t(array.nbytes)
            self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(array.ctypes.data), pointer, size)
            self._free(pointer)
        self._call("cuModuleUnload", module)
        return arrays

    def _allocate(self, size_bytes: int) -> ctypes.c_uint64:
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size_bytes))
        return pointer

    def _free(self, pointer: ctypes.c_uint64) -> None:
        self._call("cuMemFree_v2", pointer)

    def _upload(self, array: Array) -> ctypes.c_uint64:
        pointer, size = self._allocate(array.nbytes), ctypes.c_size_t(array.nbytes)
        source = np.ascontiguousarray(array)
        self._call("cuMemcpyHtoD_v2", pointer, ctypes.c_void_p(source.ctypes.data), size)
        return pointer

    def _launch(self, program: Program, kernel: ctypes.c_void_p, addresses: Sequence[int]) -> None:
        values = [ctypes.create_string_buffer(v, len(v)) for v in parameters(program, addresses)]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        attribute = _Attribute(id=CLUSTER_DIMENSION)
        attribute.value[:3] = program.cluster
        configuration = _Configuration(
            (ctypes.c_uint * 3)(*program.grid),
            (ctypes.c_uint * 3)(*program.block),
            program.smem_bytes,
            None,
            ctypes.pointer(attribute),
            int(program.cluster != (1, 1, 1)),
        )
        self._call("cuLaunchKernelEx", ctypes.byref(configuration), kernel, pointers, None)

    def _wait(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while True:
            code = self._library.cuStreamQuery(None)
            if code != NOT_READY:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done after {limit_s} s")
            time.sleep(0.0005)
        self._call("cuCtxSynchronize")
