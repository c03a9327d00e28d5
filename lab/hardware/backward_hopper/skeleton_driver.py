"""Launches the kernels of `skeleton` through the driver; needs only NumPy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from lab.hardware.backward_hopper.skeleton_cases import OUTPUTS, repeats
from lab.hardware.emulator_hopper.driver import MAX_DYNAMIC_SHARED_SIZE, Gpu
from lab.hardware.forward_hopper.skeleton_driver import LIMIT_S, moved

BYTES = {"bfloat16": 2, "float32": 4, "int32": 4}


class SkeletonDriver(Gpu):
    """Device 0. A kernel that does not end raises TimeoutError, and the process must end."""

    def launch(self, case: dict[str, Any], image: bytes, memory: Any) -> dict[str, Any]:
        """Bytes of the outputs of the first launch, and how many others gave other bits, each.

        memory: of all tensors, as before every launch.
        """
        module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), image)
        self._call("cuModuleGetFunction", ctypes.byref(kernel), module, case["kernel"].encode())
        self._call("cuFuncSetAttribute", kernel, MAX_DYNAMIC_SHARED_SIZE, case["smem"])
        pointer = self._upload(memory)
        address = pointer.value or 0
        parts = [
            moved(bytes.fromhex(part), case["base"], memory.size, address)
            for part in case["parameters"]
        ]
        values = [ctypes.create_string_buffer(part, len(part)) for part in parts]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(x) for x in values))
        names = [name for name in OUTPUTS if name in case["places"]]
        first: dict[str, Any] = {}
        different = np.zeros(len(names), np.int64)
        for _ in range(repeats(case["name"])):
            self._call("cuMemcpyHtoD_v2", pointer, ctypes.c_void_p(memory.ctypes.data),
                       ctypes.c_size_t(memory.nbytes))  # fmt: skip
            self._call("cuLaunchKernel", kernel, *case["grid"], *case["block"], case["smem"],
                       None, pointers, None)  # fmt: skip
            self._wait(LIMIT_S)
            found = {name: self._read(address, *case["places"][name]) for name in names}
            first = first or found
            different += [not np.array_equal(first[name], found[name]) for name in names]
        self._call("cuMemFree_v2", pointer)
        return first | {"different": different}

    def _read(self, address: int, place: int, shape: list[int], kind: str) -> Any:
        array = np.empty(int(np.prod(shape)) * BYTES[kind], np.uint8)
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(array.ctypes.data),
                   ctypes.c_uint64(address + place), ctypes.c_size_t(array.nbytes))  # fmt: skip
        return array
