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
INSTANT_POWER = 186  # NVML_FI_DEV_POWER_INSTANT
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


def steady(values: list[float]) -> float:
    """The median of the second half."""
    return statistics.median(values[len(values) // 2 :])


def under_load(found: dict[str, Any], samples: list[Any]) -> dict[str, Any]:
    """One load with what was polled while it ran; the steady figures are of its second half."""
    begin, end = found.pop("begin_ns"), found.pop("end_ns")
    during = [sample for sample in samples if begin <= sample[0] <= end]
    polled = {
        name: [round(float(sample[i + 1]), 3) for sample in during] for i, name in enumerate(FIELDS)
    }
    energy = polled["energy_j"]
    spent = (energy[-1] - energy[0]) / (1e-9 * (during[-1][0] - during[0][0]))
    return {
        **found,
        "polled_ms": [round(1e-6 * (sample[0] - begin), 1) for sample in during],
        **polled,
        "steady_mhz": steady(found["mhz"]),
        "steady_tflops": steady(found["tflops"]),
        "steady_w": steady(polled["power_w"]),
        "mean_w": round(spent, 1),
    }


def measure(program: Path) -> list[dict[str, Any]]:
    """Run the program; its loads in order. CalledProcessError if it fails."""
    with Poller() as poller:
        done = subprocess.run(
            [str(program)], check=True, capture_output=True, text=True, timeout=SECONDS
        )
    return [under_load(json.loads(line), poller.samples) for line in done.stdout.splitlines()]
