"""Rates of the Hopper forward kernel's tiles of 8-bit types, by head dims and mask.

A tile is (warpgroups, keys, stages, TFLOP/s, start), as in `warpgroup_rates`; promote: where keys
are many. Measured by `lab.hardware.warpgroup_fp8.measure`, without a mask, 32k tokens and sums that
are not promoted: three warpgroups at head dims 64 and 128, two at 128, and two with 64 keys at 256.
The rest is assumed alike, and every start; of 128 keys at 256 what the simulator makes of them
beside 64: 1.10 times the rate, and a start of 80 keys more.
"""

from fa4.plan.warpgroup_rates import WarpgroupTile as Tile

Rates = tuple[Tile, ...]

_NARROW: Rates = (
    Tile(3, 160, 4, 721.0, 300, ahead=True, promote=10),
    Tile(3, 160, 4, 700.0, 300, promote=10),
    Tile(2, 128, 3, 600.0, 200, ahead=True, promote=12),
    Tile(2, 128, 3, 590.0, 200, promote=12),
    Tile(1, 128, 3, 400.0, 200, promote=12),
)
_MIDDLE: Rates = (
    Tile(3, 96, 3, 1151.0, 300, ahead=True, promote=16),
    Tile(3, 96, 3, 1129.0, 300, promote=16),
    Tile(2, 128, 3, 956.0, 200, ahead=True, promote=12),
    Tile(2, 128, 3, 940.0, 200, promote=12),
    Tile(1, 128, 3, 640.0, 200, promote=12),
)
_WIDE: Rates = (
    Tile(2, 128, 2, 1012.0, 280, promote=12, direct=True),
    Tile(2, 64, 2, 920.0, 200, promote=24),
    Tile(1, 64, 2, 610.0, 200, promote=24),
)
NARROW_RATES: dict[tuple[int, int, bool], Rates] = {
    (dim, dim, masked): rates
    for dim, rates in ((64, _NARROW), (128, _MIDDLE), (256, _WIDE))
    for masked in (False, True)
}
