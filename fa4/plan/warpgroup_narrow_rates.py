"""Rates of the Hopper forward kernel's tiles of 8-bit types, by head dims and mask.

A tile is (warpgroups, keys, stages, TFLOP/s, start, turns, ahead, promote), as in
`warpgroup_rates`; promote: where keys are many. Measured by `lab.hardware.warpgroup_fp8.measure`,
without a mask, 32k tokens and sums that are not promoted: three warpgroups at head dims 64 and 128,
two at 128 and 256. The rest is assumed alike, and every start.
"""

Rates = tuple[tuple[int, int, int, float, int, bool, bool, int], ...]

_NARROW: Rates = (
    (3, 160, 4, 721.0, 300, False, True, 10),
    (3, 160, 4, 700.0, 300, False, False, 10),
    (2, 128, 3, 600.0, 200, False, True, 12),
    (2, 128, 3, 590.0, 200, False, False, 12),
    (1, 128, 3, 400.0, 200, False, False, 12),
)
_MIDDLE: Rates = (
    (3, 96, 3, 1151.0, 300, False, True, 16),
    (3, 96, 3, 1129.0, 300, False, False, 16),
    (2, 128, 3, 956.0, 200, False, True, 12),
    (2, 128, 3, 940.0, 200, False, False, 12),
    (1, 128, 3, 640.0, 200, False, False, 12),
)
_WIDE: Rates = (
    (2, 64, 2, 920.0, 200, False, False, 24),
    (1, 64, 2, 610.0, 200, False, False, 24),
)
NARROW_RATES: dict[tuple[int, int, bool], Rates] = {
    (dim, dim, masked): rates
    for dim, rates in ((64, _NARROW), (128, _MIDDLE), (256, _WIDE))
    for masked in (False, True)
}
