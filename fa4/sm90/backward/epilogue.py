"""The end of a work tile: dV and dK of a warpgroup's keys leave by way of dS's and K's memory.

The warpgroup hands them over, and the warp that adds its dQ stores them, so that the next work tile
begins meanwhile.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from fa4.config import WARPGROUP_ROWS
from fa4.kit.rings import Ring
from fa4.kit.rowmath import rounded
from fa4.kit.signals import Signals
from fa4.kit.units import WARP
from fa4.plan.warpgroup_backward import CONSUMERS
from fa4.sm90.backward.parts import RowsPlace, store_part
from fa4.sm90.forward.output import VECTOR, share
from fa4.sm100.backward.tiles import KeyTile


@dataclass(frozen=True)
class GradientTile:
    """dK or dV of a warpgroup's keys on its way.

    atom, tensor: TMA store and its coordinates; or, where a sequence may end inside a tile of the
    tensor, atom None and the plain tensor. shared: (64, dim, places) swizzled, or one of the
    places. dim: that exists.
    """

    atom: cute.CopyAtom | None
    tensor: cute.Tensor
    shared: cute.Tensor
    dim: cutlass.Constexpr

    def at(self, place: Int32) -> "GradientTile":
        """By way of one place, (64, dim)."""
        return replace(self, shared=self.shared[None, None, place])


@dataclass(frozen=True)
class KeyGradients:
    """Both gradients. Of each, the second half of the places is the second warpgroup's."""

    dv: GradientTile
    dk: GradientTile

    def at(self, number: Int32, keys: Ring) -> "KeyGradients":
        """Those of warpgroup `number`, by way of its dS and of its K in a slot."""
        dv, dk = (number * (cute.size(x.shared, mode=[2]) // CONSUMERS) for x in (self.dv, self.dk))
        return KeyGradients(self.dv.at(dv), self.dk.at(dk + keys.slot))


def in_memory(tile: KeyTile, values: list[Float32]) -> list:
    """A thread's values as they are stored: in 16 bits, those of a part in float32."""
    return values if tile.spec.key_parts else rounded(values, tile.spec.dtype)


@cute.jit
def leave(tile: KeyTile, gradient: GradientTile, number: Int32, stored: list) -> None:
    """What is `in_memory` to shared memory, for `send`; of a part to global memory at once."""
    if cutlass.const_expr(tile.spec.key_parts):
        mine = tile.block * CONSUMERS + number
        place = RowsPlace(tile.head_k, tile.batch, mine, tile.start_k, tile.seqlen_k)
        store_part(place, gradient.tensor, stored, tile.spec.packed_k)
    else:
        share(stored, gradient.shared)


@cute.jit
def send(
    signals: Signals, name: cutlass.Constexpr, tile: KeyTile, gradient: GradientTile,
    number: Int32, ring: Ring,
) -> None:  # fmt: skip
    """A warp starts the store of what was handed over."""
    signals.wait(name, ring)
    if cutlass.const_expr(not tile.spec.key_parts):
        if cutlass.const_expr(gradient.atom is not None):
            store_by_tma(gradient, tile, number)
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
    lanes: cutlass.Constexpr = 1 << (vectors - 1).bit_length()
    lane = cute.arch.lane_idx()
    first_key, vector = tile.first_key + number * WARPGROUP_ROWS, lane % lanes
    rows = cutlass.min(tile.seqlen_k - first_key, WARPGROUP_ROWS)
    rows = cutlass.select_(vector < vectors, rows, Int32(0))
    for row in cutlass.range(lane // lanes, rows, WARP // lanes, unroll=1):
        if cutlass.const_expr(spec.packed_k):
            target = gradient.tensor[tile.start_k + first_key + row, tile.head_k, None]
        else:
            target = gradient.tensor[tile.batch, first_key + row, tile.head_k, None]
        source = cute.local_tile(gradient.shared, (1, VECTOR), (row, vector))
        cute.autovec_copy(
            cute.make_tensor(source.iterator, cute.make_layout(VECTOR)),
            cute.local_tile(target, (VECTOR,), (vector,)),
        )
