"""Looks for sizes under which what a kernel never ran does run, until all has or a limit is met.

A GEMM of K = 1,024 may never enter the loop of its remainder, and "no findings" says nothing of
it. Sizes are varied one at a time first, to the neighbours of what branches compare with and of
multiples of what sizes are divided by, as the kernel's text has these numbers; then several at
once, drawn. What counts is a line: of the source, where the PTX has such lines, so that a line is
covered by any compilation of a kernel that runs all of it; else of the PTX.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fa4.emulator.errors import EmulationFailed, EmulatorError, KernelFinding, LaunchError
from fa4.emulator.execute import Report, load_program
from fa4.emulator.machine.coverage import KernelCoverage, merge_coverages, number_ranges
from fa4.emulator.ptx.syntax import Integer, PtxInstruction
from fa4.emulator.translate.program import registers_of

RUNS, SECONDS = 32, 120.0
_MOST_NUMBERS = 12
_COMPARED = ("setp", "set", "min", "max", "slct", "selp")
_DIVIDING = ("rem", "div", "and", "shr", "shl", "mul", "mad")
_WAITS = ("mbarrier", "elect", "clusterlaunchcontrol", "vote", "activemask", "atom")

Sizes: TypeAlias = dict[str, int]
Attempt: TypeAlias = Callable[[Sizes], tuple[Iterable[KernelCoverage], Iterable[KernelFinding]]]


@dataclass(frozen=True, order=True)
class RunPlace:
    """Something that is to run. kernel: its name. file, line: of the source, or "" and of the PTX.
    way: "" for the line's instructions, "taken" or "not taken" for a branch on it."""

    kernel: str
    file: str
    line: int
    way: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.file else f"PTX line {self.line}"
        return f"{self.kernel}: {where}" + (f", a branch {self.way}" if self.way else "")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run. new: what it was the first to run. refused: the error that ended it, in one line,
    that is no finding; what it ran before counts for nothing."""

    sizes: Sizes
    new: tuple[RunPlace, ...] = ()
    findings: tuple[KernelFinding, ...] = ()
    refused: str = ""


@dataclass(kw_only=True)
class Covering:
    """What was found. trials: the first with the sizes that were given. open: what no run has run.
    ended: "covered", or which limit: "runs", "seconds", "sizes" (all that are allowed)."""

    trials: list[Trial] = field(default_factory=list)
    open: tuple[RunPlace, ...] = ()
    coverage: list[KernelCoverage] = field(default_factory=list)
    ended: str = ""

    @property
    def proposal(self) -> list[Sizes]:
        """Sizes that together run all that was run: those that ran something first."""
        return [trial.sizes for trial in self.trials if trial.new]

    @property
    def findings(self) -> list[tuple[Sizes, KernelFinding]]:
        """Those of all runs, each with the sizes of the first that had it."""
        seen: dict[tuple[str, str, str, int], tuple[Sizes, KernelFinding]] = {}
        for trial in self.trials:
            for one in trial.findings:
                key = one.kind, one.kernel, one.source, 0 if one.source else one.line
                seen.setdefault(key, (trial.sizes, one))
        return list(seen.values())

    def __str__(self) -> str:
        return "\n".join(render_covering(self))


def until_covered(
    function: Callable[..., Any],
    sizes: Mapping[str, int | Sequence[int]],
    *,
    runs: int = RUNS,
    seconds: float = SECONDS,
    seed: int = 0,
    **options: Any,
) -> Covering:
    """Calls function(**sizes) with other sizes until all of the kernels that it launches has run.

    sizes: of each name where to begin, a number (1 up to twice as much are tried), or the allowed
    values, a range or list whose first one is where to begin. function: launches kernels, or
    returns a `Report` of its own or several. runs, seconds: limits; a run under way is not ended by
    the second (`max_steps` ends kernels). options: those of `emulate`. Findings are collected.
    """
    from fa4.emulator.host.session import emulate

    chosen = {"collect": True, **options}

    def attempt(drawn: Sizes) -> tuple[list[KernelCoverage], list[KernelFinding]]:
        with emulate(**chosen) as session:
            try:
                own = function(**drawn)
            except EmulationFailed as failure:
                own = failure.report if failure.report not in session.reports else ()
        returned = [own] if isinstance(own, Report) else own if isinstance(own, list) else []
        reports = [*session.reports, *(one for one in returned if isinstance(one, Report))]
        return (
            [one for report in reports for one in report.coverage],
            [finding for report in reports for finding in report.findings],
        )

    return search(attempt, sizes, runs=runs, seconds=seconds, seed=seed)


def search(
    attempt: Attempt,
    sizes: Mapping[str, int | Sequence[int]],
    *,
    runs: int = RUNS,
    seconds: float = SECONDS,
    seed: int = 0,
) -> Covering:
    """As `until_covered`, of what runs sizes and returns coverage and findings.

    Raises what the first run raises; later errors are `Trial.refused`. Raises LaunchError for sizes
    that cannot be.
    """
    allowed = {name: _allowed(name, values) for name, values in sizes.items()}
    if runs < 1 or not seconds > 0:
        raise LaunchError(f"runs {runs}, seconds {seconds}: positive numbers are needed")
    began, found = time.monotonic(), Covering()
    state = _Seen()
    proposals = _Proposals(sizes, allowed, random.Random(seed))
    for drawn in proposals:
        if found.trials and time.monotonic() - began > seconds:
            found.ended = "seconds"
            break
        trial, coverage = _try(attempt, drawn, is_first=not found.trials)
        found.coverage = merge_coverages([*found.coverage, *coverage])
        new = state.add(found.coverage)
        found.trials.append(Trial(sizes=drawn, new=new, **trial))
        proposals.heed(drawn, bool(new), coverage)
        if not state.open():
            found.ended = "covered"
            break
        if len(found.trials) >= runs:
            found.ended = "runs"
            break
    found.ended = found.ended or "sizes"
    found.open = tuple(sorted(state.open()))
    return found


def _try(
    attempt: Attempt, drawn: Sizes, is_first: bool
) -> tuple[dict[str, Any], list[KernelCoverage]]:
    try:
        coverage, findings = attempt(dict(drawn))
    except (Exception, SystemExit) as error:
        if is_first:
            raise
        text = str(error).strip().split("\n")[0]
        kind = "" if isinstance(error, EmulatorError) else f"{type(error).__name__}: "
        return {"refused": f"{kind}{text}"}, []
    return {"findings": tuple(findings)}, list(coverage)


def _allowed(name: str, values: int | Sequence[int]) -> Sequence[int]:
    if isinstance(values, int) and not isinstance(values, bool):
        if values < 1:
            raise LaunchError(f"size {name}={values}: 1 or more, or the allowed values")
        return range(1, 2 * values + 1)
    if not isinstance(values, (range, list, tuple)) or not all(type(v) is int for v in values):
        raise LaunchError(f"size {name}={values!r}: expected an integer, a range or a list of them")
    if not values:
        raise LaunchError(f"size {name}: no value is allowed")
    return sorted(values)


class _Seen:
    """What of each kernel is known and has run, over all of its compilations."""

    def __init__(self) -> None:
        self._known: set[RunPlace] = set()
        self._ran: set[RunPlace] = set()

    def add(self, coverages: Iterable[KernelCoverage]) -> tuple[RunPlace, ...]:
        """Notes what all runs have covered; returns what ran for the first time."""
        before = set(self._ran)
        for coverage in coverages:
            known, missed = _places_of(coverage)
            self._known |= known
            self._ran |= known - missed
        return tuple(sorted(self._ran - before))

    def open(self) -> set[RunPlace]:
        """What has not run."""
        return self._known - self._ran


def _places_of(coverage: KernelCoverage) -> tuple[set[RunPlace], set[RunPlace]]:
    """The places of a kernel, and those of them that did not run."""
    program = load_program(coverage.ptx, coverage.kernel)
    places: dict[tuple[int, str], RunPlace] = {}
    known, missed = set(), set()
    waits = _waiting(program.kernel.instructions)
    for one in program.kernel.instructions:
        file, line = one.location or ("", one.written_line)
        place = RunPlace(coverage.kernel, file, line)
        places[one.written_line, one.text] = place
        known.add(place)
        if one.parts[0] == "bra" and one.guard is not None and one.guard.name not in waits:
            known |= {RunPlace(coverage.kernel, file, line, way) for way in ("taken", "not taken")}
    for gone in coverage.missed:
        missed.add(places[gone.line, gone.text])
    for branch in coverage.branches:
        place = places[branch.line, branch.text]
        ways = {True: ["not taken"], False: ["taken"], None: ["taken", "not taken"]}[branch.taken]
        missed |= {RunPlace(place.kernel, place.file, place.line, way) for way in ways}
    return known, missed


def _waiting(instructions: Iterable[PtxInstruction]) -> set[str]:
    """Predicates of branches that time decides, not sizes: whether a wait was over at once."""
    return {
        name
        for one in instructions
        if one.parts[0] in _WAITS and one.operands
        for name in registers_of(one.operands[0])
    }


class _Proposals:
    """Sizes to try, each once: where to begin, then one name changed, then several, drawn."""

    def __init__(
        self,
        begin: Mapping[str, int | Sequence[int]],
        allowed: Mapping[str, Sequence[int]],
        draw: random.Random,
    ) -> None:
        self.base = {
            name: value if isinstance(value, int) else value[0] for name, value in begin.items()
        }
        self._allowed, self._draw = allowed, draw
        self._numbers: dict[int, int] = {}
        self._useful: dict[str, list[int]] = {name: [] for name in begin}

    def heed(self, drawn: Sizes, is_new: bool, coverage: Iterable[KernelCoverage]) -> None:
        """What came of a proposal: its values are taken again if it ran something new."""
        for one in coverage:
            kernel = load_program(one.ptx, one.kernel).kernel
            for number, weight in _numbers_in(kernel.instructions):
                self._numbers[number] = max(weight, self._numbers.get(number, 0))
        for name, value in drawn.items():
            if is_new and value != self.base[name]:
                self._useful[name].append(value)

    def __iter__(self) -> Iterator[Sizes]:
        yield dict(self.base)
        tried = {tuple(self.base.values())}
        total = 1
        for values in self._allowed.values():
            total *= len(values)
        for sizes in self._all():
            if tuple(sizes.values()) not in tried:
                tried.add(tuple(sizes.values()))
                yield sizes
            if len(tried) >= total:
                return

    def _all(self) -> Iterator[Sizes]:
        names = list(self.base)
        given: set[tuple[str, int]] = set()
        while True:  # again as long as the kernels that ran name other numbers
            fresh = [
                (rank, name, value)
                for name in names
                for rank, value in enumerate(self._candidates(name))
                if (name, value) not in given
            ]
            if not fresh:
                break
            for _, name, value in sorted(fresh, key=lambda one: one[0])[: 2 * len(names)]:
                given.add((name, value))
                yield {**self.base, name: value}
        while names:
            yield {name: self._drawn(name) for name in names}

    def _candidates(self, name: str) -> list[int]:
        """Values beside those that decide something, nearest to where it began first."""
        base, allowed = self.base[name], self._allowed[name]
        numbers = sorted(self._numbers, key=lambda n: (-self._numbers[n], n))[:_MOST_NUMBERS]
        wanted = [base - 1, base + 1, 1]
        for n in numbers:
            wanted += [n, n + 1, n - 1, base + n, base - n, base + n // 2, base - n // 2]
        wanted += [2 * base - 1, base // 2, allowed[0], allowed[-1]]
        found = dict.fromkeys(_nearest(allowed, value) for value in wanted)
        return [value for value in found if value != base]

    def _drawn(self, name: str) -> int:
        """A value that was useful, a candidate, where it began, or any one."""
        base, allowed = self.base[name], self._allowed[name]
        kind = self._draw.randrange(5)
        if kind == 0:
            return base
        if kind == 1 and self._useful[name]:
            return self._draw.choice(self._useful[name])
        if kind == 2 and (candidates := self._candidates(name)):
            return self._draw.choice(candidates)
        return self._draw.choice(allowed)


def _nearest(allowed: Sequence[int], value: int) -> int:
    index = bisect_left(allowed, value)
    around = allowed[max(index - 1, 0) : index + 1]
    return min(around, key=lambda other: abs(other - value))


def _numbers_in(instructions: Iterable[PtxInstruction]) -> Iterator[tuple[int, int]]:
    """Numbers that a kernel compares with or divides by, with a weight."""
    for one in instructions:
        weight = 2 if one.parts[0] in _COMPARED else 1 if one.parts[0] in _DIVIDING else 0
        if not weight:
            continue
        for operand in one.operands[1:]:
            if isinstance(operand, Integer):
                value = abs(operand.value)
                if one.parts[0] in ("shr", "shl"):
                    value = 1 << value if value < 16 else 0
                if one.parts[0] == "and":
                    value += 1
                if 1 < value <= 2**20:
                    yield value, weight


def render_covering(found: Covering) -> Iterator[str]:
    """The report for people: what ran, by which sizes, and what did not."""
    first, tried = found.trials[0], len(found.trials)
    for trial in found.trials[1:]:
        if trial.new:
            yield f"{_words(trial.sizes)}: now {_several(trial.new)} ran"
    refused = [trial for trial in found.trials if trial.refused]
    if refused:
        yield (
            f"{len(refused)} of {tried} runs were refused, such as {_words(refused[0].sizes)}: "
            f"{refused[0].refused}"
        )
    for sizes, finding in found.findings:
        if sizes != first.sizes:
            yield f"{_words(sizes)}: {finding}"
    if not found.open:
        yield f"all has run after {tried} runs, with " + "; ".join(map(_words, found.proposal))
        return
    limits = {"runs": "the limit of runs", "seconds": "the limit of seconds"}
    limit = limits.get(found.ended, "all sizes that are allowed")
    yield f"never ran in {tried} runs ({limit}): {_several(found.open)}"


def _words(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in sizes.items())


def _several(places: Iterable[RunPlace]) -> str:
    """ "gemm.py lines 22-24, branches taken in line 20"."""
    groups: dict[tuple[str, str], dict[str, list[int]]] = {}
    for one in sorted(places):
        groups.setdefault((one.kernel, one.file), {}).setdefault(one.way, []).append(one.line)
    texts = []
    for (kernel, file), ways in groups.items():
        lines = [
            f"{f'branches {way} in ' if way else ''}{'line' if file else 'PTX line'}"
            f"{'s' * (len(numbers) > 1)} {number_ranges(numbers)}"
            for way, numbers in ways.items()
        ]
        texts.append(f"{kernel}{f' ({file})' if file else ''}: {', '.join(lines)}")
    return "; ".join(texts)
