"""A warpgroup's finished gradient: 64 rows of dQ, dK or dV, by way of shared memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from fa4.config import WARPGROUP_ROWS
from fa4.kit.rowmath import rounded
from fa4.kit.signals import Signals
from fa4.kit.units import WARP, WARPGROUP
from fa4.sm90.backward.parts import RowsPlace, store_part
from fa4.sm90.forward.output import VECTOR, meet_warpgroup, share

VECTOR_BITS = 128  # of a store
WORDS_OF_MATRICES = 4  # of a thread, that are stored at a time


@dataclass(frozen=True)
class StoredRows:
    """Where a gradient goes.

    atom, coordinates: TMA store and its coordinates, (rows, dim, heads, batch); where a sequence
    may end inside a tile of the tensor, atom None. tensor: in global memory,
    (batch, rows, heads, dim), or (rows, heads, dim) where sequences are packed. shared: (64, dim)
    swizzled, which nobody reads any more. packed: are sequences packed?
    """

    atom: cute.CopyAtom | None
    coordinates: cute.Tensor
    tensor: cute.Tensor
    shared: cute.Tensor
    packed: cutlass.Constexpr


@cute.jit
def store_gradient(
    signals: Signals,
    done: cutlass.Constexpr,
    output: StoredRows,
    place: RowsPlace,
    values: list[Float32],
    dtype: cutlass.Constexpr,
) -> None:
    """A thread's values in 16 bits, or those of a part in float32, dtype None; done: the signal
    that shared memory was read."""
    if cutlass.const_expr(dtype is None):
        store_part(place, output.tensor, values, output.packed)
        signals.arrive(done, after="tma")
    else:
        store_whole(signals, done, output, place, rounded(values, dtype))
    signals.wait(done)


@cute.jit
def store_whole(
    signals: Signals,
    done: cutlass.Constexpr,
    output: StoredRows,
    place: RowsPlace,
    words: list[Int32],
) -> None:
    """A thread's words to shared memory, and from there to global memory."""
    rest: cutlass.Constexpr = -len(words) % WORDS_OF_MATRICES
    share(words + [Int32(0)] * rest, output.shared)
    cute.arch.fence_proxy("async.shared", space="cta")
    meet_warpgroup(signals)
    if cutlass.const_expr(output.atom is not None):
        if cute.arch.thread_idx()[0] % WARPGROUP < WARP:
            store_by_tma(output, place)
            signals.arrive(done, after="tma")
    else:

        def stored(row: Int32, vector: Int32) -> cute.Tensor:
            source = cute.local_tile(output.shared, (1, VECTOR), (row, vector))
            return cute.make_tensor(source.iterator, cute.make_layout(VECTOR))

        store_rows(output, place, stored)
        signals.arrive(done, after="tma")


def store_zeros(output: StoredRows, place: RowsPlace) -> None:
    """The gradient of keys that no query sees."""
    kind = output.tensor.element_type
    zeros = cute.make_rmem_tensor(cute.make_layout(VECTOR_BITS // kind.width), kind)
    zeros.fill(0.0)
    store_rows(output, place, lambda row, vector: zeros)


def store_by_tma(output: StoredRows, place: RowsPlace) -> None:
    """TMA leaves out rows and columns that the tensor does not have."""
    tensor = output.coordinates[None, None, place.head, place.batch]
    shape = tuple(cute.size(mode) for mode in output.shared.shape)
    source, target = cpasync.tma_partition(
        output.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(output.shared, 0, 2),
        cute.group_modes(cute.local_tile(tensor, shape, (place.number, 0)), 0, 2),
    )
    cute.copy(output.atom, source, target)


@cute.jit
def store_rows(output: StoredRows, place: RowsPlace, source: cutlass.Constexpr) -> None:
    """With 16-byte stores, a row's vectors side by side; rows beyond the sequence stay out.

    source: gives the vector of a row, by both numbers.
    """
    size: cutlass.Constexpr = VECTOR_BITS // output.tensor.element_type.width
    vectors: cutlass.Constexpr = output.tensor.shape[-1] // size
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    for index in cutlass.range(thread, WARPGROUP_ROWS * vectors, WARPGROUP, unroll=1):
        row, vector = index // vectors, index % vectors
        position = place.number * WARPGROUP_ROWS + row
        if position < place.length:
            if cutlass.const_expr(output.packed):
                target = output.tensor[place.start + position, place.head, None]
            else:
                target = output.tensor[place.batch, position, place.head, None]
            cute.autovec_copy(source(row, vector), cute.local_tile(target, (size,), (vector,)))
