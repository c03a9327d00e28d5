"""Warpgroups: four warps that multiply together (wgmma), and what each of them has under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from fa4.emulator.checks.clocks import Stream
from fa4.emulator.machine.operations import AsyncOperation
from fa4.emulator.machine.waits import Waitable
from fa4.emulator.warp_lanes import Array

WARPS = 4


@dataclass(slots=True)
class Product:
    """One wgmma.mma_async of a warp. number: 1 for its first. shape: what successive ones on the
    same accumulators must agree in. d, a: bits of the registers that it holds."""

    number: int
    line: int
    shape: Hashable
    d: int
    a: int


@dataclass(slots=True, eq=False)
class WarpProducts:
    """The wgmma instructions of a warp.

    actors: whom their reads of shared memory count for. issued: how many so far. groups: the
    number of the last product of each committed group that nothing has waited for. under_way:
    products that nothing has waited for; held: the registers they hold, as bits of
    `Program.held_registers`. unfenced: registers that threads have touched since the last
    wgmma.fence, at first all; touching: the steps that did. since_fence: products since then, one
    for each shape and set of registers.
    """

    actors: Stream
    issued: int = 0
    groups: deque[int] = field(default_factory=deque)
    under_way: list[Product] = field(default_factory=list)
    held: int = 0
    unfenced: int = -1
    touching: dict[int, None] = field(default_factory=dict)
    since_fence: dict[Hashable, Product] = field(default_factory=dict)

    def begin(self, line: int, shape: Hashable, d: int, a: int) -> None:
        """One more is issued."""
        self.issued += 1
        product = Product(self.issued, line, shape, d, a)
        self.under_way.append(product)
        self.since_fence.setdefault((shape, d, a), product)
        self.held |= d | a

    def commit(self) -> None:
        """All that are in no group become one."""
        self.groups.append(self.issued)

    def needed(self, left: int) -> int:
        """Up to which number all must be complete so that at most `left` groups are not."""
        return self.groups[-1 - left] if len(self.groups) > left else 0

    def settle(self, number: int) -> None:
        """Those up to `number` are complete and the warp has waited for that."""
        while self.groups and self.groups[0] <= number:
            self.groups.popleft()
        self.under_way = [product for product in self.under_way if product.number > number]
        self.held = 0
        for product in self.under_way:
            self.held |= product.d | product.a
        if number:
            self.actors.settle(number)

    def fence(self) -> None:
        """wgmma.fence: what threads did to registers comes before the products that follow."""
        self.unfenced = 0
        self.touching.clear()
        self.since_fence.clear()


@dataclass(slots=True, eq=False)
class Meeting:
    """One product that some warps of the group have issued and others have not.

    key: what must be the same in all. a: by position in the group, the registers of A; codes: the
    metadata of a sparse A.
    """

    line: int
    key: Hashable
    a: dict[int, Array | None] = field(default_factory=dict)
    codes: dict[int, Array] = field(default_factory=dict)


class WarpgroupUnit(Waitable):
    """Four warps, the first of which has an index that is a multiple of four.

    queue: their products that are under way. met, completed: how many all warps have issued, and
    how many are complete. meetings: those that only some have issued, oldest first.
    """

    def __init__(self, first_warp: int) -> None:
        super().__init__()
        self.first_warp = first_warp
        self.queue: deque[AsyncOperation] = deque()
        self.met = 0
        self.completed = 0
        self.meetings: deque[Meeting] = deque()

    def join(
        self,
        place: int,
        number: int,
        line: int,
        key: Hashable,
        a: Array | None,
        codes: Array | None = None,
    ) -> Meeting | None:
        """The warp at `place` issues its product `number`; None if another one is expected."""
        index = number - self.met - 1
        if index == len(self.meetings):
            self.meetings.append(Meeting(line, key))
        meeting = self.meetings[index]
        if meeting.key != key:
            return None
        meeting.a[place] = a
        if codes is not None:
            meeting.codes[place] = codes
        return meeting

    def complete(self) -> None:
        """The oldest product under way is done."""
        self.completed += 1
        self.wake()

    def waits_for(self, number: int) -> str:
        """Why product `number` is not complete, for reports."""
        if number <= self.met:
            return "a wgmma under way"
        meeting = self.meetings[0]
        absent = [self.first_warp + k for k in range(WARPS) if k not in meeting.a]
        listed = ", ".join(map(str, absent))
        return f"the wgmma of PTX line {meeting.line}, which warps {listed} have not executed"
