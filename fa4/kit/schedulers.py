"""Which work tile is next: by a stride, or asked of the hardware by the scheduler warp."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa4.kit.signals import Signals
from fa4.kit.tiles import KernelProblem, locate
from fa4.plan.work_stealing import RESPONSE_BYTES


def first_tile(problem: KernelProblem) -> Int32:
    """The first work tile of this CTA (or CTA pair)."""
    return _skip_empty(problem, cute.arch.block_idx()[0] // problem.spec.cta_group)


def next_tile(signals: Signals, problem: KernelProblem, index: Int32, tiles_done: Int32) -> Int32:
    """The work tile after `index`; num_tiles or more at the end.

    A grid of as many CTAs as work in parallel strides by its size. With "clc" the hardware answers
    the scheduler warp's question; tiles_done counts this role's tiles before the one it has ended.
    """
    if problem.spec.scheduler == "clc":
        return _stolen_tile(signals, problem, tiles_done)
    step = cute.arch.grid_dim()[0] // problem.spec.cta_group
    return _skip_empty(problem, index + step)


@cute.jit
def _stolen_tile(signals: Signals, problem: KernelProblem, tiles_done: Int32) -> Int32:
    """The work tile of the CTA that was cancelled for this one; num_tiles if there was none."""
    signals.wait("work_full", tiles_done)
    first_cta, _, _, valid = cute.arch.clc_response(problem.response)
    # The next answer is written by the asynchronous proxy, over what was read just now.
    cute.arch.fence_proxy("async.shared", space="cta")
    signals.arrive_once("work_empty")
    return cutlass.select_(valid != 0, first_cta, problem.num_tiles)


@cute.jit
def _skip_empty(problem: KernelProblem, index: Int32) -> Int32:
    """Pass over the blocks that lie beyond their sequence's end, where lengths differ."""
    spec: cutlass.Constexpr = problem.spec
    if cutlass.const_expr(spec.ragged_q):
        step = cute.arch.grid_dim()[0] // spec.cta_group
        while index < problem.num_tiles and not has_rows(problem, index):
            index += step
    return index


def has_rows(problem: KernelProblem, index: Int32) -> Boolean:
    """Has the work tile any rows?"""
    # Traced code evaluates both sides of an `and`: beyond the end it looks at the last tile.
    tile = locate(problem, cutlass.min(index, problem.num_tiles - 1))
    return tile.first_row < tile.seqlen_q * problem.spec.group


@cute.jit
def scheduler(signals: Signals, problem: KernelProblem) -> None:
    """One question per work tile, as soon as everybody has read the answer before."""
    index = first_tile(problem)
    tiles_done = Int32(0)
    while index < problem.num_tiles:
        signals.wait("work_empty", tiles_done)
        full = signals.expect("work_full", RESPONSE_BYTES)
        with cute.arch.elect_one():
            cute.arch.issue_clc_query(full, problem.response, multicast=False)
        index = next_tile(signals, problem, index, tiles_done)
        tiles_done += 1
