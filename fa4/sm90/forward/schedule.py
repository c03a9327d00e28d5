"""Which work tile is next: CTAs stride over all of them, back and forth where lengths differ."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4.kit.schedulers import has_rows
from fa4.kit.tiles import L2_SECTION_BYTES, KernelProblem
from fa4.plan.warpgroup_tuned import ROWS_AT_ONCE


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


def first_work(problem: KernelProblem) -> Int32:
    """The first work tile of this CTA."""
    return _skip_empty(problem, cute.arch.block_idx()[0])


def next_work(problem: KernelProblem, index: Int32) -> Int32:
    """The work tile after `index`; num_tiles or more at the end."""
    return _skip_empty(problem, _following(problem, index))


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
