"""The epilogue warp: finished O tiles from shared to global memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from fa4.kit.schedulers import first_tile, next_tile
from fa4.kit.signals import Signals
from fa4.kit.tiles import KernelProblem, WorkTile, locate
from fa4.kit.units import TILE_ROWS, WARP
from fa4.plan.forward_layout import output_over_queries

VECTOR = 8  # elements of a 16-byte store


@dataclass(frozen=True)
class Store:
    """O in shared memory (rows, cols, Q tile) and in global memory.

    atom, tensor: TMA store and its coordinates; or, where a sequence may end inside a tile of the
    packed tensor, atom None and the plain tensor.
    """

    atom: cute.CopyAtom | None
    tensor: cute.Tensor
    shared: cute.Tensor


@cute.jit
def epilogue(signals: Signals, problem: KernelProblem, store: Store) -> None:
    """One O tile after the other, as the correction warps finish them."""
    q_tiles: cutlass.Constexpr = problem.spec.numerics.q_tiles
    index = first_tile(problem)
    tiles_done = Int32(0)
    while index < problem.num_tiles:
        tile = locate(problem, index)
        for i in cutlass.range_constexpr(q_tiles):
            signals.numbered(i).wait("epi#_full", tiles_done)
            if cutlass.const_expr(store.atom is not None):
                store_by_tma(store, tile, i)
                cute.arch.cp_async_bulk_commit_group()
            else:
                store_rows(store, tile, i)
                signals.numbered(i).arrive("epi#_empty", after="tma")
        if cutlass.const_expr(store.atom is not None):
            for i in cutlass.range_constexpr(q_tiles):
                cute.arch.cp_async_bulk_wait_group(q_tiles - 1 - i, read=True)
                signals.numbered(i).arrive("epi#_empty", after="tma")
        if cutlass.const_expr(output_over_queries(problem.spec.pipeline)):
            signals.arrive("o_stored", after="tma")
        index = next_tile(signals, problem, index, tiles_done)
        tiles_done += 1


def store_by_tma(store: Store, tile: WorkTile, i: int) -> None:
    """O_i; TMA leaves out rows and columns that the tensor does not have."""
    cols = store.shared.shape[1]
    tensor = store.tensor[None, None, tile.head, tile.batch]
    target = cute.local_tile(tensor, (TILE_ROWS, cute.size(cols)), (tile.tile_number(i), 0))
    shared = store.shared[None, None, i]
    source, target = cpasync.tma_partition(
        store.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(shared, 0, 2),
        cute.group_modes(target, 0, 2),
    )
    cute.copy(store.atom, source, target)


@cute.jit
def store_rows(store: Store, tile: WorkTile, i: cutlass.Constexpr) -> None:
    """O_i with 16-byte stores, a row's vectors side by side; rows beyond the sequence stay out."""
    spec: cutlass.Constexpr = tile.spec
    vectors: cutlass.Constexpr = spec.head_dim_v // VECTOR
    lane = cute.arch.lane_idx()
    first = tile.tile_row(i)
    for number in cutlass.range(lane, TILE_ROWS * vectors, WARP, unroll=1):
        row, vector = number // vectors, number % vectors
        packed = first + row
        if packed < tile.seqlen_q * spec.group:
            position, head = tile.start_q + tile.position(packed), tile.query_head(packed)
            if cutlass.const_expr(spec.packed_q):
                target = store.tensor[position, head, None]
            else:
                target = store.tensor[tile.batch, position, head, None]
            source = cute.local_tile(store.shared[None, None, i], (1, VECTOR), (row, vector))
            cute.autovec_copy(
                cute.make_tensor(source.iterator, cute.make_layout(VECTOR)),
                cute.local_tile(target, (VECTOR,), (vector,)),
            )
