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
LARGEST = 2.0**126  # far below float32's end: a rounded quotient times its divisor stays finite

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

MASK_COLUMNS = 28  # columns that share a mask word

Pair = tuple[Float32, Float32]


def unseen(scale_log2: Float32) -> Float32:
    """The reference maximum of a row that has seen no key: finite, so that no case is special.

    A masked score of -inf stays -inf below it, and its exponent does not overflow.
    """
    return -LARGEST / cute.arch.fmax(scale_log2, Float32(1.0))


def new_reference(
    most: Float32, highest: Float32, scale_log2: Float32, threshold: float
) -> tuple[Float32, Float32]:
    """(reference maximum, alpha) from the true maximum so far and the old reference.

    The old one stays while the maximum has risen by no more than `threshold` powers of two.
    """
    rise = (highest - most) * scale_log2
    if threshold > 0:
        keep = rise >= -threshold
        most = cutlass.select_(keep, highest, most)
        alpha = cute.math.exp2(rise, fastmath=True)
        return most, cutlass.select_(keep, Float32(1.0), alpha)
    return most, cute.math.exp2(rise, fastmath=True)


def maximum(row: list[Float32], floor: Float32) -> Float32:
    """Largest element, at least `floor`; NaN is passed over.

    Five chains of 3-input maxima, joined by two more: one instruction per two elements.
    """
    chains, rest = [floor, *row[:4]], row[4:]
    for i in range(0, len(rest), 2):
        chain = i // 2 % 5
        chains[chain] = _max3(chains[chain], *rest[i : i + 2])
    return _max3(_max3(*chains[:3]), *chains[3:])


def _max3(a: Float32, b: Float32, c: Float32) -> Float32:
    return cute.arch.fmax(cute.arch.fmax(a, b), c)


def total(row: list[Float32]) -> Float32:
    """Sum of the row: four chains of packed additions."""
    sums: list[Pair] = [(row[i], row[i + 1]) for i in range(0, 8, 2)]
    for i in range(8, len(row), 2):
        chain = i // 2 % 4
        sums[chain] = cute.arch.add_packed_f32x2(sums[chain], (row[i], row[i + 1]))
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
    """The row with -inf outside columns [start, stop).

    One instruction moves 7 bits of a byte to predicates (R2P), so a byte of a mask word stands for
    7 columns: column c is bit c + c // 7 of all words, and 28 columns share a word.
    """
    stop = _mask_bit(stop, len(row))
    start = None if start is None else _mask_bit(start, len(row))
    result: list[Float32] = []
    for word, first in enumerate(range(0, len(row), MASK_COLUMNS)):
        keep = ~_ones_from(stop - 32 * word)
        if start is not None:
            keep = keep & _ones_from(start - 32 * word)
        for c, value in enumerate(row[first : first + MASK_COLUMNS]):
            seen = (keep & (1 << (c + c // 7))) != 0
            result.append(cutlass.select_(seen, value, -Float32.inf))
    return result


def _mask_bit(column: Int32, columns: int) -> Int32:
    """column + column // 7 for columns from 0 to 128; the same order outside."""
    column = cutlass.max(cutlass.min(column, columns), 0)
    return (column * (1024 + 147)) >> 10


def _ones_from(bit: Int32) -> Int32:
    """A word whose bits from `bit` on are set; bit may lie outside 0..31."""
    return cute.arch.inline_ptx(
        "shl.b32 {$w0}, -1, {$r0};",  # shifts by more than 31 leave 0 in PTX
        write_only_types=[Int32],
        read_only_args=[cutlass.max(bit, 0)],
    )
