"""What the three backward kernels hand one another in global memory.

Query rows are kept by tiles of the spec's `block_rows`, 128 where nothing else is said, so that a
tile of one sequence never reaches into another's: sequence b's tile m is tile `first_tile(b) + m`
of every head. Nothing of CUTLASS is imported: the host allocates what is described here.

    dq_accum    float32 (heads, tiles, rows * d): dQ, not yet scaled and rounded, see `dq_offset`
    stats       float32 (heads, tiles, 2, rows): -LSE log2(e) and -D of each row. Rows that do not
                exist have -inf and 0, so that their P is 0; rows that see no key have 0.
    sink_parts  float32 (heads, tiles): a tile's part of dsink
    turns       int32 (heads, tiles, 8): how often each warp's part of a dQ tile was added to
    drawn       int32 (1, 1): how many work tiles CTAs have drawn, where they draw them

d is padded to a multiple of 16.
"""

from __future__ import annotations

from typing import Any

from fa4.kit.units import TILE_ROWS, WARP

VECTOR = 4  # float32 of a 16-byte access
DQ_WARPS = 8  # that add to one dQ tile: four of each CTA of a pair


def tiles_of(rows: int, batch: int, *, packed: bool, block_rows: int = TILE_ROWS) -> int:
    """Tiles that a head needs: of `batch` sequences of `rows` each, or of `rows` in all."""
    if packed:
        return rows // block_rows + batch
    return batch * -(-rows // block_rows)


def first_tile(
    batch: Any, start: Any, blocks: Any, *, packed: bool, block_rows: int = TILE_ROWS
) -> Any:
    """The first tile of sequence `batch`, which starts at row `start` of a packed tensor.

    blocks: tiles of each sequence where they are not packed. A sequence's tiles end before the next
    one's begin: its length needs at most one tile more than whole ones.
    """
    return start // block_rows + batch if packed else batch * blocks


def dq_offset(row: Any, col: Any, head_dim: int) -> Any:
    """Where element (row, col) of a dQ tile lies in it, in float32.

    By blocks of 32 rows, then by 4 columns, then by rows: the 32 lanes of a warp, each with a row,
    store 16 bytes side by side, and a warp's columns are one run of memory.
    """
    block, vector = row // WARP * (WARP * head_dim), col // VECTOR * (WARP * VECTOR)
    return block + vector + row % WARP * VECTOR + col % VECTOR
