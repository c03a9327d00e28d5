"""Operands of the Hopper kernels of dK and dV between global and shared memory."""

from functools import partial
from typing import Any, NamedTuple, TypeAlias

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync

from fa4.kit.descriptors import ELEMENTS
from fa4.kit.features import BackwardFeatures
from fa4.kit.views import box_atoms, ending_views, rows_first, swizzled_layout
from fa4.plan.schema import Buffer, PipelinePlan
from fa4.sm90.backward.divided import DividedFeatures
from fa4.sm90.backward.load import MINUS_D, MINUS_LSE, LoadSources, RowNumbers
from fa4.sm100.backward.load import TileSource

FLOAT_BYTES = 4
OPERANDS = ("q", "k", "v", "do")


class TileShape(NamedTuple):
    """Of an operand in shared memory; 0 stages: it has one place.

    run_bytes: of a row that lie together, 0 for as many as may.
    """

    rows: int
    cols: int
    stages: int
    run_bytes: int = 0


Shapes: TypeAlias = dict[str, TileShape]


def tile_atom(op: Any, view: cute.Tensor, shape: TileShape) -> Any:
    """TMA's copy of tiles of a shape, swizzled in shared memory, and the view's coordinates."""
    layout = swizzled_layout(shape.rows, shape.cols, run_bytes=shape.run_bytes)
    return cpasync.make_tiled_tma_atom(op, view, layout, shape[:2])


def load_atoms(spec: BackwardFeatures, shapes: Shapes, tensors: tuple) -> tuple:
    """Of each of OPERANDS: what starts its loads (`box_atoms`), and its coordinates."""
    loads = []
    for name, tensor in zip(OPERANDS, tensors, strict=True):
        of_keys = name in ("k", "v")
        packed, ragged = (
            (spec.packed_k, spec.ragged_k) if of_keys else (spec.packed_q, spec.ragged_q)
        )
        loading = cpasync.CopyBulkTensorTileG2SOp()
        views = ending_views(rows_first(tensor, packed), 0, ragged)
        make = partial(tile_atom, loading, shape=shapes[name])
        loads.append(box_atoms(make, views))
    return tuple(loads)


def store_atoms(spec: DividedFeatures, shapes: Shapes, dv: cute.Tensor, dk: cute.Tensor) -> tuple:
    """The same of dV and dK; (None, tensor) where sequences may end inside a tile, or of parts."""
    if spec.ragged_k or spec.key_parts:
        return (None, dv), (None, dk)
    storing = cpasync.CopyBulkTensorTileS2GOp()
    return tuple(
        tile_atom(storing, rows_first(tensor, spec.packed_k), shapes[name])
        for tensor, name in ((dv, "v"), (dk, "k"))
    )


def prefetch_descriptors(loads: tuple, stores: tuple) -> None:
    """Those of all copies, by one warp."""
    for atom in (*(atoms[0] for atoms, _ in loads), *(atom for atom, _ in stores)):
        if atom is not None:
            cpasync.prefetch_descriptor(atom)


def first_buffer(plan: PipelinePlan, name: str) -> Buffer:
    """A buffer of the plan; of one for each warpgroup, which lie one behind the other, the first.

    KeyError if it has neither.
    """
    names = {buffer.name for buffer in plan.buffers}
    return plan.buffer(name if name in names else f"{name}0")


def shared_tile(
    spec: BackwardFeatures, plan: PipelinePlan, shapes: Shapes, memory: cute.Pointer, name: str,
    over: str = "",
) -> cute.Tensor:  # fmt: skip
    """(rows, dim, stages) of a buffer of the plan, swizzled; (rows, dim) of one place.

    over: another buffer in whose memory it lies.
    """
    shape = shapes[name]
    layout = swizzled_layout(*shape[:3], run_bytes=shape.run_bytes)
    pointer = cute.recast_ptr(
        memory + first_buffer(plan, over or name).start, layout.inner, dtype=ELEMENTS[spec.dtype]
    )
    return cute.make_tensor(pointer, layout.outer)


def make_sources(
    spec: BackwardFeatures, plan: PipelinePlan, shapes: Shapes, memory: cute.Pointer,
    loads: tuple, stats: cute.Tensor,
) -> LoadSources:  # fmt: skip
    """Q, K, V, dO and the numbers of rows on their way from global to shared memory."""
    q, k, v, dout = (
        TileSource(atoms, tensor, shared_tile(spec, plan, shapes, memory, name))
        for (atoms, tensor), name in zip(loads, OPERANDS, strict=True)
    )
    lse, d = (
        RowNumbers(which, stats, cute.recast_ptr(memory + buffer.start, dtype=Float32),
                   buffer.size // FLOAT_BYTES)
        for which, buffer in ((MINUS_LSE, plan.buffer("lse")), (MINUS_D, plan.buffer("d")))
    )  # fmt: skip
    return LoadSources(q, k, v, dout, lse, d)
