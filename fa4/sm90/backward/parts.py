"""Gradients of few keys: the query heads that share them are divided over CTAs.

A CTA has all query heads of its keys, so that dK and dV are summed in registers; where that leaves
SMs without work, each of several CTAs has some of these heads. To the kernel it is as if there were
as many more KV heads, of which several have the same K and V: dK and dV are given with a head for
each part, in float32, and whoever launches adds them up.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.kit.units import WARPGROUP
from fa4.sm90.forward import fragment
from fa4.sm100.backward.tiles import KeyTile

PAIR = 2  # float32 of neighbouring columns that a thread has


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
