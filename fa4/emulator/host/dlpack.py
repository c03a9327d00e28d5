"""CPU memory offered to CuTe-DSL as if a GPU held it.

CuTe-DSL compiles different code for tensors that lie in GPU memory (global address space) than for
others (generic), and TVM-FFI entry points refuse tensors on the wrong device. `DeviceView` exports
a CPU array through DLPack with the device field overwritten, at the address that kernels see.
"""

from __future__ import annotations

import ctypes as C
import sys
from typing import Any

import ml_dtypes
import numpy as np

from fa4.emulator.errors import LaunchError

KDL_CPU, KDL_CUDA = 1, 2  # DLDeviceType (dlpack.h)

# DLDataTypeCode (dlpack.h) of the types that NumPy only knows through ml_dtypes.
_EXTENSION_CODES = {
    np.dtype(ml_dtypes.bfloat16): 4,
    np.dtype(ml_dtypes.float8_e4m3fn): 10,
    np.dtype(ml_dtypes.float8_e5m2): 12,
    np.dtype(ml_dtypes.float8_e8m0fnu): 14,
}


class _DLTensor(C.Structure):
    """The head of DLManagedTensor (dlpack.h), the version without flags."""

    _fields_ = (
        ("data", C.c_void_p),
        ("device_type", C.c_int32),
        ("device_id", C.c_int32),
        ("ndim", C.c_int32),
        ("code", C.c_uint8),
        ("bits", C.c_uint8),
        ("lanes", C.c_uint16),
    )


def is_torch_tensor(value: object) -> bool:
    """False without importing torch where nobody else has."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


class DeviceView:
    """A CPU array that exports itself through DLPack as memory of the given device.

    array: a NumPy array (also of ml_dtypes' types), a CPU torch tensor, or anything with
    `__dlpack__`. shift: added to its address. Raises LaunchError from `__dlpack__` if the array
    cannot be exported.
    """

    def __init__(self, array: Any, device: int = KDL_CUDA, shift: int = 0) -> None:
        self._array = array
        self._device = device
        self._shift = shift

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0

    def __dlpack__(self, stream: Any = None, **_: Any) -> Any:
        array, code = self._array, None
        if isinstance(array, np.ndarray):
            code = _EXTENSION_CODES.get(array.dtype)
            array = _exportable(array, code)
        elif is_torch_tensor(array):
            array = array.detach()
        try:
            capsule = array.__dlpack__()
        except (BufferError, TypeError, RuntimeError) as error:
            raise LaunchError(f"{type(array).__name__} of {array.dtype}: {error}") from error
        head = _head(capsule)
        head.device_type = self._device
        head.device_id = 0
        if self._shift:
            head.data += self._shift
        if code is not None:
            head.code = code
        return capsule


def _head(capsule: Any) -> _DLTensor:
    pointer = C.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = C.c_void_p, (C.py_object, C.c_char_p)
    return _DLTensor.from_address(pointer(capsule, b"dltensor"))


def _exportable(array: np.ndarray, code: int | None) -> np.ndarray:
    """The same memory under a type that NumPy exports, and writable: DLPack has no const."""
    if code is not None:
        array = array.view(np.dtype(f"u{array.dtype.itemsize}"))
    if array.flags.writeable:
        return array
    return np.asarray(_Writable(array))


class _Writable:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
