"""The compute warps: P from S, dS from dP; a thread has a key and half of the queries of a tile."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.kit import rowmath
from fa4.kit.masked_rows import keep_range
from fa4.kit.ptx_block import PtxBlock, stand_apart
from fa4.kit.rings import Ring
from fa4.kit.signals import Signals
from fa4.kit.tmem import read_columns, warp_lanes, write_columns
from fa4.kit.units import TILE_ROWS, WARPGROUP
from fa4.plan.backward_single import HALF, STATS_BYTES
from fa4.plan.work import FRAGMENT
from fa4.sm100.backward.mods import KeyMods
from fa4.sm100.backward.tiles import KeyTile

ROW_BYTES = 2 * HALF  # of a key in one half of dS in shared memory: the width of the swizzle
FLOAT_BYTES = 4
VECTOR = 4  # words of a 16-byte access
FRAGMENTS = HALF // FRAGMENT  # of a warpgroup


@dataclass(frozen=True)
class Split:
    """Which queries of a tile a warpgroup has: two runs of 32, `fragment_step` apart.

    Those of the second warpgroup lie `group_step` behind, and so do its words of P and dS in tensor
    memory: the words lie over the first half of what the same threads read.
    """

    group_step: int
    fragment_step: int

    def query(self, run: Int32 | int) -> Int32 | int:
        """The first query of a run, counted from the warpgroup's first one."""
        return run * self.fragment_step

    def word(self, run: Int32 | int) -> Int32 | int:
        """Where its words start, counted from the warpgroup's."""
        return run * (FRAGMENT // 2)

    def word_of(self, query: int) -> int:
        """Where the word of an even query of the tile is."""
        for group in (0, 1):
            for fragment in (0, 1):
                inside = query - group * self.group_step - self.query(fragment)
                if 0 <= inside < FRAGMENT:
                    return group * self.group_step + self.word(fragment) + inside // 2
        raise ValueError(f"query must be one of a tile; got {query}")


@dataclass(frozen=True)
class DsStore:
    """Where a thread's dS goes in shared memory: its key's row, of 64 queries or 128 bytes.

    row: in this CTA, of the queries that it has for itself. swizzle: by which the order of the
    row's 16-byte vectors differs. peer_row, peer_barrier: in the other CTA of a pair, of what is
    stored there. None without a pair.
    """

    row: Int32
    swizzle: Int32
    peer_row: Int32 | None = None
    peer_barrier: Int32 | None = None


@dataclass(frozen=True)
class Columns:
    """What a compute warp works with.

    split, first_query: which queries. first_run: of the two that the warpgroup has, the one that it
    takes first: in a pair the one whose dS stays here. s, dp: the warpgroup's first columns of
    tensor memory, where P and dS go as well. ds: in shared memory. stats: shared memory of its
    first query's -LSE in stage 0. scale_log2: from scores to exponents of 2. never: see
    `stand_apart`.
    """

    split: cutlass.Constexpr
    first_query: Int32
    first_run: Int32 | int
    s: Int32
    dp: Int32
    ds: DsStore
    stats: Int32
    scale_log2: Float32
    never: Int32

    def query(self, fragment: int) -> Int32 | int:
        """The first query of a fragment, counted from the warpgroup's first one."""
        return self.split.query(fragment ^ self.first_run)

    def word(self, fragment: int) -> Int32 | int:
        """Where its words start, counted from the warpgroup's."""
        return self.split.word(fragment ^ self.first_run)


@dataclass(frozen=True)
class Progress:
    """Where a compute warp is: the stage of its statistics, and the parity of all other phases."""

    ring: Ring
    turn: Ring

    def next(self) -> "Progress":
        """One query tile on."""
        return Progress(self.ring.next(), self.turn.next())


@cute.jit
def compute(signals: Signals, tile: KeyTile, columns: Columns, mods: KeyMods) -> None:
    """Every query tile of every head of the group: masked, whole, masked by the window."""
    spec: cutlass.Constexpr = tile.spec
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    key = tile.first_key + thread
    exists = key < tile.seqlen_k
    seen = (
        cutlass.select_(exists, tile.first_row(key), Int32(0)),
        cutlass.select_(exists, tile.stop_row(key), Int32(0)),
    )
    q_start, q_stop = tile.q_start, tile.q_stop
    whole_start, whole_stop = tile.whole_tiles()
    progress = Progress(signals.ring("row_stats"), Ring.of(1))
    for _ in cutlass.range(cutlass.select_(q_stop > q_start, tile.group, Int32(0)), unroll=1):
        for row_tile in cutlass.range(q_start, whole_start, unroll=1):
            step(signals, columns, mods, row_tile, seen, progress)
            progress = progress.next()
        for row_tile in cutlass.range(whole_start, whole_stop, unroll=1):
            step(signals, columns, mods, row_tile, None, progress)
            progress = progress.next()
        if cutlass.const_expr(spec.hides_last_rows):
            for row_tile in cutlass.range(whole_stop, q_stop, unroll=1):
                step(signals, columns, mods, row_tile, seen, progress)
                progress = progress.next()
        mods = mods.next_head()
    if cutlass.const_expr(spec.cta_group == 2 and spec.overlaps_tiles):  # noqa: SIM102
        if tile.trips > 0:
            signals.arrive_once("s_read")  # there is no further S: the last dS is stored


@cute.jit
def step(
    signals: Signals,
    columns: Columns,
    mods: KeyMods,
    row_tile: Int32,
    seen: Any,
    progress: Progress,
) -> None:
    """One query tile. seen: rows [start, stop) that see the key, None where all do."""
    spec: cutlass.Constexpr = mods.spec
    pair: cutlass.Constexpr = spec.cta_group == 2
    first_row = row_tile * TILE_ROWS + columns.first_query
    stats = columns.stats + progress.ring.slot * STATS_BYTES
    signals.wait("s_full", progress.turn)
    signals.wait("row_stats_full", progress.ring)
    raw = read_scores(columns)
    if cutlass.const_expr(pair):
        cute.arch.fence_view_async_tmem_load()
        signals.arrive_once("s_read")
    p = []
    for fragment in cutlass.range_constexpr(FRAGMENTS):
        query = columns.query(fragment)
        scores = raw[fragment * FRAGMENT : (fragment + 1) * FRAGMENT]
        values, words = probabilities(
            columns, mods, scores, first_row + query, seen, stats + query * FLOAT_BYTES
        )
        p += values
        write_columns(words, warp_lanes() + (columns.s + columns.word(fragment)))
        stand_apart(columns.never)
    cute.arch.fence_view_async_tmem_store()
    signals.arrive_once("p_full")
    signals.wait("dp_full", progress.turn)
    words = []
    for fragment in cutlass.range_constexpr(FRAGMENTS):
        words += gradients(columns, mods, (raw, p), fragment, first_row, seen, stats)
        if cutlass.const_expr(not pair):
            write_ds(columns, words[-FRAGMENT // 2 :], fragment)
            store_ds(columns.ds, words[-FRAGMENT // 2 :], fragment)
        stand_apart(columns.never)
    if cutlass.const_expr(pair):  # now, as the words of one fragment lie over dP of the other
        write_ds(columns, words[: FRAGMENT // 2], 0)
        write_ds(columns, words[FRAGMENT // 2 :], 1)
    cute.arch.fence_view_async_tmem_store()
    early: cutlass.Constexpr = pair and spec.overlaps_tiles
    if cutlass.const_expr(early):  # dK may start; dQ of the tile before still reads shared memory
        signals.arrive_once("ds_full")
        signals.wait("ds_empty", progress.turn)
    if cutlass.const_expr(pair):
        exchange_ds(signals, columns.ds, words)
    cute.arch.fence_proxy("async.shared", space="cta")
    if cutlass.const_expr(not early):
        signals.arrive_once("ds_full")
    with cute.arch.elect_one():
        signals.arrive("row_stats_empty", progress.ring)


def read_scores(columns: Columns) -> list[Float32]:
    """The thread's half of a row of S^T, fragment after fragment."""
    lanes = warp_lanes() + columns.s
    if columns.split.fragment_step == FRAGMENT:
        return read_columns(lanes, HALF, HALF)
    first, later = (
        read_columns(lanes + columns.query(fragment), FRAGMENT, FRAGMENT) for fragment in (0, 1)
    )
    return first + later


def gradients(
    columns: Columns,
    mods: KeyMods,
    scores: tuple[list[Float32], list[Float32]],
    fragment: int,
    first_row: Int32,
    seen: Any,
    stats: Int32,
) -> list[Int32]:
    """dS of a fragment as words. scores: raw, and P of them."""
    spec = mods.spec
    query = columns.query(fragment)
    words: list[Int32] = []
    width = FRAGMENT // 2 if spec.modifies_scores else FRAGMENT
    for first in range(0, FRAGMENT, width):
        start = fragment * FRAGMENT + first
        raw, p = (some[start : start + width] for some in scores)
        dp = read_columns(warp_lanes() + (columns.dp + query + first), width, width)
        minus_d = read_shared(stats + (TILE_ROWS + query + first) * FLOAT_BYTES, width)
        row = first_row + query + first
        if spec.modifies_scores:
            # P once more, as there are no registers for both P and the scores.
            minus_lse = stats + (query + first) * FLOAT_BYTES
            p, _ = probabilities(columns, mods, raw, row, seen, minus_lse)
        values = rowmath.sums_times(dp, minus_d, p)
        if spec.modifies_scores:
            values = mods.passed_back(values, raw, row)
        words += rowmath.rounded(values, spec.dtype)
    return words


def write_ds(columns: Columns, words: list[Int32], fragment: int) -> None:
    """A fragment of dS to tensor memory."""
    write_columns(words, warp_lanes() + (columns.dp + columns.word(fragment)))


def store_ds(ds: DsStore, words: list[Int32], fragment: int) -> None:
    """A fragment of dS to this CTA's shared memory."""
    vectors = FRAGMENT // 2 // VECTOR
    write_shared(words, ds.row, ds.swizzle, fragment * vectors)


def exchange_ds(signals: Signals, ds: DsStore, words: list[Int32]) -> None:
    """Each fragment of dS to the CTA that has its rows of dQ: the first stays, the other goes."""
    signals.stored_in_peer("ds_peer")
    push_shared(words[FRAGMENT // 2 :], ds)
    write_shared(words[: FRAGMENT // 2], ds.row, ds.swizzle, 0)


def probabilities(
    columns: Columns,
    mods: KeyMods,
    raw: list[Float32],
    first_row: Int32,
    seen: Any,
    minus_lse: Int32,
) -> tuple[list[Float32], list[Int32]]:
    """P of the queries from `first_row` on from their raw scores, and the same as words.

    minus_lse: where theirs are in shared memory.
    """
    scores = mods.modified(raw, first_row)
    if seen is not None:
        start, stop = (row - first_row for row in seen)
        scores = keep_range(scores, start, stop)
    offsets = read_shared(minus_lse, len(raw))
    return rowmath.powers_with_offsets(scores, columns.scale_log2, offsets, mods.spec.dtype)


def read_shared(address: Int32, count: int) -> list[Float32]:
    """Floats that all threads of a warp read, 16 bytes at a time."""
    code = PtxBlock()
    start, values = code.read(address), []
    for offset in range(0, count * FLOAT_BYTES, VECTOR * FLOAT_BYTES):
        values += code.load("ld.shared.v4.f32", VECTOR, f"{start}+{offset}")
    return code.trace(*values, effects=True)


def push_shared(words: list[Int32], ds: DsStore) -> None:
    """Words to the other CTA's shared memory, whose barrier counts their bytes (PTX, st.async)."""
    code = PtxBlock()
    base, barrier = code.read(ds.peer_row), code.read(ds.peer_barrier)
    mask, names = code.read(ds.swizzle), code.read_all(words)
    for number in range(0, len(names), VECTOR):
        offset = code.do("xor.b32", mask, str(4 * number), kind="b32")
        place = code.do("add.s32", base, offset, kind="b32")
        some = ", ".join(names[number : number + VECTOR])
        code.effect(
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
            f"[{place}], {{{some}}}, [{barrier}];"
        )
    code.trace(effects=True)


def write_shared(words: list[Int32], row: Int32, swizzle: Int32, first_vector: int) -> None:
    """Words to a row of shared memory, as TMA and the tensor core swizzle it."""
    code = PtxBlock()
    base, mask, names = code.read(row), code.read(swizzle), code.read_all(words)
    for number in range(0, len(names), VECTOR):
        vector = 16 * (first_vector + number // VECTOR)
        offset = code.do("xor.b32", mask, str(vector), kind="b32")
        place = code.do("add.s32", base, offset, kind="b32")
        code.effect(
            f"st.shared.v4.b32 [{place}], {{{', '.join(names[number : number + VECTOR])}}};"
        )
    code.trace(effects=True)
