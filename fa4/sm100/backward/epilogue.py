"""The end of a work tile: the compute warps store dV and dK, by way of memory that is used up."""

from dataclasses import dataclass
from math import gcd

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from fa4.kit.rowmath import multiplied, rounded
from fa4.kit.signals import CTA_BARRIER, Signals
from fa4.kit.tmem import read_columns, warp_lanes
from fa4.kit.units import TILE_ROWS, WARPGROUP
from fa4.sm100.backward.tiles import KeyTile

READ_COLS = 32  # per instruction, at most
VECTOR = 8  # elements of a 16-byte access
COMPUTE_BARRIER = CTA_BARRIER + 1  # named barrier of the compute warps; the plan names no other
COMPUTE_THREADS = 2 * WARPGROUP


@dataclass(frozen=True)
class Gradient:
    """dK or dV of a KV tile on its way.

    atom, tensor: TMA store and its coordinates; or, where a sequence may end inside a tile of the
    tensor, atom None and the plain tensor. shared: (rows, dim) swizzled. column: in tensor memory.
    dim: that exists.
    """

    atom: cute.CopyAtom | None
    tensor: cute.Tensor
    shared: cute.Tensor
    column: cutlass.Constexpr
    dim: cutlass.Constexpr


@cute.jit
def epilogue(
    signals: Signals, tile: KeyTile, dv: Gradient, dk: Gradient, softmax_scale: Float32
) -> None:
    """dV while the last products run, then dK; zeros where no query sees a key."""
    number = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // (WARPGROUP // 32)
    if tile.trips > 0:
        signals.wait("dv_full")
        stage_sums(dv, tile, number, Float32(1.0))
    else:
        stage_zeros(dv, number)
    store(dv, tile)
    if tile.trips > 0:
        signals.wait("dk_full")
        stage_sums(dk, tile, number, softmax_scale)
    else:
        stage_zeros(dk, number)
    store(dk, tile)
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def stage_sums(gradient: Gradient, tile: KeyTile, number: Int32, factor: Float32) -> None:
    """A thread's key, half of its columns, from tensor memory to shared memory."""
    half: cutlass.Constexpr = cute.size(gradient.shared.shape[1]) // 2
    step: cutlass.Constexpr = gcd(half, READ_COLS)
    lanes = warp_lanes() + (gradient.column + number * half)
    for first in cutlass.range(0, half, step, unroll_full=True):
        values = multiplied(read_columns(lanes + first, step, step), factor)
        words = rounded(values, tile.spec.dtype)
        for vector in cutlass.range_constexpr(0, step, VECTOR):
            write_vector(gradient, number, first + vector, words[vector // 2 :][: VECTOR // 2])


@cute.jit
def stage_zeros(gradient: Gradient, number: Int32) -> None:
    """The same, where there is no sum."""
    zeros = cute.make_rmem_tensor(cute.make_layout((1, VECTOR)), gradient.shared.element_type)
    zeros.fill(0)
    half: cutlass.Constexpr = cute.size(gradient.shared.shape[1]) // 2
    for first in cutlass.range(0, half, VECTOR, unroll_full=True):
        cute.autovec_copy(zeros, vector_of(gradient, number, first))


def write_vector(gradient: Gradient, number: Int32, first: int, values: list[Int32]) -> None:
    """8 columns of the thread's key."""
    words = cute.make_rmem_tensor(cute.make_layout(VECTOR // 2), Int32)
    for place, word in enumerate(values):
        words[place] = word
    target = vector_of(gradient, number, first)
    pointer = cute.recast_ptr(words.iterator, dtype=target.element_type)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout((1, VECTOR))), target)


def vector_of(gradient: Gradient, number: Int32, first: int) -> cute.Tensor:
    """8 columns of the thread's key in shared memory, from column `first` of its half."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    half = cute.size(gradient.shared.shape[1]) // 2
    place = thread, number * (half // VECTOR) + first // VECTOR
    return cute.local_tile(gradient.shared, (1, VECTOR), place)


@cute.jit
def store(gradient: Gradient, tile: KeyTile) -> None:
    """From shared to global memory, when all compute warps have staged their parts."""
    if cutlass.const_expr(gradient.atom is not None):
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=COMPUTE_BARRIER, number_of_threads=COMPUTE_THREADS)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            store_by_tma(gradient, tile)
            cute.arch.cp_async_bulk_commit_group()
    else:
        cute.arch.barrier(barrier_id=COMPUTE_BARRIER, number_of_threads=COMPUTE_THREADS)
        store_rows(gradient, tile)


def store_by_tma(gradient: Gradient, tile: KeyTile) -> None:
    """A whole tile; TMA leaves out rows and columns that the tensor does not have."""
    tensor = gradient.tensor[None, None, tile.head_k, tile.batch]
    shape = TILE_ROWS, cute.size(gradient.shared.shape[1])
    target = cute.local_tile(tensor, shape, (tile.block, 0))
    source, target = cpasync.tma_partition(
        gradient.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(gradient.shared, 0, 2),
        cute.group_modes(target, 0, 2),
    )
    cute.copy(gradient.atom, source, target)


@cute.jit
def store_rows(gradient: Gradient, tile: KeyTile) -> None:
    """With 16-byte stores, a row's vectors side by side; rows beyond the sequence stay out."""
    spec: cutlass.Constexpr = tile.spec
    vectors: cutlass.Constexpr = gradient.dim // VECTOR
    thread = cute.arch.thread_idx()[0]
    for number in cutlass.range(thread, TILE_ROWS * vectors, COMPUTE_THREADS, unroll=1):
        row, vector = number // vectors, number % vectors
        key = tile.first_key + row
        if key < tile.seqlen_k:
            if cutlass.const_expr(spec.packed_k):
                target = gradient.tensor[tile.start_k + key, tile.head_k, None]
            else:
                target = gradient.tensor[tile.batch, key, tile.head_k, None]
            source = cute.local_tile(gradient.shared, (1, VECTOR), (row, vector))
            cute.autovec_copy(
                cute.make_tensor(source.iterator, cute.make_layout(VECTOR)),
                cute.local_tile(target, (VECTOR,), (vector,)),
            )
