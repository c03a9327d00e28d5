"""Global tensors as the kernels look at them: modes in the order that TMA wants."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int64

from fa4.kit.descriptors import swizzle_bytes


def rows_first(tensor: cute.Tensor, packed: bool) -> cute.Tensor:
    """(seqlen, dim, heads, batch), or (total, dim, heads)."""
    modes = [0, 2, 1] if packed else [1, 3, 2, 0]
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, modes))


def columns_first(tensor: cute.Tensor, packed: bool) -> cute.Tensor:
    """(dim, seqlen, heads, batch), or (dim, total, heads)."""
    modes = [2, 0, 1] if packed else [3, 1, 2, 0]
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, modes))


def ending_views(
    view: cute.Tensor, mode: int, ragged: bool
) -> tuple[cute.Tensor, cute.Tensor | None]:
    """The same view, rows or keys in `mode`; where sequences are ragged, one that ends with them.

    TMA fills with zeros what lies beyond a mode's size, and a sequence's end is not the tensor's.
    So that it is, the start moves back by all `n` keys, and a last mode with the keys' own stride
    moves it forward again: element (n - length + j, start + length) is key j of the sequence, and
    beyond the mode from j = length on. Otherwise a NaN behind the end would reach a sum as 0 * NaN.

    In front of the tensor may be no memory, and TMA translates a map's start for a box that holds
    nothing of a sequence (H100 and H200: an illegal memory access). Such boxes, and no others, are
    loaded by the second view: the same modes, from the tensor's own start.
    """
    if not ragged:
        return view, None
    shape, stride = view.layout.shape, view.layout.stride
    element = view.element_type
    moved = view.iterator.toint() - shape[mode] * Int64(stride[mode]) * (element.width // 8)
    start = cute.make_ptr(element, moved, cute.AddressSpace.gmem, assumed_align=16)
    layout = cute.make_layout((*shape, shape[mode] + 1), stride=(*stride, stride[mode]))
    return cute.make_tensor(start, layout), cute.make_tensor(view.iterator, layout)


def box_atoms(
    make: Callable[[cute.Tensor], tuple], views: tuple[cute.Tensor, cute.Tensor | None]
) -> tuple[tuple, cute.Tensor]:
    """(TMA copies of both `ending_views`, their coordinates). make: copy and coordinates of one."""
    view, from_start = views
    atom, coordinates = make(view)
    return (atom, None if from_start is None else make(from_start)[0]), coordinates


@cute.jit
def copy_box(
    atoms: tuple,
    source: cute.Tensor,
    target: cute.Tensor,
    full: cute.Pointer,
    empty: Boolean | bool = False,
) -> None:
    """Start the load of a box into shared memory, which completes `full`.

    atoms: of `box_atoms`. empty: the box holds nothing of its sequence.
    """
    atom, from_start = atoms
    if cutlass.const_expr(from_start is None or empty is False):
        cute.copy(atom, source, target, tma_bar_ptr=full)
    elif empty:
        cute.copy(from_start, source, target, tma_bar_ptr=full)
    else:
        cute.copy(atom, source, target, tma_bar_ptr=full)


def swizzled_layout(
    rows: int,
    dim: int,
    stages: int = 0,
    *,
    element_bytes: int = 2,
    held: int | None = None,
    run_bytes: int = 0,
) -> cute.ComposedLayout:
    """(rows, dim) or (rows, dim, stages) of elements in shared memory, as
    `descriptors.swizzled_tiles` describes them to the tensor core. held: rows of which these are
    some; None for no others. run_bytes: of a row that lie together, 0 for as many as may."""
    width = run_bytes or swizzle_bytes(dim, element_bytes)
    run = width // element_bytes
    shape: tuple = (rows, (run, dim // run))
    held = held or rows
    stride: tuple = (run, (1, held * run))
    if stages:
        shape, stride = (*shape, stages), (*stride, held * dim)
    bits = {128: 3, 64: 2, 32: 1}[width]
    return cute.make_composed_layout(
        cute.make_swizzle(bits, 4, 3), 0, cute.make_layout(shape, stride=stride)
    )
