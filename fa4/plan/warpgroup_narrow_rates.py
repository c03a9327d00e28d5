"""Rates of the Hopper forward kernel's tiles of 8-bit types, by head dims and mask.

A tile is (warpgroups, keys, stages, TFLOP/s, start, turns, ahead, promote), as in
`warpgroup_rates`. Measured by `hardware.warpgroup_fp8.measure` with 32k tokens are those of three
warpgroups at head dims 64 and 128 and of two at 256, without promotion of two at 128; the rest is
assumed alike, and every start.
"""

Rates = tuple[tuple[int, int, int, float, int, bool, bool, int], ...]

_NARROW: Rates = (
    (3, 160, 4, 700.0, 300, False, True, 4),
    (3, 160, 4, 680.0, 300, False, False, 4),
    (2, 128, 3, 560.0, 200, False, True, 6),
    (2, 128, 3, 550.0, 200, False, False, 6),
    (1, 128, 3, 370.0, 200, False, False, 6),
)
_MIDDLE: Rates = (
    (3, 96, 3, 1060.0, 300, False, True, 8),
    (3, 96, 3, 1040.0, 300, False, False, 8),
    (2, 128, 3, 900.0, 200, False, True, 6),
    (2, 128, 3, 890.0, 200, False, False, 6),
    (1, 128, 3, 600.0, 200, False, False, 6),
)
_WIDE: Rates = (
    (2, 64, 2, 900.0, 200, False, False, 12),
    (1, 64, 2, 600.0, 200, False, False, 12),
)
NARROW_RATES: dict[tuple[int, int, bool], Rates] = {
    (dim, dim, masked): rates
    for dim, rates in ((64, _NARROW), (128, _MIDDLE), (256, _WIDE))
    for masked in (False, True)
}
