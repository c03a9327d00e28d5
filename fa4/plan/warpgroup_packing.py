"""How the query heads of a KV head share the rows of a Hopper kernel's tiles.

Row r of a sequence is of head r mod P and of position r // P, with P the heads packed; no row is
empty. TMA moves whole positions. Where these end where warpgroups' rows do, each warpgroup has a
box of its own. Else a work tile's rows begin, and end, in the middle of a position: one box has all
positions of which the work tile has a row, and begins in shared memory as many rows earlier as the
first position does, so that every row lies where it belongs.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from fa4.config import WARPGROUP_ROWS, WarpgroupPipeline

ATOM_ROWS = 8  # after which the pattern repeats in which TMA and the tensor core swizzle
ROW_BYTES = 128  # of what TMA's address in shared memory is a multiple


class QueryPlace(NamedTuple):
    """Rows of a place for a work tile's Q in shared memory.

    rows: all of them. lead: those before the work tile's own. positions: of a box.
    """

    rows: int
    lead: int
    positions: int


def packings(ratio: int, least: int = 1) -> tuple[int, ...]:
    """Numbers of query heads to choose from, of the `ratio` of a KV head: if it has divisors that
    can be packed, at least `least`.

    Divisors of it, above 64 only multiples of 64: the smallest, the largest that does not straddle,
    and the largest.
    """
    groups = [n for n in range(least, ratio + 1) if ratio % n == 0]
    groups = [n for n in groups if n <= WARPGROUP_ROWS or n % WARPGROUP_ROWS == 0] or [1]
    whole = [n for n in groups if not straddles(n)]
    return tuple(sorted({groups[0], *whole[-1:], groups[-1]}, reverse=True))


def straddles(packed: int) -> bool:
    """Do the rows of a position lie in two warpgroups' tiles, with so many heads packed?"""
    return packed < WARPGROUP_ROWS and WARPGROUP_ROWS % packed != 0


def query_place(packed: int, rows: int) -> QueryPlace:
    """Where work tiles of `rows` rows have Q."""
    most = packed - gcd(packed, rows)  # rows of its first position that a work tile does not have
    positions = -(-(rows + most) // packed)
    lead = _whole_atoms(most)
    return QueryPlace(lead + _whole_atoms(positions * packed), lead, positions)


def query_bytes(pipeline: WarpgroupPipeline) -> tuple[int, int]:
    """Of a work tile's Q: what its place in shared memory takes, and what is loaded."""
    held = loaded = pipeline.block_rows
    if straddles(pipeline.packed):
        place = query_place(pipeline.packed, pipeline.block_rows)
        held, loaded = place.rows, place.positions * pipeline.packed
    row_bytes = pipeline.widths[0] * pipeline.element_bytes
    return held * row_bytes, loaded * row_bytes


def query_parts(pipeline: WarpgroupPipeline) -> tuple[str, ...]:
    """The rings' names, whose `_full` say that rows of Q are there: each warpgroup's its own, or
    that of all, where these are loaded at once."""
    if pipeline.published or straddles(pipeline.packed):
        return ("q",)
    return tuple(f"q{i}" for i in range(pipeline.consumers))


def _whole_atoms(rows: int) -> int:
    return -(-rows // ATOM_ROWS) * ATOM_ROWS
