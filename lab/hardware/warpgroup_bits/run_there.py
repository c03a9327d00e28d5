"""Launches the suite on GPU 0, each kernel often: its outputs, and whether they stay the same.

    python3 -m lab.hardware.warpgroup_bits.run_there FOLDER RESULTS.npz

Needs NumPy and the driver.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np

from lab.hardware.emulator_hopper.driver import MAX_DYNAMIC_SHARED_SIZE, Gpu
from lab.hardware.forward_hopper.skeleton_driver import moved

KERNELS = ("compiled", "exact")
LIMIT_S = 20.0
REPEATS = 20


class BitsDriver(Gpu):
    """Device 0. A kernel that does not end raises TimeoutError, and the process must end."""

    def outputs(self, given: Any, kernel_name: str) -> dict[str, Any]:
        """Bytes of each output of the first launch; how many of the others gave other bits."""
        case = json.loads(str(given["launch"]))
        module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        image = given[kernel_name].tobytes()
        self._call("cuModuleLoadData", ctypes.byref(module), image)
        self._call("cuModuleGetFunction", ctypes.byref(kernel), module, case["kernel"].encode())
        self._call("cuFuncSetAttribute", kernel, MAX_DYNAMIC_SHARED_SIZE, case["smem"])
        memory = given["memory"]
        pointer = self._upload(memory)
        address = pointer.value or 0
        parts = [
            moved(bytes.fromhex(part), case["base"], case["size"], address)
            for part in case["parameters"]
        ]
        values = [ctypes.create_string_buffer(part, len(part)) for part in parts]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(x) for x in values))
        first: dict[str, Any] = {}
        different = 0
        for _ in range(REPEATS):
            for at in case["places"].values():
                self._write(address, memory, at)
            self._call("cuLaunchKernel", kernel, *case["grid"], *case["block"], case["smem"],
                       None, pointers, None)  # fmt: skip
            self._wait(LIMIT_S)
            found = {name: self._read(address, at) for name, at in case["places"].items()}
            first = first or found
            different += any(found[name].tobytes() != first[name].tobytes() for name in found)
        self._call("cuMemFree_v2", pointer)
        return first | {"different": np.array(different)}

    def _write(self, address: int, memory: Any, at: dict[str, Any]) -> None:
        source = memory[at["start"] : at["start"] + num_bytes(at)]
        target, size = ctypes.c_uint64(address + at["start"]), ctypes.c_size_t(source.nbytes)
        self._call("cuMemcpyHtoD_v2", target, ctypes.c_void_p(source.ctypes.data), size)

    def _read(self, address: int, at: dict[str, Any]) -> Any:
        array = np.empty(num_bytes(at), np.uint8)
        source, size = ctypes.c_uint64(address + at["start"]), ctypes.c_size_t(array.nbytes)
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(array.ctypes.data), source, size)
        return array


def num_bytes(at: dict[str, Any]) -> int:
    """Of an output, from its first element to its last."""
    return int(at["count"]) * {"float32": 4, "bfloat16": 2, "float16": 2}[at["dtype"]]


def main() -> int:
    """Writes the outputs of all launches."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path)
    arguments = parser.parse_args()
    driver = BitsDriver()
    kept: dict[str, Any] = {"device": np.array(driver.name)}
    for path in sorted(arguments.folder.glob("*.npz")):
        given = dict(np.load(path))
        for name in KERNELS:
            found = driver.outputs(given, name)
            kept |= {f"{path.stem}/{name}/{key}": array for key, array in found.items()}
        print(f"{path.stem}: {REPEATS} launches of each kernel", flush=True)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(arguments.results, **kept)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
