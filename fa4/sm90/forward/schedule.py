"""Which work tile is next: CTAs stride over all, back and forth where lengths differ, or draw."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4.kit.ptx_block import PtxBlock
from fa4.kit.schedulers import has_rows
from fa4.kit.signals import Signals
from fa4.kit.tiles import L2_SECTION_BYTES, KernelProblem

# Rows of blocks that run at once back and forth, by warpgroups: of 2 to 16 those whose worst CTA,
# of causal calls on 132 CTAs with 2k to 32k tokens, has least to do beyond the average.
ROWS_AT_ONCE = {1: 4, 2: 4, 3: 2}


def heads_at_once(consumers: int, ctas: Int32) -> Int32:
    """Heads whose blocks are taken side by side: the grid takes whole rows of blocks."""
    return cutlass.max(ctas // ROWS_AT_ONCE[consumers], 1)


def heads_of_section(head_bytes: Int32, heads: Int32) -> Int32:
    """Heads that run side by side: as many as have their K and V in L2, or a little fewer.

    All sections are of about one size: a small last one would begin with its longest work tiles
    when most SMs have ended.
    """
    fitting = cutlass.max(L2_SECTION_BYTES // cutlass.max(head_bytes, 1), 1)
    sections = (heads + fitting - 1) // fitting
    return (heads + sections - 1) // sections


@dataclass(frozen=True)
class WorkQueue:
    """Where numbers of work tiles come from that are drawn; a ring's slot of the next one.

    drawn: global tensor of one int32, of what was drawn so far beyond each CTA's first. numbers:
    shared memory. None of both where CTAs know their work tiles.
    """

    drawn: Any
    numbers: Any
    ring: Any

    def next(self) -> "WorkQueue":
        """One slot on."""
        return replace(self, ring=self.ring.next())


def first_work(problem: KernelProblem) -> Int32:
    """The first work tile of this CTA."""
    return _skip_empty(problem, cute.arch.block_idx()[0])


def next_work(problem: KernelProblem, index: Int32) -> Int32:
    """The work tile after `index`; num_tiles or more at the end."""
    return _skip_empty(problem, _following(problem, index))


def draw_work(queue: WorkQueue) -> Int32:
    """The load warp's first lane draws a number; it is not waited for yet."""
    code = PtxBlock()
    number, place = code.register("b32"), code.read(queue.drawn.iterator.toint())
    first = code.do("setp.eq.s32", code.read(cute.arch.lane_idx()), "0", kind="pred")
    code.effect(f"mov.b32 {number}, 0;")
    code.effect(f"@{first} atom.relaxed.gpu.global.add.u32 {number}, [{place}], 1;")
    (found,) = code.trace(number, effects=True)
    return found


@cute.jit
def tell_work(signals: Signals, problem: KernelProblem, queue: WorkQueue, drawn: Int32) -> Int32:
    """The next work tile with rows, by what was drawn; the load warp says which it is."""
    index = _told(drawn)
    if cutlass.const_expr(problem.spec.ragged_q):
        while index < problem.num_tiles and not has_rows(problem, index):
            index = _told(draw_work(queue))
    signals.wait("work_empty", queue.ring)
    with cute.arch.elect_one():
        _number(queue)[0] = index
        signals.arrive("work_full", queue.ring)
    return index


def follow(
    signals: Signals, problem: KernelProblem, queue: WorkQueue, index: Int32
) -> tuple[Int32, WorkQueue]:
    """The next work tile of a role that does not load, and the queue's next slot."""
    if problem.spec.draws_work:
        return read_work(signals, queue), queue.next()
    return next_work(problem, index), queue


def read_work(signals: Signals, queue: WorkQueue) -> Int32:
    """The number that was drawn, as everybody else reads it."""
    signals.wait("work_full", queue.ring)
    index = cute.arch.make_warp_uniform(_number(queue)[0])
    signals.arrive_once("work_empty", queue.ring)
    return index


def _number(queue: WorkQueue) -> cute.Tensor:
    return cute.make_tensor(queue.numbers + queue.ring.slot, cute.make_layout(1))


def _told(drawn: Int32) -> Int32:
    """A work tile beyond each CTA's first one; the first lane counts for its warp."""
    index = cute.arch.grid_dim()[0] + cute.arch.shuffle_sync(drawn, 0)
    return cute.arch.make_warp_uniform(index)


def _following(problem: KernelProblem, index: Int32) -> Int32:
    """A grid's size on; or, longest first, at the mirrored place of the next round of the grid.

    Of tiles that become shorter, each CTA then gets about as much work.
    """
    grid = cute.arch.grid_dim()[0]
    if problem.spec.scheduler != "snake":
        return index + grid
    return 2 * (index // grid + 1) * grid - 1 - index


@cute.jit
def _skip_empty(problem: KernelProblem, index: Int32) -> Int32:
    """Pass over blocks that lie beyond their sequence's end, where lengths differ."""
    spec: cutlass.Constexpr = problem.spec
    if cutlass.const_expr(spec.ragged_q):
        while index < problem.num_tiles and not has_rows(problem, index):
            index = _following(problem, index)
    return index
