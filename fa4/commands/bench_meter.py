"""The GPU's clock and power, as its driver tells them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

SM_CLOCK = 1  # NVML_CLOCK_SM

Meter = Callable[[], tuple[float, float]]  # MHz of the multiprocessors, watts


@cache
def find_meter(number: int) -> Meter | None:
    """The meter of torch's GPU `number`; None where NVML does not have it.

    The number is NVML's if all GPUs are visible, as they are in this order then.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device = ctypes.c_void_p()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)):
        return None

    def read() -> tuple[float, float]:
        clock, power = ctypes.c_uint(), ctypes.c_uint()
        library.nvmlDeviceGetClockInfo(device, SM_CLOCK, ctypes.byref(clock))
        library.nvmlDeviceGetPowerUsage(device, ctypes.byref(power))
        return float(clock.value), power.value / 1000

    return read
