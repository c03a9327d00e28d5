"""Sweeps: predictions over the product of several settings, in parallel, resumable.

An axis is a setting of `fa4.sim.options` with its values. Points are numbered in the order of the
product, the last axis fastest; a point's row depends on nothing but its settings, so the rows are
the same however many processes compute them. `sweep_file` keeps rows in a CSV file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

from fa4.base.files import read_text
from fa4.sim.cluster import map_on_cluster, model_version
from fa4.sim.fields import FIELDS, SUFFIXES, parse_count, parse_number

SCHEMA_VERSION = 1  # of the rows
MOST_POINTS = 1_000_000
MOST_CHUNK = 16  # points that a process is given at a time
FEW_POINTS = 32  # computed here: starting processes would take longer
TUNING = ("pipeline", "numerics", "exp2")  # what the default that points are compared to leaves out

Row = dict[str, Any]
# Columns of a row behind its settings, and how their text is read.
RESULTS: dict[str, Callable[[str], Any]] = {
    "status": str,
    "microseconds": float,
    "tflops": float,
    "peak_share": float,
    "speedup": float,
    "cycles": float,
    "imbalance": float,
    "bound_by": str,
    "bottleneck": str,
    "reason": str,
}


@dataclass(frozen=True)
class Sweep:
    """Settings and their values, as canonical text."""

    axes: Mapping[str, tuple[str, ...]]

    def __len__(self) -> int:
        """Number of points."""
        return math.prod(len(values) for values in self.axes.values()) if self.axes else 0

    def settings(self, point: int) -> dict[str, str]:
        """The settings of a point."""
        found = {}
        for name in reversed(list(self.axes)):
            point, place = divmod(point, len(self.axes[name]))
            found[name] = self.axes[name][place]
        return {name: found[name] for name in self.axes}

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of its rows."""
        return ("schema_version", "sweep", "point", *self.axes, *RESULTS)

    @property
    def digest(self) -> str:
        """Identifies axes, the model, and the content of machines and files named."""
        from fa4.sim.machine import find_machine

        machines = self.axes.get("machine", ("b200",))
        files = self.axes.get("lengths", ())
        definition = {
            "schema_version": SCHEMA_VERSION,
            "model": model_version(),
            "axes": {name: list(values) for name, values in self.axes.items()},
            "machines": [repr(find_machine(name)) for name in machines],
            "lengths": [read_text(Path(name)) for name in files],
        }
        return hashlib.sha256(json.dumps(definition).encode()).hexdigest()[:12]


def make_sweep(texts: Sequence[str]) -> Sweep:
    """The sweep of FIELD=VALUES texts. ValueError if one is wrong or there are no points."""
    axes: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name or not values.strip():
            raise ValueError(f"--set takes FIELD=VALUES; got {text!r}")
        if name in axes:
            raise ValueError(f"--set names {name} twice; put all values into one")
        axes[name] = parse_axis(name, values)
        if not axes[name]:
            raise ValueError(f"the sweep has no points: {text!r} is an empty range")
        check_names(name, axes[name])
    if not axes:
        raise ValueError("the sweep has no points: give --set FIELD=V1,V2 at least once")
    points = math.prod(len(values) for values in axes.values())  # may exceed what len() can say
    if points > MOST_POINTS:
        raise ValueError(f"a sweep has at most {MOST_POINTS} points; this one has {points}")
    return Sweep(axes)


def check_names(name: str, values: Sequence[str]) -> None:
    """Raises what is wrong with a machine, a file of lengths or a figure that is not there.

    Values that cannot run are rows of a sweep; names that mean nothing are mistakes.
    """
    from fa4.sim.machine import find_machine
    from fa4.sim.options import read_lengths, require_figure

    if name not in FIELDS:
        require_figure(name)
    for value in values:
        if name == "machine":
            find_machine(value)
        elif name == "lengths":
            read_lengths(Path(value))


def parse_axis(name: str, text: str) -> tuple[str, ...]:
    """Values of a setting: v1,v2 or first:last:step or first:last:xfactor, as canonical text.

    A window holds a comma itself, so several are separated by semicolons.
    """
    if name not in FIELDS and not name.startswith(("gpu.", "costs.")):
        raise ValueError(
            f"unknown field {name!r}; allowed: {', '.join(FIELDS)}, gpu.FIGURE, costs.FIGURE"
        )
    whole = name == "window"
    values: list[str] = []
    for part in text.split(";") if ";" in text or whole else text.split(","):
        is_number = name not in FIELDS or FIELDS[name].parse in (parse_count, parse_number)
        values += parse_range(name, part) if is_number and ":" in part else [part]
    return tuple(dict.fromkeys(canonical(name, value) for value in values))


def canonical(name: str, text: str) -> str:
    """The one way in which a value is written in rows: 8k as 8192, on as yes."""
    value: object
    try:
        value = FIELDS[name].read(text) if name in FIELDS else _figure(text)
    except ValueError as error:
        message = str(error) if name in FIELDS else f"{name} must be a number; got {text!r}"
        raise ValueError(message) from error
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ",".join("none" if side is None else str(side) for side in value)
    return str(value)


def _figure(text: str) -> float:
    return int(text) if text.strip().lstrip("-").isdigit() else parse_number(text)


def parse_range(name: str, text: str) -> list[str]:
    """Numbers from first to last (included) in steps, or by a factor: 1k:8k:1k, 1k:32k:x2."""
    parts = [part.strip().lower() for part in text.split(":")]
    by_factor = len(parts) == 3 and parts[2].startswith("x")
    try:
        first, last, step = (_decimal(part.removeprefix("x")) for part in [*parts, "1"][:3])
        if len(parts) > 3 or (step <= 1 if by_factor else step <= 0) or (by_factor and first <= 0):
            raise ValueError
    except (ValueError, InvalidOperation) as error:
        raise ValueError(
            f"a range is first:last:step with a positive step, or first:last:xFACTOR with a factor "
            f"over 1; got {name}={text}"
        ) from error
    values = []
    while first <= last:
        values.append(f"{first:f}".rstrip("0").rstrip(".") if "." in f"{first:f}" else f"{first:f}")
        if len(values) > MOST_POINTS:
            raise ValueError(f"a range has at most {MOST_POINTS} values; got {name}={text}")
        first = first * step if by_factor else first + step
    return values


def _decimal(text: str) -> Decimal:
    suffix = text[-1:] if text[-1:] in ("k", "m") else ""
    value = Decimal(text.removesuffix(suffix)) * SUFFIXES[suffix]
    if not value.is_finite():
        raise ValueError
    return value


def evaluate(settings: Mapping[str, str]) -> Row:
    """Results of one point. A point that cannot run gets the reason instead of numbers."""
    from fa4.sim.options import build

    try:
        prediction = build(settings).predict()
    except (ValueError, TypeError, RuntimeError) as error:  # RuntimeError: a deadlock
        empty = dict.fromkeys(RESULTS, "")
        return empty | {"status": "infeasible", "reason": " ".join(str(error).split())}
    seconds, default = prediction.seconds, default_seconds(tuple(sorted(settings.items())))
    return {
        "status": "ok",
        "microseconds": seconds * 1e6,
        "tflops": prediction.tflops,
        "peak_share": prediction.peak_share,
        "speedup": "" if default is None else default / seconds,
        "cycles": prediction.cycles,
        "imbalance": prediction.imbalance,
        "bound_by": prediction.bound_by,
        "bottleneck": prediction.bottleneck,
        "reason": "",
    }


def default_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings without what FlashAttention-4 would choose itself."""
    chosen = {name for name, field in FIELDS.items() if field.target in TUNING}
    return {name: x for name, x in settings.items() if name not in chosen | {"rescale_rate"}}


def default_seconds(settings: tuple[tuple[str, str], ...]) -> float | None:
    """Time of the default pipeline for the same problem and machine; None if it cannot run."""
    return _seconds(tuple(default_settings(dict(settings)).items()))


@lru_cache(maxsize=65536)
def _seconds(settings: tuple[tuple[str, str], ...]) -> float | None:
    from fa4.sim.options import build

    try:
        return build(dict(settings)).predict().seconds
    except (ValueError, TypeError, RuntimeError):
        return None


Chunk = list[tuple[int, dict[str, str]]]


def evaluate_chunk(chunk: Chunk) -> list[tuple[int, Row]]:
    """(point, results) of several points; what other processes run."""
    return [(point, evaluate(settings)) for point, settings in chunk]


def chunks_of(sweep: Sweep, points: Iterable[int], size: int) -> Iterator[Chunk]:
    """The points with their settings, `size` at a time."""
    remaining = iter(points)
    while some := list(islice(remaining, size)):
        yield [(point, sweep.settings(point)) for point in some]


def run_points(
    sweep: Sweep, points: Sequence[int], *, jobs: int | None = None, dask: str | None = None
) -> Iterator[tuple[int, Row]]:
    """(point, results) in the order of `points`, computed by `jobs` processes or a dask cluster."""
    jobs = local_cores() if jobs is None else jobs
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1; got {jobs}")
    size = max(1, min(MOST_CHUNK, len(points) // (8 * jobs)))
    if dask is not None:
        yield from map_on_cluster(dask, evaluate_chunk, chunks_of(sweep, points, size))
    elif jobs == 1 or len(points) <= FEW_POINTS:
        for point in points:
            yield point, evaluate(sweep.settings(point))
    else:  # the first point here: where nothing compiled is kept, one process makes it for all
        yield points[0], evaluate(sweep.settings(points[0]))
        yield from _map_on_cores(chunks_of(sweep, points[1:], size), jobs)


def local_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        return os.cpu_count() or 1


def _map_on_cores(chunks: Iterator[Chunk], jobs: int) -> Iterator[tuple[int, Row]]:
    # Spawned, not forked: the progress bar's thread may hold a lock.
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=prepare_worker)
    try:
        for rows in pool.map(evaluate_chunk, chunks):
            yield from rows
    finally:
        pool.shutdown(cancel_futures=True)


def prepare_worker() -> None:
    """Ctrl-C is for the process that hands out the work; if that is killed, its workers end too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
