"""Row blocks: the query rows of a head that a CTA of the two small kernels works on.

As many as the spec's `block_rows`, and as many threads: 128 if nothing else is said.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from fa4.kit.tiles import sequence
from fa4.kit.units import WARP
from fa4.sm100.backward.spec import BackwardSpec
from fa4.sm100.backward.workspace import first_tile, tiles_of


@dataclass(frozen=True)
class QueryRows:
    """The query rows of a call. Lengths are None where the spec says so.

    heads: of queries. seqlen: rows of each sequence, or of all where they are packed. blocks: of
    each sequence. tiles: of each head in the workspace.
    """

    spec: cutlass.Constexpr
    heads: Int32
    batch: Int32
    seqlen: Int32
    blocks: Int32
    tiles: Int32
    cu_seqlens: Any
    seqused: Any

    def first_tile(self, batch: Int32, start: Int32) -> Int32:
        """Of the sequence that starts at row `start` of a packed tensor."""
        spec = self.spec
        return first_tile(
            batch, start, self.blocks, packed=spec.packed_q, block_rows=spec.block_rows
        )


@dataclass(frozen=True)
class RowBlock:
    """One block.

    first: its first row in the sequence, which starts at row `start` of a packed tensor. rows: from
    there to the end of the sequence; 0 or less for a block that does not exist. tile: its number in
    the workspace.
    """

    spec: cutlass.Constexpr
    head: Int32
    batch: Int32
    first: Int32
    start: Int32
    rows: Int32
    tile: Int32

    @property
    def exists(self) -> Boolean:
        """Does the sequence reach into the block?"""
        return self.rows > 0

    def of(self, tensor: cute.Tensor) -> cute.Tensor:
        """(rows, dim) of q, or of what is shaped like it, from the block's first row on."""
        if self.spec.packed_q:
            tensor = tensor[None, self.head, None]
        else:
            tensor = tensor[self.batch, None, self.head, None]
        return cute.domain_offset((self.start + self.first, 0), tensor)

    def of_lse(self, tensor: cute.Tensor) -> cute.Tensor:
        """(rows,) of the LSE, or of its gradient, from the block's first row on."""
        if self.spec.packed_q:
            tensor = tensor[self.head, None]
        else:
            tensor = tensor[self.batch, self.head, None]
        return cute.domain_offset((self.start + self.first,), tensor)


def all_rows(tensor: cute.Tensor, cu_seqlens: Any, seqused: Any, spec: BackwardSpec) -> QueryRows:
    """The rows of a tensor (batch, seqlen, heads, dim), or (total, heads, dim) where packed."""
    batch, seqlen = tensor.shape[0], tensor.shape[-3]
    if spec.packed_q:
        batch = cu_seqlens.shape[0] - 1
    blocks = (seqlen + spec.block_rows - 1) // spec.block_rows
    tiles = tiles_of(seqlen, batch, packed=spec.packed_q, block_rows=spec.block_rows)
    return QueryRows(spec, tensor.shape[-2], batch, seqlen, blocks, tiles, cu_seqlens, seqused)


def this_block(rows: QueryRows) -> RowBlock:
    """The block of this CTA: one for each tile. Heads vary fastest, as they do in memory."""
    index = cute.arch.block_idx()[0]
    return block_at(rows, index % rows.heads, index // rows.heads)


@cute.jit
def block_at(rows: QueryRows, head: Int32, tile: Int32) -> RowBlock:
    """The block that has a tile of the workspace; it may not exist.

    Packed: the last sequence whose tiles do not begin after it, by bisection. So the grid needs no
    block for the longest sequence's length in every sequence.
    """
    batch, number = tile // rows.blocks, tile % rows.blocks
    if cutlass.const_expr(rows.spec.packed_q):
        batch, beyond = Int32(0), rows.batch
        while beyond - batch > 1:
            middle = (batch + beyond) // 2
            before = rows.first_tile(middle, rows.cu_seqlens[middle]) <= tile
            batch = cutlass.select_(before, middle, batch)
            beyond = cutlass.select_(before, beyond, middle)
        number = tile - rows.first_tile(batch, rows.cu_seqlens[batch])
    start, length = sequence(rows.cu_seqlens, rows.seqused, batch, rows.seqlen)
    first = number * rows.spec.block_rows
    return RowBlock(
        spec=rows.spec,
        head=head,
        batch=batch,
        first=first,
        start=start,
        rows=length - first,
        tile=tile,
    )


@cute.jit
def store_sum(value: Float32, target: cute.Tensor, place: Any, threads: cutlass.Constexpr) -> None:
    """target[place] = the sum over the CTA's threads, always added up in the same order."""
    thread = cute.arch.thread_idx()[0]
    warps: cutlass.Constexpr = threads // WARP
    memory = cutlass.memory.SmemAllocator().allocate(4 * warps, 4)
    parts = cute.make_tensor(cute.recast_ptr(memory, dtype=Float32), cute.make_layout(warps))
    value = cute.arch.warp_reduction_sum(value)
    if thread % WARP == 0:
        parts[thread // WARP] = value
    cute.arch.barrier()
    if thread == 0:
        for warp in cutlass.range_constexpr(1, warps):
            value += parts[warp]
        target[place] = value
