"""What the first work tile of every CTA waits for longer than the others: its rows, from HBM.

CTAs that a launch starts all at once ask HBM for their Q at the same time, and nothing has brought
it to L2. Later ones come out of step, or have had L2 fetch it. SMs are simulated one by one, so the
wait is added to what they take.
"""

from __future__ import annotations

import re
from dataclasses import replace

from fa4.plan.schema import Copy, PipelinePlan, Work, walk
from fa4.sim.costs import MachineCosts
from fa4.sim.machine import Machine

ROWS = re.compile(r"load q\d*")  # what a CTA has of its own; K and V are those of others too


def first_round_cycles(plan: PipelinePlan, machine: Machine, ctas: int, num_bytes: int) -> float:
    """Cycles that the first Q takes longer than a cold one is simulated to take, to its last part.

    ctas, num_bytes: of the call, and of all its Q: rows and columns beyond it are not in HBM. 0 of
    plans that do not load Q by itself, and of machines of which the share of HBM's rate in such a
    round is not known.
    """
    share = machine.costs.first_round_share
    loads = [(role, x) for role in plan.roles for x in walk(role.program)
             if isinstance(x, Work) and ROWS.fullmatch(x.what)]  # fmt: skip
    if not share or not loads or not ctas:
        return 0.0
    costs = MachineCosts(machine.gpu, machine.costs, plan=plan, ctas=ctas)
    parts = [costs.work(role, _cold(load)) for role, load in loads]
    simulated = parts[-1].latency_cycles + sum(part.occupancy_cycles["tma"] for part in parts)
    rate = min(share * costs.hbm_bytes_per_clk, machine.costs.tma_bytes_per_clk)
    needed = machine.costs.hbm_latency_cycles + num_bytes / ctas / rate
    return max(0.0, needed - simulated)


def _cold(load: Work) -> Work:
    """The first one, beside a first K that comes from HBM, too."""
    assert isinstance(load.amount, Copy)
    return replace(load, amount=replace(load.amount, cold=True))
