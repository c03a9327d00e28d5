"""In simulated runs, accesses that the rule of order calls ordered never lie over each other."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.hardware import B200
from fa4.plan import PipelinePlan
from fa4.plan.order_rules import ordered_accesses
from fa4.plan.places import MemoryRegion, Resolver
from fa4.plan.schema import Mma, Wait, Work, unroll
from fa4.sim.costs import MachineCosts
from fa4.sim.lower import lower
from fa4.sim.machine import Machine, find_machine
from fa4.sim.timeline import Event, _read_log
from tests.plan.plans import BACKWARD, FORWARD, PUBLISHED, edit_role
from tests.sim.strategies import machines

EVERY = {"forward": FORWARD, "backward": BACKWARD, "published": PUBLISHED}
SINGLE = {f"{name} {key}": plan for name, plans in EVERY.items() for key, plan in plans.items()
          if plan.cta_group == 1}  # fmt: skip
Access = tuple[str, Work, Event, list[MemoryRegion], list[MemoryRegion]]


def accesses(plan: PipelinePlan, machine: Machine, total: int, masked: int) -> list[Access]:
    """(role, work, event, regions read, regions written) of one work tile."""
    costs = MachineCosts(machine.gpu, machine.costs)
    code = lower(plan, costs.work, costs.signal, {"rescale_rate": 0.3})
    trips = (total, masked, total - masked)
    timeline = _read_log(code, np.array([trips]), "CTA")
    events: dict[str, list[Event]] = defaultdict(list)
    for event in timeline.events:
        if event.kind in ("work", "issue"):
            events[event.role].append(event)
    resolver, found = Resolver(plan), []
    for role in sorted(plan.roles, key=lambda role: role.name != "load"):
        program = (*role.prologue, *unroll(role.program, dict(zip(plan.trips, trips, strict=True))))
        works = [step for step in program if isinstance(step, Work)]
        for work, event in zip(works, events[role.name], strict=True):
            assert work.what == event.what
            reads, writes = (resolver.resolve(role.name, work, names)
                             for names in (work.reads, work.writes))  # fmt: skip
            found.append((role.name, work, event, reads, writes))
    return found


def overlaps(found: list[Access]) -> set[frozenset[str]]:
    """Pairs of work that access the same memory, one of them to write, at the same time."""
    hits = set()
    for (role, work, event, reads, writes), (role2, work2, event2, reads2, writes2) in combinations(
        (access for access in found if access[3] or access[4]), 2
    ):
        if role == role2 and (
            isinstance(work.amount, Mma) or not (work.asynchronous or work2.asynchronous)
        ):
            continue  # one after the other
        if min(event.done, event2.done) <= max(event.start, event2.start):
            continue
        pairs = [(a, b) for a in writes for b in (*reads2, *writes2)]
        pairs += [(a, b) for a in reads for b in writes2]
        if any(a.meets(b) for a, b in pairs):
            hits.add(frozenset({work.what, work2.what}))
    return hits


@settings(max_examples=25)
@given(st.sampled_from(sorted(SINGLE)), machines(), st.integers(1, 6), st.integers(0, 2))
def test_ordered_accesses_are_apart(name: str, machine: Machine, total: int, masked: int) -> None:
    """Whatever the machine's rates and latencies."""
    plan = SINGLE[name]
    assert not list(ordered_accesses(plan, B200))
    assert overlaps(accesses(plan, machine, total, min(masked, total))) == set()


@pytest.mark.parametrize(
    ("role", "signal", "pair"),
    [
        ("mma", "p_full", ("S", "write P")),
        ("mma", "dq_empty", ("dP", "read dQ")),
        ("load", "do_empty", ("load do", "dV")),
        ("mma", "ds_full", ("dQ", "write dS")),
    ],
)
def test_a_missing_wait_shows_in_a_run(role: str, signal: str, pair: tuple[str, str]) -> None:
    """What the rule says may happen does, with B200's times."""
    plan = edit_role(BACKWARD["one CTA"], role, lambda s: () if s == Wait(signal) else (s,))
    assert any(all(f"{what} of" in message for what in pair)
               for _, message in ordered_accesses(plan, B200))  # fmt: skip
    assert frozenset(pair) in overlaps(accesses(plan, find_machine("b200"), 4, 1))
