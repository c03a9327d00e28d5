"""The queue of work tiles: the load warp draws them, and tells everybody else what they are.

A tile's place takes divisions, and loads where sequences have lengths of their own: the load warp
does that once, ahead of the others, which read the result.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa4.kit.rings import Ring
from fa4.kit.signals import Signals
from fa4.kit.units import WARP
from fa4.masks import Band
from fa4.plan.warpgroup_backward import WORK_WORDS
from fa4.sm90.backward.order import WorkList
from fa4.sm90.forward.schedule import WorkQueue, draw_work
from fa4.sm100.backward.tiles import BackwardProblem, KeyTile
from fa4.sm100.backward.workspace import first_tile

PLACE_WORDS = 3  # that are told first: the block, the KV head and the batch entry
VECTOR_BITS = 128  # of an access to global memory


@dataclass(frozen=True)
class KeyQueue:
    """Work tiles on their way to the roles of a CTA.

    drawn: global memory, how many were drawn so far by all CTAs. places: shared memory, WORK_WORDS
    for each slot of the ring "work".
    """

    work: WorkList
    drawn: cute.Tensor
    places: Any

    def words(self, ring: Ring) -> cute.Tensor:
        """Those of a slot."""
        return cute.make_tensor(self.places + ring.slot * WORK_WORDS, cute.make_layout(WORK_WORDS))


def first_number(queue: KeyQueue) -> Int32:
    """What a CTA begins with: its own number.

    In a fixed order of sums it draws: a tile of a CTA that has not started would be waited for.
    """
    if queue.work.problem.spec.deterministic:
        return _told(draw(queue))
    return cute.arch.block_idx()[0]


def draw(queue: KeyQueue) -> Int32:
    """The load warp's first lane draws a number; it is not waited for yet."""
    return draw_work(WorkQueue(queue.drawn, None, None))


def number_of(queue: KeyQueue, drawn: Int32) -> Int32:
    """The work tile that was drawn: one beyond those that CTAs begin with."""
    return _told(drawn) + (0 if queue.work.problem.spec.deterministic else cute.arch.grid_dim()[0])


def _told(drawn: Int32) -> Int32:
    """The number that the first lane has drawn, for all of its warp."""
    return cute.arch.make_warp_uniform(cute.arch.shuffle_sync(drawn, 0))


@cute.jit
def store_zeros(tile: KeyTile, gradient: cute.Tensor) -> None:
    """A warp: of the tile's keys, those that exist."""
    vector: cutlass.Constexpr = VECTOR_BITS // gradient.element_type.width
    vectors: cutlass.Constexpr = gradient.shape[-1] // vector
    lanes: cutlass.Constexpr = 1 << (vectors - 1).bit_length()
    lane = cute.arch.lane_idx()
    stop = cutlass.min(tile.seqlen_k, tile.first_key + tile.keys)
    stop = cutlass.select_(lane % lanes < vectors, stop, Int32(0))
    zeros = cute.make_rmem_tensor(cute.make_layout(vector), gradient.element_type)
    zeros.fill(0.0)
    first = tile.first_key + lane // lanes
    for key in cutlass.range(first, stop, WARP // lanes, unroll=1):
        if cutlass.const_expr(tile.spec.packed_k):
            target = gradient[tile.start_k + key, tile.head_k, None]
        else:
            target = gradient[tile.batch, key, tile.head_k, None]
        cute.autovec_copy(zeros, cute.local_tile(target, (vector,), (lane % lanes,)))


@dataclass(frozen=True)
class ToldTile:
    """A work tile as it was told. block: -1 less the last one's if there is none any more.
    sequence: where it lies, and how long it is, if that differs.

    Masks do not go through loops, so that it is a `KeyTile` only within one.
    """

    block: Int32
    head_k: Int32
    batch: Int32
    sequence: tuple

    @property
    def exists(self) -> Boolean:
        """Is there one?"""
        return self.block >= 0

    def or_last(self) -> "ToldTile":
        """The same; if there is none, the last one of the call."""
        block = cutlass.select_(self.exists, self.block, -1 - self.block)
        return replace(self, block=block)

    def of(self, problem: BackwardProblem) -> KeyTile:
        """With what all work tiles of the call have."""
        spec = problem.spec
        start_q, seqlen_q, start_k, seqlen_k, row_tile = self.sequence or (
            Int32(0), problem.seqlen_q, Int32(0), problem.seqlen_k,
            first_tile(self.batch, 0, problem.q_blocks, packed=False),
        )  # fmt: skip
        right = Int32(0) if spec.causal else problem.window_right
        return KeyTile(
            spec=spec,
            rank=0,
            block=self.block,
            head_k=self.head_k,
            group=problem.group,
            batch=self.batch,
            start_q=start_q,
            start_k=start_k,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            row_tile=row_tile,
            mask=spec.mask or Band(problem.window_left, right),
        )


@cute.jit
def tell(signals: Signals, queue: KeyQueue, ring: Ring, index: Int32, gradients: tuple) -> ToldTile:
    """Write down, for all roles, the next work tile from a number on that some query sees.

    Behind the last one that is none (`ToldTile`). gradients: dV and dK, in global memory. Of keys
    that no query sees they are zeros.
    """
    signals.wait("work_empty", ring)
    told = write(queue, ring, index)
    while told.exists and told.of(queue.work.problem).trips == 0:
        for gradient in gradients:
            store_zeros(told.of(queue.work.problem), gradient)
        told = write(queue, ring, number_of(queue, draw(queue)))
    with cute.arch.elect_one():
        signals.arrive("work_full", ring)
    return told


def write(queue: KeyQueue, ring: Ring, index: Int32) -> ToldTile:
    """A work tile into a slot, as this warp reads it again."""
    tile = queue.work.tile_or_last(index)
    block = cutlass.select_(index < queue.work.count, tile.block, -1 - tile.block)
    sequence = tile.start_q, tile.seqlen_q, tile.start_k, tile.seqlen_k, tile.row_tile
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        words = queue.words(ring)
        for i, word in enumerate((block, tile.head_k, tile.batch, *sequence)):
            words[i] = word
    cute.arch.sync_warp()
    return _read(queue, ring)


def receive(signals: Signals, queue: KeyQueue, ring: Ring) -> ToldTile:
    """The work tile of a slot."""
    signals.wait("work_full", ring)
    told = _read(queue, ring)
    signals.arrive_once("work_empty", ring)
    return told


def _read(queue: KeyQueue, ring: Ring) -> ToldTile:
    spec = queue.work.problem.spec
    differ = spec.ragged_q or spec.ragged_k or spec.packed_q or spec.packed_k
    words = queue.words(ring)
    block, head_k, batch, *sequence = (
        cute.arch.make_warp_uniform(words[i]) for i in range(WORK_WORDS if differ else PLACE_WORDS)
    )
    return ToldTile(block, head_k, batch, tuple(sequence))
