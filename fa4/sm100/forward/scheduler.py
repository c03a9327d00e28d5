"""The scheduler warp asks the hardware for the next work tile while the others work on this one."""

import cutlass.cute as cute
from cutlass import Int32

from fa4.plan.work_stealing import RESPONSE_BYTES
from fa4.sm100.forward.context import Signals
from fa4.sm100.forward.tiles import Problem, first_tile, next_tile


@cute.jit
def scheduler(signals: Signals, problem: Problem) -> None:
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
