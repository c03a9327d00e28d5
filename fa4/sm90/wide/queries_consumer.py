"""A warpgroup of the dQ kernel: its 64 queries' products with every KV tile, dS, and dQ."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.config import Exp2Split
from fa4.kit.descriptors import OperandTiles
from fa4.kit.ptx_block import PtxBlock, hold_before
from fa4.kit.rings import Ring
from fa4.kit.rowmath import rounded
from fa4.kit.signals import Signals
from fa4.kit.tiles import WorkTile
from fa4.kit.units import WARPGROUP
from fa4.plan.warpgroup_wide_queries import sums_first
from fa4.sm90.backward.parts import RowsPlace
from fa4.sm90.forward import fragment
from fa4.sm90.forward.products import wait_products
from fa4.sm90.wide.output import StoredRows, store_gradient
from fa4.sm90.wide.products import RowProducts, start_sum
from fa4.sm90.wide.row_mods import RowScoreMods

PART = 16  # elements of a thread whose modified scores there are at a time


@dataclass(frozen=True)
class QueryWork:
    """What a warpgroup works with.

    number: which warpgroup it is. head: of dQ, or of its parts. scores, upstream: S and dP.
    key_rows: K, summed over its rows. stats: in global memory, (heads, tiles, 2, 128); stats_tile:
    of the block. scale_log2: from scores to exponents of 2.
    """

    number: Int32
    head: Int32
    scores: RowProducts
    upstream: RowProducts
    key_rows: OperandTiles
    stats: cute.Tensor
    stats_tile: Int32
    scale_log2: Float32
    softmax_scale: Float32
    mods: RowScoreMods
    output: StoredRows


@dataclass(frozen=True)
class RowPair:
    """A thread's two rows of queries, and -LSE log2(e) and -D of each."""

    rows: tuple
    lse: list
    d: list


@dataclass(frozen=True)
class QueryState:
    """What is carried from one KV tile to the next. dq: a thread's part. number: of the last.

    words: dS of the last tile, which is not in dq yet; none before the first one.
    """

    dq: list
    words: list
    keys: Ring
    values: Ring
    number: Int32


@cute.jit
def consume(signals: Signals, tile: WorkTile, work: QueryWork) -> None:
    """Every KV tile of the work tile, last keys first."""
    spec: cutlass.Constexpr = tile.spec
    if tile.first_row < tile.seqlen_q:
        rows = read_rows(tile, work)
        state = QueryState(
            dq=[Float32(0.0)] * (spec.pipeline.sum_dims[0] // 2), words=[],
            keys=signals.ring("k"), values=signals.ring("v"), number=tile.kv_stop,
        )  # fmt: skip
        state = step(signals, tile, work, rows, state)
        for _ in cutlass.range(tile.kv_tiles - 1, unroll=1):
            state = step(signals, tile, work, rows, state)
        dq = sum_done(signals, state, start_queries(signals, work, state))
        dq = [value * work.softmax_scale for value in dq]
        number = tile.tile_number(work.number)
        place = RowsPlace(work.head, tile.batch, number, tile.start_q, tile.seqlen_q)
        dtype: cutlass.Constexpr = None if spec.query_parts else spec.dtype
        store_gradient(signals, "stored#", work.output, place, dq, dtype)


def read_rows(tile: WorkTile, work: QueryWork) -> RowPair:
    """The thread's rows, and the two numbers of each."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    first = fragment.thread_row(thread)
    steps = [first + i * fragment.ROW_STEP for i in range(fragment.ROWS_OF_THREAD)]
    inside = [work.number * tile.spec.tile_rows + row for row in steps]
    lse, d = (
        [work.stats[tile.head, work.stats_tile, which, row] for row in inside] for which in (0, 1)
    )
    return RowPair(tuple(tile.tile_row(work.number) + row for row in steps), lse, d)


def step(
    signals: Signals, tile: WorkTile, work: QueryWork, rows: RowPair, state: QueryState
) -> QueryState:
    """One KV tile, and dQ of the one before, if there is one (see `warpgroup_wide_queries`)."""
    spec, keys, values = tile.spec, state.keys, state.values
    number, dq, later = state.number - 1, state.dq, bool(state.words)
    sums_go_first = later and sums_first(spec.pipeline)
    if sums_go_first:
        dq = start_queries(signals, work, state)
    signals.wait("k_full", keys)
    s = work.scores.start(keys.slot)
    signals.arrive("s#_done", after="tensor")
    signals.wait("v_full", values)
    dp = work.upstream.start(values.slot)
    signals.arrive("dp#_done", after="tensor")
    if sums_go_first:
        dq = sum_done(signals, state, dq, behind=2)
    behind = int(later and not sums_go_first)
    if behind:
        dq = start_queries(signals, work, state)
    signals.wait("s#_done")
    s = wait_products(1 + behind, s)
    p = s
    if not spec.modifies_scores:
        p = probabilities(tile, work, rows, number, s)
        if sums_first(spec.pipeline):  # up to head dim 192 holding half of them costs 1%
            hold_before(p)  # else ptxas waits for dP before the exponentials
    signals.wait("dp#_done")
    dp = wait_products(behind, dp)
    signals.arrive_once("v_empty", values)
    if spec.modifies_scores:
        ds = modified_gradients(tile, work, rows, number, s, dp)
    else:
        ds = sums_times(dp, p, rows.d)
    if behind:
        hold_before(ds)  # else ptxas rounds into the words that dQ's product still reads
        dq = sum_done(signals, state, dq)
    return QueryState(dq, rounded(ds, spec.dtype), keys.next(), values.next(), number)


def start_queries(signals: Signals, work: QueryWork, state: QueryState) -> list[Float32]:
    """Start dQ += dS K of the last tile."""
    place = before(state.keys).slot
    dq = start_sum(state.dq, state.words, work.key_rows, place, work.scores.dtype)
    signals.arrive("dq#_done", after="tensor")
    return dq


def sum_done(
    signals: Signals, state: QueryState, dq: list[Float32], behind: int = 0
) -> list[Float32]:
    """Wait for that, and give its K back. behind: products started since."""
    signals.wait("dq#_done")
    dq = wait_products(behind, dq)
    signals.arrive_once("k_empty", before(state.keys))
    return dq


def before(keys: Ring) -> Ring:
    """The slot before a ring's; in whatever round, as it is only given back."""
    first = keys.slot == 0
    return keys.on(cutlass.select_(first, Int32(keys.stages - 1), keys.slot - 1))


def probabilities(
    tile: WorkTile, work: QueryWork, rows: RowPair, number: Int32, raw: list[Float32],
    first: int = 0,
) -> list[Float32]:  # fmt: skip
    """P in float32; raw: scores as the tensor core made them, the elements from `first` on."""
    first_key = number * tile.spec.tile_n + fragment.column_of(first)
    scores = work.mods.modified(raw, first_key)
    scores = masked(tile, rows, work.number, number, first_key, scores)
    return fragment.powers(scores, work.scale_log2, rows.lse, Exp2Split())


def modified_gradients(
    tile: WorkTile, work: QueryWork, rows: RowPair, number: Int32, raw: list[Float32],
    dp: list[Float32],
) -> list[Float32]:  # fmt: skip
    """dS in float32, of modified scores."""
    ds: list[Float32] = []
    for first in range(0, len(dp), PART):
        mine = raw[first : first + PART]
        p = probabilities(tile, work, rows, number, mine, first)
        values = sums_times(dp[first : first + PART], p, rows.d)
        first_key = number * tile.spec.tile_n + fragment.column_of(first)
        ds += work.mods.passed_back(values, mine, first_key)
    return ds


def sums_times(
    values: list[Float32], factors: list[Float32], terms: list[Float32]
) -> list[Float32]:
    """(value + number of its row) * factor."""
    code = PtxBlock()
    registers, scales, numbers = (code.read_all(one) for one in (values, factors, terms))
    results = [
        code.do("mul.rn.f32", code.do("add.rn.f32", x, numbers[fragment.row_of(i)]), scale)
        for i, (x, scale) in enumerate(zip(registers, scales, strict=True))
    ]
    return code.trace(*results)


@cute.jit
def masked(
    tile: WorkTile, rows: RowPair, warpgroup: Int32, number: Int32, first_key: Int32,
    s: list[Float32],
) -> list[Float32]:  # fmt: skip
    """S from a key on, with -inf where a row does not see a key."""
    whole_stop, whole_start = tile.whole_tiles(tile.tile_row(warpgroup))
    if (number >= whole_stop) | (number < whole_start):
        starts = None
        if cutlass.const_expr(tile.mask.has_start):
            starts = [tile.visible_start(row) - first_key for row in rows.rows]
        stops = [tile.visible_end(row) - first_key for row in rows.rows]
        quad_thread = cute.arch.thread_idx()[0] % fragment.QUAD
        s = fragment.keep_columns(s, starts, stops, quad_thread)
    return s
