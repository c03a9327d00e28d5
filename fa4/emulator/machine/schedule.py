"""Who runs next: the order in which ready warps run and asynchronous operations complete."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

from fa4.emulator.errors import LaunchError
from fa4.emulator.machine.operations import AsyncOperation
from fa4.emulator.machine.waits import Runnable

Ready = TypeVar("Ready", bound=Runnable)

# Share of blocking waits that end without success, under seeded schedules: one of these for each
# wait in the PTX. A wait that gives up nearly always shows what a mere attempt would do.
GIVE_UP = (0.2, 0.2, 0.9)


class Schedule(Protocol):
    """Chooses among ready fragments (oldest first) and operations that may complete now.

    Returns the chosen item and for how many steps a fragment runs at most.
    """

    def choose(
        self, ready: Sequence[Ready], operations: Sequence[AsyncOperation]
    ) -> tuple[Ready | AsyncOperation, int]:
        """The next item and its number of steps."""

    def gives_up(self, line: int) -> bool:
        """Whether an mbarrier.try_wait of this PTX line that would block returns false instead."""


class Patience:
    """How often the waits of each PTX line give up."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._shares: dict[int, float] = {}

    def gives_up(self, line: int) -> bool:
        """Whether the next one does."""
        if line not in self._shares:
            self._shares[line] = self._random.choice(GIVE_UP)
        return self._random.random() < self._shares[line]


class Fifo:
    """Operations complete as soon as possible, in order of issue; warps take turns."""

    def choose(
        self, ready: Sequence[Ready], operations: Sequence[AsyncOperation]
    ) -> tuple[Ready | AsyncOperation, int]:
        """The oldest operation, else the oldest warp."""
        if operations:
            return operations[0], 0
        return ready[0], 1 << 30

    def gives_up(self, line: int) -> bool:
        """Never: it waits as long as it takes."""
        return False


class Random:
    """Every choice is equally likely, for a random number of steps."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._patience = Patience(seed)

    def choose(
        self, ready: Sequence[Ready], operations: Sequence[AsyncOperation]
    ) -> tuple[Ready | AsyncOperation, int]:
        """Any ready warp or operation."""
        index = self._random.randrange(len(ready) + len(operations))
        if index < len(ready):
            return ready[index], self._random.choice((1, 2, 4, 16, 64, 1 << 30))
        return operations[index - len(ready)], 0

    def gives_up(self, line: int) -> bool:
        """Sometimes, as the hardware's time limit may."""
        return self._patience.gives_up(line)


class Adversarial:
    """Random priorities that change now and then; operations complete as late as possible.

    The warp of highest priority runs until it blocks (probabilistic concurrency testing,
    Burckhardt et al., ASPLOS 2010). Operations wait until no warp can run, except that one in
    `EAGERNESS` choices completes the newest that may.
    """

    CHANGE = 40
    EAGERNESS = 50

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._patience = Patience(seed)
        self._priority: dict[object, float] = {}

    def choose(
        self, ready: Sequence[Ready], operations: Sequence[AsyncOperation]
    ) -> tuple[Ready | AsyncOperation, int]:
        """The warp of highest priority; operations last."""
        draw = self._random.random()
        if operations and (not ready or draw * self.EAGERNESS < 1):
            return operations[self._random.choice((0, -1))], 0
        if draw * self.CHANGE < 1:
            self._priority.clear()
        best = max(ready, key=lambda fragment: self._of(fragment.warp))
        return best, 1 << 30

    def gives_up(self, line: int) -> bool:
        """Sometimes, as the hardware's time limit may."""
        return self._patience.gives_up(line)

    def _of(self, warp: object) -> float:
        if warp not in self._priority:
            self._priority[warp] = self._random.random()
        return self._priority[warp]


def make_schedule(name: str, seed: int) -> Schedule:
    """The schedule of this name. Raises LaunchError for an unknown one."""
    if name == "fifo":
        return Fifo()
    if name == "random":
        return Random(seed)
    if name == "adversarial":
        return Adversarial(seed)
    raise LaunchError(f"schedule {name!r}: allowed are 'fifo', 'random' and 'adversarial'")
