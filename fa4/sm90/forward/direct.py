"""O from registers to global memory, 16 bytes a thread: it needs no place in shared memory.

The threads of a quad have two columns each of every eight. They exchange what they hold of four
times eight columns, so that each has eight that lie side by side.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from fa4.kit.ptx_block import PtxBlock
from fa4.kit.tiles import WorkTile
from fa4.sm90.forward.fragment import FULL_MASK, QUAD, ROWS_OF_THREAD, RUN

RUN_BYTES = 16  # eight columns of 16 bits


def store_direct(
    tile: WorkTile, tensor: cute.Tensor, rows: tuple, words: list[Int32], shift: Int32 | int
) -> None:
    """A thread's words of two elements, in the accumulator's order, to its two rows of O.

    tensor: O, (batch, rows, heads, dim) or packed. shift: columns of the accumulator before O's
    first.
    """
    quad_thread = cute.arch.thread_idx()[0] % QUAD
    for i in range(ROWS_OF_THREAD):
        mine = [word for number, word in enumerate(words) if number % ROWS_OF_THREAD == i]
        store_row(tile, tensor, rows[i], exchanged(mine, quad_thread), quad_thread, shift)


@cute.jit
def store_row(
    tile: WorkTile, tensor: cute.Tensor, row: Int32, words: list, quad_thread: Int32,
    shift: Int32 | int,
) -> None:  # fmt: skip
    """Runs of eight columns: quad_thread's of every four; none beyond the row, or the rows."""
    spec: cutlass.Constexpr = tile.spec
    if tile.has_row(row):
        place: tuple[Any, ...] = (tile.start_q + tile.position(row), tile.query_head(row), None)
        if cutlass.const_expr(not spec.packed_q):
            place = (tile.batch, *place)
        first = quad_thread - shift // RUN  # of this thread's runs, where it lies in the row
        start = tensor[place].iterator.toint() + Int64(first) * RUN_BYTES
        store_runs(start, first, words, spec.head_dim_v // RUN)


def store_runs(start: Int64, first: Int32, words: list[Int32], runs: int) -> None:
    """Every fourth run of a row from its number `first` on; `runs`: of the row."""
    code = PtxBlock()
    address, number, held = code.read(start), code.read(first), code.read_all(words)
    for step in range(len(words) // QUAD):
        own = ", ".join(held[QUAD * step : QUAD * (step + 1)])
        at = code.do("add.s32", number, str(QUAD * step), kind="b32")
        inside = code.do("setp.lt.u32", at, str(runs), kind="pred")  # also if it is negative
        code.effect(f"@{inside} st.global.v4.b32 [{address}+{QUAD * step * RUN_BYTES}], {{{own}}};")
    code.trace(effects=True)


def exchanged(words: list[Int32], quad_thread: Int32) -> list[Int32]:
    """From a word of each run to all four words of every fourth run, the quad's thread by thread.

    Four runs at a time are a square of runs and threads, of which first each 2 x 2 square and then
    the square of these is transposed. Runs that are missing to a multiple of four are anything.
    """
    code = PtxBlock()
    held = code.read_all(words)
    odd, late = (
        code.do("setp.ne.b32", code.do("and.b32", code.read(quad_thread), str(bit), kind="b32"),
                "0", kind="pred")
        for bit in (1, 2)
    )  # fmt: skip
    found: list[str] = []
    for start in range(0, len(held), QUAD):
        four = (held[start : start + QUAD] + [held[start]] * QUAD)[:QUAD]
        a, b = _swapped(code, four[0], four[1], odd, 1)
        c, d = _swapped(code, four[2], four[3], odd, 1)
        (a, c), (b, d) = _swapped(code, a, c, late, 2), _swapped(code, b, d, late, 2)
        found += [a, b, c, d]
    return code.trace(*found, effects=True)


def _swapped(code: PtxBlock, low: str, high: str, upper: str, distance: int) -> tuple[str, str]:
    """The lower thread's `high` and the upper one's `low` change places."""
    given = code.do("selp.b32", low, high, upper, kind="b32")
    got = code.do("shfl.sync.bfly.b32", given, str(distance), "31", FULL_MASK, kind="b32")
    return (
        code.do("selp.b32", got, low, upper, kind="b32"),
        code.do("selp.b32", high, got, upper, kind="b32"),
    )
