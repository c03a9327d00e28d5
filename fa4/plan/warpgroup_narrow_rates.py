"""Rates of the Hopper forward kernel's tiles of 8-bit types, by head dims and mask.

A tile is (warpgroups, keys, stages, TFLOP/s, start), as in `warpgroup_rates`; promote: where keys
are many. Measured by `lab.hardware.warpgroup_fp8.measure`, 32k tokens and sums that are not
promoted: without a mask three warpgroups at head dims 64 and 128, two at 128; two warpgroups at 192
and 256, whose start is what 1k or 4k keys beside 16k say. The rest is assumed alike, and every
other start.
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
    Tile(2, 128, 2, 1195.0, 246, promote=12, direct=True),
    Tile(2, 64, 2, 1001.0, 154, promote=24),
    Tile(1, 64, 2, 660.0, 154, promote=24),
)
_WIDEST: Rates = (
    Tile(2, 128, 2, 1312.0, 221, promote=12, direct=True),
    Tile(2, 64, 2, 1131.0, 174, promote=24),
    Tile(1, 64, 2, 750.0, 174, promote=24),
)
# Without a mask work tiles stride, and the next one's first S goes ahead.
_AHEAD = {
    192: Tile(2, 128, 2, 1208.0, 243, ahead=True, promote=12, direct=True),
    256: Tile(2, 128, 2, 1335.0, 243, ahead=True, promote=12, direct=True),
}
NARROW_RATES: dict[tuple[int, int, bool], Rates] = {
    (dim, dim, masked): rates if masked or dim not in _AHEAD else (_AHEAD[dim], *rates)
    for dim, rates in ((64, _NARROW), (128, _MIDDLE), (192, _WIDE), (256, _WIDEST))
    for masked in (False, True)
}
