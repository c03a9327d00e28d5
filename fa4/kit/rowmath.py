"""Arithmetic of one row of S in one thread: maximum, exponentials, sums.

Rows are Python lists of Float32; each function is traced as one piece of PTX (`ptx_block`).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.kit.ptx_block import PtxBlock, literal

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

PACKED = {"bf16": "bf16x2", "fp16": "f16x2"}


def reference_without_keys(scale_log2: Float32) -> Float32:
    """The reference maximum of a row that has seen no key: finite, so that no case is special.

    A masked score of -inf stays -inf below it, and its exponent does not overflow.
    """
    return -LARGEST / cute.arch.fmax(scale_log2, Float32(1.0))


def new_reference(
    most: Float32, highest: Float32, scale_log2: Float32, threshold: float
) -> tuple[Float32, Float32]:
    """(reference maximum, log2 of alpha) from the true maximum so far and the old reference.

    The old one stays while the maximum has risen by no more than `threshold` powers of two.
    """
    log2_alpha = (highest - most) * scale_log2
    if threshold > 0:
        keep = log2_alpha >= -threshold
        most = cutlass.select_(keep, highest, most)
        log2_alpha = cutlass.select_(keep, Float32(0.0), log2_alpha)
    return most, log2_alpha


def maximum(row: list[Float32], floor: Float32) -> Float32:
    """Largest element, at least `floor`; NaN is passed over.

    Five chains of 3-input maxima, joined by two more: one instruction per two elements. From the
    end, whose columns `read_columns` has first.
    """
    code = PtxBlock()
    values = code.read_all([floor, *reversed(row)])
    chains, rest = values[:5], values[5:]
    for i in range(0, len(rest), 2):
        chain = i // 2 % 5
        chains[chain] = _max3(code, chains[chain], *rest[i : i + 2])
    largest = _max3(code, _max3(code, *chains[:3]), *chains[3:])
    return code.trace(largest)[0]


def _max3(code: PtxBlock, a: str, b: str, c: str) -> str:
    """ptxas makes one instruction of two."""
    return code.do("max.f32", code.do("max.f32", a, b), c)


def add_up(row: list[Float32], sums: list[Float32]) -> list[Float32]:
    """Eight partial sums, with the row added in four chains of packed additions.

    No sums yet: the row's first eight elements are them.
    """
    code = PtxBlock()
    values = code.read_all([*sums, *row])
    pairs = [code.pair(*values[i : i + 2]) for i in range(0, len(values), 2)]
    chains, rest = pairs[:4], pairs[4:]
    for i, pair in enumerate(rest):
        chains[i % 4] = code.packed("add.rn", chains[i % 4], pair)
    return code.trace(*(half for chain in chains for half in code.halves(chain)))


def total(sums: list[Float32], before: list[Float32], factor: Float32) -> list[Float32]:
    """Two partial sums: before * factor + the eight."""
    code = PtxBlock()
    values = code.read_all([*sums, *before, factor])
    *chains, old = [code.pair(*values[i : i + 2]) for i in range(0, len(values) - 1, 2)]
    left, right = (code.packed("add.rn", *two) for two in (chains[:2], chains[2:]))
    both = code.packed("add.rn", left, right)
    factors = code.pair(values[-1], values[-1])
    return code.trace(*code.halves(code.packed("fma.rn", old, factors, both)))


def exponentials(
    row: list[Float32],
    scale: Float32,
    offset: Float32,
    emulated: tuple[bool, ...],
    degree: int,
    element: str,
) -> tuple[list[Float32], list[Int32]]:
    """2^(row * scale + offset), and the same rounded to `element`, two to a word.

    On MUFU, or as a polynomial of `degree` where `emulated` says so, two elements at a time.
    """
    code = PtxBlock()
    values = code.read_all(row)
    scales, offsets = (code.pair(one, one) for one in code.read_all([scale, offset]))
    pairs = [code.pair(*values[i : i + 2]) for i in range(0, len(values), 2)]
    exponents = [code.packed("fma.rn", pair, scales, offsets) for pair in pairs]
    results: list[str] = []
    for x, polynomial in zip(exponents, emulated[::2], strict=True):
        if polynomial:
            results += _polynomial_exp2(code, x, degree)
        else:
            results += [code.do("ex2.approx.ftz.f32", half) for half in code.halves(x)]
    words = _round_pairs(code, results, element)
    traced = code.trace(*results, *words)
    return traced[: len(results)], traced[len(results) :]


def rounded(row: list[Float32], element: str) -> list[Int32]:
    """The row as words of two 16-bit floats."""
    code = PtxBlock()
    values = code.read_all(row)
    return code.trace(*_round_pairs(code, values, element))


def store_rounded(row: list[Float32], target: cute.Tensor, element: str) -> None:
    """The row as 16-bit floats, by the widest stores that the target allows."""
    words = cute.make_rmem_tensor(cute.make_layout(len(row) // 2), Int32)
    for i, word in enumerate(rounded(row, element)):
        words[i] = word
    start = cute.recast_ptr(words.iterator, dtype=target.element_type)
    cute.autovec_copy(cute.make_tensor(start, cute.make_layout(target.shape)), target)


def dot(a: list[Float32], b: list[Float32]) -> Float32:
    """Sum of products, in order."""
    code = PtxBlock()
    pairs = list(zip(code.read_all(a), code.read_all(b), strict=True))
    total = code.do("mul.rn.f32", *pairs[0])
    for pair in pairs[1:]:
        total = code.do("fma.rn.f32", *pair, total)
    return code.trace(total)[0]


def _round_pairs(code: PtxBlock, values: list[str], element: str) -> list[str]:
    """float32 registers as words of two 16-bit floats."""
    opcode = f"cvt.rn.{PACKED[element]}.f32"
    pairs = zip(values[::2], values[1::2], strict=True)
    return [code.do(opcode, high, low, kind="b32") for low, high in pairs]


def _polynomial_exp2(code: PtxBlock, pair: str, degree: int) -> tuple[str, str]:
    """2^x for x <= 127 on the FMA and integer pipes: floor by rounding, polynomial, exponent."""

    def both(constant: float) -> str:
        return code.pair(literal(constant), literal(constant))

    lowest, magic = literal(LOWEST_EXPONENT), both(MAGIC)
    x = code.pair(*(code.do("max.f32", half, lowest) for half in code.halves(pair)))
    rounded = code.packed("add.rm.ftz", x, magic)
    whole = code.packed("sub.rn", rounded, magic)
    fraction = code.packed("sub.rn", x, whole)
    coefficients = COEFFICIENTS[degree]
    value = both(coefficients[-1])
    for c in (*coefficients[-2::-1], 1.0):
        value = code.packed("fma.rn", value, fraction, both(c))
    halves = zip(code.halves(value, "b32"), code.halves(rounded, "b32"), strict=True)
    low, high = (_scale_by_power(code, *two) for two in halves)
    return low, high


def _scale_by_power(code: PtxBlock, value: str, rounded: str) -> str:
    """value * 2^floor(x): the integer in the low bits of `rounded` is added to the exponent."""
    shifted = code.do("shl.b32", rounded, "23", kind="b32")
    return code.do("mov.b32", code.do("add.s32", value, shifted, kind="b32"))


def multiplied(row: list[Float32], factor: Float32) -> list[Float32]:
    """row * factor, two elements at a time."""
    code = PtxBlock()
    return code.trace(*_products(code, row, factor))


def tanh(row: list[Float32], factor: Float32) -> list[Float32]:
    """tanh(row * factor), by one instruction each."""
    code = PtxBlock()
    arguments = _products(code, row, factor)
    return code.trace(*(code.do("tanh.approx.f32", argument) for argument in arguments))


def _products(code: PtxBlock, row: list[Float32], factor: Float32) -> list[str]:
    values = code.read_all(row)
    one = code.read(factor)
    factors = code.pair(one, one)
    result: list[str] = []
    for i in range(0, len(values), 2):
        result += code.halves(code.packed("mul.rn", code.pair(*values[i : i + 2]), factors))
    return result


def one_minus_squares(row: list[Float32], factors: list[Float32]) -> list[Float32]:
    """factor * (1 - x^2), two elements at a time."""
    code = PtxBlock()
    values, others = code.read_all(row), code.read_all(factors)
    one, minus_one = (code.pair(literal(sign), literal(sign)) for sign in (1.0, -1.0))
    result: list[str] = []
    for i in range(0, len(values), 2):
        x, factor = (code.pair(*some[i : i + 2]) for some in (values, others))
        square = code.packed("mul.rn", x, x)
        rest = code.packed("fma.rn", square, minus_one, one)
        result += code.halves(code.packed("mul.rn", rest, factor))
    return code.trace(*result)


def powers_with_offsets(
    row: list[Float32], scale: Float32, offsets: list[Float32], element: str
) -> tuple[list[Float32], list[Int32]]:
    """2^(row * scale + offset of each element), and the same rounded, two to a word."""
    code = PtxBlock()
    values, others, factor = code.read_all(row), code.read_all(offsets), code.read(scale)
    factors = code.pair(factor, factor)
    results: list[str] = []
    for i in range(0, len(values), 2):
        x, offset = (code.pair(*some[i : i + 2]) for some in (values, others))
        exponents = code.halves(code.packed("fma.rn", x, factors, offset))
        results += [code.do("ex2.approx.ftz.f32", half) for half in exponents]
    words = _round_pairs(code, results, element)
    traced = code.trace(*results, *words)
    return traced[: len(results)], traced[len(results) :]


def sums_times(row: list[Float32], terms: list[Float32], factors: list[Float32]) -> list[Float32]:
    """(row + term) * factor, two elements at a time."""
    code = PtxBlock()
    sources = [code.read_all(one) for one in (row, terms, factors)]
    result: list[str] = []
    for i in range(0, len(row), 2):
        x, term, factor = (code.pair(*some[i : i + 2]) for some in sources)
        result += code.halves(code.packed("mul.rn", code.packed("add.rn", x, term), factor))
    return code.trace(*result)
