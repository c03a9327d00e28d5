"""Which work tile is next: CTAs stride over all of them, back and forth where lengths differ."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4.sm100.kit.schedulers import _skip_empty
from fa4.sm100.kit.tiles import KernelProblem


def first_work(problem: KernelProblem) -> Int32:
    """The first work tile of this CTA."""
    return _skip_empty(problem, cute.arch.block_idx()[0])


def next_work(problem: KernelProblem, index: Int32, tiles_done: Int32) -> Int32:
    """The work tile after `index`; num_tiles or more at the end.

    Longest first, a CTA that began a round of the grid ends the next one: of tiles that become
    shorter, each then has about as much. tiles_done: of this CTA, before the one that has ended.
    """
    grid = cute.arch.grid_dim()[0]
    if problem.spec.scheduler != "lpt" or problem.spec.ragged_q:
        return _skip_empty(problem, index + grid)
    place = cute.arch.block_idx()[0]
    back = 2 * (grid - 1 - place) + 1
    return index + cutlass.select_(tiles_done % 2 == 0, back, 2 * place + 1)
