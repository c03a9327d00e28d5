"""Which work tile is next: CTAs stride over all of them, or over pairs of equal work."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4.sm100.kit.schedulers import has_rows
from fa4.sm100.kit.tiles import KernelProblem


def first_work(problem: KernelProblem) -> Int32:
    """The first work tile of this CTA."""
    index = cute.arch.block_idx()[0]
    return _skip_empty(problem, 2 * index if problem.spec.scheduler == "fold" else index)


def next_work(problem: KernelProblem, index: Int32) -> Int32:
    """The work tile after `index`; num_tiles or more at the end."""
    return _skip_empty(problem, _following(problem, index))


def _following(problem: KernelProblem, index: Int32) -> Int32:
    """A grid's size on; folded, the other tile of the pair or the first of a pair so far on."""
    grid = cute.arch.grid_dim()[0]
    if problem.spec.scheduler != "fold":
        return index + grid
    return index + cutlass.select_(index % 2 == 0, Int32(1), 2 * grid - 1)


@cute.jit
def _skip_empty(problem: KernelProblem, index: Int32) -> Int32:
    """Pass over blocks that have no rows: beyond their sequence's end, or in the fold's middle."""
    spec: cutlass.Constexpr = problem.spec
    if cutlass.const_expr(spec.ragged_q or spec.scheduler == "fold"):
        while index < problem.num_tiles and not has_rows(problem, index):
            index = _following(problem, index)
    return index
