"""Launches the suite on GPU 0: what each launch changed, and how long the large call takes."""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.hardware.emulator_hopper.driver import Gpu
from lab.hardware.forward_hopper.skeleton_driver import moved

LIMIT_S = 20.0
REPEATS = 50  # launches on the same memory, which must all leave the same bits
WARM_UPS, TIMED_LAUNCHES, ROUNDS = 10, 20, 7
FILLING = 0x3C  # bytes of the large call: small numbers in each of its formats


class Driver(Gpu):
    """Device 0, whose primary context torch uses too. Launches are on the default stream."""

    def launch(self, given: Any, memory: Any) -> Callable[[], None]:
        """A function that launches a case's kernel on its memory on the GPU."""
        case = json.loads(str(given["launch"]))
        module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), given["cubin"].tobytes())
        self._call("cuModuleGetFunction", ctypes.byref(kernel), module, case["kernel"].encode())
        parts = [
            moved(bytes.fromhex(part), case["base"], case["size"], memory.data_ptr())
            for part in case["parameters"]
        ]
        values = [ctypes.create_string_buffer(part, len(part)) for part in parts]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(x) for x in values))

        def now() -> None:
            _ = values  # which `pointers` points at
            self._call("cuLaunchKernel", kernel, *case["grid"], *case["block"], case["smem"],
                       None, pointers, None)  # fmt: skip

        return now

    def changes(self, given: Any) -> dict[str, Any]:
        """The bytes that the first launch changed, and how many of the others gave other bits."""
        before = given["before"]
        memory = torch.from_numpy(before).cuda()
        launch = self.launch(given, memory)
        first, different = None, 0
        for _ in range(REPEATS):
            memory.copy_(torch.from_numpy(before))
            launch()
            self._wait(LIMIT_S)
            after = memory.cpu().numpy()
            first = after if first is None else first
            different += after.tobytes() != first.tobytes()
        return {"changed": first ^ before, "different": np.array(different)}

    def rates(self, given: Any) -> dict[str, Any]:
        """Bytes per second of the kernel, and of torch's copy that reads and writes as many."""
        case = json.loads(str(given["launch"]))
        memory = torch.full((case["size"],), FILLING, dtype=torch.uint8, device="cuda")
        launch = self.launch(given, memory)
        source = torch.full((case["moved_bytes"] // 2,), FILLING, dtype=torch.uint8, device="cuda")
        rounds = [(seconds(launch), seconds(source.clone)) for _ in range(ROUNDS)]
        return {"seconds": np.array(rounds), "moved_bytes": np.array(case["moved_bytes"])}


def seconds(function: Callable[[], Any]) -> float:
    """Mean time on the GPU."""
    for _ in range(WARM_UPS):
        function()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(TIMED_LAUNCHES):
        function()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / TIMED_LAUNCHES


def main() -> int:
    """Writes the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path)
    arguments = parser.parse_args()
    torch.cuda.init()
    driver = Driver()
    kept: dict[str, Any] = {"device": np.array(driver.name)}
    for path in sorted(arguments.folder.glob("*.npz")):
        given = np.load(path)
        found = driver.changes(given) if "before" in given.files else driver.rates(given)
        kept.update({f"{path.stem}/{name}": array for name, array in found.items()})
        print(f"{path.stem}: {', '.join(found)}", flush=True)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(arguments.results, **kept)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
