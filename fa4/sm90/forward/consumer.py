"""A consumer warpgroup: products, softmax and output of its 64 rows of queries."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from fa4.kit import rowmath
from fa4.kit.ptx_block import stand_apart
from fa4.kit.rings import Ring
from fa4.kit.signals import Signals
from fa4.kit.tiles import KernelProblem, WorkTile, locate
from fa4.kit.units import WARPGROUP
from fa4.plan.warpgroup import output_over_queries
from fa4.plan.warpgroup_roles import passes_tiles
from fa4.sm90.forward import fragment, held, narrow
from fa4.sm90.forward.held import meet_warpgroup
from fa4.sm90.forward.load import query_ring
from fa4.sm90.forward.output import OutputTile, close, finish, share
from fa4.sm90.forward.places import HeldPlaces
from fa4.sm90.forward.products import WarpgroupProducts, wait_products
from fa4.sm90.forward.schedule import WorkQueue, first_work, follow
from fa4.sm100.forward.mods import Mods


@dataclass(frozen=True)
class ConsumerWork:
    """What a warpgroup works with.

    number: which warpgroup it is. probabilities: P in shared memory, (rows, cols) of this
    warpgroup, None where PV takes it from registers. slack: of scores, by which a maximum may rise
    above its reference. num_tiles: work tiles of the call. descales: of q, k and v, global tensors
    or None. memory: where shared memory begins. held: where this thread's part of a promoted O is,
    of a work tile. queue: of the numbers of work tiles.
    """

    spec: cutlass.Constexpr
    number: Int32
    products: WarpgroupProducts
    probabilities: cute.Tensor | None
    scale_log2: Float32
    slack: Float32
    num_tiles: Int32
    mods: Mods
    descales: tuple
    memory: Int32
    queue: WorkQueue
    held: HeldPlaces | None = None

    def on(self, tile: WorkTile) -> "ConsumerWork":
        """The same with the factors of a work tile's keys, if there are any, in the scales."""
        factor = narrow.factor_of(self.descales[:2], tile)
        if factor is None:
            return self
        if self.mods.score_scale is not None:  # softcap's own factor comes behind it
            return replace(
                self, mods=replace(self.mods, score_scale=self.mods.score_scale * factor)
            )
        scale = self.scale_log2 * factor
        slack = self.spec.numerics.rescale_threshold_log2 / scale
        return replace(self, scale_log2=scale, slack=slack)


@dataclass(frozen=True)
class ConsumerState:
    """What is carried from one KV tile to the next. Of each list, a thread's part.

    sums: O. words: P of the KV tile whose PV is next, in registers. highest: reference
    maxima. totals: row sums of this thread's columns. lags: factors of what O is promoted to, since
    it last was; none if it is not.
    """

    sums: list
    words: list
    highest: list
    totals: list
    lags: list
    queries: Ring
    keys: Ring
    values: Ring


@cute.jit
def consume(
    signals: Signals, problem: KernelProblem, work: ConsumerWork, output: OutputTile
) -> None:
    """All work tiles of this CTA, if it has one: else there is no memory to begin with."""
    spec: cutlass.Constexpr = problem.spec
    if cutlass.const_expr(spec.begins_ahead and spec.ragged_q):
        if first_work(problem) < problem.num_tiles:
            work_through(signals, problem, work, output)
    else:
        work_through(signals, problem, work, output)


@cute.jit
def work_through(
    signals: Signals, problem: KernelProblem, work: ConsumerWork, output: OutputTile
) -> None:
    """Every KV tile of every work tile, last keys first: masked, whole, masked by the window."""
    spec: cutlass.Constexpr = problem.spec
    index = first_work(problem)
    queries, keys, values = query_ring(spec), signals.ring("k"), signals.ring("v")
    queue = work.queue
    if cutlass.const_expr(spec.takes_turns):  # noqa: SIM102
        if work.number == spec.consumers - 1:
            last = signals.of(f"consumer{spec.consumers - 1}").numbered(0)
            last.arrive("turn#")
    tile = locate_any(problem, index)
    number, s = tile.kv_stop, []
    if cutlass.const_expr(spec.begins_ahead):
        exists = index < problem.num_tiles
        number, s, keys, values = begin(signals, work, tile, queries, keys, values, exists)
    while index < problem.num_tiles:
        first_row = tile.tile_row(work.number)
        thread_row = first_row + fragment.thread_row(cute.arch.thread_idx()[0] % WARPGROUP)
        rows = thread_row, thread_row + fragment.ROW_STEP
        whole_stop, whole_start = tile.whole_tiles(first_row)
        stop = tile.kv_start
        if cutlass.const_expr(not spec.begins_ahead):
            number, s, keys, values = begin(signals, work, tile, queries, keys, values)
        scaled = work.on(tile)
        if cutlass.const_expr(spec.promote):
            places = held.held_places(work.memory, spec, work.number, tile, output.tensor, rows)
            scaled = replace(scaled, held=places)
        state = start(scaled, queries, keys, values)
        if cutlass.const_expr(spec.overlap):
            number -= 1
            state = first_step(signals, scaled, tile, number, rows, s, state)
        if cutlass.const_expr(spec.promote):
            held.clear(signals, scaled)
        for _ in cutlass.range(number - cutlass.max(whole_stop, stop), unroll=1):
            number -= 1
            state = step(signals, scaled, tile, number, rows, state)
        for _ in cutlass.range(number - cutlass.max(whole_start, stop), unroll=1):
            number -= 1
            state = step(signals, scaled, tile, number, None, state)
        if cutlass.const_expr(spec.hides_first_keys):
            for _ in cutlass.range(number - stop, unroll=1):
                number -= 1
                state = step(signals, scaled, tile, number, rows, state)
        if cutlass.const_expr(not output_over_queries(spec.pipeline, spec.gpu)):
            signals.arrive_once("q_empty", queries)
        queries = queries.next()
        if cutlass.const_expr(spec.overlap):
            signals.wait("v_full", state.values)
            sums = start_values(signals, work, state)
        else:
            give_turn(signals, work)
        index, queue = follow(signals, problem, queue, index)
        following = locate_any(problem, index)  # its divisions run beside the last product
        if cutlass.const_expr(spec.overlap):
            sums, values = values_done(signals, sums, state.values)
            state = replace(state, sums=sums, words=[], values=values)
        keys, values, s = state.keys, state.values, []
        if cutlass.const_expr(spec.begins_ahead):
            exists = index < problem.num_tiles
            number, s, keys, values = begin(signals, work, following, queries, keys, values, exists)
        finish(signals, scaled, tile, output, rows, state)
        tile = following
    if cutlass.const_expr(spec.begins_ahead):
        wait_products(0, s)  # the one that nobody uses
    close(signals, spec)


def locate_any(problem: KernelProblem, index: Int32) -> WorkTile:
    """The work tile; beyond the end, the last one, of which nothing is used."""
    return locate(problem, cutlass.min(index, problem.num_tiles - 1))


@cute.jit
def begin(
    signals: Signals,
    work: ConsumerWork,
    tile: WorkTile,
    queries: Ring,
    keys: Ring,
    values: Ring,
    exists: Boolean | bool = True,
) -> tuple[Int32, list[Float32], Ring, Ring]:
    """Pass over what only others need, wait for Q; with overlap, start the first S.

    exists: is there such a work tile? Known where the one before it is still to be finished. The
    number of its last KV tile but those passed over, plus 1; S; the rings of K and V.
    """
    spec: cutlass.Constexpr = work.spec
    number, s = tile.kv_stop, []
    if cutlass.const_expr(passes_tiles(spec.pipeline)):
        passed = number - stop_of_rows(tile, tile.tile_row(work.number))
        if cutlass.const_expr(spec.begins_ahead):
            passed = cutlass.select_(exists, passed, Int32(0))
        for _ in cutlass.range(passed, unroll=1):
            number -= 1
            keys, values = pass_over(signals, work, keys, values)
    if exists:
        signals.wait("q_full" if spec.straddles else "q#_full", queries)
        if cutlass.const_expr(spec.overlap):
            signals.wait("k_full", keys)
    if cutlass.const_expr(spec.overlap):
        # In a branch, ptxas has no registers for it. What it reads then is there, and S not used.
        slots = [
            cutlass.select_(exists, ring.slot, 0)
            if cutlass.const_expr(spec.begins_ahead)
            else ring.slot
            for ring in (queries, keys)
        ]
        s = start_scores(signals, work, *slots)
    else:
        take_turn(signals, work)
    return number, s, keys, values


def stop_of_rows(tile: WorkTile, first_row: Int32) -> Int32:
    """One past the last KV tile that a warpgroup needs; at least one, also if it has no row."""
    spec, start = tile.spec, tile.kv_start
    stop = cutlass.max(tile.stop_of(first_row + spec.tile_rows - 1), start + 1)
    if spec.has_mods:  # they have no register to spare for it
        return stop
    return cutlass.select_(first_row < tile.seqlen_q * spec.group, stop, start + 1)


def pass_over(signals: Signals, work: ConsumerWork, keys: Ring, values: Ring) -> tuple[Ring, Ring]:
    """A KV tile of which no row of this warpgroup sees a key; others need it."""
    signals.wait("k_full", keys)
    signals.arrive_once("k_empty", keys)
    signals.wait("v_full", values)
    signals.arrive_once("v_empty", values)
    take_turn(signals, work)
    give_turn(signals, work)
    return keys.next(), values.next()


def start(work: ConsumerWork, queries: Ring, keys: Ring, values: Ring) -> ConsumerState:
    """The state of a work tile that has seen no key."""
    spec = work.spec
    return ConsumerState(
        sums=[Float32(0.0)] * (work.products.values // 2),
        words=[Int32(0)] * (spec.p_words if spec.overlap and spec.p_source != "smem" else 0),
        highest=[rowmath.reference_without_keys(work.scale_log2)] * fragment.ROWS_OF_THREAD,
        totals=[Float32(0.0)] * (fragment.ROWS_OF_THREAD),
        lags=[Float32(1.0)] * (fragment.ROWS_OF_THREAD if spec.promote else 0),
        queries=queries,
        keys=keys,
        values=values,
    )


def step(
    signals: Signals,
    work: ConsumerWork,
    tile: WorkTile,
    number: Int32,
    rows: Any,
    state: ConsumerState,
) -> ConsumerState:
    """KV tile `number`; rows: the thread's, or None where the tile needs no mask."""
    if work.spec.overlap:
        return _overlapped(signals, work, tile, number, rows, state)
    return _serial(signals, work, tile, number, rows, state)


def first_step(
    signals: Signals,
    work: ConsumerWork,
    tile: WorkTile,
    number: Int32,
    rows: Any,
    s: list[Float32],
    state: ConsumerState,
) -> ConsumerState:
    """Softmax of the last keys, whose S is under way and PV runs beside the next tile's softmax."""
    s, keys = scores_done(signals, 0, s, state.keys)
    p, state, _ = softmax(work, tile, number, rows, s, state)
    words = probabilities(signals, work, p)
    return replace(state, words=words, keys=keys)


def _overlapped(
    signals: Signals,
    work: ConsumerWork,
    tile: WorkTile,
    number: Int32,
    rows: Any,
    state: ConsumerState,
) -> ConsumerState:
    """S of this tile, then PV of the one before, which runs under this tile's softmax."""
    signals.wait("k_full", state.keys)
    if work.spec.takes_turns:  # nothing is waited for in a turn
        signals.wait("v_full", state.values)
        take_turn(signals, work)
    s = start_scores(signals, work, state.queries.slot, state.keys.slot)
    if not work.spec.takes_turns:
        signals.wait("v_full", state.values)
    sums = start_values(signals, work, state)
    give_turn(signals, work)
    s, keys = scores_done(signals, 1, s, state.keys)
    p, state, fix = softmax(work, tile, number, rows, s, state)
    stand_apart(work.num_tiles)  # else ptxas waits for PV before the exponentials
    sums, values = values_done(signals, sums, state.values)
    sums = fragment.rescale(sums, *fix)
    words = probabilities(signals, work, p)
    state = replace(state, sums=sums, words=words, keys=keys, values=values)
    return held.promote(work, number, fix[1], state) if work.spec.promote else state


def _serial(
    signals: Signals,
    work: ConsumerWork,
    tile: WorkTile,
    number: Int32,
    rows: Any,
    state: ConsumerState,
) -> ConsumerState:
    """S, softmax, PV, one after the other; a turn is PV and the next S."""
    signals.wait("k_full", state.keys)
    s = start_scores(signals, work, state.queries.slot, state.keys.slot)
    give_turn(signals, work)
    s, keys = scores_done(signals, 0, s, state.keys)
    p, state, fix = softmax(work, tile, number, rows, s, state)
    sums = fragment.rescale(state.sums, *fix)
    words = probabilities(signals, work, p)
    signals.wait("v_full", state.values)
    take_turn(signals, work)
    state = replace(state, sums=sums, words=words, keys=keys)
    sums = start_values(signals, work, state)
    sums, values = values_done(signals, sums, state.values)
    return replace(state, sums=sums, words=[], values=values)


def take_turn(signals: Signals, work: ConsumerWork) -> None:
    """Wait for this warpgroup's turn at the tensor core."""
    if work.spec.takes_turns:
        signals.wait("turn#")


def give_turn(signals: Signals, work: ConsumerWork) -> None:
    """The next warpgroup's turn."""
    if work.spec.takes_turns:
        signals.hand_on("turn#", work.spec.consumers)


def start_scores(
    signals: Signals, work: ConsumerWork, queries: Int32 | int, keys: Int32 | int
) -> list[Float32]:
    """S of what is in these slots, once it is done."""
    s = work.products.scores(queries, keys)
    signals.arrive("s#_done", after="tensor")
    return s


def start_values(signals: Signals, work: ConsumerWork, state: ConsumerState) -> list[Float32]:
    """O with PV, once it is done."""
    sums = work.products.weighted(state.sums, state.words, state.values.slot)
    signals.arrive("o#_done", after="tensor")
    return sums


def scores_done(
    signals: Signals, pending: int, s: list[Float32], keys: Ring
) -> tuple[list[Float32], Ring]:
    """S; its keys are released. pending: groups of products that were started later."""
    signals.wait("s#_done")
    s = wait_products(pending, s)
    signals.arrive_once("k_empty", keys)
    return s, keys.next()


def values_done(signals: Signals, sums: list[Float32], values: Ring) -> tuple[list[Float32], Ring]:
    """O; its values are released."""
    signals.wait("o#_done")
    sums = wait_products(0, sums)
    signals.arrive_once("v_empty", values)
    return sums, values.next()


def softmax(
    work: ConsumerWork,
    tile: WorkTile,
    number: Int32,
    rows: Any,
    s: list[Float32],
    state: ConsumerState,
) -> tuple[list[Float32], ConsumerState, tuple]:
    """P in float32, the state with new maxima and totals; whether O needs factors, and them."""
    spec = work.spec
    s = modified(work, tile, number * spec.tile_n, s)
    if rows is not None:
        s = masked(tile, number * spec.tile_n, rows, s)
    highest, factors, moved = fragment.raise_references(
        s, state.highest, work.scale_log2, work.slack, as_integers=spec.element_bytes == 1
    )
    offsets = [-(one * work.scale_log2) for one in highest]
    if spec.numerics.p_offset_log2:
        offsets = [one + spec.numerics.p_offset_log2 for one in offsets]
    p = fragment.powers(s, work.scale_log2, offsets, spec.numerics.exp2)
    totals = fragment.add_rows(p, state.totals, factors)
    return p, replace(state, highest=highest, totals=totals), (moved, factors)


def modified(
    work: ConsumerWork, tile: WorkTile, first_key: Int32, s: list[Float32]
) -> list[Float32]:
    """S after softcap, score_mod and mask_mod (`fa4.sm100.forward.mods`)."""
    spec, mods = work.spec, work.mods
    if spec.softcap:
        s = fragment.tanh(s, mods.score_scale)
    if spec.score_mod is None and spec.mask_mod is None:
        return s
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    first_row = tile.tile_row(work.number) + fragment.thread_row(thread)
    rows = [mods.of_row(tile, first_row + i * fragment.ROW_STEP) for i in range(2)]
    first_key = first_key + 2 * (thread % fragment.QUAD)
    last = cutlass.max(tile.seqlen_k - 1, 0)
    keys = [cutlass.min(first_key + fragment.column_of(i), last) for i in range(len(s))]
    return [
        rows[fragment.row_of(i)].modify(score, key)
        for i, (score, key) in enumerate(zip(s, keys, strict=True))
    ]


def probabilities(signals: Signals, work: ConsumerWork, p: list[Float32]) -> list[Int32]:
    """P in the operands' type, in words; none if it is in shared memory, for all to see."""
    if work.spec.element_bytes == 1:
        return narrow.operand_words(p, work.spec.dtype)
    words = rowmath.rounded(p, work.spec.dtype)
    if work.probabilities is None:
        return words
    share(words, work.probabilities)
    cute.arch.fence_proxy("async.shared", space="cta")
    meet_warpgroup(signals)
    return []


def masked(
    tile: WorkTile, first_key: Int32, rows: tuple[Int32, Int32], s: list[Float32]
) -> list[Float32]:
    """S with -inf where a row does not see a key."""
    quad_thread = cute.arch.thread_idx()[0] % fragment.QUAD
    starts = None
    if tile.spec.hides_first_keys:
        starts = [tile.visible_start(row) - first_key for row in rows]
    stops = [tile.visible_end(row) - first_key for row in rows]
    return fragment.keep_columns(s, starts, stops, quad_thread)
