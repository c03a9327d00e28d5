"""Gradients of few keys: the query heads that share them are divided over CTAs.

A CTA has all query heads of its keys, so that dK and dV are summed in registers; where that leaves
SMs without work, each of several CTAs has some of these heads. To the kernel it is as if there were
as many more KV heads, of which several have the same K and V: it gives dK and dV with a head for
each part, in float32, and another kernel adds them up, in their order.
"""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

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


@cute.jit
def store_part(tile: KeyTile, tensor: cute.Tensor, first_key: Int32, values: list[Float32]) -> None:
    """A warpgroup's 64 rows of dK or dV in float32, from registers; those of keys that exist.

    tensor: (batch, keys, heads, dim), or (keys, heads, dim) where packed. values: a thread's part
    of the accumulator. A quad writes 32 bytes of a row at a time.
    """
    spec: cutlass.Constexpr = tile.spec
    runs: cutlass.Constexpr = tensor.shape[-1] // fragment.RUN
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    for half in cutlass.range_constexpr(fragment.ROWS_OF_THREAD):
        key = first_key + fragment.thread_row(thread) + half * fragment.ROW_STEP
        if key < tile.seqlen_k:
            if cutlass.const_expr(spec.packed_k):
                row = tensor[tile.start_k + key, tile.head_k, None]
            else:
                row = tensor[tile.batch, key, tile.head_k, None]
            for run in cutlass.range_constexpr(runs):
                place = cute.local_tile(
                    row, (PAIR,), (run * fragment.QUAD + thread % fragment.QUAD,)
                )
                held = cute.make_rmem_tensor(cute.make_layout(PAIR), Float32)
                for i in cutlass.range_constexpr(PAIR):
                    held[i] = values[4 * run + PAIR * half + i]
                cute.autovec_copy(held, place)


@cute.jit
def add_up_parts(parts: tuple, grads: tuple, stream: Any, spec: cutlass.Constexpr) -> None:
    """Launch the kernel that writes dK and dV, both (batch, keys, heads, dim), or packed.

    parts: of both the same in float32, with as many heads for each head as there are parts.
    """
    keys, heads = grads[0].shape[-3], grads[0].shape[-2]
    rows = keys if spec.packed_k else keys * grads[0].shape[0]
    sizes = (rows, keys, heads)
    vectors: cutlass.Constexpr = (spec.head_dim + spec.head_dim_v) // VECTOR
    ctas = (rows * heads * vectors + THREADS - 1) // THREADS
    sum_kernel(parts, grads, sizes, spec).launch(
        grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.kernel
def sum_kernel(parts: tuple, grads: tuple, sizes: tuple, spec: cutlass.Constexpr) -> None:
    """A thread has eight columns of a head's row: those of dK first, then those of dV."""
    rows, keys, heads = sizes
    of_keys: cutlass.Constexpr = spec.head_dim // VECTOR
    vectors: cutlass.Constexpr = (spec.head_dim + spec.head_dim_v) // VECTOR
    index = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if index < rows * heads * vectors:
        vector, rest = index % vectors, index // vectors
        place = (rest // heads, rest % heads, keys)
        if vector < of_keys:
            add_up(parts[0], grads[0], place, vector, spec)
        else:
            add_up(parts[1], grads[1], place, vector - of_keys, spec)


@cute.jit
def add_up(
    parts: cute.Tensor, grad: cute.Tensor, place: tuple, vector: Int32, spec: cutlass.Constexpr
) -> None:
    """A vector of a row of a gradient. place: row over the batch, head, rows of a sequence."""
    row, head, keys = place
    count = parts.shape[-2] // grad.shape[-2]
    sums = [Float32(0.0)] * VECTOR
    for part in cutlass.range(count, unroll=1):
        loaded = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
        source = row_of(parts, row, head * count + part, keys, spec)
        cute.autovec_copy(cute.local_tile(source, (VECTOR,), (vector,)), loaded)
        sums = [total + loaded[i] for i, total in enumerate(sums)]
    target = cute.local_tile(row_of(grad, row, head, keys, spec), (VECTOR,), (vector,))
    store_rounded(sums, target, spec.dtype)


def row_of(
    tensor: cute.Tensor, row: Int32, head: Int32, keys: Int32, spec: cutlass.Constexpr
) -> cute.Tensor:
    """The columns of a row, counted over the batch, of a head."""
    if spec.packed_k:
        return tensor[row, head, None]
    return tensor[row // keys, row % keys, head, None]
