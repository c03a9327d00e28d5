"""Work tiles: which (query block, head, batch entry) a CTA works on, and which keys it needs."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa4.kit.signals import pair_rank
from fa4.masks import Band, IntervalMask

L2_SECTION_BYTES = 50 << 20  # K and V that stay in L2 beside everything else (FlashAttention-4)
MOST_SECTION_BITS = 10
LONGEST_FIRST = ("lpt", "clc", "snake", "queue")


class TiledSpec(Protocol):
    """What the rows of a work tile depend on: part of every kernel's spec."""

    @property
    def cta_group(self) -> int:
        """CTAs that work together."""

    @property
    def tile_rows(self) -> int:
        """Rows of a Q tile."""

    @property
    def tile_n(self) -> int:
        """Keys of a KV tile."""

    @property
    def q_tiles(self) -> int:
        """Q tiles of a CTA."""


@dataclass(frozen=True)
class KernelProblem:
    """Run-time sizes of a call, the same for every role. Tensors are None where the spec says so.

    heads: of work tiles, so KV heads where query heads are packed. group: query heads per KV head
    beyond those packed. blocks: query blocks of the longest sequence. splits: parts of the keys,
    each with a work tile of its own; None where they are not divided.
    """

    spec: cutlass.Constexpr
    seqlen_q: Int32
    seqlen_k: Int32
    heads: Int32
    group: Int32
    blocks: Int32
    num_tiles: Int32
    section: Int32
    window_left: Int32 | None
    window_right: Int32 | None
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    seqused_q: cute.Tensor | None
    seqused_k: cute.Tensor | None
    response: cute.Pointer | None
    splits: Int32 | None = None


@dataclass(frozen=True)
class WorkTile:
    """One work tile: where it lies, its sequences' first rows and lengths.

    split: the part of the keys that it has, KV tiles cut_start to cut_stop: none, if they are
    equal. None where keys are not divided.
    """

    spec: cutlass.Constexpr
    block: Int32
    head: Int32
    head_k: Int32
    batch: Int32
    rank: Int32 | int
    start_q: Int32
    start_k: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    window_left: Int32 | None
    window_right: Int32 | None
    split: Int32 | None = None
    cut_start: Int32 | None = None
    cut_stop: Int32 | None = None

    @property
    def mask(self) -> IntervalMask:
        """The spec's, or the band of the bounds that are given at run time.

        No field: what a loop carries is taken apart into values of the kernel, and a mask's own
        numbers are none.
        """
        right = Int32(0) if self.spec.causal else self.window_right
        return self.spec.mask or Band(self.window_left, right)

    @property
    def first_row(self) -> Int32:
        """First packed row of the block, of all Q tiles and of both CTAs of a pair."""
        return self.block * block_rows(self.spec)

    def tile_number(self, i: Int32 | int) -> Int32:
        """Number in the sequence of this CTA's Q tile i; those of a pair lie side by side."""
        number = self.block * self.spec.q_tiles + i
        return number * self.spec.cta_group + self.rank

    def tile_row(self, i: Int32 | int) -> Int32:
        """First packed row of this CTA's Q tile i."""
        return self.tile_number(i) * self.spec.tile_rows

    def position(self, row: Int32) -> Int32:
        """Position in its sequence of a packed row."""
        return row // self.spec.group if self.spec.group > 1 else row

    def query_head(self, row: Int32) -> Int32:
        """Query head of a packed row."""
        group = self.spec.group
        return self.head * group + row % group if group > 1 else self.head

    def has_row(self, row: Int32) -> Boolean:
        """Is there a query at this packed row?"""
        return row < self.seqlen_q * self.spec.group

    def visible_end(self, row: Int32) -> Int32:
        """One past the last key that a packed row sees."""
        stop = self.mask.stop(self.position(row), self.seqlen_q, self.seqlen_k)
        end = self.seqlen_k if stop is None else cutlass.min(self.seqlen_k, stop)
        if self.cut_stop is None:
            return end
        return cutlass.min(end, self.cut_stop * self.spec.tile_n)

    def visible_start(self, row: Int32) -> Int32:
        """The first key that a packed row sees; may be negative."""
        start = self.mask.start(self.position(row), self.seqlen_q, self.seqlen_k)
        return Int32(0) if start is None else start

    @property
    def last_row(self) -> Int32:
        """Last packed row of the block that exists."""
        rows = self.seqlen_q * self.spec.group
        return cutlass.max(cutlass.min(self.first_row + block_rows(self.spec), rows) - 1, 0)

    @property
    def kv_stop(self) -> Int32:
        """One past the last KV tile that any row of the block sees; at least 1."""
        if self.cut_start is not None:
            return cutlass.max(self.cut_stop, self.cut_start + 1)
        return self.stop_of(self.last_row)

    def stop_of(self, row: Int32) -> Int32:
        """One past the last KV tile that a packed row sees; at least 1."""
        tile_n = self.spec.tile_n
        return cutlass.max((self.visible_end(row) + tile_n - 1) // tile_n, 1)

    @property
    def kv_start(self) -> Int32:
        """First KV tile that any row of the block sees, below kv_stop."""
        if self.cut_start is not None:
            return self.cut_start
        if not self.mask.has_start:
            return Int32(0)
        first = cutlass.max(self.visible_start(self.first_row), 0) // self.spec.tile_n
        return cutlass.min(first, self.kv_stop - 1)

    def whole_tiles(self, first_row: Int32) -> tuple[Int32, Int32]:
        """(stop, start): every row of the Q tile from `first_row` sees all of tiles in between."""
        tile_n = self.spec.tile_n
        stop = cutlass.max(self.visible_end(first_row), 0) // tile_n
        last_row = first_row + self.spec.tile_rows - 1
        start = cutlass.max(self.visible_start(last_row) + tile_n - 1, 0) // tile_n
        return stop, start

    @property
    def kv_tiles(self) -> Int32:
        """KV tiles of the work tile; at least 1, so that every role sees every work tile."""
        return self.kv_stop - self.kv_start


def block_rows(spec: TiledSpec) -> int:
    """Packed query rows of a work tile."""
    return spec.tile_rows * spec.q_tiles * spec.cta_group


def heads_per_section(head_bytes: Int32, heads: Int32) -> Int32:
    """Heads that run side by side so that their K and V stay in L2: a power of two, at most all."""
    section = Int32(1)
    for width in (2 << exponent for exponent in range(MOST_SECTION_BITS)):
        fits = (head_bytes <= L2_SECTION_BYTES // width) & (width <= heads)
        section = cutlass.select_(fits, Int32(width), section)
    return section


def _order(problem: KernelProblem, index: Int32) -> tuple[Int32, Int32]:
    """(query block, head of all batch entries) of work tile `index`.

    Query blocks vary fastest; or, longest first: in sections of heads that share L2, the last
    query blocks of all heads come first, as under a mask they see the most keys.
    """
    if problem.spec.scheduler not in LONGEST_FIRST:
        return index % problem.blocks, index // problem.blocks
    tiles = problem.section * problem.blocks
    section, place = index // tiles, index % tiles
    first_head = section * problem.section
    heads = problem.num_tiles // problem.blocks
    if problem.splits is not None:
        heads //= problem.splits
    width = cutlass.min(problem.section, heads - first_head)
    return problem.blocks - 1 - place // width, first_head + place % width


def locate(problem: KernelProblem, index: Int32) -> WorkTile:
    """The work tile number `index`, and its sequences."""
    spec = problem.spec
    split = None
    if problem.splits is not None:  # the parts of a block lie side by side
        split, index = index % problem.splits, index // problem.splits
    block, rest = _order(problem, index)
    head, batch = rest % problem.heads, rest // problem.heads
    start_q, seqlen_q = sequence(problem.cu_seqlens_q, problem.seqused_q, batch, problem.seqlen_q)
    start_k, seqlen_k = sequence(problem.cu_seqlens_k, problem.seqused_k, batch, problem.seqlen_k)
    tile = WorkTile(
        spec=spec,
        block=block,
        head=head,
        head_k=head // problem.group,
        batch=batch,
        rank=pair_rank(spec.cta_group),
        start_q=start_q,
        start_k=start_k,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        window_left=problem.window_left,
        window_right=problem.window_right,
    )
    return tile if split is None else cut(tile, split, problem.splits)


def cut(tile: WorkTile, split: Int32, splits: Int32) -> WorkTile:
    """Part `split` of a work tile: KV tiles are dealt out evenly, the first parts get one more.

    A part without tiles begins at the last one, which it does not see.
    """
    start, count = tile.kv_start, tile.kv_tiles
    each, more = count // splits, count % splits
    first = start + cutlass.min(split * each + cutlass.min(split, more), count - 1)
    last = first + each + cutlass.select_(split < more, Int32(1), Int32(0))
    return replace(tile, split=split, cut_start=first, cut_stop=last)


def sequence(offsets: Any, used: Any, batch: Int32, length: Int32) -> tuple[Int32, Int32]:
    """(first row in the packed tensor, length) of a batch entry's sequence."""
    start = Int32(0)
    if offsets is not None:
        start = offsets[batch]
        length = offsets[batch + 1] - start
    if used is not None:
        length = used[batch]
    return start, length
