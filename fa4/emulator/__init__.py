"""Runs the PTX of compiled Blackwell and Hopper kernels on a CPU and finds what is wrong with it.

It keeps the hardware's rules of ordering, completes asynchronous operations late, and reports
races, deadlocks, uninitialised reads, missing fences and stray accesses with their PTX lines.

    from fa4 import emulator

    with emulator.emulate():          # CuTe-DSL programs: calls inside run here, on CPU tensors
        compiled = cute.compile(host_function, q, k, v, o)
        compiled(q, k, v, o)

    report = emulator.run_ptx(text, {"x": x, "y": y}, grid=(8, 1, 1))    # PTX text, NumPy arrays

`run` takes launches and memory as they are; `explore` runs several seeds. The names below are
imported when they are first used: neither cutlass nor torch is needed before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fa4.emulator.accepted import Accepted
    from fa4.emulator.errors import (
        EmulationFailed,
        EmulatorError,
        KernelFinding,
        LaunchError,
        PtxError,
        UnsupportedInstruction,
    )
    from fa4.emulator.execute import Report, run
    from fa4.emulator.host.ptx_launch import Tma, make_launch, run_ptx
    from fa4.emulator.host.session import Session, emulate, launch
    from fa4.emulator.host.until_covered import Covering, until_covered
    from fa4.emulator.machine.coverage import KernelCoverage, MissedInstruction
    from fa4.emulator.machine.events import BarrierUse, RunEvents
    from fa4.emulator.machine.launch_record import Allocation, Launch
    from fa4.emulator.machine.options import Options
    from fa4.emulator.orders.steer import Shown, Steering, run_steered, steer
    from fa4.emulator.orders.witness import Witness, find_witness
    from fa4.emulator.tools.seeds import Exploration, explore
    from fa4.emulator.tools.trace import Recorder
    from fa4.emulator.tools.traffic import SharedTraffic

__all__ = [
    "Accepted",
    "Allocation",
    "BarrierUse",
    "Covering",
    "EmulationFailed",
    "EmulatorError",
    "Exploration",
    "KernelCoverage",
    "KernelFinding",
    "Launch",
    "LaunchError",
    "MissedInstruction",
    "Options",
    "PtxError",
    "Recorder",
    "Report",
    "RunEvents",
    "Session",
    "SharedTraffic",
    "Shown",
    "Steering",
    "Tma",
    "UnsupportedInstruction",
    "Witness",
    "emulate",
    "explore",
    "find_witness",
    "launch",
    "make_launch",
    "run",
    "run_ptx",
    "run_steered",
    "steer",
    "until_covered",
]

_MODULES = {
    "accepted": ("Accepted",),
    "errors": (
        "EmulationFailed", "EmulatorError", "KernelFinding", "LaunchError", "PtxError",
        "UnsupportedInstruction",
    ),
    "execute": ("Report", "run"),
    "host.ptx_launch": ("Tma", "make_launch", "run_ptx"),
    "host.session": ("Session", "emulate", "launch"),
    "machine.coverage": ("KernelCoverage", "MissedInstruction"),
    "machine.events": ("BarrierUse", "RunEvents"),
    "machine.launch_record": ("Allocation", "Launch"),
    "machine.options": ("Options",),
    "tools.seeds": ("Exploration", "explore"),
    "tools.trace": ("Recorder",),
    "tools.traffic": ("SharedTraffic",),
    "host.until_covered": ("Covering", "until_covered"),
    "orders.steer": ("Shown", "Steering", "run_steered", "steer"),
    "orders.witness": ("Witness", "find_witness"),
}  # fmt: skip
_OWNERS = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports the module that holds a public name."""
    if name not in _OWNERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_OWNERS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted({*globals(), *__all__})
