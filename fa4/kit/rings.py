"""Slots that a producer and a consumer use in turn, and where a role is in them."""

from dataclasses import dataclass, replace

import cutlass
from cutlass import Int32


@dataclass(frozen=True)
class Ring:
    """Where a role is in a ring: the slot that is next, and the parity of its rounds so far.

    Every role that uses a ring goes round it for itself. A ring of one slot is a signal of which
    only the parity matters.
    """

    stages: cutlass.Constexpr
    slot: Int32 | int
    parity: Int32

    @classmethod
    def of(cls, stages: int) -> "Ring":
        """The start of a ring of so many slots."""
        return cls(stages, Int32(0) if stages > 1 else 0, Int32(0))

    def next(self) -> "Ring":
        """One slot on."""
        if self.stages == 1:
            return replace(self, parity=self.parity ^ 1)
        following = self.slot + 1
        wrapped = following == self.stages
        return replace(
            self,
            slot=cutlass.select_(wrapped, Int32(0), following),
            parity=cutlass.select_(wrapped, self.parity ^ 1, self.parity),
        )

    def on(self, slot: Int32 | int) -> "Ring":
        """Another slot in the same round."""
        return replace(self, slot=slot)


def slot_of(at: Ring | Int32 | int) -> Int32 | int:
    """The slot of a ring; 0 where a phase is given by its number."""
    return at.slot if isinstance(at, Ring) else 0


def phase_of(at: Ring | Int32 | int) -> Int32 | int:
    """The number of a phase, or its parity in a ring."""
    return at.parity if isinstance(at, Ring) else at


def stage_offset(stage: Int32 | int, pitch: int, shift: int) -> Int32 | int:
    """Where a stage starts in memory; `shift` is what stage 1 lies off."""
    offset = stage * pitch
    return offset + cutlass.select_(stage == 1, Int32(shift), Int32(0)) if shift else offset
