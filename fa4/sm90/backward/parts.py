"""Gradients in parts: what one CTA would add up is divided over several.

A CTA has all query heads of its keys, so that dK and dV are summed in registers; where that leaves
SMs without work, each of several CTAs has some of these heads. To the kernel it is as if there were
as many more KV heads, of which several have the same K and V: it gives dK and dV with a head for
each part, in float32, and another kernel adds them up, in their order. Likewise a CTA that has
queries of a wide head has all of their keys, or one part of them.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.config import WARPGROUP_ROWS
from fa4.kit.rowmath import store_rounded
from fa4.kit.units import WARPGROUP
from fa4.sm90.forward import fragment
from fa4.sm100.backward.tiles import KeyTile

PAIR = 2  # float32 of neighbouring columns that a thread has
VECTOR = 8  # columns that a thread adds up: 16 bytes of the sum
THREADS = 256


def shared_keys(tile: KeyTile, q: cute.Tensor, k: cute.Tensor) -> KeyTile:
    """The work tile by the KV head whose K and V it has. q, k: (rows, dim, heads, ...)."""
    if not tile.spec.key_parts:
        return tile
    parts = q.shape[2] // k.shape[2] // tile.group
    return replace(tile, head_k=tile.head_k // parts)


@dataclass(frozen=True)
class RowsPlace:
    """Which rows they are: tile `number` of 64 of a sequence of `length` rows from `start` on."""

    head: Int32
    batch: Int32
    number: Int32
    start: Int32
    length: Int32


@cute.jit
def store_part(
    place: RowsPlace, tensor: cute.Tensor, values: list[Float32], packed: cutlass.Constexpr
) -> None:
    """A warpgroup's 64 rows of a gradient in float32, from registers; those that exist.

    tensor: (batch, rows, heads, dim), or (rows, heads, dim) where packed. values: a thread's part
    of the accumulator. A quad writes 32 bytes of a row at a time.
    """
    first = place.number * WARPGROUP_ROWS
    runs: cutlass.Constexpr = tensor.shape[-1] // fragment.RUN
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    for half in cutlass.range_constexpr(fragment.ROWS_OF_THREAD):
        position = first + fragment.thread_row(thread) + half * fragment.ROW_STEP
        if position < place.length:
            if cutlass.const_expr(packed):
                row = tensor[place.start + position, place.head, None]
            else:
                row = tensor[place.batch, position, place.head, None]
            for run in cutlass.range_constexpr(runs):
                pair = run * fragment.QUAD + thread % fragment.QUAD
                held = cute.make_rmem_tensor(cute.make_layout(PAIR), Float32)
                for i in cutlass.range_constexpr(PAIR):
                    held[i] = values[4 * run + PAIR * half + i]
                cute.autovec_copy(held, cute.local_tile(row, (PAIR,), (pair,)))


@cute.jit
def add_up_parts(parts: tuple, grads: tuple, stream: Any, packed: cutlass.Constexpr,
                 dtype: cutlass.Constexpr) -> None:  # fmt: skip
    """Launch the kernel that writes gradients of the same rows, (batch, rows, heads, dim), or
    packed.

    parts: of each the same in float32, with as many heads for each head as there are parts.
    """
    length, heads = grads[0].shape[-3], grads[0].shape[-2]
    rows = length if packed else length * grads[0].shape[0]
    count = rows * heads * sum(vectors_of(grads))
    sum_kernel(parts, grads, (rows, length, heads), packed, dtype).launch(
        grid=((count + THREADS - 1) // THREADS, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


def vectors_of(grads: tuple) -> tuple[int, ...]:
    """Vectors of a row of each."""
    return tuple(grad.shape[-1] // VECTOR for grad in grads)


@cute.kernel
def sum_kernel(parts: tuple, grads: tuple, sizes: tuple, packed: cutlass.Constexpr,
               dtype: cutlass.Constexpr) -> None:  # fmt: skip
    """A thread has eight columns of a head's row: those of the first gradient, then the next."""
    rows, length, heads = sizes
    vectors: cutlass.Constexpr = sum(vectors_of(grads))
    index = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if index < rows * heads * vectors:
        vector, rest = index % vectors, index // vectors
        place = (rest // heads, rest % heads, length)
        for i in cutlass.range_constexpr(len(grads)):
            first: cutlass.Constexpr = sum(vectors_of(grads)[:i])
            mine: cutlass.Constexpr = vectors_of(grads)[i]
            if (vector >= first) & (vector < first + mine):
                add_up(parts[i], grads[i], place, vector - first, packed, dtype)


@cute.jit
def add_up(
    parts: cute.Tensor, grad: cute.Tensor, place: tuple, vector: Int32, packed: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
) -> None:  # fmt: skip
    """A vector of a row of a gradient. place: row over the batch, head, rows of a sequence."""
    row, head, length = place
    count = parts.shape[-2] // grad.shape[-2]
    sums = [Float32(0.0)] * VECTOR
    for part in cutlass.range(count, unroll=1):
        loaded = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
        source = row_of(parts, row, head * count + part, length, packed)
        cute.autovec_copy(cute.local_tile(source, (VECTOR,), (vector,)), loaded)
        sums = [total + loaded[i] for i, total in enumerate(sums)]
    target = cute.local_tile(row_of(grad, row, head, length, packed), (VECTOR,), (vector,))
    store_rounded(sums, target, dtype)


def row_of(
    tensor: cute.Tensor, row: Int32, head: Int32, length: Int32, packed: bool
) -> cute.Tensor:
    """The columns of a row, counted over the batch, of a head."""
    if packed:
        return tensor[row, head, None]
    return tensor[row // length, row % length, head, None]
