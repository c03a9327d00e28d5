"""The compute warps: P from S, dS from dP; a thread has a key and half of the queries of a tile."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.plan.backward_single import HALF, STATS_BYTES
from fa4.plan.work import FRAGMENT
from fa4.sm100.backward.mods import KeyMods
from fa4.sm100.backward.tiles import KeyTile
from fa4.sm100.kit import rowmath
from fa4.sm100.kit.masks import keep_range
from fa4.sm100.kit.ptx_block import PtxBlock, stand_apart
from fa4.sm100.kit.rings import Ring
from fa4.sm100.kit.signals import Signals
from fa4.sm100.kit.tmem import read_columns, warp_lanes, write_columns
from fa4.sm100.kit.units import TILE_ROWS, WARPGROUP

ROW_BYTES = 2 * HALF  # of a key in one half of dS in shared memory: the width of the swizzle
FLOAT_BYTES = 4
VECTOR = 4  # words of a 16-byte access


@dataclass(frozen=True)
class Columns:
    """What a compute warp works with; its warpgroup's half of everything.

    s, dp: columns of tensor memory, where P and dS go as well. ds: shared memory of this thread's
    key, in which 16-byte vectors lie in another order (`swizzle`). stats: shared memory of -LSE of
    the half in stage 0. scale_log2: from scores to exponents of 2. number: of the half.
    """

    s: Int32
    dp: Int32
    ds: Int32
    swizzle: Int32
    stats: Int32
    scale_log2: Float32
    number: Int32
    never: Int32


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
    first_row = row_tile * TILE_ROWS + columns.number * HALF
    stats = columns.stats + progress.ring.slot * STATS_BYTES
    signals.wait("s_full", progress.turn)
    signals.wait("row_stats_full", progress.ring)
    raw = read_columns(warp_lanes() + columns.s, HALF, HALF)
    p = []
    for first in cutlass.range_constexpr(0, HALF, FRAGMENT):
        values, words = probabilities(
            columns, mods, raw[first : first + FRAGMENT], first_row + first, seen,
            stats + first * FLOAT_BYTES,
        )  # fmt: skip
        p += values
        write_columns(words, warp_lanes() + (columns.s + first // 2))
        stand_apart(columns.never)
    cute.arch.fence_view_async_tmem_store()
    signals.arrive_once("p_full")
    signals.wait("dp_full", progress.turn)
    width: cutlass.Constexpr = FRAGMENT // 2 if spec.modifies_scores else FRAGMENT
    for first in cutlass.range_constexpr(0, HALF, width):
        chunk = slice(first, first + width)
        dp = read_columns(warp_lanes() + (columns.dp + first), width, width)
        minus_d = read_shared(stats + (TILE_ROWS + first) * FLOAT_BYTES, width)
        chances = p[chunk]
        if cutlass.const_expr(spec.modifies_scores):
            # P once more, as there are no registers for both P and the scores.
            chances, _ = probabilities(columns, mods, raw[chunk], first_row + first, seen,
                                       stats + first * FLOAT_BYTES)  # fmt: skip
        gradients = rowmath.sums_times(dp, minus_d, chances)
        if cutlass.const_expr(spec.modifies_scores):
            gradients = mods.passed_back(gradients, raw[chunk], first_row + first)
        words = rowmath.rounded(gradients, spec.dtype)
        write_columns(words, warp_lanes() + (columns.dp + first // 2))
        write_shared(words, columns.ds, columns.swizzle, first // 8)
        stand_apart(columns.never)
    cute.arch.fence_view_async_tmem_store()
    cute.arch.fence_proxy("async.shared", space="cta")
    signals.arrive_once("ds_full")
    with cute.arch.elect_one():
        signals.arrive("row_stats_empty", progress.ring)


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
