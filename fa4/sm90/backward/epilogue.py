"""The end of a work tile: a warpgroup stores dV and dK of its keys by way of V's and K's memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from fa4.config import WARPGROUP_ROWS
from fa4.kit.rowmath import rounded
from fa4.kit.signals import Signals
from fa4.kit.units import WARP, WARPGROUP
from fa4.plan.warpgroup_backward import CONSUMERS
from fa4.sm90.backward.parts import RowsPlace, store_part
from fa4.sm90.forward.output import VECTOR, meet_warpgroup, share
from fa4.sm100.backward.tiles import KeyTile


@dataclass(frozen=True)
class GradientTile:
    """dK or dV of a warpgroup's keys on its way.

    atom, tensor: TMA store and its coordinates; or, where a sequence may end inside a tile of the
    tensor, atom None and the plain tensor. shared: (64, dim) swizzled. dim: that exists.
    """

    atom: cute.CopyAtom | None
    tensor: cute.Tensor
    shared: cute.Tensor
    dim: cutlass.Constexpr


@dataclass(frozen=True)
class KeyGradients:
    """Both gradients; dK is multiplied by softmax_scale."""

    dv: GradientTile
    dk: GradientTile
    softmax_scale: Float32


def store_values(
    signals: Signals, tile: KeyTile, gradients: KeyGradients, number: Int32, dv: list[Float32]
) -> None:
    """dV, by way of the warpgroup's V, which no product reads any more."""
    store(signals, tile, gradients.dv, number, dv)


def store_keys(
    signals: Signals, tile: KeyTile, gradients: KeyGradients, number: Int32, dk: list[Float32]
) -> None:
    """dK, likewise; then nothing reads shared memory any more."""
    scaled = [value * gradients.softmax_scale for value in dk]
    store(signals, tile, gradients.dk, number, scaled)
    signals.wait("stored#")
    signals.wait("stored#")


@cute.jit
def store(
    signals: Signals, tile: KeyTile, gradient: GradientTile, number: Int32, values: list[Float32]
) -> None:
    """A thread's values in 16 bits to shared memory, and from there to global memory.

    Those of a part go there in float32 at once.
    """
    if cutlass.const_expr(tile.spec.key_parts):
        mine = tile.block * CONSUMERS + number
        place = RowsPlace(tile.head_k, tile.batch, mine, tile.start_k, tile.seqlen_k)
        store_part(place, gradient.tensor, values, tile.spec.packed_k)
        signals.arrive("stored#", after="tma")
    else:
        store_whole(signals, tile, gradient, number, rounded(values, tile.spec.dtype))


@cute.jit
def store_whole(
    signals: Signals, tile: KeyTile, gradient: GradientTile, number: Int32, words: list[Int32]
) -> None:
    """A thread's words to shared memory, and from there to global memory."""
    share(words, gradient.shared)
    cute.arch.fence_proxy("async.shared", space="cta")
    meet_warpgroup(signals)
    if cutlass.const_expr(gradient.atom is not None):
        if cute.arch.thread_idx()[0] % WARPGROUP < WARP:
            store_by_tma(gradient, tile, number)
            signals.arrive("stored#", after="tma")
    else:
        store_rows(gradient, tile, number)
        signals.arrive("stored#", after="tma")


def store_by_tma(gradient: GradientTile, tile: KeyTile, number: Int32) -> None:
    """A whole tile; TMA leaves out rows and columns that the tensor does not have."""
    tensor = gradient.tensor[None, None, tile.head_k, tile.batch]
    shape = tuple(cute.size(mode) for mode in gradient.shared.shape)
    target = cute.local_tile(tensor, shape, (tile.block * CONSUMERS + number, 0))
    source, target = cpasync.tma_partition(
        gradient.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(gradient.shared, 0, 2),
        cute.group_modes(target, 0, 2),
    )
    cute.copy(gradient.atom, source, target)


@cute.jit
def store_rows(gradient: GradientTile, tile: KeyTile, number: Int32) -> None:
    """With 16-byte stores, a row's vectors side by side; rows beyond the sequence stay out."""
    spec: cutlass.Constexpr = tile.spec
    vectors: cutlass.Constexpr = gradient.dim // VECTOR
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    first_key = tile.first_key + number * WARPGROUP_ROWS
    for index in cutlass.range(thread, WARPGROUP_ROWS * vectors, WARPGROUP, unroll=1):
        row, vector = index // vectors, index % vectors
        key = first_key + row
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
