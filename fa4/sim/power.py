"""The clock that power leaves a kernel that runs for long: from the energy of what it does.

For some 50 ms a GPU runs at the clock of short bursts, whatever that takes; then its power limit
lowers the clock until it holds. What an operation takes was measured on an H200 with loads of one
kind (`lab/hardware/hopper_units`, energy); attention kernels were not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fa4.hardware import Gpu
from fa4.sim.cost_table import SourcedFigures, TakenOver, figure


@dataclass(frozen=True, kw_only=True)
class PowerFigures(SourcedFigures):
    """What operations take at the clock of short bursts, and how the rest falls with the clock."""

    limit_w: float = figure(700.0, "power limit of an H200 (nvidia-smi)")
    idle_w: float = figure(160.8, "measured on an H200: all SMs in an empty loop")
    product_pj: float = figure(
        0.957,
        "measured on an H200: a FLOP of products of normal numbers, 131 to 440 TFLOP/s",
        (0.957, 1.186),
    )
    exp_pj: float = figure(
        67.9, "measured on an H200: an exponential with three FMAs and two maxima"
    )
    l2_byte_pj: float = figure(27.1, "measured on an H200: bulk loads from L2")
    hbm_byte_pj: float = figure(
        61.2, "measured on an H200: bulk loads from HBM, beyond those of L2"
    )
    exponent: float = figure(
        4.2,
        "measured on an H200: of the clock in what a load takes beyond idle, median of six",
        (3.5, 5.5),
    )


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What a kernel does in all: cycles of every SM's tensor core, exponentials, bytes."""

    tensor_cycles: float
    exponentials: float
    l2_bytes: float
    hbm_bytes: float


@dataclass(frozen=True, kw_only=True)
class Sustained:
    """A call that is repeated for long. demand_w: what the clock of short bursts would take;
    clock_share: of that clock which the limit leaves."""

    limit_w: float
    demand_w: float
    clock_share: float
    seconds: float
    tflops: float


def energy_joules(activity: Activity, figures: PowerFigures, gpu: Gpu) -> float:
    """What it takes beyond idle, at the clock of short bursts."""
    flops = activity.tensor_cycles * gpu.mma_flops_per_clk
    return 1e-12 * (
        flops * figures.product_pj
        + activity.exponentials * figures.exp_pj
        + activity.l2_bytes * figures.l2_byte_pj
        + activity.hbm_bytes * figures.hbm_byte_pj
    )


def clock_share(beyond_idle_w: float, figures: PowerFigures) -> float:
    """Share of the clock at which this power falls to what the limit leaves; 1 if it is less.

    The clock takes the voltage with it: power falls with the `exponent`-th power of the clock.
    """
    left = figures.limit_w - figures.idle_w
    if beyond_idle_w <= left:
        return 1.0
    return float((left / beyond_idle_w) ** (1.0 / figures.exponent))


@dataclass(frozen=True, kw_only=True)
class H100PowerFigures(TakenOver, PowerFigures):
    """An H100's: its own limit; what operations take as on an H200, the same chip."""

    limit_w: float = figure(700.0, "NVIDIA H100 data sheet, SXM5: up to 700 W")


@dataclass(frozen=True, kw_only=True)
class B200PowerFigures(PowerFigures):
    """A B200's: nobody has published what its operations take. Its best matrix product says what
    1,000 W allow; the rest is an H200's."""

    limit_w: float = figure(1000.0, "NVIDIA HGX B200 data sheet: up to 1000 W")
    idle_w: float = figure(200.0, "assumed: an H200's share of its limit", (140.0, 260.0))
    product_pj: float = figure(
        0.87,
        "derived: the limit leaves cuBLAS at best 1745 TFLOP/s (stas00/ml-engineering) of 95% of "
        "the peak; interval: of 90% to 99%, with idle power and exponent within theirs",
        (0.61, 1.46),
    )
    exp_pj: float = figure(67.9, "as on an H200, not measured on a B200")
    l2_byte_pj: float = figure(27.1, "as on an H200, not measured on a B200")
    hbm_byte_pj: float = figure(61.2, "as on an H200, not measured on a B200")
    exponent: float = figure(4.2, "as on an H200, not measured on a B200", (3.5, 5.5))


H200_POWER, B200_POWER = PowerFigures(), B200PowerFigures()
POWER: Mapping[str, PowerFigures] = {
    "b200": B200_POWER,
    "h100": H100PowerFigures(),
    "h200": H200_POWER,
}
