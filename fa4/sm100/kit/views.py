"""Global tensors as the kernels look at them: modes in the order that TMA wants."""

import cutlass.cute as cute
from cutlass import Int64

from fa4.sm100.kit.descriptors import swizzle_bytes


def rows_first(tensor: cute.Tensor, packed: bool) -> cute.Tensor:
    """(seqlen, dim, heads, batch), or (total, dim, heads)."""
    modes = [0, 2, 1] if packed else [1, 3, 2, 0]
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, modes))


def columns_first(tensor: cute.Tensor, packed: bool) -> cute.Tensor:
    """(dim, seqlen, heads, batch), or (dim, total, heads)."""
    modes = [2, 0, 1] if packed else [3, 1, 2, 0]
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, modes))


def ending_view(view: cute.Tensor, mode: int, ragged: bool) -> cute.Tensor:
    """The same view, rows or keys in `mode`; where sequences are ragged, one that ends with them.

    TMA fills with zeros what lies beyond a mode's size, and a sequence's end is not the tensor's.
    So that it is, the start moves back by all `n` keys, and a last mode with the keys' own stride
    moves it forward again: element (n - length + j, start + length) is key j of the sequence, and
    beyond the mode from j = length on. Otherwise a NaN behind the end would reach a sum as 0 * NaN.
    """
    if not ragged:
        return view
    shape, stride = view.layout.shape, view.layout.stride
    element = view.element_type
    moved = view.iterator.toint() - shape[mode] * Int64(stride[mode]) * (element.width // 8)
    start = cute.make_ptr(element, moved, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(
        start, cute.make_layout((*shape, shape[mode] + 1), stride=(*stride, stride[mode]))
    )


def swizzled_layout(rows: int, dim: int, stages: int = 0) -> cute.ComposedLayout:
    """(rows, dim) or (rows, dim, stages) of 16-bit elements in shared memory, as
    `descriptors.swizzled_tiles` describes them to the tensor core."""
    run = swizzle_bytes(dim) // 2
    shape: tuple = (rows, (run, dim // run))
    stride: tuple = (run, (1, rows * run))
    if stages:
        shape, stride = (*shape, stages), (*stride, rows * dim)
    bits = {64: 3, 32: 2, 16: 1}[run]
    return cute.make_composed_layout(
        cute.make_swizzle(bits, 4, 3), 0, cute.make_layout(shape, stride=stride)
    )
