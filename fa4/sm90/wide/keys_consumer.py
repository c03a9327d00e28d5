"""The warpgroups of the kernel of dK and dV: `values` computes P and dV, `keys` dS and dK.

Both have the same 64 keys, and a thread of either the same elements of S^T and dP^T.
"""

from dataclasses import dataclass, replace

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
from fa4.sm100.kit.ptx_block import stand_apart
from fa4.sm100.kit.rings import Ring
from fa4.sm100.kit.rowmath import rounded
from fa4.sm100.kit.signals import Signals
from fa4.sm100.kit.units import WARPGROUP

PART = 16  # elements of a thread whose P is computed again at a time


@dataclass(frozen=True)
class HalfWork:
    """What either warpgroup works with.

    first: its product S^T or dP^T. summed: the name of what it adds up, "dv" or "dk". rows: of the
    tiles whose rows its sums add up, dO or Q. never: see `stand_apart`. lse, d:
    addresses of the numbers of the thread's first column; handed: of its first vector of P; all in
    stage 0. scale_log2: from scores to exponents of 2. output_scale: of the gradient.
    """

    first: RowProducts
    summed: cutlass.Constexpr
    rows: OperandTiles
    never: Int32
    lse: Int32
    d: Int32
    handed: Int32
    scale_log2: Float32
    mods: ScoreMods
    output: StoredRows
    output_scale: Float32 | None


@dataclass(frozen=True)
class HalfState:
    """What is carried from one query tile to the next.

    sums: a thread's part of dV or dK. words: P or dS of the tile whose product is next, with
    overlap; it lies in slot `last`. queries: P's ring too.
    """

    sums: list
    words: list
    last: Ring
    queries: Ring
    grads: Ring
    head: Int32
    row_tile: Int32

    def next(self, tile: WarpgroupKeys, words: list[Int32], last: Ring) -> "HalfState":
        """Behind a query tile whose words are there."""
        head, row_tile = next_tile(tile, self.head, self.row_tile)
        queries, grads = self.queries.next(), self.grads.next()
        return HalfState(self.sums, words, last, queries, grads, head, row_tile)


@cute.jit
def consume(
    signals: Signals, tile: WarpgroupKeys, work: HalfWork, of_values: cutlass.Constexpr
) -> None:
    """Query heads of the group one after the other, their query tiles from the first on."""
    spec: cutlass.Constexpr = tile.spec
    dim: cutlass.Constexpr = spec.pipeline.head_dim_v if of_values else spec.pipeline.head_dim
    step: cutlass.Constexpr = values_step if of_values else keys_step
    sums = [Float32(0.0)] * (dim // 2)
    if tile.trips > 0:
        queries, grads = signals.ring("q"), signals.ring("do")
        state = HalfState(
            sums=sums, words=[], last=queries, queries=queries, grads=grads,
            head=tile.head_k * tile.group, row_tile=tile.q_start,
        )  # fmt: skip
        if cutlass.const_expr(spec.overlap):
            signals.wait("q_full" if of_values else "do_full", queries)
            own = work.first.hold()
            state = step(signals, tile, work, own, state)
            for _ in cutlass.range(tile.trips - 1, unroll=1):
                state = step(signals, tile, work, own, state)
            sums = finish_product(signals, work, state, start_product(signals, work, state))
        else:
            for _ in cutlass.range(tile.trips, unroll=1):
                state = step(signals, tile, work, [], state)
                found = start_product(signals, work, state)
                found = finish_product(signals, work, state, found)
                state = replace(state, sums=found, words=[])
            sums = state.sums
        finish(signals, tile, work, of_values, sums)
    else:
        finish(signals, tile, work, of_values, sums)


def finish(
    signals: Signals, tile: WarpgroupKeys, work: HalfWork, of_values: bool, sums: list[Float32]
) -> None:
    """Store the gradient, when the other warpgroup has read what it is stored over."""
    mine, other = ("values", "keys") if of_values else ("keys", "values")
    signals.arrive(f"{mine}_read")
    signals.wait(f"{other}_read")
    if work.output_scale is not None:
        sums = [value * work.output_scale for value in sums]
    place = RowsPlace(tile.head_k, tile.batch, tile.block, tile.start_k, tile.seqlen_k)
    store_gradient(signals, f"{mine}_stored", work.output, place, sums, tile.spec.dtype)


def values_step(
    signals: Signals, tile: WarpgroupKeys, work: HalfWork, own: list[Int32], state: HalfState
) -> HalfState:
    """P of a query tile, which is handed on, beside dV's product of the tile before."""
    spec, queries, before = tile.spec, state.queries, bool(state.words)
    if before or not spec.overlap:
        signals.wait("q_full", queries)
    s = work.first.start(queries.slot, own)
    signals.arrive("s_done", after="tensor")
    dv = start_product(signals, work, state) if before else []
    signals.wait("s_done")
    s = wait_products(int(before), s)
    p = probabilities(tile, work, state, s)
    signals.arrive_once("q_empty", queries)
    hand_over(s if spec.modifies_scores else p, work.handed + queries.slot * P_BYTES)
    signals.arrive_once("p_full", queries)
    if before:
        stand_apart(work.never)  # else ptxas waits for dV before the exponentials
        state = replace(state, sums=finish_product(signals, work, state, dv))
    return state.next(tile, rounded(p, spec.dtype), state.grads)


def keys_step(
    signals: Signals, tile: WarpgroupKeys, work: HalfWork, own: list[Int32], state: HalfState
) -> HalfState:
    """dS of a query tile, of the P that is handed over, beside dK's product of the tile before."""
    spec, queries, grads, before = tile.spec, state.queries, state.grads, bool(state.words)
    if before or not spec.overlap:
        signals.wait("do_full", grads)
    dp = work.first.start(grads.slot, own)
    signals.arrive("dp_done", after="tensor")
    dk = start_product(signals, work, state) if before else []
    signals.wait("p_full", queries)
    found = take_over(ELEMENTS, work.handed + queries.slot * P_BYTES)
    signals.wait("q_full", queries)
    signals.wait("dp_done")
    dp = wait_products(int(before), dp)
    ds = score_gradients(tile, work, state, found, dp)
    signals.arrive_once("do_empty", grads)
    if before:
        stand_apart(work.never)
        state = replace(state, sums=finish_product(signals, work, state, dk))
    return state.next(tile, rounded(ds, spec.dtype), queries)


def start_product(signals: Signals, work: HalfWork, state: HalfState) -> list[Float32]:
    """dV += P^T dO, or dK += dS^T Q, of the words' tile, as a group of its own."""
    if work.summed == "dv":
        signals.wait("do_full", state.last)
    sums = start_sum(state.sums, state.words, work.rows, state.last.slot, work.first.dtype)
    signals.arrive(f"{work.summed}_done", after="tensor")
    return sums


def finish_product(
    signals: Signals, work: HalfWork, state: HalfState, sums: list[Float32]
) -> list[Float32]:
    """The sums; the tile that was added is given back."""
    signals.wait(f"{work.summed}_done")
    sums = wait_products(0, sums)
    signals.arrive_once("do_empty" if work.summed == "dv" else "q_empty", state.last)
    return sums


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
