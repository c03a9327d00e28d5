"""The load warp: Q, K and V tiles to shared memory by TMA, as far ahead as the rings allow."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync

from fa4.kit.rings import Ring
from fa4.kit.signals import Signals
from fa4.kit.tiles import KernelProblem, WorkTile, locate
from fa4.kit.views import copy_box
from fa4.plan.warpgroup import fetches_early, query_stages
from fa4.plan.warpgroup_packing import query_parts, straddles
from fa4.plan.warpgroup_roles import loaded_values
from fa4.sm90.forward.schedule import WorkQueue, draw_work, first_work, next_work, tell_work
from fa4.sm90.forward.sectors import shift_of, shifted
from fa4.sm90.forward.spec import WarpgroupSpec, query_box


@dataclass(frozen=True)
class TileLoad:
    """One operand's way from global to shared memory.

    atoms, tensor: the TMA copies, as `copy_box` takes them, and their coordinates, (rows, dim,
    head, batch). shared: (rows, dim, stage) swizzled; of Q, a stage is a warpgroup's rows, and a
    place of its ring all warpgroups'. halves: as of `sectors.shift_of`.
    """

    atoms: tuple
    tensor: cute.Tensor
    shared: cute.Tensor
    halves: Any = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of one tile."""
        rows, cols = (cute.size(mode) for mode in self.shared.shape[:2])
        return rows, cols

    @property
    def num_bytes(self) -> int:
        """Bytes of one tile."""
        rows, cols = self.shape
        return rows * cols * self.shared.element_type.width // 8


@cute.jit
def load(
    signals: Signals, problem: KernelProblem, query: TileLoad, key: TileLoad, value: TileLoad,
    queue: WorkQueue,
) -> None:  # fmt: skip
    """K and Q, then each K ahead of the V before it, last keys first."""
    parts: cutlass.Constexpr = query_parts(problem.spec.pipeline)
    boxes: cutlass.Constexpr = len(parts)
    loaded: cutlass.Constexpr = loaded_values(problem.spec.pipeline)
    index = first = first_work(problem)
    queries, keys, values = query_ring(problem.spec), signals.ring("k"), signals.ring(loaded)
    while index < problem.num_tiles:
        tile = locate(problem, index)
        q, k, v = query_tiles(query, tile), key_tiles(key, tile), key_tiles(value, tile)
        last = tile.kv_stop - 1
        empty = tile.seqlen_k == 0 if problem.spec.ragged_k else False
        fill(signals, "k", key, k[None, None, last], keys, empty)
        keys = keys.next()
        if cutlass.const_expr(fetches_early(problem.spec.pipeline, problem.spec.gpu)):  # noqa: SIM102
            if index != first:
                for i in cutlass.range_constexpr(boxes):
                    _prefetch(query, q[None, None, first_box(tile) + i])
        signals.wait("q_empty", queries)
        for i in cutlass.range_constexpr(boxes):
            full = signals.expect(f"{parts[i]}_full", query.num_bytes, queries)
            box = beginning_earlier(query, tile)
            start_copy(box, q[None, None, first_box(tile) + i], queries.slot * boxes + i, full)
        for j in cutlass.range(1, tile.kv_tiles, unroll=1):
            fill(signals, "k", key, k[None, None, last - j], keys)
            keys = keys.next()
            fill(signals, loaded, value, v[None, None, last - j + 1], values)
            values = values.next()
        drawn = Int32(0)
        if cutlass.const_expr(problem.spec.draws_work):  # not earlier: who is free draws first
            drawn = draw_work(queue)
        fill(signals, loaded, value, v[None, None, tile.kv_start], values, empty)
        values = values.next()
        if cutlass.const_expr(problem.spec.draws_work):
            index = tell_work(signals, problem, queue, drawn)
            queue = queue.next()
        else:
            index = next_work(problem, index)
        queries = queries.next()


def query_ring(spec: WarpgroupSpec) -> Ring:
    """The start of the ring of places for Q."""
    return Ring.of(query_stages(spec.pipeline, spec.gpu))


def fill(
    signals: Signals,
    name: str,
    operand: TileLoad,
    tile: cute.Tensor,
    ring: Ring,
    empty: Boolean | bool = False,
) -> None:
    """Wait until the ring's slot is free, then start the copy of a tile into it.

    empty: the sequence has no keys. Every other tile holds some, as no work tile has more tiles of
    keys than its last row's keys fill.
    """
    signals.wait(f"{name}_empty", ring)
    full = signals.expect(f"{name}_full", operand.num_bytes, ring)
    start_copy(operand, tile, ring.slot, full, empty)


def start_copy(
    operand: TileLoad,
    tile: cute.Tensor,
    stage: Int32 | int,
    full: cute.Pointer,
    empty: Boolean | bool = False,
) -> None:
    """Start the copy of a tile into a stage, which completes `full`; empty as of `fill`."""
    target, source = _ends(operand, tile, stage)
    copy_box(operand.atoms, source, target, full, empty)


def _prefetch(operand: TileLoad, tile: cute.Tensor) -> None:
    """Has L2 fetch a tile."""
    cute.prefetch(operand.atoms[0], _ends(operand, tile, 0)[1])


def _ends(operand: TileLoad, tile: cute.Tensor, stage: Int32 | int) -> tuple[Any, Any]:
    """A tile in shared memory and in global memory, as TMA takes them."""
    target, source = cpasync.tma_partition(
        operand.atoms[0],
        0,
        cute.make_layout(1),
        cute.group_modes(operand.shared[None, None, stage], 0, 2),
        cute.group_modes(tile, 0, 2),
    )
    return target, source


def query_tiles(query: TileLoad, tile: WorkTile) -> cute.Tensor:
    """Tiles of the work tile's queries, by their number in the sequence; where positions straddle,
    from the first one on that the work tile has a row of."""
    spec, position = tile.spec, tile.start_q
    inside = straddles(spec.group)
    if inside:
        position = position + tile.position(tile.first_row)
    start = (0, position) if spec.group > 1 else position
    place = [tile.head] if spec.packed_q else [tile.head, tile.batch]
    shift = shift_of(query.halves, tile)
    tensor = query.tensor[(None, None, *place)]
    if spec.packed_q or inside or query.halves is not None:
        tensor = shifted(tensor, start, shift)
    return cute.local_tile(tensor, query_box(spec, query.shape), (None, 0))


def first_box(tile: WorkTile) -> Int32 | int:
    """The number of the first of `query_tiles` that the work tile has."""
    return 0 if tile.spec.straddles else tile.tile_number(0)


def beginning_earlier(query: TileLoad, tile: WorkTile) -> TileLoad:
    """The same into shared memory from as many rows earlier as the first position begins."""
    if not tile.spec.straddles:
        return query
    earlier = tile.first_row % tile.spec.group
    row = query.shared.layout.stride[0]
    shared = cute.make_tensor(query.shared.iterator - earlier * row, query.shared.layout)
    return replace(query, shared=shared)


def key_tiles(operand: TileLoad, tile: WorkTile) -> cute.Tensor:
    """Tiles of the work tile's keys or values, by their number in the sequence."""
    spec = tile.spec
    index = [tile.head_k] if spec.packed_k else [tile.head_k, tile.batch]
    if spec.ragged_k:
        index.append(tile.start_k + tile.seqlen_k)
    tensor = operand.tensor[(None, None, *index)]
    start = operand.tensor.shape[0] - tile.seqlen_k if spec.ragged_k else 0
    if spec.ragged_k or operand.halves is not None:
        tensor = shifted(tensor, start, shift_of(operand.halves, tile))
    return cute.local_tile(tensor, operand.shape, (None, 0))
