"""Orders of events as lists of choices: what differs from `fifo`, to be kept and replayed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fa4.emulator.machine.operations import AsyncOperation
from fa4.emulator.machine.schedule import Fifo, Ready, Schedule


class EventChoice(NamedTuple):
    """At decision `at` (they are counted from 0): the warp of a CTA runs for so many steps; or,
    with steps 0, the oldest operation of that PTX line of that CTA (warp -1) completes."""

    at: int
    cta: int
    warp: int
    line: int
    steps: int

    def __str__(self) -> str:
        who = f"CTA {self.cta} warp {self.warp}" if self.warp >= 0 else f"CTA {self.cta}"
        if not self.steps:
            return f"decision {self.at}: an operation of {who} (PTX line {self.line}) completes"
        return f"decision {self.at}: {who} runs"


def _of(item: Any, at: int, steps: int) -> EventChoice:
    if isinstance(item, AsyncOperation):
        return EventChoice(at, item.cta, -1, item.line, 0)
    return EventChoice(at, item.warp.cta.index, item.warp.index, 0, steps)


@dataclass
class RecordedOrder:
    """A schedule that notes where it differs from fifo. gave_up: which attempts to wait ended
    without success, counted from 0."""

    schedule: Schedule
    choices: list[EventChoice] = field(default_factory=list)
    gave_up: list[int] = field(default_factory=list)
    _decisions: int = 0
    _waits: int = 0
    _fifo: Fifo = field(default_factory=Fifo)

    def choose(
        self, ready: Sequence[Ready], operations: Sequence[AsyncOperation]
    ) -> tuple[Ready | AsyncOperation, int]:
        """What the schedule chooses."""
        usual, chosen = (s.choose(ready, operations) for s in (self._fifo, self.schedule))
        if chosen[0] is not usual[0] or chosen[1] != usual[1]:
            self.choices.append(_of(*chosen[:1], self._decisions, chosen[1]))
        self._decisions += 1
        return chosen

    def gives_up(self, line: int) -> bool:
        """What the schedule says."""
        gives_up = self.schedule.gives_up(line)
        if gives_up:
            self.gave_up.append(self._waits)
        self._waits += 1
        return gives_up


class ReplayedOrder:
    """Fifo, but for these choices; one that is not possible is left out."""

    def __init__(self, choices: Iterable[EventChoice], gave_up: Iterable[int] = ()) -> None:
        self._choices = {choice.at: choice for choice in choices}
        self._gave_up = frozenset(gave_up)
        self._decisions = self._waits = -1
        self._fifo = Fifo()

    def choose(
        self, ready: Sequence[Ready], operations: Sequence[AsyncOperation]
    ) -> tuple[Ready | AsyncOperation, int]:
        """The choice that was kept, or fifo's."""
        self._decisions += 1
        choice = self._choices.get(self._decisions)
        if choice is not None:
            for operation in operations:
                if _of(operation, choice.at, 0) == choice:
                    return operation, 0
            for fragment in ready:
                if _of(fragment, choice.at, choice.steps) == choice:
                    return fragment, choice.steps
        return self._fifo.choose(ready, operations)

    def gives_up(self, line: int) -> bool:
        """Whether this attempt to wait ends without success."""
        self._waits += 1
        return self._waits in self._gave_up
