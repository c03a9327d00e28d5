"""Arithmetic of one row of S in one thread: masks, maximum, exponentials, sums.

Rows are Python lists of Float32, unrolled while tracing, so that the compiler sees straight code.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

LOG2_E = 1.4426950408889634
# 2^23 + 2^22: adding it leaves the integer part of a small number in the low mantissa bits.
MAGIC = 12582912.0
LOWEST_EXPONENT = -127.0

# Minimax polynomials of 2^f on [0, 1], constant term 1 (fa4.reference.exp2 names their source).
COEFFICIENTS = {
    1: (0.922497093677520751953125,),
    2: (0.6657850742340087890625, 0.330107033252716064453125),
    3: (0.695146143436431884765625, 0.227564394474029541015625, 0.077119089663028717041015625),
    4: (0.693042695522308349609375, 0.2412912547588348388671875, 0.052225358784198760986328125,
        0.013434938155114650726318359375),
    5: (0.693151414394378662109375, 0.24016360938549041748046875, 0.055802188813686370849609375,
        0.00901452265679836273193359375, 0.00186810153536498546600341796875),
}  # fmt: skip

Pair = tuple[Float32, Float32]


def maximum(row: list[Float32], floor: Float32) -> Float32:
    """Largest element, at least `floor`; NaN is passed over. Four chains, so that they overlap."""
    chains = [cute.arch.fmax(floor, row[0]), *row[1:4]]
    for i in range(4, len(row), 8):
        for lane in range(4):
            pair = (
                cute.arch.fmax(row[i + lane], row[i + 4 + lane])
                if i + 4 + lane < len(row)
                else row[i + lane]
            )
            chains[lane] = cute.arch.fmax(chains[lane], pair)
    return cute.arch.fmax(
        cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3])
    )


def total(row: list[Float32], start: Float32) -> Float32:
    """start + sum of the row, in packed additions."""
    sums: list[Pair] = [(start, row[0])]
    sums = [cute.arch.add_packed_f32x2((start, Float32(0.0)), (row[0], row[1]))]
    sums += [(row[i], row[i + 1]) for i in range(2, 8, 2)]
    for i in range(8, len(row), 2):
        lane = (i // 2) % 4
        sums[lane] = cute.arch.add_packed_f32x2(sums[lane], (row[i], row[i + 1]))
    left = cute.arch.add_packed_f32x2(sums[0], sums[1])
    right = cute.arch.add_packed_f32x2(sums[2], sums[3])
    both = cute.arch.add_packed_f32x2(left, right)
    return both[0] + both[1]


def scaled(row: list[Float32], scale: Float32, offset: Float32) -> list[Float32]:
    """row * scale + offset, two elements at a time."""
    result: list[Float32] = []
    for i in range(0, len(row), 2):
        result += cute.arch.fma_packed_f32x2((row[i], row[i + 1]), (scale, scale), (offset, offset))
    return result


def exponentials(row: list[Float32], emulated: tuple[bool, ...], degree: int) -> list[Float32]:
    """2^x of each element: on MUFU, or as a polynomial where `emulated` says so."""
    result: list[Float32] = []
    for i in range(0, len(row), 2):
        if emulated[i]:
            result += polynomial_exp2((row[i], row[i + 1]), degree)
        else:
            result += [cute.math.exp2(x, fastmath=True) for x in row[i : i + 2]]
    return result


def polynomial_exp2(pair: Pair, degree: int) -> Pair:
    """2^x for x <= 127 on the FMA and integer pipes: floor by rounding, polynomial, exponent."""
    x = tuple(cute.arch.fmax(value, Float32(LOWEST_EXPONENT)) for value in pair)
    magic = (Float32(MAGIC), Float32(MAGIC))
    rounded = cute.arch.add_packed_f32x2(x, magic, rnd="rm", ftz=True)
    whole = cute.arch.sub_packed_f32x2(rounded, magic)
    fraction = cute.arch.sub_packed_f32x2(x, whole)
    coefficients = COEFFICIENTS[degree]
    value = (Float32(coefficients[-1]),) * 2
    for c in (*coefficients[-2::-1], 1.0):
        value = cute.arch.fma_packed_f32x2(value, fraction, (Float32(c), Float32(c)))
    return tuple(_scale_by_power(v, r) for v, r in zip(value, rounded, strict=True))


def _scale_by_power(value: Float32, rounded: Float32) -> Float32:
    """value * 2^floor(x): the integer in the low bits of `rounded` is added to the exponent."""
    bits = (rounded.bitcast(Int32) << 23) + value.bitcast(Int32)
    return bits.bitcast(Float32)


def keep_range(row: list[Float32], start: Int32 | None, stop: Int32) -> list[Float32]:
    """The row with -inf outside columns [start, stop), by one bit mask per 32 columns."""
    result: list[Float32] = []
    for first in range(0, len(row), 32):
        keep = _ones_below(stop - first)
        if start is not None:
            keep = keep & ~_ones_below(start - first)
        for bit, value in enumerate(row[first : first + 32]):
            seen = (keep & (1 << bit if bit < 31 else -(1 << 31))) != 0
            result.append(cutlass.select_(seen, value, -Float32.inf))
    return result


def _ones_below(count: Int32) -> Int32:
    """A word whose lowest `count` bits are set; count may lie outside 0..32."""
    count = cutlass.min(cutlass.max(count, 0), 32)
    return cute.arch.inline_ptx(
        "bmsk.clamp.b32 {$w0}, 0, {$r0};", write_only_types=[Int32], read_only_args=[count]
    )
