"""Work tiles of the kernel of dK and dV: 64 keys of a head, and the query tiles that see them."""

import cutlass
from cutlass import Int32

from fa4.config import WARPGROUP_ROWS
from fa4.sm100.backward.tiles import KeyTile


class WarpgroupKeys(KeyTile):
    """A work tile of as many keys as a warpgroup has rows."""

    @property
    def keys(self) -> int:
        """Keys of the tile."""
        return WARPGROUP_ROWS


def next_tile(tile: KeyTile, head: Int32, row_tile: Int32) -> tuple[Int32, Int32]:
    """What comes after a query tile of a head: the next one, or the first of the next head."""
    row_tile += 1
    ended = row_tile == tile.q_stop
    head = cutlass.select_(ended, head + 1, head)
    return head, cutlass.select_(ended, tile.q_start, row_tile)
