"""How much a simulation may be asked for, so that it is refused at once instead of never ending.

The limits are where a prediction on one core would take about half a minute (measured: 150,000
steps of a pipeline and 400,000 work tiles a second) or some gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from fa4.config import Problem
from fa4.designs import design_of
from fa4.designs.design import CallWork

MOST_LENGTH = 2**31 - 1  # what a kernel's 32-bit coordinates can say
MOST_SEQUENCES = 2**17  # of different lengths
MOST_WORK_TILES = 2**22
MOST_STEPS = 4_000_000  # of pipelines, simulated one by one
MOST_TURNS = 2**30  # additions to dQ in a fixed order


def check_work(
    problem: Problem, pipeline: object, lengths: Sequence[tuple[int, int]] | None
) -> None:
    """Raises ValueError, naming the number and the limit, for a problem too large to simulate."""
    for name in ("batch", "seqlen_q", "seqlen_k"):
        value = getattr(problem, name)
        if value > MOST_LENGTH:
            raise ValueError(f"{name} must be at most {MOST_LENGTH}; got {value}")
    if lengths is not None and len(lengths) > MOST_SEQUENCES:
        raise ValueError(f"lengths must be at most {MOST_SEQUENCES}; got {len(lengths)}")
    pairs = [(problem.seqlen_q, problem.seqlen_k)] if lengths is None else lengths
    tiles = sum(count_tiles(problem, pipeline, *pair) for pair in pairs)
    tiles *= problem.batch if lengths is None else 1
    if tiles > MOST_WORK_TILES:
        raise ValueError(
            f"a prediction has at most {MOST_WORK_TILES} work tiles; {problem.batch} sequences of "
            f"up to {problem.seqlen_q} queries and {problem.seqlen_k} keys with "
            f"{problem.heads_q} heads make {tiles}"
        )


def count_tiles(problem: Problem, pipeline: object, rows: int, keys: int) -> int:
    """Work tiles of one sequence, at least one per head."""
    return modelled(pipeline).count(problem, pipeline, rows, keys)


def modelled(pipeline: object) -> CallWork:
    """What a call is for a pipeline's kernel. Raises ValueError for one that is only compiled."""
    design = design_of(pipeline)
    if design.work is None:
        raise ValueError(f"the times of {design.name} are not modelled")
    return design.work


def check_steps(steps: int) -> None:
    """Raises ValueError if so many steps of a pipeline are too many to simulate one by one."""
    if steps > MOST_STEPS:
        raise ValueError(
            f"at most {MOST_STEPS} steps are simulated one by one, about half a minute; this takes "
            f"{steps}: leave exact out, or ask for shorter sequences or another scheduler"
        )


def check_turns(turns: int) -> None:
    """Raises ValueError if so many additions to dQ are too many to put in order."""
    if turns > MOST_TURNS:
        raise ValueError(
            f"at most {MOST_TURNS} additions to dQ are put in order; deterministic makes {turns}: "
            "ask for shorter sequences or a smaller batch"
        )
