"""A thread's part of a 64 x N accumulator of wgmma: which elements, and arithmetic on them.

Thread t of the warpgroup, lane l of warp w, has rows 16 w + l / 4 and the one 8 below. Element i is
of row i / 2 % 2 of these and in column 8 (i / 4) + 2 (l % 4) + i % 2 (PTX ISA 9.7.15.5.1.1.1). The
four threads of a quad have the same rows.
"""

import cutlass
from cutlass import Float32, Int32

from fa4.config import Exp2Split
from fa4.kit.masked_rows import keep_range
from fa4.kit.ptx_block import PtxBlock, literal
from fa4.kit.rowmath import COEFFICIENTS, LOWEST_EXPONENT, MAGIC

ROWS_OF_THREAD = 2
ROW_STEP = 8  # from a thread's first row to its second
QUAD = 4
RUN = 8  # columns that a quad shares, two for each of its threads
FULL_MASK = "-1"  # all lanes take part in a shuffle
CHAINS = 2  # of dependent maxima, for each row


def thread_row(thread: Int32) -> Int32:
    """The first of the rows of a thread of the warpgroup."""
    return thread // 32 * 16 + thread % 32 // QUAD


def row_of(element: int) -> int:
    """Which of the thread's two rows an element is of."""
    return element // 2 % ROWS_OF_THREAD


def column_of(element: int) -> int:
    """Its column, for the first thread of a quad."""
    return element // 4 * RUN + element % 2


def of_row(values: list, row: int) -> list:
    """The elements of one of the thread's two rows."""
    return [value for i, value in enumerate(values) if row_of(i) == row]


def joined(first: list, second: list) -> list:
    """Both rows' elements in the accumulator's order."""
    rows = iter(first), iter(second)
    return [next(rows[row_of(i)]) for i in range(len(first) + len(second))]


def visible_elements(columns: Int32, quad_thread: Int32) -> Int32:
    """How many of its elements in a row lie in the first `columns` columns; they come first."""
    left = cutlass.max(columns - 2 * quad_thread, 0)
    return left // RUN * 2 + cutlass.min(left % RUN, 2)


def keep_columns(
    values: list[Float32], starts: list[Int32] | None, stops: list[Int32], quad_thread: Int32
) -> list[Float32]:
    """-inf outside columns [start, stop) of each row."""
    kept = []
    for row in range(ROWS_OF_THREAD):
        start = None if starts is None else visible_elements(starts[row], quad_thread)
        stop = visible_elements(stops[row], quad_thread)
        kept.append(keep_range(of_row(values, row), start, stop))
    return joined(*kept)


def raise_references(
    values: list[Float32], highest: list[Float32], scale: Float32, slack: Float32, *,
    as_integers: bool = False,
) -> tuple[list[Float32], list[Float32], Int32]:  # fmt: skip
    """(reference maximum of each row, factors of what came before, is a factor not 1?).

    A reference rises to the row's maximum when that is higher by more than `slack`. No lane of the
    warp has seen so high a score: then nothing is exchanged, and a branch passes over all of it.

    as_integers: whether one has is seen by the scores' bits, of which one instruction takes two
    more: positive floats are in the order of integers, and above all negative ones. A limit below
    zero is not trusted to it.
    """
    code = PtxBlock()
    registers, references = code.read_all(values), code.update_all(highest)
    factor, room = code.read(scale), code.read(slack)
    limits = [code.do("add.rn.f32", one, room) for one in references]
    rows = [of_row(registers, row) for row in range(ROWS_OF_THREAD)]
    if as_integers:
        above = [_above(code, *two) for two in zip(rows, limits, strict=True)]
    else:
        found = [_largest(code, row) for row in rows]
        above = [
            code.do("setp.gt.f32", *two, kind="pred") for two in zip(found, limits, strict=True)
        ]
    either = code.do("or.pred", *above, kind="pred")
    needed = code.do("vote.sync.any.pred", either, FULL_MASK, kind="pred")
    alphas = [code.do("mov.f32", literal(1.0)) for _ in rows]
    moved = code.do("mov.b32", "0", kind="b32")
    code.effect(f"@!{needed} bra.uni KEPT;")
    if as_integers:
        found = [_largest(code, row) for row in rows]
    for distance in (1, 2):
        others = [_exchanged(code, value, distance) for value in found]
        found = [code.do("max.f32", *two) for two in zip(found, others, strict=True)]
    for reference, limit, largest, alpha in zip(references, limits, found, alphas, strict=True):
        rises = code.do("setp.gt.f32", largest, limit, kind="pred")
        step = code.do("sub.rn.f32", reference, largest)
        code.effect(f"@{rises} mul.rn.f32 {step}, {step}, {factor};")
        code.effect(f"@{rises} ex2.approx.ftz.f32 {alpha}, {step};")
        code.effect(f"@{rises} mov.f32 {reference}, {largest};")
    code.effect(f"mov.b32 {moved}, 1;")
    code.effect("KEPT:")
    *results, flag = code.trace(*references, *alphas, moved, effects=True)
    return results[:ROWS_OF_THREAD], results[ROWS_OF_THREAD:], flag


def _largest(code: PtxBlock, values: list[str]) -> str:
    chains = values[:CHAINS]
    for i, value in enumerate(values[CHAINS:]):
        chains[i % CHAINS] = code.do("max.f32", chains[i % CHAINS], value)
    return code.do("max.f32", *chains)


def _above(code: PtxBlock, values: list[str], limit: str) -> str:
    """Is one of the values above the limit, or that below zero?"""
    bits = [code.do("mov.b32", value, kind="b32") for value in (*values, limit)]
    chains, rest = bits[:CHAINS], bits[CHAINS:-1]
    for i in range(0, len(rest), 2):
        chain = i // 2 % CHAINS
        for one in rest[i : i + 2]:
            chains[chain] = code.do("max.s32", chains[chain], one, kind="b32")
    largest = code.do("max.s32", *chains, kind="b32")
    higher = code.do("setp.gt.s32", largest, bits[-1], kind="pred")
    negative = code.do("setp.lt.s32", bits[-1], "0", kind="pred")
    return code.do("or.pred", higher, negative, kind="pred")


def quad_sums(values: list[Float32]) -> list[Float32]:
    """Each value summed over the quad."""
    code = PtxBlock()
    found = code.read_all(values)
    for distance in (1, 2):
        others = [_exchanged(code, value, distance) for value in found]
        found = [code.do("add.rn.f32", *two) for two in zip(found, others, strict=True)]
    return code.trace(*found)


def _exchanged(code: PtxBlock, value: str, distance: int) -> str:
    return code.do("shfl.sync.bfly.b32", value, str(distance), "31", FULL_MASK)


def emulated_elements(exp2: Exp2Split, count: int) -> list[bool]:
    """For each element of a thread's row: does the polynomial compute its exponential?

    Of the pairs that a thread has in every eight columns, those that `exp2` says of pairs of
    columns; all fragments are alike.
    """
    pairs = (element & ~1 for element in range(count))
    return [
        exp2.frequency > 0 and pair % exp2.frequency >= exp2.frequency - exp2.residue
        for pair in pairs
    ]


def powers(
    values: list[Float32], scale: Float32, offsets: list[Float32], exp2: Exp2Split
) -> list[Float32]:
    """2^(value * scale + offset of its row), by MUFU or, of some elements, a polynomial."""
    code = PtxBlock()
    registers, factor = code.read_all(values), code.read(scale)
    terms = code.read_all(offsets)
    flags = emulated_elements(exp2, len(values) // ROWS_OF_THREAD)
    flags = joined(flags, flags)
    results = []
    for i, (value, polynomial) in enumerate(zip(registers, flags, strict=True)):
        x = code.do("fma.rn.f32", value, factor, terms[row_of(i)])
        if polynomial:
            results.append(_polynomial_exp2(code, x, exp2.degree))
        else:
            results.append(code.do("ex2.approx.ftz.f32", x))
    return code.trace(*results)


def _polynomial_exp2(code: PtxBlock, x: str, degree: int) -> str:
    """2^x for x <= 127: floor by rounding, polynomial, exponent (as `rowmath`, one by one)."""
    x = code.do("max.f32", x, literal(LOWEST_EXPONENT))
    rounded = code.do("add.rm.ftz.f32", x, literal(MAGIC))
    whole = code.do("sub.rn.f32", rounded, literal(MAGIC))
    fraction = code.do("sub.rn.f32", x, whole)
    coefficients = COEFFICIENTS[degree]
    value = literal(coefficients[-1])
    for c in (*coefficients[-2::-1], 1.0):
        value = code.do("fma.rn.f32", value, fraction, literal(c))
    bits, power = (code.do("mov.b32", one, kind="b32") for one in (value, rounded))
    shifted = code.do("shl.b32", power, "23", kind="b32")
    return code.do("mov.b32", code.do("add.s32", bits, shifted, kind="b32"))


def add_rows(values: list[Float32], totals: list[Float32], factors: list[Float32]) -> list[Float32]:
    """Each row's total * factor + its elements."""
    code = PtxBlock()
    registers, before, scales = (code.read_all(one) for one in (values, totals, factors))
    results = []
    for row, (total, scale) in enumerate(zip(before, scales, strict=True)):
        first, *rest = of_row(registers, row)
        total = code.do("fma.rn.f32", total, scale, first)
        for value in rest:
            total = code.do("add.rn.f32", total, value)
        results.append(total)
    return code.trace(*results)


def tanh(values: list[Float32], factor: Float32) -> list[Float32]:
    """tanh(value * factor), by one instruction each."""
    code = PtxBlock()
    registers, scale = code.read_all(values), code.read(factor)
    arguments = [code.do("mul.rn.f32", value, scale) for value in registers]
    return code.trace(*(code.do("tanh.approx.f32", argument) for argument in arguments))


def one_minus_squares(values: list[Float32], factors: list[Float32]) -> list[Float32]:
    """factor * (1 - x^2) of each value."""
    code = PtxBlock()
    terms, others = code.read_all(values), code.read_all(factors)
    results = []
    for x, factor in zip(terms, others, strict=True):
        square = code.do("mul.rn.f32", x, x)
        rest = code.do("sub.rn.f32", literal(1.0), square)
        results.append(code.do("mul.rn.f32", factor, rest))
    return code.trace(*results)


def multiplied_rows(values: list[Float32], factors: list[Float32]) -> list[Float32]:
    """Each row times its factor."""
    code = PtxBlock()
    registers, scales = code.read_all(values), code.read_all(factors)
    results = [code.do("mul.rn.f32", v, scales[row_of(i)]) for i, v in enumerate(registers)]
    return code.trace(*results)


def rescale(values: list[Float32], moved: Int32, factors: list[Float32]) -> list[Float32]:
    """Each row times its factor, unless `moved` is 0, as it is in the whole warp."""
    code = PtxBlock()
    registers = code.update_all(values)
    scales = code.read_all(factors)
    stays = code.do("setp.eq.b32", code.read(moved), "0", kind="pred")
    code.effect(f"@{stays} bra.uni RESCALED;")
    for i, value in enumerate(registers):
        code.effect(f"mul.rn.f32 {value}, {value}, {scales[row_of(i)]};")
    code.effect("RESCALED:")
    return code.trace(*registers, effects=True)


def store_matrices(words: list[Int32], base: Int32, thread: Int32, row_bytes: int) -> None:
    """Words of two 16-bit elements to 64 rows of shared memory, swizzled as TMA reads them.

    base: its address. row_bytes: of a run; runs of all 64 rows lie one behind the other.
    """
    code = PtxBlock()
    registers = code.read_all(words)
    places = _matrix_places(code, len(words), base, thread, row_bytes)
    for number, place in enumerate(places):
        operands = ", ".join(registers[4 * number : 4 * number + 4])
        code.effect(f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [{place}], {{{operands}}};")
    code.trace(effects=True)


def load_matrices(count: int, base: Int32, thread: Int32, row_bytes: int) -> list[Int32]:
    """The first `count` words of what `store_matrices`, or TMA, has stored, as A of a product."""
    code = PtxBlock()
    found: list[str] = []
    for place in _matrix_places(code, count, base, thread, row_bytes):
        words = [code.register("b32") for _ in range(4)]
        operands = ", ".join(words)
        code.effect(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{operands}}}, [{place}];")
        found += words
    return code.trace(*found, effects=True)


def _matrix_places(
    code: PtxBlock, count: int, base: Int32, thread: Int32, row_bytes: int
) -> list[str]:
    """Addresses of a thread, for each four of its words: 16 columns of its warp's 16 rows.

    A lane names one row of one of their four 8 x 8 parts.
    """
    lane = thread % 32
    row = thread // 32 * 16 + lane % 16
    mask = row * row_bytes // 128 % (row_bytes // 16)
    half = lane // 16
    start = code.read(base + row * row_bytes)
    chunks: dict[int, str] = {}
    places = []
    for i in range(0, count, 4):
        run, chunk = i * 8 // row_bytes, i * 8 % row_bytes // 16
        if chunk not in chunks:
            place = ((chunk + half) ^ mask) * 16
            chunks[chunk] = code.do("add.s32", start, code.read(place), kind="b32")
        places.append(f"{chunks[chunk]}+{run * 64 * row_bytes}")
    return places


def store_columns(words: list[Int32], base: Int32, thread: Int32) -> None:
    """Words of two 16-bit elements to shared memory, columns as rows of 128 bytes, swizzled.

    base: its address. A column's 64 elements, of all rows of the warpgroup, lie together. Each
    stmatrix stores 16 columns of a warp's 16 rows, each 8 x 8 part transposed; a lane names one
    column of one of four parts.
    """
    part, column = thread % 32 // RUN, thread % RUN
    chunk = (thread // 32 * 2 + part % 2) ^ column
    code = PtxBlock()
    registers = code.read_all(words)
    start = code.read(base + (part // 2 * RUN + column) * 128 + chunk * 16)
    for i in range(0, len(words), 4):
        operands = ", ".join(registers[i : i + 4])
        offset = i // 2 * RUN * 128
        code.effect(
            f"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{start}+{offset}], {{{operands}}};"
        )
    code.trace(effects=True)
