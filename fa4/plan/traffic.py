"""Bytes that a backward plan moves through the shared memory of a CTA for each query tile.

By the names that `fa4.emulator.tools.traffic` counts them under in a run. What all lanes of a warp
read alike, such as statistics of rows, is no access of a plan.
"""

from __future__ import annotations

from collections import Counter

from fa4.plan.schema import Copy, Loop, Mma, PipelinePlan, Program, SmemAccess, Work

PER_TILE = ("q_tiles", "plain_tiles")  # loops over query tiles; masked ones move as much
COPY_KINDS = {
    "load": "copies",
    "dsmem": "stores from a peer",
    "reduce": "bulk reductions",
    "store": "copies",
}


def tile_traffic(plan: PipelinePlan) -> dict[str, int]:
    """What moves the bytes -> how many: of operands of products, stores, copies."""
    found: Counter[str] = Counter()
    for role in plan.roles:
        _add(role.program, False, found)
    return dict(found)


def _add(program: Program, inside: bool, found: Counter[str]) -> None:
    for step in program:
        if isinstance(step, Loop):
            _add(step.body, inside or step.trip in PER_TILE, found)
        elif isinstance(step, Work) and inside:
            amount = step.amount
            if isinstance(amount, Mma):
                found["products"] += int(amount.a_bytes + amount.b_bytes)
            elif isinstance(amount, SmemAccess):
                found["stores"] += int(amount.num_bytes)
            elif isinstance(amount, Copy):
                found[COPY_KINDS[amount.kind]] += int(amount.num_bytes)
