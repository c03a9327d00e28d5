"""The load warp: Q, K and V tiles to shared memory by TMA, as far ahead as the ring allows."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync

from fa4.kit.rings import Ring, stage_offset
from fa4.kit.schedulers import first_tile, next_tile
from fa4.kit.signals import Signals
from fa4.kit.tiles import KernelProblem, WorkTile, locate
from fa4.kit.views import copy_box
from fa4.plan.forward_layout import output_over_queries


@dataclass(frozen=True)
class Operand:
    """One operand's way from global to shared memory.

    atoms, tensor: the TMA copies, as `copy_box` takes them, and their coordinates, (rows, dim,
    head, batch) or (dim, keys, ...) of V. mma: partition of the product it feeds. tile: its
    elements in the tensor's first two modes. start, layout: swizzled shared memory of a tile.
    pitch: elements from one stage to the next, shift: by which stage 1 lies off, where K and V
    share an uneven ring (see `kv_shift`).
    """

    atoms: tuple
    tensor: cute.Tensor
    mma: cute.ThrMma
    tile: cutlass.Constexpr
    start: cute.Pointer
    layout: cute.Layout
    pitch: cutlass.Constexpr
    shift: cutlass.Constexpr = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of one tile."""
        return cute.size_in_bytes(self.start.dtype, self.layout)


@cute.jit
def load(
    signals: Signals, problem: KernelProblem, query: Operand, key: Operand, value: Operand
) -> None:
    """K, Q0, Q1, V, then K and V of the other KV tiles, last keys first."""
    q_tiles: cutlass.Constexpr = problem.spec.numerics.q_tiles
    index = first_tile(problem)
    ring, tiles_done = signals.ring("kv"), Int32(0)
    while index < problem.num_tiles:
        tile = locate(problem, index)
        q, k, v = _query_tiles(query, tile), _key_tiles(key, tile), _value_tiles(value, tile)
        last = tile.kv_stop - 1
        empty = _last_tile_is_empty(tile)
        _fill(signals, "kv", key, k[None, last], ring.slot, ring, empty[0])
        ring = ring.next()
        if cutlass.const_expr(output_over_queries(problem.spec.pipeline)):
            signals.wait("o_stored", tiles_done)
        for i in cutlass.range_constexpr(q_tiles):
            source = q[None, tile.block * q_tiles + i]
            _fill(signals.numbered(i), "q#", query, source, i, tiles_done)
        _fill(signals, "kv", value, v[None, last], ring.slot, ring, empty[1])
        ring = ring.next()
        for j in cutlass.range(1, tile.kv_tiles, unroll=1):
            _fill(signals, "kv", key, k[None, last - j], ring.slot, ring)
            ring = ring.next()
            _fill(signals, "kv", value, v[None, last - j], ring.slot, ring)
            ring = ring.next()
        index = next_tile(signals, problem, index, tiles_done)
        tiles_done += 1
    _drain(signals, q_tiles, ring, tiles_done)


@cute.jit
def _drain(signals: Signals, q_tiles: cutlass.Constexpr, ring: Ring, tiles_done: Int32) -> None:
    """The last products end, and tell, before this CTA's shared memory is given back."""
    for _ in cutlass.range_constexpr(ring.stages):
        signals.wait("kv_empty", ring)
        ring = ring.next()
    for i in cutlass.range_constexpr(q_tiles):
        signals.numbered(i).wait("q#_empty", tiles_done)


def _fill(
    signals: Signals,
    name: str,
    operand: Operand,
    tile: cute.Tensor,
    stage: Int32 | int,
    at: Ring | Int32,
    empty: Boolean | bool = False,
) -> None:
    """Wait until a stage is free, then start the copy of a tile into it.

    stage: of shared memory. at: the phase of its signals. empty: as of `copy_box`. A K in stage 0
    of an uneven ring reaches into the K that was in stage 1: it waits for that one, which is
    released after the last user of stage 0.
    """
    reaches_over = operand.shift < 0
    free = at.on(cutlass.select_(stage == 0, Int32(1), stage)) if reaches_over else at
    signals.wait(f"{name}_empty", free)
    full = signals.expect(f"{name}_full", operand.num_bytes, at)
    start = operand.start + stage_offset(stage, operand.pitch, operand.shift)
    shared = cute.make_tensor(start, operand.layout)
    target, source = cpasync.tma_partition(
        operand.atoms[0], 0, cute.make_layout(1), cute.group_modes(shared, 0, 3), tile
    )
    copy_box(operand.atoms, source, target, full, empty)


def _last_tile_is_empty(tile: WorkTile) -> tuple[Boolean | bool, Boolean | bool]:
    """Whether what this CTA loads of K's and of V's last tile holds nothing of the sequence.

    A CTA of a pair loads half of the keys, and half of the columns of all values.
    """
    if not tile.spec.ragged_k:
        return False, False
    keys = tile.spec.numerics.tile_n
    first_key = (tile.kv_stop - 1) * keys + tile.rank * (keys // tile.spec.cta_group)
    return first_key >= tile.seqlen_k, tile.seqlen_k == 0


def _query_tiles(query: Operand, tile: WorkTile) -> cute.Tensor:
    """Tiles of the work tile's queries, by their number in the sequence."""
    spec = tile.spec
    if spec.packed_q:
        start = (0, tile.start_q) if spec.group > 1 else tile.start_q
        tensor = cute.domain_offset((start, 0), query.tensor[None, None, tile.head])
    else:
        tensor = query.tensor[None, None, tile.head, tile.batch]
    tiles = cute.local_tile(tensor, query.tile, (None, 0))
    return cute.group_modes(query.mma.partition_A(tiles), 0, 3)


def _key_tiles(key: Operand, tile: WorkTile) -> cute.Tensor:
    """Tiles of the work tile's keys, by their number in the sequence."""
    tensor = key.tensor[(None, None, *_sequence_index(tile))]
    if tile.spec.ragged_k:
        tensor = cute.domain_offset((key.tensor.shape[0] - tile.seqlen_k, 0), tensor)
    tiles = cute.local_tile(tensor, key.tile, (None, 0))
    return cute.group_modes(key.mma.partition_B(tiles), 0, 3)


def _value_tiles(value: Operand, tile: WorkTile) -> cute.Tensor:
    """Tiles of the work tile's values, by their number in the sequence."""
    tensor = value.tensor[(None, None, *_sequence_index(tile))]
    if tile.spec.ragged_k:
        tensor = cute.domain_offset((0, value.tensor.shape[1] - tile.seqlen_k), tensor)
    tiles = cute.local_tile(tensor, value.tile, (0, None))
    return cute.group_modes(value.mma.partition_B(tiles), 0, 3)


def _sequence_index(tile: WorkTile) -> list[Int32]:
    """The last coordinates of a sequence of keys in `views.ending_views`."""
    index = [tile.head_k]
    if not tile.spec.packed_k:
        index.append(tile.batch)
    if tile.spec.ragged_k:
        index.append(tile.start_k + tile.seqlen_k)
    return index
