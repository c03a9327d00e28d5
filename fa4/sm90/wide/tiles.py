"""Work tiles of the kernel of dK and dV: 64 keys of a head, and the query tiles that see them."""

from fa4.config import WARPGROUP_ROWS
from fa4.sm100.backward.tiles import KeyTile


class WarpgroupKeys(KeyTile):
    """A work tile of as many keys as a warpgroup has rows."""

    @property
    def keys(self) -> int:
        """Keys of the tile."""
        return WARPGROUP_ROWS
