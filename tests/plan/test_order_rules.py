"""The rule on the order of accesses: which missing or early signals it finds; it is fast."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from fa4.config import WarpgroupPipeline
from fa4.hardware import B200, H100, H200
from fa4.plan import PipelinePlan, check_plan
from fa4.plan.order_rules import ordered_accesses
from fa4.plan.places import MemoryRegion, Resolver, find_place
from fa4.plan.schema import Arrive, Copy, Loop, SmemAccess, Sync, Wait, Work, walk
from fa4.plan.warpgroup import warpgroup_plan
from tests.plan.plans import (
    BACKWARD,
    FORWARD,
    PUBLISHED,
    Step,
    edit_role,
    forward,
    with_role,
    with_signal,
)
from tests.plan.test_amounts import HOPPER

ONE, PAIR, APART = BACKWARD["one CTA"], BACKWARD["pair"], BACKWARD["head dim 64"]
WIDE = BACKWARD["wide pair"]
HOPPER_PLANS = {name: warpgroup_plan(pipeline, H100) for name, pipeline in HOPPER.items()}


def found(plan: PipelinePlan) -> list[str]:
    """What the rule says."""
    return [f"{subject}: {message}" for subject, message in ordered_accesses(plan, B200)]


def unordered(plan: PipelinePlan) -> set[frozenset[str]]:
    """Pairs of work that the rule finds not to be ordered."""
    pattern = r": (.+) of \w+(?: \d)? may come before (.+) of \w+(?: \d)? has ended"
    return {frozenset(re.search(pattern, text).groups()) for text in found(plan)}  # type: ignore[union-attr]


def moved(plan: PipelinePlan, role: str, step: Step, behind: Step) -> PipelinePlan:
    """`plan` in which `step` comes right behind the next `behind` of the same program or loop."""

    def turn(program: Sequence[Step]) -> tuple[Step, ...]:
        steps: list[Step] = []
        held: list[Step] = []
        for one in program:
            if isinstance(one, Loop):
                steps.append(replace(one, body=turn(one.body)))
            elif one == step:
                held.append(one)
            else:
                steps.append(one)
                if one == behind or (isinstance(one, Work) and one.what == behind):
                    steps += held
                    held = []
        return (*steps, *held)

    return with_role(plan, role, lambda r: replace(r, program=turn(r.program)))


def before(plan: PipelinePlan, role: str, step: Step, work: str) -> PipelinePlan:
    """`plan` in which each arrival `step` comes ahead of the work in front of it."""

    def turn(program: Sequence[Step]) -> tuple[Step, ...]:
        steps: list[Step] = []
        for one in program:
            if isinstance(one, Loop):
                steps.append(replace(one, body=turn(one.body)))
            elif one == step and any(isinstance(s, Work) and s.what == work for s in steps):
                last = max(i for i, s in enumerate(steps)
                           if isinstance(s, Work) and s.what == work)  # fmt: skip
                steps.insert(last, one)
            else:
                steps.append(one)
        return tuple(steps)

    return with_role(plan, role, lambda r: replace(r, program=turn(r.program)))


@pytest.mark.parametrize("name", HOPPER_PLANS)
def test_plans_without_tensor_memory_are_ordered(name: str) -> None:
    """Those of all other kernels are in the test of all rules."""
    assert [str(f) for f in check_plan(HOPPER_PLANS[name], H100)] == []


def test_o_over_q_waits_for_its_store() -> None:
    """Q's place released before O in it is stored: the next Q would be loaded over O."""
    plan = warpgroup_plan(WarpgroupPipeline(head_dim=192, head_dim_v=128), H100)
    early, late = Arrive("q_empty"), Arrive("q_empty", after="tma")
    for i in (0, 1):
        plan = edit_role(plan, f"consumer{i}", lambda s: () if s == late else (s,))
        plan = edit_role(plan, f"consumer{i}", lambda s, i=i: (
            (early, s) if s == Wait(f"stored{i}") else (s,)))  # fmt: skip
    assert any("load q0 of load may come before store O0" in text for text in found(plan))


# Proofs of the pair's kernel, each without its reason: the fault, two accesses that are not ordered
# then, and whether phases alone would show it.
S_READ, DQ_DONE = Arrive("s_read"), Arrive("ds_empty", after="tensor")
PROOFS: dict[str, tuple[Callable[[], PipelinePlan], tuple[str, str], bool]] = {
    "dQ is issued before the S that it lies over is read": (
        lambda: moved(PAIR, "mma", Wait("s_read"), DQ_DONE), ("dQ", "read S"), True),
    "S counts as read before it is": (
        lambda: before(PAIR, "compute", S_READ, "read S"), ("dQ", "read S"), False),
    "the last S counts as read before the last dS is stored": (
        lambda: with_role(PAIR, "compute", first_s_read), ("dQ", "write dS"), True),
    "dS is stored where dQ still reads the last one": (
        lambda: moved(PAIR, "compute", Wait("ds_empty"), Arrive("ds_peer", after="dsmem")),
        ("dQ", "push dS"), True),
    "dS counts as used before dQ has read it": (
        lambda: before(PAIR, "mma", DQ_DONE, "dQ"), ("dQ", "push dS"), False),
    "the other CTA's part of dS is not waited for": (
        lambda: moved(PAIR, "mma", Wait("ds_relayed"), DQ_DONE), ("dQ", "push dS"), True),
}  # fmt: skip


def first_s_read(role):  # type: ignore[no-untyped-def]
    """The arrival after the loops made ahead of them, one phase early."""
    rest = tuple(step for step in role.program if step != S_READ)
    return replace(role, program=(S_READ, *rest))


@pytest.mark.parametrize("name", PROOFS)
def test_proofs_of_the_pair(name: str) -> None:
    """Signals that come too early or are waited for too late, as often as before."""
    make, pair, by_phases = PROOFS[name]
    plan = make()
    steps = [sorted(str(step) for role in some.roles for step in walk(role.program))
             for some in (plan, PAIR)]  # fmt: skip
    assert plan != PAIR and steps[0] == steps[1]
    assert frozenset(pair) in unordered(plan)
    rules = {f.rule for f in check_plan(plan, B200)}
    assert rules == {"ordered_accesses"} | ({"parity_is_enough"} if by_phases else set())


def test_the_pairs_signals_come_from_both_ctas() -> None:
    """Without the peer's arrival, its accesses are not known to have ended."""
    for name in ("s_read", "p_full", "ds_full", "dq_empty", "ds_relayed"):
        plan = with_signal(PAIR, name, remote=False)
        assert any(" 1 has ended" in text or "0 may come before" in text for text in found(plan))


def drop_wait(plan: PipelinePlan, role: str, number: int) -> PipelinePlan:
    """`plan` without the wait of that number in a role's programs."""
    seen = iter(range(1000))

    def change(step: Step) -> Sequence[Step]:
        return () if isinstance(step, Wait) and next(seen) == number else (step,)

    return edit_role(plan, role, change)


# Signals of which another one tells the same of memory; they keep phases apart.
# row_stats_empty: a load of statistics comes after one of Q or dO, whose place is free after a
# product that was issued when dS was stored, and so when the statistics were read.
# dk_full, p_full of the wide pair: it commits dV's and dK's sums together; dV comes after dK, which
# waits for dS, stored after P.
IMPLIED = {(plan.name, "row_stats_empty") for plan in (ONE, APART, PAIR, WIDE)}
IMPLIED |= {(WIDE.name, "dk_full"), (WIDE.name, "p_full")}


@pytest.mark.parametrize("plan", [ONE, APART, PAIR, WIDE], ids=lambda plan: plan.name)
def test_every_wait_is_needed(plan: PipelinePlan) -> None:
    """Without any one wait a rule finds something; without one for memory, this rule does."""
    for role in plan.roles:
        waits = [step for step in walk(role.steps) if isinstance(step, Wait)]
        for number, wait in enumerate(waits):
            dropped = drop_wait(plan, role.name, number)
            assert check_plan(dropped, B200), (role.name, number, wait)
            if number < len(waits) - len(role.closing):
                implied = (plan.name, wait.signal) in IMPLIED
                assert bool(found(dropped)) is not implied, (role.name, number, wait)


def test_warpgroups_know_each_other_by_barriers() -> None:
    """The published P lies over scores of the other warpgroup: without the barrier, too early."""
    plan = edit_role(PUBLISHED["one CTA"], "compute", lambda s: (
        () if isinstance(s, Work) and isinstance(s.amount, Sync) else (s,)))  # fmt: skip
    assert any("write P of compute may come before read S of compute" in t for t in found(plan))
    # This package's plans have none per tile, since a warpgroup stays in its own columns.
    other = edit_role(ONE, "compute", lambda s: (
        (replace(s, writes=("p1", "p0")),) if isinstance(s, Work) and s.what == "write P" else (s,)
    ))  # fmt: skip
    assert any("write P of compute may come before read S of compute" in t for t in found(other))


def test_a_ring_has_places() -> None:
    """Each load that comes one phase too early is over a tile that is still read."""
    for name in ("one CTA", "P in shared memory", "uneven ring"):
        plan = FORWARD[name]
        stages = plan.buffer("kv").stages
        early = with_signal(plan, "kv_empty", free=stages + 1)
        assert any("load K of load may come before" in text for text in found(early))


def test_stores_are_waited_for() -> None:
    """O is written again only when its store has read it."""
    plan = edit_role(forward(), "correction", lambda s: () if s == Wait("epi0_empty") else (s,))
    assert any("write O0 of correction may come before store O0" in text for text in found(plan))


def test_names_of_places() -> None:
    """Buffers, stages, columns, labels; nothing else."""
    plan = FORWARD["one CTA"]
    regions = {name: find_place(plan, name) for name in ("q1", "s1[0:32,64:96]", "kv:K", "kv")}
    assert regions["q1"] is not None and regions["q1"].region().spans == ((32768, 65536),)
    assert regions["s1[0:32,64:96]"] is not None
    assert regions["s1[0:32,64:96]"].region().spans == ((128, 160), (192, 224))
    for name in ("q2", "s1[0:129]", "s1[32:32]", "s1[]", "kv:", "lost", "s0[0:8"):
        assert find_place(plan, name) is None
    assert not MemoryRegion("a", "smem", ((0, 8),)).meets(MemoryRegion("b", "smem", ((8, 16),)))
    assert MemoryRegion("a", "smem", ((0, 8),)).meets(MemoryRegion("b", "smem", ((20, 24), (7, 9))))
    assert not MemoryRegion("a", "smem", ((0, 8),)).meets(MemoryRegion("b", "tmem", ((0, 8),)))


def test_a_waited_stage_is_the_last_wait_s() -> None:
    """However often it is read, until its role waits for the next one."""
    tile = WarpgroupPipeline(head_dim=64, consumers=3, ahead=True)
    plan = warpgroup_plan(tile, H200)
    resolver, queries = Resolver(plan), plan.buffer("q")
    assert queries.stages == 2
    read = Work("QK1", SmemAccess(num_bytes=1), reads=("q@[8192:16384]",))
    starts = []
    for _ in range(3):
        resolver.wait("consumer1", "q_full")
        resolver.wait("consumer0", "q_full")  # another role's waits are its own
        starts += [resolver.resolve("consumer1", read, read.reads)[0].spans for _ in range(2)]
    first, second = (((at + 8192, at + 16384),) for at in (0, queries.size))
    assert starts == [first, first, second, second, first, first]
    assert find_place(plan, "q@[0:24577]") is None


def test_a_label_means_the_loads_of_its_name() -> None:
    """K and V alternate in the ring, so that each K lies two slots behind the last."""
    plan, loads = FORWARD["one CTA"], []
    resolver = Resolver(plan)
    ring = plan.buffer("kv")
    assert ring.stages == 3
    for what in ("K", "V") * 3:
        copy = Copy(kind="load", num_bytes=ring.size)
        work = Work(f"load {what}", copy, asynchronous=True, writes=(f"kv:{what}",))
        loads += resolver.resolve("load", work, work.writes)
    slots = [(region.spans[0][0] - ring.start) // ring.size for region in loads]
    assert slots == [0, 1, 2, 0, 1, 2]
    read = Work("QK0", SmemAccess(num_bytes=1), reads=("kv:K",))
    uses = [resolver.resolve("mma", read, read.reads)[0] for _ in range(3)]
    assert uses == [loads[0], loads[2], loads[4]]
    with pytest.raises(IndexError):
        resolver.resolve("mma", read, read.reads)


def test_a_tile_that_nobody_loads() -> None:
    """A product that reads one more K than there are."""
    extra = next(s for s in walk(FORWARD["one CTA"].role("mma").program)
                 if isinstance(s, Work) and s.what == "QK0")  # fmt: skip
    plan = with_role(FORWARD["one CTA"], "mma",
                     lambda r: replace(r, program=(*r.program, extra)))  # fmt: skip
    assert found(plan) == ["rings: with tiles of (1, 1, 1) a tile is read that no load brings"]


def test_checks_are_fast() -> None:
    """They run before each compilation, which takes a second."""
    for plan in (ONE, PAIR, FORWARD["pair"]):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            check_plan(plan, B200)
            times.append(time.perf_counter() - start)
        assert min(times) < 0.25
