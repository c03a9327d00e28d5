"""The best single change: a call's kernel with one of its choices moved to the next one.

Neighbours change how the kernel computes, not what: tiles, stages, pairs, where P waits, the share
of software exponentials, order of work. What rounds differently on purpose (tau, the degree of the
polynomial, a fixed order of sums) or is another kernel stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fa4.plan.schema import PipelinePlan
from fa4.sim.fields import FIELDS

if TYPE_CHECKING:
    from fa4.sim.options import SimulationRequest

PARTS = ("pipeline", "numerics", "exp2")  # targets of the settings that make a kernel
KEPT = frozenset({"deterministic", "tau", "exp2_degree", "exp2_start", "exp2_residue"})
# How far the next choices of a number are.
STEPS: Mapping[str, tuple[int, ...]] = {
    "tile_n": (-32, -16, 16, 32),
    "tile_m": (-64, 64),
    "kv_stages": (-1, 1),
    "exp2_frequency": (-4, -2, 2, 4),
}
OTHERS: Mapping[str, tuple[int, ...]] = {"q_tiles": (1, 2), "cta_group": (1, 2)}
DOUBLED = frozenset({"num_splits"})
SPLITS = (0.5, 0.75, 1.0)  # of P
FIRST_FREQUENCY = 16  # of emulated exponentials where none are
RING = ("kv_full", "k_full")  # whose stages are kv_stages, if it is left to what fits


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """One setting changed; speedup: time before over time after. None, with why, if it cannot."""

    setting: str
    value: str
    seconds: float | None
    speedup: float | None
    refused: str = ""

    @property
    def change(self) -> str:
        """As on a command line."""
        return f"{self.setting}={self.value}"


def neighbours(request: SimulationRequest, seconds: float) -> tuple[Neighbour, ...]:
    """All neighbours of a request that takes `seconds`, the fastest first, refused ones last."""
    tried = [_try(request, seconds, name, value) for name, value in choices(request)]
    return tuple(sorted(tried, key=lambda found: -(found.speedup or 0.0)))


def choices(request: SimulationRequest) -> Iterator[tuple[str, str]]:
    """(setting, value) of every neighbour, whether it fits or not."""
    from fa4.designs import plan_of

    plan = plan_of(request.pipeline, request.machine.gpu)
    for name, field in FIELDS.items():
        if field.target not in PARTS or name in KEPT:
            continue
        holds, now = _current(request, name, plan)
        if not holds:
            continue
        if field.is_flag:
            yield name, "no" if now else "yes"
        elif field.choices:
            yield from ((name, choice) for choice in field.choices if choice != now)
        else:
            yield from ((name, f"{value:g}") for value in _numbers(name, now))


def _numbers(name: str, now: Any) -> Iterator[float]:
    """The next values of a number."""
    if name == "exp2_frequency":
        yield from (FIRST_FREQUENCY,) if now == 0 else (0,)
    if now:
        yield from (now + step for step in STEPS.get(name, ()) if now + step > 0)
    yield from (value for value in OTHERS.get(name, ()) if value != now)
    if name in DOUBLED:
        yield from (2 * now, *((now // 2,) if now > 1 else ()))
    if name == "split_p":
        yield from (share for share in SPLITS if share != now)


def _current(request: SimulationRequest, name: str, plan: PipelinePlan) -> tuple[bool, Any]:
    """Whether the request's kernel has a setting, and its value."""
    from fa4.sim.options import read_choice

    holds, now = read_choice(request.pipeline, name)
    if holds and now is None and name == "kv_stages":
        now = next((s.stages for s in plan.signals if s.name in RING), None)
    return holds, now


def _try(request: SimulationRequest, seconds: float, name: str, value: str) -> Neighbour:
    from fa4.sim.options import build

    try:
        found = build({**request.given, name: value}).predict().seconds
    except (ValueError, TypeError, RuntimeError) as error:  # RuntimeError: a deadlock
        reason = " ".join(str(error).split())
        return Neighbour(setting=name, value=value, seconds=None, speedup=None, refused=reason)
    return Neighbour(setting=name, value=value, seconds=found, speedup=seconds / found)
