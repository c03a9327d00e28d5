"""Looks for a schedule that shows a hazard: orders are steered at what nothing keeps in order.

A race, or a wait that meets its phase by luck, names the places that could have happened the other
way round. Each is made late in turn, until nothing else can go on; that is the step by which
dynamic partial-order reduction (Flanagan and Godefroid, POPL 2005) turns two events round. Runs
that synchronise in an order that was seen before lead to nothing new and are not gone on from (as
with sleep sets); what is found on the way is steered at in turn. It ends after a number of runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fa4.emulator.errors import EmulationFailed, KernelFinding, Site
from fa4.emulator.execute import Report, failures, run
from fa4.emulator.machine.events import BarrierUse, RunEvents
from fa4.emulator.machine.holds import BASES, HeldOrder, Hold
from fa4.emulator.machine.launch_record import Allocation, Launch
from fa4.emulator.machine.options import Options
from fa4.emulator.orders.kept_memory import KeptMemory, kept
from fa4.emulator.orders.witness import Witness

# Findings that another order may turn into something else; the rest is there in every order.
STEERED_KINDS = ("race", "mbarrier")
MOST_HOLDS = 2
_VISITS_TRIED = 4


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a hazard leads to. hazard: the finding; outcome: what happens in one sentence; finding:
    the error, if it is one; witness: the order."""

    hazard: KernelFinding
    outcome: str
    finding: KernelFinding | None
    witness: Witness

    def __str__(self) -> str:
        held = "; ".join(str(hold) for hold in self.witness.holds)
        return f"{self.outcome}, if {held} (otherwise {self.witness.base})"


@dataclass(kw_only=True)
class Steering:
    """What steering found. runs: of the launches. unshown: hazards that no run has shown."""

    shown: list[Shown] = field(default_factory=list)
    unshown: list[KernelFinding] = field(default_factory=list)
    runs: int = 0


def steer(
    launches: Sequence[Launch],
    allocations: Sequence[Allocation],
    options: Options | None = None,
    runs: int = 64,
) -> Steering:
    """Steers at the hazards that one run finds, in at most so many runs of the launches.

    A hazard is shown by an error that the run in the order "fifo" does not have, or by memory that
    is left different. The memory is as it was, afterwards.
    """
    with kept(allocations) as memory:
        return _Search(launches, allocations, options or Options(), memory, runs).search()


def run_steered(
    launches: Sequence[Launch],
    allocations: Sequence[Allocation],
    options: Options | None = None,
    runs: int = 64,
) -> Report:
    """Runs launches as `fa4.emulator.run` does, then steers at the hazards that were found.

    Errors that another order leads to are findings of the report; a hazard says what it leads to.
    """
    options = options or Options()
    before = KeptMemory(allocations)
    report = run(launches, allocations, replace(options, collect=True))
    if any(is_steered(finding) for finding in report.findings):
        with kept(allocations):  # the results
            before.restore()
            report.steering = steer(launches, allocations, options, runs)
        _tell(report, report.steering)
    if failures(report.findings, options.fail_on) and not options.collect:
        raise EmulationFailed(report)
    return report


def _tell(report: Report, steering: Steering) -> None:
    """Puts what was shown into the report's findings."""
    told = {(shown.hazard.kind, shown.hazard.line): shown for shown in steering.shown}
    for index, finding in enumerate(report.findings):
        shown = told.get((finding.kind, finding.line))
        if shown is not None and is_steered(finding):
            message = f"{finding.message}; shown by steering: {shown}"
            report.findings[index] = replace(finding, message=message)
    errors: dict[tuple[str, int], KernelFinding] = {}
    for shown in steering.shown:
        error = shown.finding
        if error is not None:
            message = f"{error.message}\n    in this order: {'; '.join(shown.witness.steps())}"
            errors.setdefault((error.kind, error.line), replace(error, message=message))
    report.findings += errors.values()


@dataclass(frozen=True)
class _Lead:
    """holds: to try; hazard: at which they are steered."""

    holds: tuple[Hold, ...]
    hazard: KernelFinding


class _Search:
    """A search of `steer`."""

    def __init__(
        self,
        launches: Sequence[Launch],
        allocations: Sequence[Allocation],
        options: Options,
        memory: KeptMemory,
        runs: int,
    ) -> None:
        self._launches, self._allocations = launches, allocations
        self._options, self._memory, self._left = options, memory, runs
        self._result = Steering()
        self._orders: set[frozenset[tuple[Any, int]]] = set()
        self._usual = KeptMemory(())  # what the run in the usual order leaves
        self._unsteady: set[str] = set()

    def search(self) -> Steering:
        """Breadth first: one late event, then two."""
        report, _ = self._run("fifo")
        self._usual = KeptMemory(self._allocations)
        hazards = {key_of(f): f for f in report.findings if is_steered(f)}
        if not hazards:
            return self._result
        if _adds_floats(report):
            self._run("late")
            self._unsteady = set(self._usual.differing())
        known = {(f.kind, f.line) for f in report.findings}
        open_ones = dict(hazards)
        leads = [_Lead(holds, f) for f in hazards.values() for holds in _turned(f, ())]
        while leads and open_ones and self._left > 0:
            further: list[_Lead] = []
            for lead in _in_turn(leads):
                if key_of(lead.hazard) not in open_ones or self._left <= 0:
                    continue
                for shown, found in self._try(lead, known):
                    if shown is not None:
                        self._result.shown.append(shown)
                        del open_ones[key_of(lead.hazard)]
                        break
                    further += [
                        _Lead(holds, lead.hazard)
                        for finding in found
                        for holds in _turned(finding, lead.holds)
                    ]
            leads = further
        self._result.unshown = list(open_ones.values())
        return self._result

    def _try(
        self, lead: _Lead, known: set[tuple[str, int]]
    ) -> Iterator[tuple[Shown | None, list[KernelFinding]]]:
        """(what it shows, or None and new hazards) of a lead, in each base order."""
        for base in BASES:
            if self._left <= 0:
                return
            witness = Witness(
                kind=lead.hazard.kind, line=lead.hazard.line, holds=lead.holds, base=base
            )
            schedule = HeldOrder(lead.holds, base)
            report, is_new = self._run(schedule)
            if len(schedule.reached) < len(lead.holds):
                return
            errors = [
                finding
                for finding in report.findings
                if finding.severity == "error" and (finding.kind, finding.line) not in known
            ]
            if errors:
                kept_one = replace(witness, kind=errors[0].kind, line=errors[0].line)
                outcome = f"{errors[0].kind} at PTX line {errors[0].line}"
                yield (
                    Shown(hazard=lead.hazard, outcome=outcome, finding=errors[0], witness=kept_one),
                    [],
                )
                return
            changed = self._usual.differing().items()
            steady = [(name, at) for name, at in changed if name not in self._unsteady]
            if steady and lead.hazard.kind == "race":
                name, at = steady[0]
                outcome = f"{name} is left different, from byte {at} on"
                yield Shown(hazard=lead.hazard, outcome=outcome, finding=None, witness=witness), []
                return
            new = [f for f in report.findings if is_steered(f) and (f.kind, f.line) not in known]
            yield None, new if is_new else []

    def _run(self, schedule: Any) -> tuple[Report, bool]:
        """A run, and whether its threads have not synchronised in this order before."""
        self._memory.restore()
        order = _Order()
        chosen = HeldOrder((), schedule) if isinstance(schedule, str) else schedule
        options = replace(self._options, schedule=chosen, collect=True, events=order)
        report = run(self._launches, self._allocations, options)
        self._left -= 1
        self._result.runs += 1
        seen = order.summary()
        is_new = seen not in self._orders
        self._orders.add(seen)
        return report, is_new


class _Order(RunEvents):
    """In which order warps used each mbarrier, and operations of each CTA were done."""

    def __init__(self) -> None:
        self._chains: dict[Any, int] = {}

    def barrier_used(self, fragment: Any, cta: Any, offset: int, use: BarrierUse) -> None:
        """A link in the chain of the barrier."""
        me = fragment.warp.cta.index, fragment.warp.index, use.value
        self._add((cta.grid.index, cta.index, offset), me)

    def completed(self, operation: Any, tick: int) -> None:
        """A link in the chain of its CTA."""
        self._add((operation.cluster, operation.cta), operation.line)

    def _add(self, chain: Any, link: Any) -> None:
        self._chains[chain] = hash((self._chains.get(chain, 0), link))

    def summary(self) -> frozenset[tuple[Any, int]]:
        """The same for runs with the same chains."""
        return frozenset(self._chains.items())


def key_of(finding: KernelFinding) -> tuple[str, int, str, tuple[Site, ...]]:
    """What tells findings of one run from one another."""
    return finding.kind, finding.line, finding.instruction, finding.sites


def is_steered(finding: KernelFinding) -> bool:
    """Whether another order may show more of it."""
    return finding.kind in STEERED_KINDS and bool(finding.sites) and not finding.excuse


def _turned(finding: KernelFinding, held: tuple[Hold, ...]) -> Iterator[tuple[Hold, ...]]:
    """Lists of holds that make one of its sides late, too."""
    if len(held) >= MOST_HOLDS:
        return
    for site in finding.sites:
        count = max(site.visits, 1)
        visits = dict.fromkeys((count - 1, 0, count // 2, max(count - 2, 0)))
        for visit in list(visits)[:_VISITS_TRIED]:
            hold = Hold(site.cta, site.warp, site.line, visit)
            if hold not in held:
                yield (*held, hold)


def _in_turn(leads: list[_Lead]) -> Iterator[_Lead]:
    """Each hazard's first lead, then each one's second, ..."""
    by_hazard: dict[Any, list[_Lead]] = {}
    for lead in leads:
        by_hazard.setdefault(key_of(lead.hazard), []).append(lead)
    for place in range(max(map(len, by_hazard.values()), default=0)):
        yield from (found[place] for found in by_hazard.values() if place < len(found))


def _adds_floats(report: Report) -> bool:
    """Whether threads add floats in whatever order, so that bits may differ without a fault."""
    adding = ("red.", "atom.", "cp.reduce.")
    return any(
        opcode.startswith(adding) and any(f".{kind}" in opcode for kind in ("f", "bf"))
        for opcode in report.instructions
    )
