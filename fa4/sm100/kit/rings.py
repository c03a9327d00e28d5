"""Slots that a producer and a consumer use in turn."""

import cutlass
from cutlass import Int32


def stage_offset(stage: Int32 | int, pitch: int, shift: int) -> Int32 | int:
    """Where a stage starts; `shift` is what stage 1 lies off."""
    offset = stage * pitch
    return offset + cutlass.select_(stage == 1, Int32(shift), Int32(0)) if shift else offset


def advance(slot: Int32, lap: Int32, stages: int) -> tuple[Int32, Int32]:
    """The next slot of a ring, and how often the ring has been gone round."""
    following = slot + 1
    wrapped = following == stages
    return (
        cutlass.select_(wrapped, Int32(0), following),
        cutlass.select_(wrapped, lap ^ 1, lap),
    )
