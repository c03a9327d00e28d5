"""A consumer warpgroup: its 64 keys' products with every query tile, P, dS, and its part of dQ."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from fa4.config import WARPGROUP_ROWS
from fa4.kit.ptx_block import hold_before
from fa4.kit.rings import Ring
from fa4.kit.rowmath import rounded
from fa4.kit.signals import Signals
from fa4.kit.units import WARPGROUP
from fa4.plan.warpgroup_backward import CONSUMERS, stats_bytes
from fa4.sm90.backward import columns
from fa4.sm90.backward.epilogue import KeyGradients, in_memory, leave
from fa4.sm90.backward.mods import ScoreMods, score_mods
from fa4.sm90.backward.order import first_rows, next_rows, query_head
from fa4.sm90.backward.products import GradientProducts
from fa4.sm90.backward.queue import KeyQueue, receive
from fa4.sm90.backward.reduce import hand_over_part, store_part
from fa4.sm90.backward.spec import WarpgroupBackwardSpec
from fa4.sm90.forward import fragment
from fa4.sm90.forward.products import wait_products
from fa4.sm100.backward.tiles import KeyTile

DS_ROW_BYTES = 128  # of a query, by a warpgroup's 64 keys
PART = 16  # elements of a thread whose P is computed again at a time


@dataclass(frozen=True)
class KeyWork:
    """What a warpgroup works with.

    number: which warpgroup it is. lse, d: addresses of the numbers of the thread's first column.
    dq, ds: of the warpgroup's part of dQ, and of its dS, in stage 0. scale_log2: from scores to
    exponents of 2. softmax_scale: of dK. score_scale, aux: as of `score_mods`. mods: None before
    there is a work tile.
    """

    number: Int32
    products: GradientProducts
    dq: Int32
    gradients: KeyGradients
    lse: Int32
    d: Int32
    ds: Int32
    scale_log2: Float32
    softmax_scale: Float32
    score_scale: Any
    aux: Any
    mods: Any = None

    def on(self, tile: KeyTile, keys: Ring) -> "KeyWork":
        """The same for a work tile, whose K is in a slot."""
        return replace(
            self,
            products=self.products.at(keys.slot),
            gradients=self.gradients.at(self.number, keys),
            mods=score_mods(tile.spec, self.score_scale, self.aux, tile, self.number),
        )


@dataclass(frozen=True)
class ScoreTile:
    """What P and dS of a query tile take. lse, d: as of `KeyWork`, in the tile's stage."""

    row_tile: Int32
    lse: Int32
    d: Int32
    mods: ScoreMods


@dataclass(frozen=True)
class KeyState:
    """What is carried from one query tile to the next. Of each list, a thread's part.

    rows: of Q and dO. member: as of `first_rows`.
    """

    dk: list
    dv: list
    rows: Ring
    member: Int32
    row_tile: Int32

    @classmethod
    def of(cls, tile: KeyTile, rows: Ring) -> "KeyState":
        """At the start of a work tile: there are no sums yet."""
        return cls([], [], rows, *first_rows(tile))


@cute.jit
def consume(signals: Signals, queue: KeyQueue, work: KeyWork) -> None:
    """All work tiles of this CTA, if it has one: else there is no memory to begin with."""
    rows, keys = signals.ring("q"), signals.ring("work")
    told = receive(signals, queue, keys)
    if told.exists:
        s = begin(signals, work, rows, keys, told.exists)
        while told.exists:
            tile = told.of(queue.work.problem)
            mine = work.on(tile, keys)
            state = walk(signals, tile, mine, KeyState.of(tile, rows), keys, s)
            signals.arrive_once("v#_empty", once_per_tile(keys))
            dq = start_queries(signals, mine, state.rows)
            following = receive(signals, queue, keys.next())
            s = begin(signals, work, state.rows, keys.next(), following.exists)
            finish(signals, tile, mine, state, dq, keys)
            rows, keys, told = state.rows, keys.next(), following
        wait_products(0, s)  # the one that nobody uses


@cute.jit
def begin(
    signals: Signals, work: KeyWork, rows: Ring, keys: Ring, exists: Boolean
) -> list[Float32]:
    """The first S of a work tile, while the one before it is still to be finished.

    exists: is there such a tile? Its K is there anyhow.
    """
    for i in cutlass.range_constexpr(CONSUMERS):
        signals.wait(f"k{i}_full", keys)
    if exists:
        signals.wait("q_full", rows)
    # In a branch, ptxas has no registers for it. Else it reads the last Q, and nobody uses S.
    stage = cutlass.select_(exists, rows.slot, 1 - rows.slot)
    s = work.products.at(keys.slot).scores(stage)
    signals.arrive("s#_done", after="tensor")
    return s


@cute.jit
def walk(
    signals: Signals, tile: KeyTile, work: KeyWork, state: KeyState, keys: Ring, s: list
) -> KeyState:
    """The query tiles of the group's heads, in their order.

    s: the first of them, under way.
    """
    state = step(signals, tile, work, state, s, once_per_tile(keys))
    for _ in cutlass.range(tile.trips - 1, unroll=1):
        state = step(signals, tile, work, state)
    return state


def once_per_tile(keys: Ring) -> Ring:
    """Of what there is one of for each work tile, the phase; keys: of two places."""
    return Ring(1, 0, keys.slot)


def step(
    signals: Signals, tile: KeyTile, work: KeyWork, state: KeyState, begun: list | None = None,
    once: Ring | None = None,
) -> KeyState:  # fmt: skip
    """One query tile, and dQ of the one before, of which both warpgroups have long stored dS.

    dQ runs under the first exponentials; dP, into the registers that dQ has left, under the others.
    In the first step of a work tile there is no dQ.
    Shared memory gives the tensor core all it has while it computes S, dQ and dP: what is read from
    it meanwhile comes late, so -LSE is read before.

    begun, once: S under way and the phase of V, in the first step of a work tile.
    """
    spec, products, first = tile.spec, work.products, once is not None
    s = begun or []
    rows, ring = spec.tile_rows, state.rows
    numbers = stats_bytes(spec.pipeline)
    where = ScoreTile(
        row_tile=state.row_tile,
        lse=work.lse + ring.slot * numbers,
        d=work.d + ring.slot * numbers,
        mods=work.mods.of_head(query_head(tile, state.member)),
    )
    if not first:
        signals.wait("q_full", ring)
    terms = columns.numbers(where.lse, rows // fragment.QUAD) if reads_early(spec) else []
    if not first:
        s = products.scores(ring.slot)
        signals.arrive("s#_done", after="tensor")
    dq = [] if first else start_queries(signals, work, ring)
    signals.wait("s#_done")
    s = wait_products(0 if first else 1, s)
    early = elements_before_upstream(spec, first)
    p: list[Float32] = []
    if early:
        p = probabilities(tile, work, where, s[:early], terms=terms[: early // 2])
    words = rounded(p, spec.dtype)
    if not first:
        hold_before(words)  # else ptxas waits for dQ before the exponentials
        leave_queries(signals, work, ring, dq)
    signals.wait("do_full", ring)
    if first:
        signals.wait("v#_full", once)
    dp = products.upstream(ring.slot)
    signals.arrive("dp#_done", after="tensor")
    if early < len(s):
        late = probabilities(tile, work, where, s[early:], early, terms=terms[early // 2 :])
        p, words = p + late, words + rounded(late, spec.dtype)
        # Else it waits for dP before them. They are started in turn: the first one's result is
        # enough, and that of the last would be late.
        hold_before(words[early // 2 : early // 2 + 1])
    signals.wait("dp#_done")
    dp = wait_products(0, dp)
    ds = rounded(score_gradients(tile, work, where, (s, p), dp), spec.dtype)
    if first:
        signals.wait("dv#_empty", once)
    place = work.ds + ring.slot * (rows * DS_ROW_BYTES)
    fragment.store_columns(ds, place, cute.arch.thread_idx()[0] % WARPGROUP)
    dv = products.values(state.dv, words, ring.slot)
    signals.arrive("dv#_done", after="tensor")
    cute.arch.fence_proxy("async.shared", space="cta")
    signals.arrive_once("met")
    dk = products.keys(state.dk, ds, ring.slot)
    signals.arrive("dk#_done", after="tensor")
    return finish_step(signals, tile, replace(state, dk=dk, dv=dv))


def start_queries(signals: Signals, work: KeyWork, ring: Ring) -> list[Float32]:
    """Start dQ of the tile before, when the other warpgroup has stored its dS; ring: of this one.

    dS has two places, so the other one is that tile's.
    """
    signals.wait("met", before(ring))
    dq = work.products.queries(1 - ring.slot)
    signals.arrive("dq#_done", after="tensor")
    return dq


def leave_queries(signals: Signals, work: KeyWork, ring: Ring, dq: list[Float32]) -> None:
    """dQ of the tile before into shared memory when its product, the last one, is done."""
    signals.wait("dq#_done")
    store_part(signals, work.dq, before(ring), wait_products(0, dq))
    hand_over_part(signals, before(ring))


def before(ring: Ring) -> Ring:
    """Of what there is one of for each query tile, the phase of the tile before the ring's."""
    return Ring(1, 0, 1 - ring.slot)


def finish_step(signals: Signals, tile: KeyTile, state: KeyState) -> KeyState:
    """Wait for dV and dK in turn, and give back what they have read."""
    signals.wait("dv#_done")
    dv = wait_products(1, state.dv)
    signals.arrive_once("do_empty", state.rows)
    signals.wait("dk#_done")
    dk = wait_products(0, state.dk)
    signals.arrive_once("q_empty", state.rows)
    return KeyState(dk, dv, state.rows.next(), *next_rows(tile, state.member, state.row_tile))


def finish(
    signals: Signals, tile: KeyTile, work: KeyWork, state: KeyState, dq: list[Float32], keys: Ring
) -> None:
    """The last tile's dQ; then dV and dK over dS and K, when no warpgroup reads these any more.

    They are rounded while dQ, and S of the next work tile, are computed.
    """
    gradients, number, once = work.gradients, work.number, once_per_tile(keys)
    scaled = [value * work.softmax_scale for value in state.dk]
    dv, dk = (in_memory(tile, values) for values in (state.dv, scaled))
    signals.wait("dq#_done")
    dq = wait_products(1, dq)
    signals.arrive_once("left")
    store_part(signals, work.dq, before(state.rows), dq)
    hand_over_part(signals, before(state.rows))
    signals.wait("left", once)
    leave(tile, gradients.dv, number, dv)
    leave(tile, gradients.dk, number, dk)
    cute.arch.fence_proxy("async.shared", space="cta")
    signals.arrive_once("dv#_full", once)
    signals.arrive_once("dk#_full", keys)


def elements_before_upstream(spec: WarpgroupBackwardSpec, first: bool) -> int:
    """Of a thread's scores, those whose exponentials are computed before dP's product starts.

    A half, for the rest to run under dP; none where no dQ runs beside them, in the first step; all
    where scores are kept beside P, as registers do not suffice for both.
    """
    whole = spec.tile_rows // fragment.ROWS_OF_THREAD
    if spec.modifies_scores:
        return whole
    return 0 if first else whole // 2


def reads_early(spec: WarpgroupBackwardSpec) -> bool:
    """Is -LSE read before the products? There are registers for it where a tile has 64 queries."""
    return spec.tile_rows == WARPGROUP_ROWS and not spec.modifies_scores


def probabilities(
    tile: KeyTile,
    work: KeyWork,
    where: ScoreTile,
    raw: list[Float32],
    first: int = 0,
    terms: Sequence[Float32] = (),
) -> list[Float32]:
    """P in float32; raw: scores as the tensor core made them, the elements from `first` on.

    terms: -LSE of their columns, if it has been read.
    """
    first_row = where.row_tile * tile.spec.tile_rows
    scores = where.mods.modified(raw, first_row, first)
    column = fragment.column_of(first)
    scores = masked(tile, work, where.row_tile, scores, column)
    place = where.lse + column * columns.FLOAT_BYTES
    return columns.powers(scores, work.scale_log2, terms or place)


def score_gradients(
    tile: KeyTile, work: KeyWork, where: ScoreTile, scores: tuple, dp: list[Float32]
) -> list[Float32]:
    """dS in float32. scores: raw, and P of them."""
    raw, p = scores
    if not tile.spec.modifies_scores:
        return columns.sums_times(dp, p, where.d)
    first_row = where.row_tile * tile.spec.tile_rows
    found: list[Float32] = []
    for first in range(0, len(dp), PART):
        mine = raw[first : first + PART]
        # P once more, as there are no registers for both P and the scores.
        p = probabilities(tile, work, where, mine, first)
        offset = fragment.column_of(first) * columns.FLOAT_BYTES
        values = columns.sums_times(dp[first : first + PART], p, where.d + offset)
        found += where.mods.passed_back(values, mine, first_row, first)
    return found


@cute.jit
def masked(
    tile: KeyTile, work: KeyWork, row_tile: Int32, s: list[Float32], column: cutlass.Constexpr
) -> list[Float32]:
    """S^T from a column on, with -inf where a query does not see a key."""
    whole_start, whole_stop = tile.whole_tiles()
    cut = row_tile < whole_start
    if cutlass.const_expr(tile.spec.hides_last_rows):
        cut |= row_tile >= whole_stop
    if cut:
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        first_key = tile.first_key + work.number * WARPGROUP_ROWS + fragment.thread_row(thread)
        first_row = row_tile * tile.spec.tile_rows + column
        starts, stops = [], []
        for key in (first_key, first_key + fragment.ROW_STEP):
            exists = key < tile.seqlen_k
            starts.append(tile.first_row(key) - first_row)
            stops.append(cutlass.select_(exists, tile.stop_row(key) - first_row, Int32(0)))
        s = fragment.keep_columns(s, starts, stops, thread % fragment.QUAD)
    return s
