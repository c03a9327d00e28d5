"""What roles wait for in a kernel that HBM slows down.

SMs are simulated one by one and do not see each other's traffic; HBM bounds the kernel as a whole.
Where that bound is the longer time, a run whose bulk copies are slowed down until it takes as long
shows the waits: of the roles for their loads, not for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fa4.sim.chip import ChipRun
from fa4.sim.machine import Machine

CLOSE, MOST_RUNS = 0.01, 24  # of the wanted cycles; 24 halvings of the slowdown


def run_at_pace(run: Callable[[Machine], ChipRun], machine: Machine, cycles: float) -> ChipRun:
    """A run of about `cycles`, more than `run(machine)` takes, with slower bulk copies."""
    low, high = 1.0, 2.0
    found = run(_slowed(machine, high))
    while found.cycles < cycles:
        low, high = high, 2 * high
        found = run(_slowed(machine, high))
    for _ in range(MOST_RUNS):
        if abs(found.cycles - cycles) <= CLOSE * cycles:
            break
        middle = (low + high) / 2
        found = run(_slowed(machine, middle))
        low, high = (middle, high) if found.cycles < cycles else (low, middle)
    return found


def _slowed(machine: Machine, factor: float) -> Machine:
    rate = machine.costs.tma_bytes_per_clk / factor
    return replace(machine, costs=replace(machine.costs, tma_bytes_per_clk=rate))
