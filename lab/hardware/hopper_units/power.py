"""Clock and power of the GPU under a few loads of all SMs (power.cu), polled while they run.

NVML gives the instantaneous power and the energy used so far; the SMs themselves tell their clock.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

EVERY_SECONDS = 0.02
FIELDS = ("power_w", "average_w", "clock_mhz", "energy_j", "reasons")
RATES = ("exponentials_per_ns", "bytes_per_ns")  # of the whole GPU; older runs did not count them
INSTANT_POWER = 186  # NVML_FI_DEV_POWER_INSTANT
BURST_MS = (1.0, 20.0)
SECONDS = 40  # of the program, at most


class Poller:
    """Reads the first GPU's power, clock, energy and reasons for a low clock until it is left."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml = pynvml
        self._gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.samples: list[tuple[int, float, float, float, float, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll)

    def _poll(self) -> None:
        nvml, gpu = self._nvml, self._gpu
        while not self._stop.wait(EVERY_SECONDS):
            instant = nvml.nvmlDeviceGetFieldValues(gpu, [INSTANT_POWER])[0].value.uiVal / 1e3
            self.samples.append(
                (
                    time.time_ns(),
                    instant,
                    nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
                    float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
                    nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3,
                    nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu),
                )
            )

    def __enter__(self) -> Poller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def median_within(times: list[float], values: list[float], begin: float, end: float) -> float:
    """Median of the values at times (ms) from `begin` to before `end`."""
    found = [value for ms, value in zip(times, values, strict=True) if begin <= ms < end]
    return round(statistics.median(found), 1)


def summary(found: dict[str, Any]) -> dict[str, float]:
    """What a load comes to: clock from 1 to 20 ms, and clock, rate and power in its second half."""
    end = 1e3 * found["seconds"]
    half, clocks = end / 2, (found["ms"], found["mhz"])
    rates = {
        f"steady_{name}": median_within(found["ms"], found[name], half, end)
        for name in RATES
        if name in found
    }
    return {
        "burst_mhz": median_within(*clocks, *BURST_MS),
        "burst_tflops": median_within(found["ms"], found["tflops"], *BURST_MS),
        "steady_mhz": median_within(*clocks, half, end),
        "steady_tflops": median_within(found["ms"], found["tflops"], half, end),
        "steady_w": median_within(found["polled_ms"], found["power_w"], half, end),
        **rates,
    }


def under_load(found: dict[str, Any], samples: list[Any]) -> dict[str, Any]:
    """One load with what was polled while it ran, and its summary."""
    begin, end = found.pop("begin_ns"), found.pop("end_ns")
    during = [sample for sample in samples if begin <= sample[0] <= end]
    found["polled_ms"] = [round(1e-6 * (sample[0] - begin), 1) for sample in during]
    for i, name in enumerate(FIELDS):
        found[name] = [round(float(sample[i + 1]), 3) for sample in during]
    return {**found, **summary(found)}


def measure(program: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run the program; its loads in order. CalledProcessError if it fails."""
    command = [str(program), *arguments]
    with Poller() as poller:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
    return [under_load(json.loads(line), poller.samples) for line in done.stdout.splitlines()]
