"""Rules on phases: programs are replayed without times, work tile after work tile.

Who waits and arrives depends on trip counts alone, never on data, so how far the roles can get
while one of them is held at a step is well defined: the worst case over all timings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from fa4.hardware import Gpu
from fa4.plan.schema import Arrive, Loop, PipelinePlan, Role, Wait, Work, in_order, unroll

Broken = Iterator[tuple[str, str]]

MOST_TRIPS = 4
# KV (or query) tiles of the work tiles that are replayed one after the other.
REPLAYED = ((1, 1, 1), (3, 2), (2, 3), (2, 2, 2))


def trip_counts(plan: PipelinePlan, total: int) -> list[dict[str, int]]:
    """The ways in which a work tile of `total` trips can be cut.

    A plan's first trip name counts all trips; the others, if any, add up to it. A loop over the
    first of them that starts from its second trip means that there always is a first.
    """
    whole, *parts = plan.trips
    if not parts:
        return [{whole: total}]
    if len(parts) == 1:
        return [{whole: total, parts[0]: total}]
    cuts: list[dict[str, int]] = []
    least = max((-loop.offset for loop in _loops(plan) if loop.trip == parts[0]), default=0)
    for first in range(max(0, least), total + 1):
        rest = dict.fromkeys(parts[1:-1], 0)
        cuts.append({whole: total, parts[0]: first, **rest, parts[-1]: total - first})
    return cuts


def _loops(plan: PipelinePlan) -> Iterator[Loop]:
    pending = [step for role in plan.roles for step in role.program]
    for step in pending:
        if isinstance(step, Loop):
            yield step
            pending.extend(step.body)


def balanced_phases(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """In each work tile, a signal's waiters wait as often as each of its arrivers arrives."""
    broken: set[str] = set()
    for total in range(1, MOST_TRIPS + 1):
        for trips in trip_counts(plan, total):
            counts = {role.name: _count(role, trips) for role in plan.roles}
            for signal in plan.signals:
                made = {f"{a} arrives": counts[a][Arrive, signal.name] for a in signal.arrivals}
                made |= {f"{w} waits": counts[w][Wait, signal.name] for w in signal.waiters}
                if len(set(made.values())) > 1 and signal.name not in broken:
                    broken.add(signal.name)
                    listed = ", ".join(f"{who} {times}x" for who, times in made.items())
                    yield signal.name, f"per work tile of {trips}: {listed}"


def _count(role: Role, trips: Mapping[str, int]) -> Counter[tuple[type, str]]:
    return Counter(
        (type(step), step.signal)
        for step in unroll(role.program, trips)
        if not isinstance(step, Work)
    )


class Replay:
    """Every role's waits and arrives over some work tiles, and how far each has got."""

    def __init__(self, plan: PipelinePlan, tiles: Sequence[Mapping[str, int]]) -> None:
        self.plan = plan
        self.signals = {signal.name: signal for signal in plan.signals}
        self.steps: dict[str, list[Wait | Arrive]] = {}
        for role in plan.roles:
            every = [*unroll(role.prologue, {})]
            for trips in in_order(tiles):
                every += unroll(role.program, trips)
            every += unroll(role.closing, {})
            self.steps[role.name] = [step for step in every if not isinstance(step, Work)]
        self.position = dict.fromkeys(self.steps, 0)
        self.arrived: Counter[tuple[str, str]] = Counter()
        self.waited: Counter[tuple[str, str]] = Counter()

    def phase(self, role: str, signal: str) -> int:
        """The phase that the role's next wait on the signal is for; negative if it is free."""
        return self.waited[role, signal] - self.signals[signal].free

    def completed(self, signal: str) -> int:
        """Phases of a signal that are complete."""
        return min(self.arrived[name, signal] for name in self.signals[signal].arrivals)

    def next_step(self, role: str) -> Wait | Arrive | None:
        """What the role does next; None at its end."""
        steps = self.steps[role]
        return steps[self.position[role]] if self.position[role] < len(steps) else None

    def advance(self, role: str) -> bool:
        """Take the role's next step if it has one that does not block."""
        step = self.next_step(role)
        if step is None:
            return False
        if isinstance(step, Wait):
            if self.phase(role, step.signal) >= self.completed(step.signal):
                return False
            self.waited[role, step.signal] += 1
        else:
            self.arrived[role, step.signal] += 1
        self.position[role] += 1
        return True

    def run(self, held: str | None = None) -> None:
        """Let every role but `held` go as far as it can."""
        progress = True
        while progress:
            progress = False
            for role in self.steps:
                while role != held and self.advance(role):
                    progress = True


def _replayed(plan: PipelinePlan) -> Iterator[tuple[tuple[int, ...], Replay]]:
    for totals in REPLAYED:
        yield totals, Replay(plan, [trip_counts(plan, total)[0] for total in totals])


def runs_to_the_end(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """No role is left waiting when nobody can go on."""
    for totals, replay in _replayed(plan):
        replay.run()
        stuck = {role: replay.next_step(role) for role in replay.steps}
        for role, step in stuck.items():
            if step is not None:
                phase = replay.phase(role, step.signal)
                yield role, f"waits on {step.signal} phase {phase} for ever, tiles of {totals}"
        if any(stuck.values()):
            return


def parity_is_enough(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """No mbarrier runs a phase ahead of a waiter: its parity would mean the wrong phase."""
    broken: set[tuple[str, str]] = set()
    for role in plan.roles:
        for _, replay in _replayed(plan):
            replay.run(held=role.name)
            while (step := replay.next_step(role.name)) is not None:
                signal = replay.signals[step.signal]
                if isinstance(step, Wait) and signal.kind == "mbarrier":
                    phase, done = (
                        replay.phase(role.name, signal.name),
                        replay.completed(signal.name),
                    )
                    key = (role.name, signal.name)
                    if done > phase + signal.stages and key not in broken:
                        broken.add(key)
                        yield (
                            signal.name,
                            f"{role.name} waits for phase {phase} on {signal.stages} barriers of "
                            f"which {done} phases may be complete",
                        )
                if not replay.advance(role.name):
                    break
                replay.run(held=role.name)


def arrivers_in_step(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """With several arrivers, none arrives for a phase before the last one on its barrier is over.

    The hardware counts arrivals, not arrivers: a second arrival of one would pass for the other's.
    """
    shared = [signal for signal in plan.signals if len(signal.arrivals) > 1]
    broken: set[tuple[str, str]] = set()
    for held in sorted({name for signal in shared for name in signal.arrivals}):
        for _, replay in _replayed(plan):
            while True:
                replay.run(held=held)
                for signal in (s for s in shared if held in s.arrivals):
                    slow = replay.arrived[held, signal.name]
                    for other in signal.arrivals:
                        fast = replay.arrived[other, signal.name]
                        if fast > slow + signal.stages and (other, signal.name) not in broken:
                            broken.add((other, signal.name))
                            yield (
                                signal.name,
                                f"{other} may arrive {fast} times while {held} has {slow} times",
                            )
                if not replay.advance(held):
                    break
