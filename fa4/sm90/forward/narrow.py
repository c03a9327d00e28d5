"""8-bit operands: P as the tensor core reads it, O's columns as they come, factors of K and V.

Of 16 keys, a thread holds four scores of a row: 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t in lane t of a
quad. An operand of 8-bit elements wants four neighbours, 4 t to 4 t + 3. Which keys these are does
not matter as long as V^T has the same order, so `transpose` stores its keys in P's.

V^T's rows come in another order too: the eight even columns of 16, then the odd ones.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.kit.descriptors import swizzle_bytes
from fa4.kit.ptx_block import PtxBlock
from fa4.kit.tiles import WorkTile
from fa4.kit.units import WARPGROUP
from fa4.sm90.forward import fragment

BLOCK = 8  # elements of a thread in 16 columns, of both its rows
LATER = 4  # from an element to the one 8 columns on


def factor_of(descales: tuple, tile: WorkTile) -> Any:
    """The product of those factors that are given, of a work tile's batch entry and KV head."""
    found = None
    for descale in descales:
        if descale is not None:
            factor = descale[tile.batch, tile.head_k]
            found = factor if found is None else found * factor
    return found


def quadruples(values: list) -> list[list]:
    """(first two, then those 8 columns on) of each row, for every 16 columns."""
    return [
        [values[block + row + i] for i in (0, 1, LATER, LATER + 1)]
        for block in range(0, len(values), BLOCK)
        for row in (0, 2)
    ]


def operand_words(p: list[Float32], dtype: str) -> list[Int32]:
    """P as words of four 8-bit elements, in the order of the operand's registers."""
    code = PtxBlock()
    words = []
    for a, b, c, d in quadruples(code.read_all(p)):
        low, high = (
            code.do(f"cvt.rn.satfinite.{dtype}x2.f32", second, first, kind="b16")
            for first, second in ((a, b), (c, d))
        )
        words.append(code.do("mov.b32", f"{{{low}, {high}}}", kind="b32"))
    return code.trace(*words)


def in_column_pairs(values: list) -> list:
    """A thread's elements of O as neighbouring columns: 4 t to 4 t + 3 of each 16, row by row."""
    firsts = (block + row for block in range(0, len(values), BLOCK) for row in (0, 2))
    return [values[i] for first in firsts for i in neighbours(first)]


def neighbours(first: int) -> tuple[int, ...]:
    """Numbers of a row's elements in 16 columns, from the first on, column by column."""
    return tuple(first + i for i in (0, LATER, 1, LATER + 1))


def store_column_pairs(words: list[Int32], shared: cute.Tensor) -> None:
    """Words of two such columns to a warpgroup's (rows, cols) of 16-bit elements."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    width = swizzle_bytes(cute.size(shared.shape[1]))
    rows = cute.size(shared.shape[0])
    row = fragment.thread_row(thread)
    mask = row * width // 128 % (width // 16)  # the same 8 rows below
    lane = thread % fragment.QUAD
    code = PtxBlock()
    registers = code.read_all(words)
    start = code.read(shared.iterator.toint().to(Int32) + row * width + lane % 2 * 8)
    places: dict[int, str] = {}
    for i in range(0, len(words), 2):
        block, below = i // 4, i // 2 % 2
        run, chunk = block * 32 // width, block * 32 % width // 16
        if chunk not in places:
            place = ((chunk + lane // 2) ^ mask) * 16
            places[chunk] = code.do("add.s32", start, code.read(place), kind="b32")
        offset = run * rows * width + below * fragment.ROW_STEP * width
        code.effect(
            f"st.shared.v2.b32 [{places[chunk]}+{offset}], {{{registers[i]}, {registers[i + 1]}}};"
        )
    code.trace(effects=True)
