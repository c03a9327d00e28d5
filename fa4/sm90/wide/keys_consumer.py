"""The warpgroups of the kernel of dK and dV: `values` computes P and dV, `keys` dS and dK.

Both have the same 64 keys, and a thread of either the same elements of S^T and dP^T.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.kit.descriptors import OperandTiles
from fa4.kit.rings import Ring
from fa4.kit.rowmath import rounded
from fa4.kit.signals import Signals
from fa4.kit.units import WARPGROUP
from fa4.plan.warpgroup_wide_keys import P_BYTES, PART
from fa4.sm90.backward import columns
from fa4.sm90.backward.mods import ScoreMods
from fa4.sm90.backward.order import first_rows, next_rows, query_head
from fa4.sm90.backward.parts import RowsPlace
from fa4.sm90.forward import fragment
from fa4.sm90.forward.products import wait_products
from fa4.sm90.wide.exchange import hand_over, take_over
from fa4.sm90.wide.output import StoredRows, store_gradient, store_zeros
from fa4.sm90.wide.products import RowProducts, start_sum
from fa4.sm100.backward.tiles import KeyTile


@dataclass(frozen=True)
class HalfWork:
    """What either warpgroup works with.

    first: its product S^T or dP^T. summed: the name of what it adds up, "dv" or "dk". rows: of the
    tiles whose rows its sums add up, dO or Q. lse, d:
    addresses of the numbers of the thread's first column; handed: of its first vector of P; all in
    stage 0. scale_log2: from scores to exponents of 2. output_scale: of the gradient.
    """

    first: RowProducts
    summed: cutlass.Constexpr
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
    """What is carried from one query tile to the next.

    sums: a thread's part of dV or dK. queries: P's ring too. member: as of `first_rows`.
    """

    sums: list
    queries: Ring
    grads: Ring
    member: Int32
    row_tile: Int32

    def next(self, tile: KeyTile) -> "HalfState":
        """Of the next query tile."""
        rows = next_rows(tile, self.member, self.row_tile)
        return HalfState(self.sums, self.queries.next(), self.grads.next(), *rows)


@cute.jit
def consume(signals: Signals, tile: KeyTile, work: HalfWork, of_values: cutlass.Constexpr) -> None:
    """The query tiles of the group's heads, in their order."""
    spec: cutlass.Constexpr = tile.spec
    cols: cutlass.Constexpr = spec.pipeline.sum_dims[of_values]
    step: cutlass.Constexpr = values_step if of_values else keys_step
    sums = [Float32(0.0)] * (cols // 2)
    if tile.trips > 0:
        state = HalfState(sums, signals.ring("q"), signals.ring("do"), *first_rows(tile))
        await_first(signals, work, state)
        own = work.first.hold()
        found = begin(signals, work, own, state)
        for _ in cutlass.range(tile.trips - 1, unroll=1):
            found, state = step(signals, tile, work, own, found, state, True)
        _, state = step(signals, tile, work, own, found, state, False)
        finish(signals, tile, work, of_values, state.sums)
    else:
        store_zeros(work.output, place_of(tile))


def finish(
    signals: Signals, tile: KeyTile, work: HalfWork, of_values: bool, sums: list[Float32]
) -> None:
    """Store the gradient, when the other warpgroup has read what it is stored over."""
    mine, other = ("values", "keys") if of_values else ("keys", "values")
    signals.arrive(f"{mine}_read")
    signals.wait(f"{other}_read")
    if work.output_scale is not None:
        sums = [value * work.output_scale for value in sums]
    dtype = None if tile.spec.key_parts else tile.spec.dtype
    store_gradient(signals, f"{mine}_stored", work.output, place_of(tile), sums, dtype)


def place_of(tile: KeyTile) -> RowsPlace:
    """The tile's keys, of its KV head or the part of one."""
    return RowsPlace(tile.head_k, tile.batch, tile.block, tile.start_k, tile.seqlen_k)


def await_first(signals: Signals, work: HalfWork, state: HalfState) -> None:
    """Q, or dO, of a query tile."""
    if work.summed == "dv":
        signals.wait("q_full", state.queries)
    else:
        signals.wait("do_full", state.grads)


def begin(signals: Signals, work: HalfWork, own: list[Int32], state: HalfState) -> list[Float32]:
    """Start S^T, or dP^T, of a query tile whose rows are there."""
    values = work.summed == "dv"
    found = work.first.start((state.queries if values else state.grads).slot, own)
    signals.arrive("s_done" if values else "dp_done", after="tensor")
    return found


def values_step(
    signals: Signals, tile: KeyTile, work: HalfWork, own: list[Int32], s: list[Float32],
    state: HalfState, ahead: bool,
) -> tuple[list[Float32], HalfState]:  # fmt: skip
    """P of a query tile, which is handed on, and its product; ahead: S of the next one behind it.

    s: under way.
    """
    spec, queries, grads = tile.spec, state.queries, state.grads
    signals.wait("s_done")
    s = wait_products(0, s)
    p = probabilities(tile, work, state, s)
    signals.arrive_once("q_empty", queries)
    hand_over(s if spec.modifies_scores else p, work.handed + queries.slot * P_BYTES)
    signals.arrive_once("p_full", queries)
    words = rounded(p, spec.dtype)
    signals.wait("do_full", grads)
    found, state = add_up(signals, tile, work, own, words, state, ahead)
    signals.arrive_once("do_empty", grads)
    return found, state


def keys_step(
    signals: Signals, tile: KeyTile, work: HalfWork, own: list[Int32], dp: list[Float32],
    state: HalfState, ahead: bool,
) -> tuple[list[Float32], HalfState]:  # fmt: skip
    """dS of a query tile, of the P that is handed over, and its product; ahead: the next dP.

    dp: under way.
    """
    spec, queries, grads = tile.spec, state.queries, state.grads
    signals.wait("p_full", queries)
    handed = take_over(0, PART, work.handed + queries.slot * P_BYTES)
    signals.wait("q_full", queries)
    signals.wait("dp_done")
    dp = wait_products(0, dp)
    ds = rounded(score_gradients(tile, work, state, handed, dp), spec.dtype)
    signals.arrive_once("do_empty", grads)
    found, state = add_up(signals, tile, work, own, ds, state, ahead)
    signals.arrive_once("q_empty", queries)
    return found, state


def add_up(
    signals: Signals, tile: KeyTile, work: HalfWork, own: list[Int32], words: list[Int32],
    state: HalfState, ahead: bool,
) -> tuple[list[Float32], HalfState]:  # fmt: skip
    """dV += P^T dO or dK += dS^T Q, and behind it what the next query tile begins with."""
    last = state.grads if work.summed == "dv" else state.queries
    sums = start_sum(state.sums, words, work.rows, last.slot, work.first.dtype)
    signals.arrive(f"{work.summed}_done", after="tensor")
    following, found = state.next(tile), []
    if ahead:
        await_first(signals, work, following)
        found = begin(signals, work, own, following)
    signals.wait(f"{work.summed}_done")
    return found, replace(following, sums=wait_products(int(ahead), sums))


def probabilities(
    tile: KeyTile, work: HalfWork, state: HalfState, raw: list[Float32], first: int = 0
) -> list[Float32]:
    """P in float32; raw: scores as the tensor core made them, the elements from `first` on."""
    rows = tile.spec.tile_rows
    scores = work.mods.of_head(query_head(tile, state.member)).modified(
        raw, state.row_tile * rows, first
    )
    column = fragment.column_of(first)
    scores = masked(tile, state.row_tile, scores, column)
    offset = state.queries.slot * rows + column
    return columns.powers(scores, work.scale_log2, work.lse + offset * columns.FLOAT_BYTES)


def score_gradients(
    tile: KeyTile, work: HalfWork, state: HalfState, found: list[Float32], dp: list[Float32]
) -> list[Float32]:
    """dS in float32. found: P of the first part, or of modified scores the raw ones."""
    rows, place = tile.spec.tile_rows, work.handed + state.queries.slot * P_BYTES
    numbers = work.d + state.grads.slot * (rows * columns.FLOAT_BYTES)
    mods, ds = work.mods.of_head(query_head(tile, state.member)), []
    for first in range(0, len(dp), PART):
        p = found if first == 0 else take_over(first, PART, place)
        raw = p
        if tile.spec.modifies_scores:
            p = probabilities(tile, work, state, raw, first)
        offset = fragment.column_of(first) * columns.FLOAT_BYTES
        values = columns.sums_times(dp[first : first + PART], p, numbers + offset)
        if tile.spec.modifies_scores:
            values = mods.passed_back(values, raw, state.row_tile * rows, first)
        ds += values
    return ds


@cute.jit
def masked(
    tile: KeyTile, row_tile: Int32, s: list[Float32], column: cutlass.Constexpr
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
