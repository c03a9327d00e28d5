"""Work tiles of the backward kernel: a KV tile (or a pair's two), and the query tiles that see any
of its keys.

`q_start`, `q_stop` and `keys_before` say which tiles meet, from either side: those in which some
query sees some key. A fixed order of sums needs that both sides agree: a CTA's turn at a dQ tile is
the number of KV tiles that add to it before.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4.kit.signals import pair_rank
from fa4.kit.tiles import sequence
from fa4.kit.units import TILE_ROWS
from fa4.masks import Band
from fa4.sm100.backward.workspace import first_tile


@dataclass(frozen=True)
class BackwardProblem:
    """Run-time sizes of a call, the same for every role. Tensors are None where the spec says so.

    group: query heads per KV head. blocks: CTAs, or pairs, of the longest sequence; q_blocks: its
    tiles in the workspace.
    """

    spec: cutlass.Constexpr
    seqlen_q: Int32
    seqlen_k: Int32
    heads_k: Int32
    group: Int32
    blocks: Int32
    q_blocks: Int32
    window_left: Int32 | None
    window_right: Int32 | None
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    seqused_q: cute.Tensor | None
    seqused_k: cute.Tensor | None


def call_sizes(
    q: cute.Tensor, k: cute.Tensor, longest: tuple, lengths: tuple, block_keys: int,
    block_rows: int = TILE_ROWS,
) -> tuple[tuple, Int32]:  # fmt: skip
    """(the sizes of a `BackwardProblem`, work tiles of a call) whose CTAs have block_keys each.

    block_rows: the spec's.
    """
    batch, seqlen_q, seqlen_k = k.shape[0], q.shape[-3], k.shape[-3]
    if lengths[0] is not None:
        batch, seqlen_q = lengths[0].shape[0] - 1, longest[0]
    if lengths[1] is not None:
        batch, seqlen_k = lengths[1].shape[0] - 1, longest[1]
    heads_k = k.shape[-2]
    group = q.shape[-2] // heads_k
    blocks = (seqlen_k + block_keys - 1) // block_keys
    q_blocks = (seqlen_q + block_rows - 1) // block_rows
    return (seqlen_q, seqlen_k, heads_k, group, blocks, q_blocks), blocks * heads_k * batch


@dataclass(frozen=True)
class KeyTile:
    """The work tile of a CTA; those of a pair lie side by side, and walk the same query tiles.

    row_tile: of its sequence's first row, in the workspace.
    """

    spec: cutlass.Constexpr
    rank: Int32 | int
    block: Int32
    head_k: Int32
    group: Int32
    batch: Int32
    start_q: Int32
    start_k: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    row_tile: Int32
    mask: Any

    @property
    def keys(self) -> int:
        """Keys of the tile."""
        return TILE_ROWS

    @property
    def first_key(self) -> Int32:
        """The first key of the tile."""
        return self.block * self.keys

    @property
    def group_keys(self) -> int:
        """Keys of the CTA, or of its pair."""
        return self.keys * self.spec.cta_group

    @property
    def group_number(self) -> Int32:
        """Number of the CTA, or of its pair, among those of the sequence."""
        return self.block // self.spec.cta_group

    @property
    def group_first_key(self) -> Int32:
        """The first key of the CTA, or of its pair."""
        return self.group_number * self.group_keys

    def first_row(self, key: Int32) -> Int32:
        """The first query that sees a key; may be negative."""
        row = self.mask.first_row(key, self.seqlen_q, self.seqlen_k)
        return Int32(0) if row is None else row

    def stop_row(self, key: Int32) -> Int32:
        """One past the last query that sees a key; at most the sequence's end."""
        row = self.mask.stop_row(key, self.seqlen_q, self.seqlen_k)
        return self.seqlen_q if row is None else cutlass.min(self.seqlen_q, row)

    @property
    def q_start(self) -> Int32:
        """The first query tile that sees a key of this one, or of the pair's."""
        return cutlass.max(self.first_row(self.group_first_key), 0) // self.spec.tile_rows

    @property
    def q_stop(self) -> Int32:
        """One past the last query tile that sees such a key; q_start if none does."""
        rows = self.spec.tile_rows
        last = cutlass.min(self.group_first_key + self.group_keys, self.seqlen_k) - 1
        reach = self.stop_row(last)
        # A window that ends before the diagonal hides the last keys from all queries.
        exists = self.group_first_key < self.seqlen_k
        seen = exists & (self.first_row(self.group_first_key) < reach)
        stop = (cutlass.max(reach, 0) + rows - 1) // rows
        return cutlass.max(cutlass.select_(seen, stop, Int32(0)), self.q_start)

    @property
    def trips(self) -> Int32:
        """Query tiles of all heads of the group."""
        return (self.q_stop - self.q_start) * self.group

    def whole_tiles(self) -> tuple[Int32, Int32]:
        """(start, stop): every key of the tile is seen by all queries of tiles in between.

        Rows beyond the sequence's end count as queries: their P is 0 by their LSE. Keys beyond the
        end do not, so that the last KV tile may have no such tiles.
        """
        q_start, q_stop, rows = self.q_start, self.q_stop, self.spec.tile_rows
        last_key = self.first_key + self.keys - 1
        start = (cutlass.max(self.first_row(last_key), 0) + rows - 1) // rows
        start = cutlass.select_(last_key < self.seqlen_k, cutlass.max(start, q_start), q_stop)
        start = cutlass.min(start, q_stop)
        stop = q_stop
        if self.spec.hides_last_rows:
            reach = self.stop_row(self.first_key)
            whole = cutlass.max(reach, 0) // rows
            stop = cutlass.select_(reach < self.seqlen_q, cutlass.min(whole, q_stop), q_stop)
        return start, cutlass.max(stop, start)

    def keys_before(self, row_tile: Int32) -> Int32:
        """CTAs, or pairs, that add to the dQ of a query tile before this one: its turn.

        Where a mask hides the last keys from the first rows, the last KV tiles come first: they
        have the fewest query tiles, and everybody begins with another one.
        """
        first = row_tile * self.spec.tile_rows
        if self.spec.hides_first_rows:
            last = cutlass.min(first + self.spec.tile_rows, self.seqlen_q) - 1
            stop = self.mask.stop(last, self.seqlen_q, self.seqlen_k)
            stop = self.seqlen_k if stop is None else cutlass.min(stop, self.seqlen_k)
            return (stop + self.group_keys - 1) // self.group_keys - 1 - self.group_number
        start = self.mask.start(first, self.seqlen_q, self.seqlen_k)
        before = Int32(0) if start is None else cutlass.max(start, 0) // self.group_keys
        return self.group_number - before


def locate(problem: BackwardProblem, kind: type[KeyTile] = KeyTile) -> KeyTile:
    """The work tile of this CTA, of a kind.

    Tiles of a head side by side; the first ones, which most queries see under a causal mask, come
    first, or in a fixed order of sums last, as nobody may wait for a CTA that starts later.
    """
    spec = problem.spec
    index = cute.arch.block_idx()[0] // spec.cta_group
    block, number = index % problem.blocks, index // problem.blocks
    if spec.deterministic and spec.hides_first_rows:
        block = problem.blocks - 1 - block
    return key_tile(problem, block, number, kind)


def key_tile(
    problem: BackwardProblem, block: Int32, number: Int32, kind: type[KeyTile] = KeyTile
) -> KeyTile:
    """KV tile `block`, of a CTA or a pair, of a KV head; number: of the head over the batch."""
    spec = problem.spec
    rank = pair_rank(spec.cta_group)
    head_k, batch = number % problem.heads_k, number // problem.heads_k
    start_q, seqlen_q = sequence(problem.cu_seqlens_q, problem.seqused_q, batch, problem.seqlen_q)
    start_k, seqlen_k = sequence(problem.cu_seqlens_k, problem.seqused_k, batch, problem.seqlen_k)
    right = Int32(0) if spec.causal else problem.window_right
    return kind(
        spec=spec,
        rank=rank,
        block=block * spec.cta_group + rank,
        head_k=head_k,
        group=problem.group,
        batch=batch,
        start_q=start_q,
        start_k=start_k,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        row_tile=first_tile(
            batch, start_q, problem.q_blocks, packed=spec.packed_q, block_rows=spec.block_rows
        ),
        mask=spec.mask or Band(problem.window_left, right),
    )
