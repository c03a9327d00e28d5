"""Operands of both products: views of global tensors, shared-memory layouts, MMA descriptors."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.tensor_utils.layout import LayoutEnum
from cutlass.utils.blackwell_helpers import (
    make_smem_layout_a,
    make_smem_layout_b,
    make_smem_layout_epi,
)

from fa4.kit.descriptors import (
    CTA_GROUPS,
    ELEMENTS,
    computed_anew,
    instruction_descriptor,
    operand_tiles,
)
from fa4.kit.signals import pair_rank
from fa4.kit.units import MMA_DEPTH, TILE_ROWS, padded_dim
from fa4.kit.views import rows_first
from fa4.plan.forward_layout import split_columns
from fa4.sm100.forward.load import Operand
from fa4.sm100.forward.mma import PartOfP, Products
from fa4.sm100.forward.spec import ForwardSpec


def tiled_mmas(spec: ForwardSpec) -> tuple:
    """S = Q K^T (both K-major, shared) and O = P V (P in tensor memory, V MN-major)."""

    def make(n: int, source: tcgen05.OperandSource, b_major: OperandMajorMode) -> Any:
        op = tcgen05.MmaF16BF16Op(
            ELEMENTS[spec.dtype],
            Float32,
            (rows_of_product(spec), n, MMA_DEPTH),
            CTA_GROUPS[spec.cta_group],
            source,
            OperandMajorMode.K,
            b_major,
        )
        return cute.make_tiled_mma(op)

    return (
        make(spec.numerics.tile_n, tcgen05.OperandSource.SMEM, OperandMajorMode.K),
        make(padded_dim(spec.head_dim_v), tcgen05.OperandSource.TMEM, OperandMajorMode.MN),
    )


def rows_of_product(spec: ForwardSpec) -> int:
    """M of a product: a Q tile of each CTA that takes part."""
    return TILE_ROWS * spec.cta_group


def product_tiles(spec: ForwardSpec) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """(M, N, K) of the two products, of both CTAs of a pair.

    Each CTA of a pair holds its own rows of A and of the sums, and half of B: half of
    K's keys, half of V's columns.
    """
    rows, tile_n = rows_of_product(spec), spec.numerics.tile_n
    return (
        (rows, tile_n, padded_dim(spec.head_dim)),
        (rows, padded_dim(spec.head_dim_v), tile_n),
    )


def shared_layouts(spec: ForwardSpec, mmas: tuple) -> tuple:
    """One tile of Q, K and V in shared memory, and O's of all Q tiles."""
    element = ELEMENTS[spec.dtype]
    qk_tile, pv_tile = product_tiles(spec)
    tiles = (
        make_smem_layout_a(mmas[0], qk_tile, element, 1),
        make_smem_layout_b(mmas[0], qk_tile, element, 1),
        make_smem_layout_b(mmas[1], pv_tile, element, 1),
    )
    output = make_smem_layout_epi(
        element, LayoutEnum.ROW_MAJOR, output_tile(spec), spec.numerics.q_tiles
    )
    return (*(cute.select(layout, [0, 1, 2]) for layout in tiles), output)


def output_tile(spec: ForwardSpec) -> tuple[int, int]:
    """Rows and columns of an O tile."""
    return TILE_ROWS, padded_dim(spec.head_dim_v)


def kv_shift(spec: ForwardSpec) -> int:
    """Bytes by which the middle slot of an uneven ring gives way: 0 where slots are of one size.

    Slots lie (K + V) / 2 apart and hold K, V, K or V, K, V in turn. A V in the middle starts half
    the difference later, behind the K before it; a K starts earlier, behind the V before it.
    """
    tails = [buffer.size for buffer in spec.plan.buffers if buffer.name == "kv_tail"]
    return tails[0] if tails else 0


def parts_of_p(spec: ForwardSpec) -> tuple[PartOfP, ...]:
    """All of P, or what may be used before the last of it is stored, and that."""
    steps, split = spec.tile_n // MMA_DEPTH, split_columns(spec.pipeline) // MMA_DEPTH
    first = PartOfP("p#_full_o#_scaled", 0, split, 0)
    if split == steps:
        return (first,)
    return first, PartOfP("p#_last", split, steps, split * MMA_DEPTH // 2)


def make_products(
    spec: Any,
    mmas: tuple,
    shared: tuple,
    tmem: Int32,
    parts: tuple[PartOfP, ...],
    groups: tuple[str, ...] = ("",),
) -> Products:
    """Descriptors of Q, K and V. shared: of each, (a tile, pitch, shift) as in `Operand`.

    groups: letters of the warps that share a Q tile's scores, "" for one that has all.
    """
    plan, tiles = spec.plan, range(spec.numerics.q_tiles)
    makers = mmas[0].make_fragment_A, mmas[0].make_fragment_B, mmas[1].make_fragment_B
    q, k, v = (
        operand_tiles(make(tensor), pitch, shift, ELEMENTS[spec.dtype].width // 8)
        for make, (tensor, pitch, shift) in zip(makers, shared, strict=True)
    )
    (rows, tile_n, _), (_, values, _) = product_tiles(spec)
    return Products(
        q=q,
        k=k,
        v=tuple(v if i == 0 else computed_anew(v) for i in tiles),
        idesc_s=instruction_descriptor(spec.dtype, rows, tile_n, transpose_b=False),
        idesc_o=instruction_descriptor(spec.dtype, rows, values, transpose_b=True),
        cta_group=spec.cta_group,
        s=tuple(tmem + plan.buffer(f"s{i}{groups[0]}").start for i in tiles),
        p=tuple(tmem + plan.buffer(f"p{i}{groups[0]}").start for i in tiles),
        o=tuple(tmem + plan.buffer(f"o{i}").start for i in tiles),
        told=tuple(f"s#{group}_full" for group in groups),
        parts=parts,
    )


def make_operands(
    spec: Any, mmas: tuple, loads: tuple, layouts: tuple, memory: cute.Pointer, queries: str = "q"
) -> tuple[Operand, ...]:
    """Q, K and V on their way from global to shared memory. queries: the buffer of the first Q."""
    rank = pair_rank(spec.cta_group)
    slices = mmas[0].get_slice(rank), mmas[0].get_slice(rank), mmas[1].get_slice(rank)
    (rows, keys, depth), (_, values, _) = product_tiles(spec)
    tiles = (rows, depth), (keys, depth), (values, keys)
    operands = []
    shift = kv_shift(spec)
    for number, (name, shift_bytes) in enumerate(((queries, 0), ("kv", -shift), ("kv", shift))):
        shared = shared_tensor(spec, memory, name, layouts[number])
        element_bytes = shared.element_type.width // 8
        pitch = spec.plan.buffer(name).size // element_bytes
        operand = Operand(
            atoms=loads[number][0],
            tensor=loads[number][1],
            mma=slices[number],
            tile=tiles[number],
            start=shared.iterator,
            layout=shared.layout,
            pitch=pitch,
            shift=shift_bytes // element_bytes,
        )
        operands.append(operand)
    return tuple(operands)


def shared_tensor(
    spec: Any, memory: cute.Pointer, name: str, layout: cute.ComposedLayout
) -> cute.Tensor:
    """A buffer of the plan in shared memory, with the swizzle of `layout`."""
    start = memory + spec.plan.buffer(name).start
    pointer = cute.recast_ptr(start, layout.inner, dtype=ELEMENTS[spec.dtype])
    return cute.make_tensor(pointer, layout.outer)


def query_view(tensor: cute.Tensor, spec: ForwardSpec) -> cute.Tensor:
    """(rows, dim, heads, batch) of Q or O; rows are (head in group, position) where packed."""
    view = rows_first(tensor, spec.packed_q)
    if spec.group == 1:
        return view
    shape, stride = view.layout.shape, view.layout.stride
    shape = ((spec.group, shape[0]), shape[1], shape[2] // spec.group, *shape[3:])
    stride = ((stride[2], stride[0]), stride[1], stride[2] * spec.group, *stride[3:])
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))
