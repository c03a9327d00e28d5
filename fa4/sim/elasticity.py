"""What the time of a call depends on: each figure of a machine changed up and down, by simulation.

The elasticity of a figure is the relative change of the time for a relative change of what it
costs: 1 if the time is proportional to it, 0 if it does not matter. A rate counts by its inverse,
so that more always means slower. With a fixed order of events the time is a sum of such costs and
the elasticities add up to 1; a sum that differs shows how often a change of 10% brings another
chain of events to the fore.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from fa4.sim.costs import CostTable
from fa4.sim.machine import Machine

STEP = 0.1  # of a figure, up and down
NEUTRAL, NEUTRAL_STEPS = 3, (0.07, 0.13)  # figures that matter least, and how far they move again

# Each unit with the figures that are its rate.
UNIT_RATES: Mapping[str, tuple[str, ...]] = {
    "tensor": ("gpu.mma_flops_per_clk",),
    "mufu": ("gpu.exp_per_clk",),
    "fma": ("gpu.fma_lanes_per_clk",),
    "alu": ("costs.alu_lanes_per_clk",),
    "issue": ("costs.issue_per_clk",),
    "smem": ("gpu.smem_bytes_per_clk",),
    "tmem_load": ("costs.tmem_load_bytes_per_clk",),
    "tmem_store": ("costs.tmem_store_bytes_per_clk",),
    "tma": ("costs.tma_bytes_per_clk", "gpu.l2_bytes_per_s"),
    "tma_store": ("costs.tma_store_bytes_per_clk",),
    "dsmem": ("costs.dsmem_bytes_per_clk",),
    "reduce": ("costs.reduce_bytes_per_clk",),
    "l2": ("gpu.l2_bytes_per_s",),
    "hbm": ("gpu.hbm_bytes_per_s",),
}
# Shares of hbm_bytes_per_s only ever stand beside it; the clock is the unit of all cycles.
LEFT_OUT = frozenset({"costs.hbm_efficiency", "costs.hbm_copy_efficiency", "costs.sustained_clock"})
# What is part of two units: not counted in the sum again.
COUNTED_TWICE = frozenset({"vector_efficiency"})
RATES = ("_per_clk", "_per_s", "efficiency")  # ends of the names of what is better when larger

Seconds = Callable[[Machine], float]
Progress = Callable[[int, int], None]  # simulations done, and in all


@dataclass(frozen=True, kw_only=True)
class Elasticity:
    """`value` of the cost of a unit, or of a constant of the cost table, called `name`.

    figures: what was changed, together: gpu.X or costs.X. used: the model of this call reads it.
    """

    name: str
    figures: tuple[str, ...]
    is_unit: bool
    used: bool
    value: float


@dataclass(frozen=True, kw_only=True)
class Elasticities:
    """Of every unit and constant, largest first.

    noise: what a mere change of the order of events can feign. The largest value seen when the
    `neutral` ones, which matter least, were changed by other steps as well; or how far any value
    lies below 0, which no cost can do in a fixed order (a faster unit that makes a call slower).
    """

    rows: tuple[Elasticity, ...]
    noise: float
    neutral: tuple[str, ...]
    simulations: int

    @property
    def total(self) -> float:
        """Sum over all that is counted once."""
        return sum(row.value for row in self.rows if row.name not in COUNTED_TWICE)

    @property
    def shares(self) -> tuple[float, float]:
        """The total's parts: of units, and of latencies and other constants."""
        units = sum(row.value for row in self.rows if row.is_unit)
        return units, self.total - units

    @property
    def felt(self) -> tuple[Elasticity, ...]:
        """Those above the noise."""
        return tuple(row for row in self.rows if row.value > self.noise)


def measure(seconds: Seconds, machine: Machine, progress: Progress | None = None) -> Elasticities:
    """Elasticities of `seconds` (of a machine) around `machine`, by central differences."""
    used = figures_read(seconds, machine)
    groups = {name: tuple(f for f in group if f in used) for name, group in all_figures().items()}
    wanted = {name: group for name, group in groups.items() if group}
    neutral_count = min(NEUTRAL, len(wanted))
    most = 2 * (len(wanted) + neutral_count * len(NEUTRAL_STEPS))
    done = 0

    def slope(group: tuple[str, ...], step: float) -> float:
        nonlocal done
        (less, fewer), (more, longer) = (
            _changed(seconds, machine, group, factor) for factor in (1 - step, 1 + step)
        )
        done += 2
        if progress is not None:
            progress(done, most)
        return math.log(longer / fewer) / math.log(more / less)

    values = {name: slope(group, STEP) for name, group in wanted.items()}
    neutral = sorted(values, key=lambda name: abs(values[name]))[:neutral_count]
    again = [slope(wanted[name], step) for name in neutral for step in NEUTRAL_STEPS]
    rows = [
        Elasticity(
            name=name, figures=all_figures()[name], is_unit=name in UNIT_RATES,
            used=name in wanted, value=values.get(name, 0.0),
        )
        for name in groups
    ]  # fmt: skip
    return Elasticities(
        rows=tuple(sorted(rows, key=lambda row: -row.value)),
        noise=max((*map(abs, again), *(-x for x in values.values()), 0.0)),
        neutral=tuple(neutral),
        simulations=done,
    )


def all_figures() -> dict[str, tuple[str, ...]]:
    """Units, and the constants of the cost table that are no unit's rate, with their figures."""
    rates = {figure for group in UNIT_RATES.values() for figure in group} | LEFT_OUT
    constants = (item.name for item in fields(CostTable))
    return dict(UNIT_RATES) | {
        name: (f"costs.{name}",) for name in constants if f"costs.{name}" not in rates
    }


def scale_cost(machine: Machine, figure: str, factor: float) -> tuple[Machine, float]:
    """The machine with `factor` times the cost of a figure, and the factor that it really got.

    A rate is divided by it; whole numbers stay whole, but change.
    """
    table, _, name = figure.partition(".")
    part: Any = getattr(machine, table)
    value = getattr(part, name)
    wanted = value / factor if name.endswith(RATES) else value * factor
    if isinstance(value, int):
        nearest = max(1, round(wanted))
        wanted = nearest if nearest != value else value + (1 if wanted > value else -1)
    changed = replace(machine, **{table: replace(part, **{name: wanted})})
    real = wanted / value if value else 1.0
    return changed, 1 / real if name.endswith(RATES) else real


def _changed(
    seconds: Seconds, machine: Machine, group: tuple[str, ...], factor: float
) -> tuple[float, float]:
    """(factor of the cost, time) with all figures of a group changed alike."""
    reached = factor
    for figure in group:
        machine, reached = scale_cost(machine, figure, reached)
    return reached, seconds(machine)


def figures_read(seconds: Seconds, machine: Machine) -> frozenset[str]:
    """Which figures a simulation reads: it runs once with tables that take note.

    A figure that is 0 has no relative change and counts as not read.
    """
    read: set[str] = set()
    seconds(
        Machine(gpu=_noting(machine.gpu, "gpu", read), costs=_noting(machine.costs, "costs", read))
    )
    return frozenset(
        figure for figure in read if getattr(getattr(machine, figure.partition(".")[0]),
                                             figure.partition(".")[2])
    )  # fmt: skip


def _noting(table: Any, name: str, read: set[str]) -> Any:
    """A copy of a table that adds "name.figure" to `read` whenever a figure is read."""
    kind = type(table)
    figures = {item.name for item in fields(kind)}

    def note(self: object, attribute: str) -> Any:
        if attribute in figures:
            read.add(f"{name}.{attribute}")
        return object.__getattribute__(self, attribute)

    noting = type(f"Noting{kind.__name__}", (kind,), {"__getattribute__": note})
    copy: Any = object.__new__(noting)
    for figure in figures:
        object.__setattr__(copy, figure, getattr(table, figure))
    read.clear()
    return copy
