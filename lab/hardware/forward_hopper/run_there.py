"""Launches every case of the suite on GPU 0 and keeps the arrays as they are afterwards."""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from lab.hardware.emulator_hopper.driver import Gpu

THREADS = 256


class Driver(Gpu):
    """Device 0: load a cubin with one kernel, launch it on arrays."""

    def load(self, cubin: bytes) -> ctypes.c_void_p:
        """The only kernel of a cubin."""
        library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuLibraryLoadData", ctypes.byref(library), cubin, None, None, 0, None, None, 0)
        self._call("cuLibraryEnumerateKernels", ctypes.byref(kernel), 1, library)
        return kernel

    def launch(self, kernel: ctypes.c_void_p, arrays: list[Any]) -> list[Any]:
        """The arrays after a launch of one block."""
        pointers = [self._upload(array) for array in arrays]
        parameters = (ctypes.c_void_p * len(arrays))(*(ctypes.addressof(p) for p in pointers))
        self._call("cuLaunchKernel", kernel, 1, 1, 1, THREADS, 1, 1, 0, None, parameters, None)
        self._call("cuCtxSynchronize")
        results = [np.empty_like(array) for array in arrays]
        for array, pointer in zip(results, pointers, strict=True):
            target = ctypes.c_void_p(array.ctypes.data)
            self._call("cuMemcpyDtoH_v2", target, pointer, ctypes.c_size_t(array.nbytes))
            self._call("cuMemFree_v2", pointer)
        return results


def main() -> int:
    """Writes RESULTS/<case>.npz."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path)
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    driver = Driver()
    for path in sorted(arguments.folder.glob("*.npz")):
        given = np.load(path)
        kernel = driver.load(given["cubin"].tobytes())
        launches = sorted({name.split("/")[0] for name in given.files if "/" in name}, key=int)
        kept: dict[str, Any] = {"device": np.array(driver.name)}
        for launch in launches:
            names = sorted(name for name in given.files if name.startswith(f"{launch}/"))
            arrays = [np.ascontiguousarray(given[name]) for name in names]
            kept.update(zip(names, driver.launch(kernel, arrays), strict=True))
        np.savez(arguments.results / path.name, **kept)
        print(f"{path.stem}: {len(launches)} launches on {driver.name}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
