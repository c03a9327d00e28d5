"""Three warps transpose V in shared memory, behind the loads and ahead of the products.

A warp reads 32 keys of 16 columns at a time as four matrices of pairs of columns, transposed: a
lane then holds two keys of two columns. Byte permutes part even from odd columns and join what lies
8 keys apart, which is the order that P's operand has (`narrow`). Even columns are stored to eight
rows and odd ones to the next eight: without a bank conflict, and O's columns come in that order.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4.kit.descriptors import swizzle_bytes
from fa4.kit.ptx_block import PtxBlock
from fa4.kit.signals import Signals
from fa4.kit.tiles import KernelProblem, locate
from fa4.kit.units import WARP
from fa4.plan.warpgroup_transpose import TRANSPOSING_WARPS
from fa4.sm90.forward.schedule import WorkQueue, first_work, follow

KEYS, COLUMNS = 32, 16  # of a block
UNIT_COLUMNS = 64  # at most, of blocks side by side, that a warp moves at once
IN_FLIGHT = 3  # blocks that are being read when the first is stored; registers suffice for 3
EVEN, ODD = "0x6420", "0x7531"  # bytes of two words


@dataclass(frozen=True)
class ValueTiles:
    """Where V lies, as loaded and transposed: addresses of the first stages, keys and columns."""

    raw: Int32
    transposed: Int32
    keys: cutlass.Constexpr
    columns: cutlass.Constexpr

    @property
    def num_bytes(self) -> int:
        """Of a stage."""
        return self.keys * self.columns

    @property
    def unit_columns(self) -> int:
        """Columns of a unit."""
        return min(UNIT_COLUMNS, swizzle_bytes(self.columns, 1))

    @property
    def units(self) -> int:
        """Units of 32 keys that a tile has."""
        return self.keys // KEYS * (self.columns // self.unit_columns)


@cute.jit
def transpose(
    signals: Signals, problem: KernelProblem, tiles: ValueTiles, queue: WorkQueue
) -> None:
    """Every V of every work tile of this CTA."""
    index = first_work(problem)
    raw, values = signals.ring("raw"), signals.ring("v")
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    number = warp - problem.spec.plan.role("transpose").warps[0]
    lane = cute.arch.thread_idx()[0] % WARP
    while index < problem.num_tiles:
        for _ in cutlass.range(locate(problem, index).kv_tiles, unroll=1):
            signals.wait("raw_full", raw)
            signals.wait("v_empty", values)
            for unit in cutlass.range(number, tiles.units, TRANSPOSING_WARPS, unroll=1):
                move_unit(tiles, raw.slot, values.slot, unit, lane)
            cute.arch.fence_proxy("async.shared", space="cta")
            signals.arrive_once("raw_empty", raw)
            signals.arrive_once("v_full", values)
            raw, values = raw.next(), values.next()
        index, queue = follow(signals, problem, queue, index)


def move_unit(tiles: ValueTiles, source: Int32, target: Int32, unit: Int32, lane: Int32) -> None:
    """32 keys of `unit_columns` columns; of each matrix, a lane names one row."""
    across = tiles.columns // tiles.unit_columns
    first_key, first_column = unit // across * KEYS, unit % across * tiles.unit_columns
    wide, tall = swizzle_bytes(tiles.columns, 1), swizzle_bytes(tiles.keys, 1)
    code = PtxBlock()

    # Loaded: rows of keys, `wide` bytes of them together.
    key = first_key + lane
    start = tiles.raw + source * tiles.num_bytes + first_column // wide * (tiles.keys * wide)
    start += key * wide + (key * wide // 128 % (wide // 16) ^ first_column % wide // 16) * 16
    read = code.read(start)

    # Transposed: rows of columns. A store's matrices: even and odd columns of 16 keys, of the next.
    row, later = lane % 16, lane // 16
    chunk = first_key % tall // 16 + later
    place = tiles.transposed + target * tiles.num_bytes
    place += first_key // tall * (tiles.columns * tall) + (first_column + row) * tall
    place += (chunk ^ (row * tall // 128 % (tall // 16))) * 16
    written = code.read(place)

    held: list[tuple[str, list[str]]] = []
    for column in range(0, tiles.unit_columns, COLUMNS):
        address = code.do("xor.b32", read, str(column), kind="b32") if column else read
        words = [code.register("b32") for _ in range(4)]
        code.effect(
            f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{{', '.join(words)}}}, [{address}];"
        )
        held.append((f"{written}+{column * tall}", words))
        if len(held) == IN_FLIGHT:
            _store_block(code, *held.pop(0))
    for place, words in held:
        _store_block(code, place, words)
    code.trace(effects=True)


def _store_block(code: PtxBlock, place: str, words: list[str]) -> None:
    """Even columns and odd ones of 16 keys, then of the next, of words that hold two of each."""
    parts = [
        code.do("prmt.b32", words[i], words[i + 1], selector, kind="b32")
        for i in (0, 2)
        for selector in (EVEN, ODD)
    ]
    code.effect(f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [{place}], {{{', '.join(parts)}}};")
