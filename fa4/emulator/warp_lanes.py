"""The 32 lanes of a warp, in the three ways in which instructions name some of them.

A mask is a Python integer with bit l set for lane l. `lanes_of` gives its lanes as numbers,
`lane_flags` as truth values.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

LANES = 32
FULL_MASK = 0xFFFF_FFFF
_LANE_BITS = np.uint32(1) << np.arange(LANES, dtype=np.uint32)
_KEPT = 4096  # masks whose lanes are remembered


@lru_cache(maxsize=_KEPT)
def lanes_of(mask: int) -> Array:
    """The numbers of the lanes in a mask, ascending, int64 (n,). Do not write to it."""
    return lane_flags[mask].nonzero()[0]


class _LaneFlags(dict[int, Array]):
    def __missing__(self, mask: int) -> Array:
        flags = (_LANE_BITS & np.uint32(mask)) != 0
        flags.flags.writeable = False
        if len(self) < _KEPT:
            self[mask] = flags
        return flags


lane_flags = _LaneFlags()  # mask -> whether each lane is in it, bool (32,)


def mask_of(flags: Array) -> int:
    """The mask of the lanes whose flag is true. flags: bool (32,)."""
    return int(np.packbits(flags, bitorder="little").view(np.uint32)[0])


def lowest(mask: int) -> int:
    """The lowest lane of a mask that is not empty."""
    return (mask & -mask).bit_length() - 1
