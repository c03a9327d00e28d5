"""Attention across GPUs: the sequence divided over ranks, by one communication plan.

    layout   which rank holds which rows of the sequence
    blocks   which keys a run of rows sees, as dense calls
    plan     what each rank sends, receives, computes and merges, as data
    methods  plans: ring, all_gather, ulysses, ring x ulysses, halo, pass_q, tree
    check    every pair once, no deadlock, no buffer overwritten too early
    execute  a plan carried out: in one process, or by torch.distributed (`attention`)
    simulate when each rank does what, with links as `fa4.sim.links` has them
    forecast time, efficiency and memory of a call, and its critical chain

Importing this package loads neither torch nor NumPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fa4.distributed.blocks import SequenceMask
    from fa4.distributed.check import PlanReport, check_plan
    from fa4.distributed.front import attention, positions, shard, unshard
    from fa4.distributed.layout import RowLayout, make_layout
    from fa4.distributed.methods import make_plan
    from fa4.distributed.plan import CommunicationPlan, Sizes, Spec
    from fa4.distributed.replaced import context_parallel

_HOMES = {
    "CommunicationPlan": "plan",
    "PlanReport": "check",
    "RowLayout": "layout",
    "SequenceMask": "blocks",
    "Sizes": "plan",
    "Spec": "plan",
    "attention": "front",
    "check_plan": "check",
    "context_parallel": "replaced",
    "make_layout": "layout",
    "make_plan": "methods",
    "positions": "front",
    "shard": "front",
    "unshard": "front",
}
__all__ = [
    "CommunicationPlan",
    "PlanReport",
    "RowLayout",
    "SequenceMask",
    "Sizes",
    "Spec",
    "attention",
    "check_plan",
    "context_parallel",
    "make_layout",
    "make_plan",
    "positions",
    "shard",
    "unshard",
]


def __getattr__(name: str) -> Any:
    """A public name, loaded when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fa4.distributed.{_HOMES[name]}"), name)
