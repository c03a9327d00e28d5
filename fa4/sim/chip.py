"""From work tiles to the time of a kernel: which SM runs what, when the last one is done.

SMs run independently: they share L2 and HBM bandwidth, which bounds the kernel as a whole, and
otherwise meet only through the order in which they take work tiles. CTAs of a pair run in step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fa4.designs.tiles import WorkTiles
from fa4.sim import engine
from fa4.sim.code import EngineRun, EventCode
from fa4.sim.limits import check_steps

# The periodic shortcut simulates this many steps of a longer loop and extends the rest by the
# period: the pipelines settle within about ten steps, and 24 is a whole number of any period seen.
SHORT_STEPS, PERIOD_STEPS = 24, 24
SHORT_TILES = 4  # work tiles after which a persistent CTA repeats itself
# Relative difference of the periods of work tiles above which a sequence is simulated in full: the
# pipeline has several steady states, and which one lasts cannot be told from a short run.
SAME_PERIOD = 0.002


@dataclass(frozen=True)
class Execution:
    """Cycles of one CTA over its work tiles, of these the last after its roles are done, in which
    copies read its shared memory; and the engine's run it is read from."""

    cycles: float
    tail_cycles: float
    busy: np.ndarray
    stalled: np.ndarray
    events: int


@dataclass(frozen=True)
class ChipRun:
    """Cycles until the last SM is done, and what an average SM did until then."""

    cycles: float
    busy: np.ndarray  # (U,) mean occupied cycles per unit
    stalled: np.ndarray  # (R, S) mean cycles each role waited on each signal
    events: int
    imbalance: float  # 1 - mean finish / last finish
    finish: np.ndarray = field(default_factory=lambda: np.zeros(0))  # of each SM


class TileRunner:
    """Executes sequences of work tiles on one SM, remembering equal ones.

    With `exact` every step is simulated; otherwise long loops are extended by their period.
    """

    def __init__(self, code: EventCode, *, exact: bool = False) -> None:
        self.code, self.exact = code, exact
        self._known: dict[bytes, Execution] = {}
        self._runs: dict[bytes, EngineRun] = {}
        self._periods: dict[bytes, tuple[Execution, ...] | None] = {}
        self._steps = 0

    def expect(self, sequences: Iterable[np.ndarray]) -> None:
        """Raises ValueError at once if these sequences are more than can be simulated exactly."""
        if self.exact:
            check_steps(sum(int(x[:, 0].sum()) for x in {_key(x): x for x in sequences}.values()))

    def run(self, trips: np.ndarray) -> Execution:
        """Cycles of one CTA that works on `trips` (T, 3) one after the other."""
        key = _key(trips)
        if key not in self._known:
            self._known[key] = self._simulate(trips) if self.exact else self._shortcut(trips)
        return self._known[key]

    def _simulate(self, trips: np.ndarray) -> Execution:
        return _execution(self._engine(trips))

    def _engine(self, trips: np.ndarray) -> EngineRun:
        key = _key(trips)  # long loops of many lengths are shortened to the same few
        if key not in self._runs:
            self._steps += int(trips[:, 0].sum())
            check_steps(self._steps)
            self._runs[key] = engine.execute(self.code, trips)
        return self._runs[key]

    def _shortcut(self, trips: np.ndarray) -> Execution:
        """A persistent CTA with many equal work tiles: run a few, extend the rest."""
        equal = len(trips) > SHORT_TILES + 1 and (trips == trips[0]).all()
        if not equal:
            return self._stretch(trips)
        first = self._stretch(trips[:SHORT_TILES])
        second = self._stretch(trips[: SHORT_TILES + 1])
        return _extend(second, first, second, len(trips) - SHORT_TILES - 1)

    def _stretch(self, trips: np.ndarray) -> Execution:
        """Shorten every loop to SHORT_STEPS plus a rest; add the missing periods.

        The period of each work tile is measured where it stands, by running the sequence with one
        period more in each shortened tile.
        """
        missing = np.maximum(0, trips[:, 2] - SHORT_STEPS) // PERIOD_STEPS
        if not missing.any():
            return self._simulate(trips)
        period = PERIOD_STEPS * repeated(trips, PERIOD_STEPS * missing)
        short = trips - missing[:, None] * period
        longer = short + (missing > 0)[:, None] * period
        key = _key(short) + _key(longer)
        if key not in self._periods:
            runs = [self._engine(steps) for steps in (short, longer)]
            spans = [np.diff(run.tile_ends, prepend=0.0) for run in runs]
            periods = (spans[1] - spans[0])[missing > 0]
            steady = np.ptp(periods) <= SAME_PERIOD * periods.mean()
            self._periods[key] = tuple(_execution(run) for run in runs) if steady else None
        pair = self._periods[key]
        if pair is None:
            return self._simulate(trips)
        first, second = pair
        return _extend(first, first, second, missing.sum() / np.count_nonzero(missing))


def _key(trips: np.ndarray) -> bytes:
    return np.ascontiguousarray(trips).tobytes()


def _execution(run: EngineRun) -> Execution:
    tail = run.end - float(run.finish.max(initial=0.0))
    return Execution(run.end, tail, run.busy, run.stalled, run.events)


def _extend(base: Execution, first: Execution, second: Execution, periods: float) -> Execution:
    """`base` plus `periods` times the difference between two executions one period apart."""
    return Execution(
        base.cycles + periods * (second.cycles - first.cycles),
        base.tail_cycles,
        base.busy + periods * (second.busy - first.busy),
        base.stalled + periods * (second.stalled - first.stalled),
        int(base.events + periods * (second.events - first.events)),
    )


_NOTHING = Execution(0.0, 0.0, np.zeros(1), np.zeros(1), 0)


def run_persistent(
    runner: TileRunner, tiles: WorkTiles, machines: int, start_cycles: float
) -> ChipRun:
    """Machine i works on tiles i, i + machines, ... without leaving its CTA."""
    used = min(machines, len(tiles.trips))
    sequences = [tiles.trips[i::machines] for i in range(used)]
    runner.expect(sequences)
    runs = [runner.run(trips) for trips in sequences]
    finish = np.array([start_cycles + run.cycles for run in runs])
    return summarize(runner, finish, runs, machines)


def run_one_by_one(
    runner: TileRunner,
    tiles: WorkTiles,
    machines: int,
    start_cycles: float,
    *,
    starts_once: bool = False,
    behind: np.ndarray | None = None,
) -> ChipRun:
    """One CTA per work tile, given in order to the machine that is free first.

    behind: when each machine is done with another kernel, which these CTAs need not wait for.
    With `starts_once` a machine keeps its CTA, which steals further tiles (CLC): it pays the start
    for its first tile only, and its tail after the last.
    """
    _, first, kind, counts = np.unique(
        kinds_of(tiles.trips), return_index=True, return_inverse=True, return_counts=True
    )
    runner.expect(tiles.trips[np.sort(first), None])
    found = {int(i): runner.run(tiles.trips[i, None]) for i in np.sort(first)}
    runs = [found[int(i)] for i in first]
    tail = max((run.tail_cycles for run in runs), default=0.0) if starts_once else 0.0
    spent = [run.cycles - (run.tail_cycles if starts_once else 0.0) for run in runs]
    cycles = np.array(spent)[kind].tolist() if runs else []
    free = [0.0] * machines if behind is None else sorted(behind.tolist())
    for taken in cycles:
        start = 0.0 if starts_once and free[0] > 0.0 else start_cycles
        heapq.heapreplace(free, free[0] + start + taken)
    finish = np.array([end + tail if end > 0.0 else end for end in free])
    return summarize(runner, finish, runs, machines, counts.tolist())


def run_drawn(runner: TileRunner, tiles: WorkTiles, machines: int, start_cycles: float) -> ChipRun:
    """CTAs that stay draw work tiles, in order, each as soon as it has one to begin.

    A tile takes what it adds behind one like it, whose end it overlaps; a CTA's first one takes
    what it takes alone.
    """
    _, first, kind, counts = np.unique(
        kinds_of(tiles.trips), return_index=True, return_inverse=True, return_counts=True
    )
    alone = [tiles.trips[i, None] for i in first]
    runner.expect([*alone, *(np.concatenate([one, one]) for one in alone)])
    ones = [runner.run(one) for one in alone]
    runs = [
        _extend(_NOTHING, one, runner.run(np.concatenate([trips, trips])), 1.0)
        for one, trips in zip(ones, alone, strict=True)
    ]
    free = [0.0] * machines
    for number in kind:
        begins = free[0] == 0.0
        taken = start_cycles + ones[number].cycles if begins else runs[number].cycles
        heapq.heapreplace(free, free[0] + taken)
    return summarize(runner, np.array(free), runs, machines, counts.tolist())


def repeated(trips: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """(T, columns) of which columns so many `steps` (T,) can be left out: plain ones of the CTA and
    of each role that passes over tiles, or, if it has less, tiles that it passes over."""
    found = np.zeros_like(trips)
    found[:, [0, 2]] = 1
    for first in range(3, trips.shape[1], 3):
        plain = trips[:, first + 2] >= steps
        found[:, first], found[:, first + 2] = ~plain, plain
    return found


def kinds_of(trips: np.ndarray) -> np.ndarray:
    """(T,) a number per work tile, equal where all of `trips` (T, columns) are, in their order."""
    total, masked, _, *own = trips.T  # the third is their difference, and so are each role's last
    kinds: np.ndarray = total * (1 + masked.max(initial=0)) + masked
    for column in (c for n, c in enumerate(own) if n % 3 < 2):
        kinds = np.unique(kinds, return_inverse=True)[1] * (1 + column.max(initial=0)) + column
    return kinds


def mean_run(first: ChipRun, second: ChipRun, share: float) -> ChipRun:
    """What lies between two runs of the same work: `share` of the way to the second."""
    return ChipRun(
        first.cycles + share * (second.cycles - first.cycles),
        first.busy + share * (second.busy - first.busy),
        first.stalled + share * (second.stalled - first.stalled),
        first.events + second.events,
        first.imbalance + share * (second.imbalance - first.imbalance),
    )


def summarize(
    runner: TileRunner,
    finish: np.ndarray,
    runs: Sequence[Execution],
    machines: int,
    counts: Sequence[int] | None = None,
) -> ChipRun:
    """Means over all machines, idle ones included; each run took place `counts` times, or once."""
    code = runner.code
    if not runs:
        shape = (len(code.role_names), len(code.signal_names))
        return ChipRun(0.0, np.zeros(len(code.unit_names)), np.zeros(shape), 0, 0.0, finish)
    times = [1] * len(runs) if counts is None else counts
    weighed = list(zip(times, runs, strict=True))
    busy = sum((n * run.busy for n, run in weighed), np.zeros_like(runs[0].busy)) / machines
    none = np.zeros_like(runs[0].stalled)
    stalled = sum((n * run.stalled for n, run in weighed), none) / machines
    last = float(finish.max())
    mean = float(finish.sum()) / machines
    imbalance = max(0.0, 1.0 - mean / last)  # not below 0 by rounding
    events = sum(n * run.events for n, run in weighed)
    return ChipRun(last, busy, stalled, events, imbalance, finish)


__all__ = [
    "ChipRun",
    "EngineRun",
    "Execution",
    "TileRunner",
    "mean_run",
    "run_drawn",
    "run_one_by_one",
    "run_persistent",
    "summarize",
]  # fmt: skip
