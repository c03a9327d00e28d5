"""The warpgroups of the kernel of dK and dV: `values` computes P and dV, `keys` dS and dK.

Both have the same 64 keys, and a thread of either the same elements of S^T and dP^T.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.plan.warpgroup_wide_keys import ELEMENTS, P_BYTES
from fa4.sm90.backward import columns
from fa4.sm90.backward.mods import ScoreMods
from fa4.sm90.forward import fragment
from fa4.sm90.forward.products import wait_products
from fa4.sm90.wide.exchange import hand_over, take_over
from fa4.sm90.wide.output import RowsPlace, StoredRows, store_gradient
from fa4.sm90.wide.products import RowProducts, start_sum
from fa4.sm90.wide.tiles import WarpgroupKeys, next_tile
from fa4.sm100.kit.descriptors import OperandTiles
from fa4.sm100.kit.rings import Ring
from fa4.sm100.kit.rowmath import rounded
from fa4.sm100.kit.signals import Signals
from fa4.sm100.kit.units import WARPGROUP

PART = 16  # elements of a thread whose P is computed again at a time


@dataclass(frozen=True)
class HalfWork:
    """What either warpgroup works with.

    first: its product S^T or dP^T. rows: of the tiles that its sums add up, dO or Q. lse, d:
    addresses of the numbers of the thread's first column; handed: of its first vector of P; all in
    stage 0. scale_log2: from scores to exponents of 2. output_scale: of the gradient.
    """

    first: RowProducts
    rows: OperandTiles
    lse: Int32
    d: Int32
    handed: Int32
    scale_log2: Float32
    mods: ScoreMods
    output: StoredRows
    output_scale: Float32 | None


@dataclass(frozen=True)
class HalfState:
    """What is carried from one query tile to the next. sums: a thread's part of dV or dK.

    queries: P's ring too.
    """

    sums: list
    queries: Ring
    grads: Ring
    head: Int32
    row_tile: Int32

    def next(self, tile: WarpgroupKeys, sums: list[Float32]) -> "HalfState":
        """With the sums, behind a query tile."""
        head, row_tile = next_tile(tile, self.head, self.row_tile)
        return HalfState(sums, self.queries.next(), self.grads.next(), head, row_tile)


@cute.jit
def consume(
    signals: Signals, tile: WarpgroupKeys, work: HalfWork, of_values: cutlass.Constexpr
) -> None:
    """Query heads of the group one after the other, their query tiles from the first on."""
    pipeline: cutlass.Constexpr = tile.spec.pipeline
    dim: cutlass.Constexpr = pipeline.head_dim_v if of_values else pipeline.head_dim
    state = HalfState(
        sums=[Float32(0.0)] * (dim // 2),
        queries=signals.ring("q"), grads=signals.ring("do"),
        head=tile.head_k * tile.group, row_tile=tile.q_start,
    )  # fmt: skip
    for _ in cutlass.range(tile.trips, unroll=1):
        if cutlass.const_expr(of_values):
            state = values_step(signals, tile, work, state)
        else:
            state = keys_step(signals, tile, work, state)
    mine, other = ("values", "keys") if of_values else ("keys", "values")
    signals.arrive(f"{mine}_read")
    signals.wait(f"{other}_read")
    values = state.sums
    if cutlass.const_expr(work.output_scale is not None):
        values = [value * work.output_scale for value in values]
    place = RowsPlace(tile.head_k, tile.batch, tile.block, tile.start_k, tile.seqlen_k)
    store_gradient(signals, f"{mine}_stored", work.output, place, values, tile.spec.dtype)


def values_step(
    signals: Signals, tile: WarpgroupKeys, work: HalfWork, state: HalfState
) -> HalfState:
    """P of a query tile, which is handed on, and its product with dO."""
    spec, queries, grads = tile.spec, state.queries, state.grads
    signals.wait("q_full", queries)
    s = work.first.start(queries.slot)
    signals.arrive("s_done", after="tensor")
    signals.wait("s_done")
    s = wait_products(0, s)
    p = probabilities(tile, work, state, s)
    signals.arrive_once("q_empty", queries)
    hand_over(s if spec.modifies_scores else p, work.handed + queries.slot * P_BYTES)
    signals.arrive_once("p_full", queries)
    words = rounded(p, spec.dtype)
    signals.wait("do_full", grads)
    dv = start_sum(state.sums, words, work.rows, grads.slot, spec.dtype)
    signals.arrive("dv_done", after="tensor")
    signals.wait("dv_done")
    dv = wait_products(0, dv)
    signals.arrive_once("do_empty", grads)
    return state.next(tile, dv)


def keys_step(signals: Signals, tile: WarpgroupKeys, work: HalfWork, state: HalfState) -> HalfState:
    """dS of a query tile, with the P that is handed over, and its product with Q."""
    spec, queries, grads = tile.spec, state.queries, state.grads
    signals.wait("do_full", grads)
    dp = work.first.start(grads.slot)
    signals.arrive("dp_done", after="tensor")
    signals.wait("p_full", queries)
    found = take_over(ELEMENTS, work.handed + queries.slot * P_BYTES)
    signals.wait("q_full", queries)
    signals.wait("dp_done")
    dp = wait_products(0, dp)
    ds = rounded(score_gradients(tile, work, state, found, dp), spec.dtype)
    signals.arrive_once("do_empty", grads)
    dk = start_sum(state.sums, ds, work.rows, queries.slot, spec.dtype)
    signals.arrive("dk_done", after="tensor")
    signals.wait("dk_done")
    dk = wait_products(0, dk)
    signals.arrive_once("q_empty", queries)
    return state.next(tile, dk)


def probabilities(
    tile: WarpgroupKeys, work: HalfWork, state: HalfState, raw: list[Float32], first: int = 0
) -> list[Float32]:
    """P in float32; raw: scores as the tensor core made them, the elements from `first` on."""
    rows = tile.spec.tile_rows
    scores = work.mods.of_head(state.head).modified(raw, state.row_tile * rows, first)
    column = fragment.column_of(first)
    scores = masked(tile, state.row_tile, scores, column)
    offset = state.queries.slot * rows + column
    return columns.powers(scores, work.scale_log2, work.lse + offset * columns.FLOAT_BYTES)


def score_gradients(
    tile: WarpgroupKeys, work: HalfWork, state: HalfState, found: list[Float32], dp: list[Float32]
) -> list[Float32]:
    """dS in float32. found: P, or of modified scores the raw ones."""
    rows = tile.spec.tile_rows
    numbers = work.d + state.grads.slot * (rows * columns.FLOAT_BYTES)
    if not tile.spec.modifies_scores:
        return columns.sums_times(dp, found, numbers)
    mods, ds = work.mods.of_head(state.head), []
    for first in range(0, len(dp), PART):
        raw = found[first : first + PART]
        p = probabilities(tile, work, state, raw, first)
        offset = fragment.column_of(first) * columns.FLOAT_BYTES
        values = columns.sums_times(dp[first : first + PART], p, numbers + offset)
        ds += mods.passed_back(values, raw, state.row_tile * rows, first)
    return ds


@cute.jit
def masked(
    tile: WarpgroupKeys, row_tile: Int32, s: list[Float32], column: cutlass.Constexpr
) -> list[Float32]:
    """S^T from a column on, with -inf where a query does not see a key."""
    whole_start, whole_stop = tile.whole_tiles()
    if (row_tile < whole_start) | (row_tile >= whole_stop):
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        first_key = tile.first_key + fragment.thread_row(thread)
        first_row = row_tile * tile.spec.tile_rows + column
        starts, stops = [], []
        for key in (first_key, first_key + fragment.ROW_STEP):
            exists = key < tile.seqlen_k
            starts.append(tile.first_row(key) - first_row)
            stops.append(cutlass.select_(exists, tile.stop_row(key) - first_row, Int32(0)))
        s = fragment.keep_columns(s, starts, stops, thread % fragment.QUAD)
    return s
