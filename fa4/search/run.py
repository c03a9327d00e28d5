"""Searching a space of designs: a draw, then the neighbours of those that lead.

A design is ranked by its least rate over all sets of constants. Once one set puts it behind the
leaders it needs no further ones, so that the leaders are those of a full comparison. What was
judged is kept in a journal, line by line; the order of the search is fixed, so that a search that
is taken up again finds its way through what is there.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from typing import Any, NamedTuple

from fa4.search.journal import Journal
from fa4.search.judge import GOOD, Judge, Verdict, timed
from fa4.search.space import DesignSpace
from fa4.sim.cluster import map_on_cluster
from fa4.sim.predict import AnyPipeline
from fa4.sim.sweep import prepare_worker

SEED = 4  # of the draw: the same designs each time
CHUNK = 20  # designs that a process is given at a time
CLIMBERS = 10  # designs whose neighbours are judged in one round
Progress = Callable[["Outcome"], None]


class Judged(NamedTuple):
    """A design: its number in the space, its pipeline, its verdict."""

    number: int
    pipeline: AnyPipeline
    verdict: Verdict


@dataclass
class Outcome:
    """What a search has found so far. top: so many leaders are kept. floor: that leaders reach by
    every set of constants, in TFLOP/s. best: design of each kind, an
    option of the first axis. reused: from the journal.

    ended: why it did: "everything judged", "no neighbour is better", "limit", "seconds" or
    "interrupted".
    """

    space: DesignSpace
    top: int
    floor: float = 0.0
    leaders: list[Judged] = field(default_factory=list)
    best: dict[int, Judged] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    judged: int = 0
    reused: int = 0
    cpu_seconds: float = 0.0
    ended: str = ""

    @property
    def at_least(self) -> float:
        """What a design must reach by every set of constants to be among the leaders."""
        return self.leaders[-1].verdict.least if len(self.leaders) == self.top else self.floor

    def add(self, found: Judged) -> None:
        """Count a verdict; take it among the leaders if it is one."""
        verdict = found.verdict
        self.judged += 1
        self.counts[verdict.status] += 1
        if not verdict.fits:
            self.examples.setdefault(verdict.status, verdict.reason)
        if verdict.status == GOOD:
            self.leaders.append(found)
            self.leaders.sort(key=lambda x: (-x.verdict.least, x.number))
            del self.leaders[self.top :]


class _Stop(Exception):
    """The search has done what it may."""


class Search:
    """One search: what it may look at, how long, with how many processes."""

    def __init__(
        self, space: DesignSpace, judge: Judge, *, limit: int, seconds: float | None = None,
        jobs: int = 1, top: int = 10, journal: Journal | None = None,
        progress: Progress | None = None, dask: str | None = None, floor: float = 0.0,
    ) -> None:  # fmt: skip
        self.space, self.judge, self.limit, self.jobs = space, judge, limit, jobs
        self.stop_at = None if seconds is None else time.monotonic() + seconds
        self.journal, self.progress, self.dask = journal, progress, dask
        self.outcome = Outcome(space, top, floor)
        self.numbers: set[int] = set()
        self.pipelines: set[AnyPipeline] = set()
        self.pool: ProcessPoolExecutor | None = None

    def run(self) -> Outcome:
        """Search; an interruption ends it with what it has."""
        try:
            self._search()
        except _Stop as stop:
            self.outcome.ended = str(stop)
        except KeyboardInterrupt:
            self.outcome.ended = "interrupted"
        finally:
            if self.pool is not None:
                self.pool.shutdown(cancel_futures=True, wait=False)
        return self.outcome

    def _search(self) -> None:
        count = len(self.space)
        if count <= self.limit:
            self._judge(range(count))
            raise _Stop("everything judged")
        self._judge(random.Random(SEED).sample(range(count), self.limit // 4))
        asked: set[int] = set()
        while new := self._best_of_kinds(asked):
            asked |= set(new)
            self._judge(n for number in new for n in self.space.neighbours(number))
        raise _Stop("no neighbour is better")

    def _best_of_kinds(self, asked: set[int]) -> list[int]:
        """The leaders, and the best designs of each kind, whose neighbours were not judged yet.

        A kind has one option of the first axis: from each, another hill may be climbed.
        """
        kinds = sorted(self.outcome.best.values(), key=lambda x: (-x.verdict.least, x.number))
        found = dict.fromkeys(x.number for x in (*self.outcome.leaders, *kinds))
        return [number for number in found if number not in asked][:CLIMBERS]

    def _judge(self, numbers: Iterable[int]) -> None:
        """Judge designs that were not judged before, in this order."""
        wanted = self._wanted(numbers)
        if self.dask is not None:
            for judged in map_on_cluster(self.dask, judge_chunk, self._chunks(wanted)):
                self._add(*judged)
            return
        if self.jobs == 1:
            for number, pipeline in wanted:
                self._add(number, pipeline, *timed(self.judge, pipeline, self.outcome.at_least))
            return
        if self.pool is None:
            # Spawned: the first one compiles, or finds compiled, what the others use.
            self.pool = ProcessPoolExecutor(
                self.jobs, mp_context=get_context("spawn"), initializer=prepare_worker
            )
        waiting: dict[Future[Any], list[tuple[int, AnyPipeline]]] = {}
        more = True
        while more or waiting:
            while more and len(waiting) < 2 * self.jobs:
                chunk = list(islice(wanted, CHUNK))
                more = len(chunk) == CHUNK
                if chunk:
                    given = [pipeline for _, pipeline in chunk]
                    future = self.pool.submit(judge_all, self.judge, given, self.outcome.at_least)
                    waiting[future] = chunk
            done, _ = wait(waiting, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in done:
                chunk = waiting.pop(future)
                for (number, pipeline), result in zip(chunk, future.result(), strict=True):
                    self._add(number, pipeline, *result)
            self._check_time()

    def _chunks(self, wanted: Iterator[tuple[int, AnyPipeline]]) -> Iterator[Item]:
        while chunk := list(islice(wanted, CHUNK)):
            yield self.judge, chunk, self.outcome.at_least

    def _wanted(self, numbers: Iterable[int]) -> Iterator[tuple[int, AnyPipeline]]:
        """Those that need a judge: no contradiction, not judged before, not in the journal."""
        for number in numbers:
            if number in self.numbers:
                continue
            if len(self.numbers) >= self.limit:
                raise _Stop("limit")
            self._check_time()
            self.numbers.add(number)
            try:
                pipeline = self.space.make(self.space.settings(number))
            except ValueError as error:
                self.outcome.add(_contradiction(number, error))
                continue
            if pipeline in self.pipelines:
                self.outcome.counts["the same by other names"] += 1
                continue
            self.pipelines.add(pipeline)
            known = self.journal.verdict(self.space.settings(number)) if self.journal else None
            if known is None:
                yield number, pipeline
            else:
                self.outcome.reused += 1
                self._take(Judged(number, pipeline, known))

    def _add(self, number: int, pipeline: AnyPipeline, verdict: Verdict, seconds: float) -> None:
        self.outcome.cpu_seconds += seconds
        self._take(Judged(number, pipeline, verdict))
        if self.journal:
            self.journal.add(self.space.settings(number), verdict)
        if self.progress:
            self.progress(self.outcome)

    def _take(self, found: Judged) -> None:
        self.outcome.add(found)
        kind, best = self.space.kind(found.number), self.outcome.best
        held = best.get(kind)
        if found.verdict.fits and (held is None or found.verdict.least > held.verdict.least):
            best[kind] = found

    def _check_time(self) -> None:
        if self.stop_at is not None and time.monotonic() > self.stop_at:
            raise _Stop("seconds")


def _contradiction(number: int, error: Exception) -> Judged:
    verdict = Verdict(status="contradiction", reason=" ".join(str(error).split()))
    return Judged(number, None, verdict)


Item = tuple[Judge, list[tuple[int, AnyPipeline]], float]


def judge_chunk(item: Item) -> list[tuple[int, AnyPipeline, Verdict, float]]:
    """Numbers, pipelines, verdicts and CPU seconds of several designs; what a cluster runs."""
    judge, chunk, at_least = item
    return [(number, one, *timed(judge, one, at_least)) for number, one in chunk]


def judge_all(
    judge: Judge, pipelines: list[AnyPipeline], at_least: float
) -> list[tuple[Verdict, float]]:
    """Verdicts and CPU seconds of several designs; what other processes run."""
    return [timed(judge, pipeline, at_least) for pipeline in pipelines]
