"""The static checks: silent on every kernel's plan, and each rule finds its planted fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fa4.config import WarpgroupPipeline
from fa4.hardware import B200, H100, H200
from fa4.plan import PipelinePlan, check_plan, require_sound
from fa4.plan.checks import OTHER_RULES, STRUCTURE_RULES
from fa4.plan.phase_rules import trip_counts
from fa4.plan.pieces import PiecesPipeline
from fa4.plan.pieces_plan import pieces_plan
from fa4.plan.schema import Arrive, Buffer, Copy, Loop, Signal, Turns, Wait
from fa4.plan.warpgroup import warpgroup_plan
from tests.plan.plans import (
    BACKWARD,
    FORWARD,
    PUBLISHED,
    change_work,
    drop_arrives,
    edit_role,
    with_buffer,
    with_role,
    with_signal,
)

ONE, PAIR, BACK = FORWARD["one CTA"], FORWARD["pair"], BACKWARD["one CTA"]
TURNS = warpgroup_plan(WarpgroupPipeline(causal=True), H200)
AHEAD = warpgroup_plan(
    WarpgroupPipeline(head_dim=64, causal=True, consumers=3, kv_stages=4, ahead=True), H200
)
QUEUE = warpgroup_plan(
    WarpgroupPipeline(element_bytes=1, causal=True, scheduler="queue", ahead=True), H200
)
STEALING = FORWARD["work stealing"]
HOPPER = {
    "turns": TURNS,
    "8 bits, queue": QUEUE,
    "ahead": AHEAD,
    "ahead, one Q": warpgroup_plan(
        WarpgroupPipeline(tile_n=80, consumers=3, ping_pong=False, ahead=True), H200
    ),
}
PLANS = {
    f"{name} {k}": plan
    for name, plans in (("forward", FORWARD), ("backward", BACKWARD), ("published", PUBLISHED))
    for k, plan in plans.items()
}


def role(name: str, **values: object) -> PipelinePlan:
    """The forward plan with fields of one role changed."""
    return with_role(ONE, name, lambda r: replace(r, **values))


def passing_less(plan: PipelinePlan) -> PipelinePlan:
    """A plan whose first role forgets the last signal where it passes over a tile."""
    first, *others = plan.roles
    return replace(plan, roles=(replace(first, passing=first.passing[:-1]), *others))


def begun_late(plan: PipelinePlan) -> PipelinePlan:
    """A plan whose first role begins its first work tile without waiting for Q."""
    first, *others = plan.roles
    prologue = tuple(step for step in first.prologue if step != Wait("q0_full"))
    return replace(plan, roles=(replace(first, prologue=prologue), *others))


def queries_released_early(plan: PipelinePlan) -> PipelinePlan:
    """A plan whose first role gives Q back when the first S is done."""
    first, *others = plan.roles
    program = [step for step in first.program if step != Arrive("q_empty")]
    program.insert(program.index(Wait("s0_done")) + 1, Arrive("q_empty"))
    return replace(plan, roles=(replace(first, program=tuple(program)), *others))


def double_arrive(step: object) -> tuple[object, ...]:
    """Arrive on P twice."""
    twice = isinstance(step, Arrive) and step.signal == "p0_full_o0_scaled"
    return (step, step) if twice else (step,)


def wait_late(step: object) -> tuple[object, ...]:
    """Leave out the waits for P: they come all at once, at the end of the work tile."""
    return () if isinstance(step, Wait) and step.signal == "s0_full" else (step,)


def strides(plan: PipelinePlan, name: str) -> PipelinePlan:
    """A plan with drawn work tiles, of which a role takes every so many-th."""
    signals = []
    for signal in plan.signals:
        waiters = tuple(x for x in signal.waiters if x != name or signal.name != "work_full")
        arrivals = {
            x: n for x, n in signal.arrivals.items() if x != name or signal.name != "work_empty"
        }
        signals.append(replace(signal, waiters=waiters, arrivals=arrivals))

    def change(old):  # type: ignore[no-untyped-def]
        return replace(old, program=old.program[:-3])

    return with_role(replace(plan, signals=tuple(signals)), name, change)


def uncommitted(step: object) -> tuple[object, ...]:
    """Signal the end of a store without waiting for it."""
    return (replace(step, after=None) if isinstance(step, Arrive) else step,)


def late_statistics(plan: PipelinePlan) -> PipelinePlan:
    """One Q tile whose correction warps release the first statistics slot after the last block."""

    def change(old):  # type: ignore[no-untyped-def]
        first, release, loop, *rest = old.program
        assert release == Arrive("stats0_empty") and isinstance(loop, Loop)
        return replace(old, program=(first, loop, release, *rest))

    return with_role(plan, "correction", change)


def five_warpgroups() -> PipelinePlan:
    """A sound plan whose warps share 512 registers of a lane: so many exist, 480 are launched."""
    pipeline = PiecesPipeline(piece=64, groups=2, joint_scores=True, correction="inline")
    plan = pieces_plan(pipeline, B200)
    assert check_plan(plan, B200) == []
    counts = {role.name: 120 if "softmax" in role.name else 32 for role in plan.roles}
    roles = (replace(role, registers=counts[role.name]) for role in plan.roles)
    return replace(plan, roles=tuple(roles))


def slow_reader(plan: PipelinePlan) -> PipelinePlan:
    """A signal that arrives in every trip and is waited for only at the end of the work tile."""

    def change(old):  # type: ignore[no-untyped-def]
        late = Loop("kv_tiles", (Wait("s0_full"),))
        return replace(old, program=(*old.program, late))

    return with_role(edit_role(plan, "softmax0", wait_late), "softmax0", change)


Fault = Callable[[], PipelinePlan]
FAULTS: list[tuple[str, Fault]] = [
    ("unique_names", lambda: replace(ONE, buffers=(*ONE.buffers, ONE.buffers[0]))),
    ("known_trips", lambda: replace(ONE, trips=("kv_tiles", "masked_tiles"))),
    ("known_trips", lambda: replace(ONE, shares=())),
    ("known_trips", lambda: role("load", prologue=(Loop("kv_tiles", ()),))),
    ("closing_waits", lambda: role("load", closing=(Arrive("kv_full"),))),
    ("declared_roles", lambda: with_signal(ONE, "kv_full", waiters=("mma", "nobody"))),
    ("declared_roles", lambda: with_signal(ONE, "kv_full", kind="semaphore")),
    ("known_signals", lambda: role("load", program=(*ONE.role("load").program, Wait("lost")))),
    ("declared_arrivers", lambda: drop_arrives(ONE, "mma", "s0_full")),
    ("declared_arrivers", lambda: with_signal(
        ONE, "p0_full_o0_scaled", arrivals={"softmax0": 128})),
    ("declared_waiters", lambda: with_signal(ONE, "s0_full", waiters=("softmax0", "load"))),
    ("declared_waiters", lambda: with_signal(ONE, "s0_full", waiters=("softmax1",))),
    ("known_buffers", lambda: change_work(ONE, "mma", "QK0", reads=("q0", "kvx"))),
    ("known_buffers", lambda: change_work(ONE, "mma", "QK0", reads=("q2", "kv"))),
    ("known_buffers", lambda: change_work(ONE, "mma", "QK0", reads=("q0", "kv:Q"))),
    ("known_buffers", lambda: change_work(ONE, "mma", "QK0", writes=("s0[0:129]",))),
    ("known_buffers", lambda: change_work(BACK, "compute", "read S", reads=("s",))),
    ("products_ended", lambda: role("load", closing=ONE.role("load").closing[1:])),
    ("products_ended", lambda: role("load", closing=2 * ONE.role("load").closing)),
    ("warps_in_one_role", lambda: role("load", warps=(13,))),
    ("warps_in_one_role", lambda: role("load", warps=())),
    ("warps_in_one_role", lambda: role("load", warps=(32,))),
    ("aligned_warpgroups", lambda: role("softmax0", warps=(16, 17, 18, 20))),
    ("aligned_warpgroups", lambda: role("softmax0", warps=(17, 18, 19, 20))),
    ("aligned_warpgroups", lambda: role("softmax0", warps=(0, 1))),
    ("register_file", lambda: role("load", registers=56)),
    ("register_file", lambda: role("correction", registers=88)),
    ("register_file", lambda: role("correction", registers=76)),
    ("register_file", lambda: role("correction", registers=16)),
    ("register_file", five_warpgroups),
    ("named_barriers", lambda: with_signal(ONE, "stats0_full", stages=13)),
    ("told_work", lambda: strides(QUEUE, "transpose")),
    ("told_work", lambda: strides(STEALING, "epilogue")),
    ("arrive_counts", lambda: with_signal(ONE, "epi0_full", arrivals={"correction": 64})),
    ("arrive_counts", lambda: with_signal(PAIR, "p0_last", arrivals={"softmax0": 4})),
    ("arrive_counts", lambda: with_signal(PAIR, "p0_last", remote=False)),
    ("arrive_counts", lambda: with_signal(ONE, "s0_full", arrivals={"mma": 32})),
    ("elected_after_sync", lambda: with_signal(ONE, "stats0_empty", arrivals={"correction": 1})),
    ("stages_and_credits", lambda: with_signal(ONE, "epi0_empty", free=2)),
    ("stages_and_credits", lambda: with_signal(ONE, "epi0_empty", arrivals={"epilogue": 0})),
    ("transaction_bytes", lambda: with_signal(ONE, "q0_full", tx_bytes=32767)),
    ("transaction_bytes", lambda: with_signal(PAIR, "q0_full", tx_bytes=32768)),
    ("transaction_bytes", lambda: with_signal(ONE, "s0_full", tx_bytes=128)),
    ("transaction_bytes", lambda: with_signal(BACK, "q_full", first_tx_bytes=0)),
    ("transaction_bytes", lambda: with_signal(ONE, "q0_full", first_tx_bytes=64)),
    ("committed_work", lambda: edit_role(ONE, "epilogue", uncommitted)),
    ("committed_work", lambda: change_work(ONE, "epilogue", "store O0", asynchronous=False)),
    ("committed_work", lambda: change_work(ONE, "softmax0", "row sum 0", asynchronous=True)),
    ("memory_fits", lambda: with_buffer(ONE, "kv", stages=4)),
    ("memory_fits", lambda: with_buffer(ONE, "o1", size=136)),
    ("memory_fits", lambda: with_buffer(ONE, "q", space="rmem")),
    ("memory_fits", lambda: with_buffer(ONE, "q", size=0)),
    ("declared_overlaps", lambda: with_buffer(ONE, "p0", overlaps={})),
    ("declared_overlaps", lambda: with_buffer(ONE, "o0", overlaps={"s0": "no reason"})),
    ("declared_overlaps", lambda: with_buffer(ONE, "p0", overlaps={"s0": " "})),
    ("declared_overlaps", lambda: with_buffer(ONE, "o0", overlaps={"s7": "gone"})),
    ("aligned_buffers", lambda: with_buffer(ONE, "kv", start=131072 + 512, stages=2)),
    ("aligned_buffers", lambda: with_buffer(ONE, "kv", size=32768 + 64, stages=2)),
    ("aligned_buffers", lambda: with_buffer(ONE, "barriers", start=231428)),
    ("aligned_buffers", lambda: with_buffer(ONE, "o1", start=388)),
    ("ring_slots", lambda: with_buffer(ONE, "kv", stages=2)),
    ("ring_slots", lambda: with_signal(ONE, "kv_empty", free=2)),
    ("loads_fit_buffers", lambda: with_buffer(ONE, "kv", size=16384)),
    ("loads_fit_buffers", lambda: change_work(
        ONE, "load", "load Q0", amount=Copy(kind="load", num_bytes=32784))),
    ("used_buffers", lambda: replace(ONE, buffers=(
        *ONE.buffers, Buffer(name="spare", space="smem", start=231728, size=8)))),
    ("barrier_space", lambda: with_buffer(ONE, "barriers", size=8 * 16)),
    ("barrier_space", lambda: replace(
        ONE, buffers=tuple(b for b in ONE.buffers if b.name != "barriers"))),
    ("balanced_phases", lambda: edit_role(ONE, "softmax0", double_arrive)),
    ("runs_to_the_end", lambda: with_signal(ONE, "kv_empty", free=0)),
    ("passing_signals", lambda: passing_less(TURNS)),
    ("begun_alike", lambda: begun_late(AHEAD)),
    ("ordered_accesses", lambda: queries_released_early(AHEAD)),
    ("runs_to_the_end", lambda: role("load", closing=4 * (Wait("kv_empty"),))),
    ("runs_to_the_end", lambda: late_statistics(FORWARD["one Q tile"])),
    ("parity_is_enough", lambda: slow_reader(FORWARD["inline correction"])),
    ("arrivers_in_step", lambda: role(
        "correction", prologue=2 * ONE.role("correction").prologue)),
    ("ordered_accesses", lambda: change_work(ONE, "mma", "PV0 head", reads=("p0", "kv:V"))),
    ("ordered_accesses", lambda: change_work(BACK, "mma", "dQ", writes=("dv",))),
    ("launches_end", lambda: replace(BACK, turns=Turns(
        order="descending", launches=("ascending",)))),
    ("launches_end", lambda: replace(PAIR, turns=Turns(
        order="ascending", launches=("ascending", "descending")))),
]  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_plans_are_sound(name: str) -> None:
    """No rule finds anything in a kernel's plan."""
    require_sound(PLANS[name], B200)


@pytest.mark.parametrize("name", HOPPER)
def test_hopper_plans_are_sound(name: str) -> None:
    """Two places for Q where there is room for them, one where there is not."""
    require_sound(HOPPER[name], H200)
    assert HOPPER[name].buffer("q").stages == (2 if name in ("ahead", "8 bits, queue") else 1)


@pytest.mark.parametrize(
    ("rule", "fault"), FAULTS, ids=[f"{row[0]}-{i}" for i, row in enumerate(FAULTS)]
)
def test_each_rule_finds_its_planted_fault(rule: str, fault: Fault) -> None:
    """A rule that cannot fail checks nothing; the message names the subject."""
    plan = fault()
    findings = check_plan(plan, B200)
    assert rule in {found.rule for found in findings}
    assert all(found.subject and found.message for found in findings)


@pytest.mark.parametrize(
    ("rule", "fault"), FAULTS, ids=[f"{row[0]}-{i}" for i, row in enumerate(FAULTS)]
)
def test_no_order_of_roles_hides_a_fault(rule: str, fault: Fault) -> None:
    """Roles have no order: the rule finds its fault whichever of them comes first."""
    plan = fault()
    turned = replace(plan, roles=plan.roles[::-1])
    assert rule in {found.rule for found in check_plan(turned, B200)}


@pytest.mark.parametrize("total", [1, 2, 5])
def test_a_work_tile_is_cut_in_every_way(total: int) -> None:
    """None of its trips masked, all, and what lies between; at least those that a loop needs."""
    assert [(cut["masked_tiles"], cut["plain_tiles"]) for cut in trip_counts(ONE, total)] == [
        (masked, total - masked) for masked in range(total + 1)
    ]
    overlapped = warpgroup_plan(WarpgroupPipeline(), H100)  # its first tile is outside the loop
    cuts = trip_counts(overlapped, total)
    assert [cut["masked_tiles"] for cut in cuts] == list(range(1, total + 1))
    assert all(sum(cut.values()) == 2 * total for cut in cuts)


def test_a_cut_names_every_trip() -> None:
    """Of a plan with more than two parts as well; they add up to the whole."""
    cuts = trip_counts(replace(ONE, trips=("all", "first", "second", "third")), 3)
    assert all(set(cut) == {"all", "first", "second", "third"} for cut in cuts)
    assert all(sum(cut.values()) == 2 * cut["all"] == 6 for cut in cuts)


def test_the_pointer_needs_room_beside_the_barriers() -> None:
    """Eight bytes for each mbarrier and for the pointer to tensor memory, not one less."""
    count = sum(signal.stages for signal in ONE.signals if signal.kind == "mbarrier")
    for size, rules in ((8 * count + 8, set()), (8 * count + 7, {"barrier_space"})):
        small = with_buffer(ONE, "barriers", size=size, stages=1)
        assert {found.rule for found in check_plan(small, B200)} == rules


def test_every_rule_has_a_planted_fault() -> None:
    """The table above is complete."""
    rules = {rule.__name__ for rule in (*STRUCTURE_RULES, *OTHER_RULES)}
    assert rules == {rule for rule, _ in FAULTS}


def test_all_findings_are_raised() -> None:
    """require_sound says everything at once, with the numbers."""
    broken = with_signal(with_buffer(ONE, "o1", size=136), "q0_full", tx_bytes=1)
    with pytest.raises(ValueError) as raised:
        require_sound(broken, B200)
    assert str(raised.value) == (
        "plan 'forward d128x128 cta_group 1' is not sound: "
        "transaction_bytes: q0_full: declares 1 (+ 0) bytes; its phases carry 32768, the first "
        "32768; memory_fits: tmem: needs 520 columns; B200 has 512"
    )


def test_the_machine_counts() -> None:
    """A Blackwell plan does not fit a GPU without tensor memory."""
    assert [str(found) for found in check_plan(ONE, H200)] == [
        "memory_fits: tmem: needs 512 columns; H200 has 0"
    ]


def test_a_single_slot_has_no_next_one_to_align() -> None:
    """Only slots behind others must be a multiple of a TMA boundary."""
    odd = with_buffer(ONE, "kv", size=32768 + 64, stages=1)
    assert "aligned_buffers" not in {found.rule for found in check_plan(odd, B200)}


def test_a_signal_without_arrivers() -> None:
    """Nobody could ever complete it."""
    lonely = Signal(name="lonely", arrivals={}, waiters=("mma",))
    findings = check_plan(replace(ONE, signals=(*ONE.signals, lonely)), B200)
    assert [found.message for found in findings if found.rule == "declared_roles"] == [
        "declares no arrivers"
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_plan_that_spills_can_be_compiled(overlap: bool) -> None:
    """Where registers do not suffice each product is waited for at once; all else is as before."""
    tight = WarpgroupPipeline(consumers=3, tile_n=144, overlap=overlap)
    plan = warpgroup_plan(tight, H200)
    assert plan.role("consumer0").spilled_registers > 0
    assert check_plan(plan, H200) == []
    product = change_work(ONE, "mma", "QK0", asynchronous=False)  # of tensor memory
    assert "committed_work" in {found.rule for found in check_plan(product, B200)}
