"""Fit the constants that no measurement gives (`costs.FREE_CONSTANTS`) to measured throughput.

Each round linearises the predicted times around the best point, minimises the objective on that
model within a trust region, and keeps the point if the simulator agrees. Constants never leave
their bounds. The same seed gives the same result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from fa4.sim.cost_table import FREE_CONSTANTS, CostTable, free_constants
from fa4.sim.machine import Machine
from fa4.sim.measurements import Row
from fa4.sim.validation import Comparison, Point, compare

WORST_WEIGHT = 0.3  # of the largest error, beside the mean
FIRST_RADIUS, LEAST_RADIUS, MOST_RADIUS = 0.25, 0.004, 0.6  # of the ranges
SAMPLES, ZOOMS = 4000, 14  # of the search on the linear model
SHIFT = 0.1  # of a constant's range, for the sensitivity
STARTS = 3
SCREENED = 0.15  # of the evaluations go to the space-filling sample
DEFAULT_EVALUATIONS = 400
REFITS = 400  # of the bootstrap
# Prior of repeated fits: errors of 2 % are as likely as a constant a fifth of its range away from
# its start.
PRIOR_PULL = 0.1
RIDGE = 0.01  # pull on a scaled constant: what changes times by 1 % over its range is barely known
CLIPPED = 0.15  # log of the ratio beyond which a measurement counts no more
FEW_CONFIGURATIONS = 8

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A fitted constant: its bounds, and the mean error with it a tenth of its range off.

    interval: what 95 of 100 other choices of configurations among the measured ones would give
    (`bootstrap`); as wide as the bounds where the measurements say nothing.
    """

    name: str
    before: float
    value: float
    least: float
    most: float
    why: str
    mape_below: float | None
    mape_above: float | None
    interval: tuple[float, float]

    @property
    def at_bound(self) -> str:
        """Which bound the fit ran into, to a hundredth of the range: least, most or empty."""
        near = (self.most - self.least) / 100
        if self.value - self.least < near:
            return "least"
        return "most" if self.most - self.value < near else ""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What a fit found. `left_out`: each point predicted by a fit to all the others."""

    before: Comparison
    after: Comparison
    constants: tuple[Constant, ...]
    costs: CostTable
    left_out: Comparison
    evaluations: int


class _Model:
    """Predicted times over measured ones as a function of constants scaled to [0, 1]."""

    def __init__(self, rows: Seq[Row], machine: Machine, names: Seq[str]) -> None:
        self.rows, self.machine, self.names = tuple(rows), machine, tuple(names)
        self.least = np.array([FREE_CONSTANTS[name][0] for name in names])
        self.span = np.array([FREE_CONSTANTS[name][1] for name in names]) - self.least
        self.known: dict[bytes, Comparison] = {}

    def start(self) -> np.ndarray:
        """The machine's own constants, moved into their bounds."""
        values = np.array([getattr(self.machine.costs, name) for name in self.names])
        return np.clip((values - self.least) / self.span, 0.0, 1.0)

    def costs(self, at: np.ndarray) -> CostTable:
        """The cost table at a scaled point; values are rounded as they are reported."""
        values = self.least + at * self.span
        changes = {
            name: round(float(value), 4 if most <= 1.0 else 1)
            for name, value, most in zip(self.names, values, self.least + self.span, strict=True)
        }
        return replace(self.machine.costs, **changes)

    def compare(self, at: np.ndarray) -> Comparison:
        """The simulator's answer at a scaled point, remembered."""
        key = at.tobytes()
        if key not in self.known:
            machine = replace(self.machine, costs=self.costs(at))
            self.known[key] = compare(self.rows, machine)
        return self.known[key]

    def times(self, at: np.ndarray) -> np.ndarray:
        """Predicted time over measured time of each row."""
        points = self.compare(at).points
        return np.array([point.row.tflops / point.predicted_tflops for point in points])

    def slopes(self, at: np.ndarray, step_size: float) -> np.ndarray:
        """(rows, constants): change of `times` per unit of each scaled constant."""
        here = self.times(at)
        columns = []
        for index in range(len(at)):
            step = step_size if at[index] + step_size <= 1.0 else -step_size
            moved = at.copy()
            moved[index] += step
            columns.append((self.times(moved) - here) / step)
        return np.stack(columns, axis=1)


def objective(times: np.ndarray) -> np.ndarray:
    """Mean plus WORST_WEIGHT times the largest absolute relative error of throughput."""
    errors = np.abs(1.0 / np.maximum(times, 1e-9) - 1.0)
    return errors.mean(axis=-1) + WORST_WEIGHT * errors.max(axis=-1)


def calibrate(
    rows: Seq[Row],
    machine: Machine,
    names: Seq[str] | None = None,
    *,
    seed: int = 0,
    evaluations: int = DEFAULT_EVALUATIONS,
    progress: Progress | None = None,
) -> Calibration:
    """Fit `names` (default: all free constants) to `rows`. Raises ValueError for other names.

    `evaluations` bounds how often all rows are predicted during the search itself.
    """
    names = free_constants(machine.costs) if names is None else tuple(dict.fromkeys(names))
    for name in names:
        if name not in FREE_CONSTANTS:
            raise ValueError(f"constants to fit: {', '.join(FREE_CONSTANTS)}; got {name!r}")
    if not names:
        raise ValueError(f"name a constant to fit: {', '.join(FREE_CONSTANTS)}")
    if len(rows) < len(names) + 1:
        raise ValueError(
            f"{len(names)} constants need at least {len(names) + 1} measurements; got {len(rows)}"
        )
    tell = progress or (lambda done, total, what: None)
    model = _Model(rows, machine, names)
    rng = np.random.default_rng(seed)
    best = _search(model, rng, evaluations, tell)
    slopes = model.slopes(best, FIRST_RADIUS / 10)
    left_out = []
    for index in range(len(rows)):
        tell(index, len(rows), "leaving out each point")
        left_out.append(_predict_left_out(model, best, slopes, index, rng))
    return Calibration(
        before=compare(rows, machine),
        after=model.compare(best),
        constants=_describe(model, best, slopes, tell),
        costs=model.costs(best),
        left_out=Comparison(machine=machine.name, points=tuple(left_out)),
        evaluations=len(model.known),
    )


def _search(
    model: _Model, rng: np.random.Generator, evaluations: int, tell: Progress
) -> np.ndarray:
    """The best scaled point found from several starts: the machine's own constants, the best of a
    space-filling sample, then once more from the best of all with a fresh radius.
    """
    own, count = model.start(), max(2, int(evaluations * SCREENED))
    strata = np.argsort(rng.random((count, len(own))), axis=0)
    sample = (strata + rng.random(strata.shape)) / count
    ranked = sorted(sample, key=lambda at: float(objective(model.times(at))))
    starts = [own, *ranked[: STARTS - 1]]
    share = (evaluations - count) // (len(starts) + 1)
    found = [
        _descend(model, rng, (start, FIRST_RADIUS), len(model.known) + share, tell)
        for start in starts
    ]
    value, best = min(found, key=lambda item: item[0])
    again, point = _descend(model, rng, (best, FIRST_RADIUS / 2), evaluations, tell)
    return point if again < value else best


def _descend(
    model: _Model,
    rng: np.random.Generator,
    start: tuple[np.ndarray, float],
    until: int,
    tell: Progress,
) -> tuple[float, np.ndarray]:
    """Objective and point reached from a point and radius; slopes are as coarse as the radius."""
    best, radius = start
    value = float(objective(model.times(best)))
    every = np.arange(len(model.rows))
    while len(model.known) < until and radius >= LEAST_RADIUS:
        tell(len(model.known), until, f"objective {value:.2%}")
        slopes = model.slopes(best, radius / 3)
        trial = _minimise(model.times(best), slopes, best, radius, (every, rng))
        trial_value = float(objective(model.times(trial)))
        if trial_value < value - 1e-6:
            best, value = trial, trial_value
            radius = min(MOST_RADIUS, radius * 1.3)
        else:
            radius /= 2
    return value, best


def _minimise(
    times: np.ndarray,
    slopes: np.ndarray,
    center: np.ndarray,
    radius: float,
    sampling: tuple[np.ndarray, np.random.Generator],
) -> np.ndarray:
    """Least objective of the linear model over some rows within a box: random search that zooms."""
    used, rng = sampling
    lower, upper = np.maximum(0.0, center - radius), np.minimum(1.0, center + radius)
    best, value, reach = center, float(objective(times[used])), radius
    for _ in range(ZOOMS):
        points = best + rng.uniform(-reach, reach, (SAMPLES, len(center)))
        # Most samples move a few constants only: corners and edges are reached as well.
        points = np.where(rng.random(points.shape) < 0.6, points, best)
        points = np.clip(points, lower, upper)
        values = objective((times + (points - center) @ slopes.T)[:, used])
        found = int(np.argmin(values))
        if values[found] < value:
            best, value = points[found], float(values[found])
        reach *= 0.65
    return best


def _predict_left_out(
    model: _Model, best: np.ndarray, slopes: np.ndarray, index: int, rng: np.random.Generator
) -> Point:
    """The point `index` predicted by constants refitted, from `best` on, to all the other rows."""
    used = np.array([i for i in range(len(model.rows)) if i != index])
    value, chosen = float(objective(model.times(best)[used])), best
    for radius in (0.2, 0.05):
        trial = _minimise(model.times(best), slopes, best, radius, (used, rng))
        trial_value = float(objective(model.times(trial)[used]))
        if trial_value < value:
            value, chosen = trial_value, trial
            break
    return model.compare(chosen).points[index]


def quick_fit(
    rows: Seq[Row],
    machine: Machine,
    names: Seq[str],
    *,
    rounds: int = 3,
    start: CostTable | None = None,
) -> tuple[CostTable, np.ndarray]:
    """Least squares of relative errors, some rounds of it: for repeated fits.

    Begins with the constants of `start`, or in the middle of the bounds; what the rows do not
    determine stays there. Returns the cost table and its scaled point.
    """
    model = _Model(rows, machine, names)
    at = np.full(len(model.names), 0.5)
    if start is not None:
        at = _Model(rows, replace(machine, costs=start), names).start()
    began, best, value = at, at, math.inf
    for _ in range(rounds):
        missed = np.clip(np.log(model.times(at)), -CLIPPED, CLIPPED)
        if float(missed @ missed) < value:
            best, value = at, float(missed @ missed)
        slopes = model.slopes(at, FIRST_RADIUS / 3)
        at = np.clip(at + _solve(slopes, missed, at - began, PRIOR_PULL), 0.0, 1.0)
    missed = np.clip(np.log(model.times(at)), -CLIPPED, CLIPPED)
    best = at if float(missed @ missed) < value else best
    return model.costs(best), best


def _solve(
    slopes: np.ndarray, missed: np.ndarray, moved: np.ndarray | float = 0.0, pull: float = RIDGE
) -> np.ndarray:
    """The step that least squares takes, pulled back by `pull` times how far it has `moved`."""
    columns = slopes.shape[1]
    held = np.vstack([slopes, pull * np.eye(columns)])
    wanted = np.concatenate([-missed, -pull * moved * np.ones(columns)])
    return np.linalg.lstsq(held, wanted, rcond=None)[0]


def configuration(row: Row) -> tuple[object, ...]:
    """What is one choice of a kernel: everything but the lengths."""
    problem = row.problem
    return (row.direction, row.software, problem.head_dim, problem.head_dim_v, problem.causal,
            problem.dtype, *row.tile.items())  # fmt: skip


def bootstrap(
    rows: Seq[Row], times: np.ndarray, slopes: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """(constants, 2) shifts of the scaled constants within which 95 % of refits lie.

    Each refit draws as many configurations as there are, with repeats, and solves the linear model.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(configuration(row), []).append(index)
    members, missed = list(groups.values()), times - 1.0
    if len(members) < FEW_CONFIGURATIONS:  # each point is its own configuration then
        members = [[index] for index in range(len(rows))]
    shifts = []
    for _ in range(REFITS):
        drawn = rng.integers(0, len(members), len(members))
        used = np.concatenate([members[i] for i in drawn])
        shifts.append(_solve(slopes[used], missed[used]))
    return np.percentile(np.array(shifts) - _solve(slopes, missed), (2.5, 97.5), axis=0).T


def _describe(
    model: _Model, best: np.ndarray, slopes: np.ndarray, tell: Progress
) -> tuple[Constant, ...]:
    """Every fitted constant with bounds, interval, and what moving it does to the mean error."""
    costs = model.costs(best)
    shifts = bootstrap(model.rows, model.times(best), slopes, np.random.default_rng(0))
    ends = model.least + np.clip(best[:, None] + shifts, 0.0, 1.0).T * model.span
    constants = []
    for index, name in enumerate(model.names):
        tell(index, len(model.names), "sensitivity")
        least, most, why = FREE_CONSTANTS[name]
        mapes = []
        for shift in (-SHIFT, SHIFT):
            moved = best.copy()
            moved[index] += shift
            inside = 0.0 <= moved[index] <= 1.0
            mapes.append(model.compare(moved).mape if inside else None)
        constants.append(
            Constant(
                name=name,
                before=getattr(model.machine.costs, name),
                value=getattr(costs, name),
                least=least,
                most=most,
                why=why,
                mape_below=mapes[0],
                mape_above=mapes[1],
                interval=(float(ends[0, index]), float(ends[1, index])),
            )
        )
    return tuple(constants)
