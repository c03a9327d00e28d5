"""Who reads whom in a shuffle (shfl.sync, PTX ISA 9.7.9.6)."""

from __future__ import annotations

from typing import TypeVar

from fa4.emulator.translate.lanes import Lanes
from fa4.emulator.warp_lanes import LANES

Word = TypeVar("Word", int, Lanes)


def source_lane(mode: str, lane_id: Word, offset: Word, clamp: Word) -> tuple[Word, Word]:
    """(source lane, bound): the source is in range if it is <= bound, or >= bound for "up".

    clamp: operand c, the bound in bits 4..0 and the mask of a segment's lanes in bits 12..8. The
    source lane may lie outside 0..31 if it is out of range. The formula serves one lane (int) and
    all of them (Lanes).
    """
    segment = (clamp >> 8) & 31
    first = lane_id & segment
    bound = first | (clamp & 31 & ~segment)
    offset = offset & 31
    if mode == "up":
        return lane_id - offset, bound
    if mode == "down":
        return lane_id + offset, bound
    if mode == "bfly":
        return lane_id ^ offset, bound
    return first | (offset & ~segment), bound


def constant_sources(mode: str, offset: int, clamp: int) -> list[tuple[int, bool]]:
    """(lane that it reads, whether that is in range) of every lane, for operands that are known."""
    found = []
    for own in range(LANES):
        source, bound = source_lane(mode, own, offset, clamp)
        reached = source >= bound if mode == "up" else source <= bound
        found.append((source if reached else own, reached))
    return found
