"""Static checks of a `PipelinePlan`: what must hold before anybody simulates or compiles it.

A rule is a function of a plan and a machine that yields (subject, message) for each thing that
breaks it; messages carry the numbers. The rules on signals, memory, phases and the order of
accesses are in `signal_rules`, `memory_rules`, `phase_rules` and `order_rules`, the one on what is
resident in `resident`; those on roles are here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fa4.hardware import Gpu
from fa4.plan import memory_rules, order_rules, phase_rules, resident, signal_rules
from fa4.plan.schema import (
    FOLLOWING,
    GROUP_WARPS,
    LEAST_REGISTERS,
    Arrive,
    Loop,
    PipelinePlan,
    Program,
    TmemAccess,
    Wait,
    Work,
    walk,
)
from fa4.plan.work import REGISTER_STEP, launch_registers

WARP = 32
MOST_REGISTERS = 256  # setmaxnreg (PTX ISA)

Broken = Iterator[tuple[str, str]]
Rule = Callable[[PipelinePlan, Gpu], Broken]


@dataclass(frozen=True)
class Finding:
    """One thing in a plan that breaks a rule: which rule, what breaks it, and how."""

    rule: str
    subject: str
    message: str

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.rule}: {self.subject}: {self.message}"


def check_plan(plan: PipelinePlan, gpu: Gpu) -> list[Finding]:
    """Everything in `plan` that breaks a rule; empty for a sound plan.

    The rules on phases replay the programs, which takes names that resolve: they are left out as
    long as the structure is broken.
    """
    findings = _apply(STRUCTURE_RULES, plan, gpu)
    return findings or _apply(OTHER_RULES, plan, gpu)


def require_sound(plan: PipelinePlan, gpu: Gpu) -> None:
    """Raise ValueError with every finding unless the plan is sound."""
    findings = check_plan(plan, gpu)
    if findings:
        raise ValueError(f"plan {plan.name!r} is not sound: " + "; ".join(map(str, findings)))


def _apply(rules: tuple[Rule, ...], plan: PipelinePlan, gpu: Gpu) -> list[Finding]:
    return [
        Finding(rule.__name__, subject, message)
        for rule in rules
        for subject, message in rule(plan, gpu)
    ]


def unique_names(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """Roles, signals and buffers are called by their names."""
    for kind, items in (("role", plan.roles), ("signal", plan.signals), ("buffer", plan.buffers)):
        for name, count in Counter(item.name for item in items).items():
            if count > 1:
                yield name, f"{count} {kind}s have this name"


def known_trips(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """Loops and shares name what the plan declares."""
    for role in plan.roles:
        for loop in _loops(role.steps):
            if loop.trip not in (*plan.trips, FOLLOWING):
                yield role.name, f"loops over {loop.trip}; the plan's trips are {list(plan.trips)}"
        if any(True for _ in _loops(role.prologue)):
            yield role.name, "loops in its prologue, before there is a work tile to count"
        for step in walk(role.steps):
            share = step.share if isinstance(step, Work) else None
            if share is not None and share not in plan.shares:
                yield role.name, f"{step} uses share {share}; declared are {list(plan.shares)}"


def closing_waits(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """After its last work tile a role only waits."""
    for role in plan.roles:
        for step in role.closing:
            if not isinstance(step, Wait):
                yield role.name, f"ends with {step}; it may only wait there"


def passing_signals(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """Passing over a tile makes the signals of a step of each loop, but for a role's own."""
    shared = {signal.name for signal in plan.signals if signal.kind in ("mbarrier", "named")}

    def signals(program: Program) -> Counter[Wait | Arrive]:
        steps = (step for step in walk(program) if isinstance(step, (Wait, Arrive)))
        return Counter(step for step in steps if step.signal in shared)

    for role in plan.roles:
        loops = (loop for loop in _loops(role.program) if loop.trip != FOLLOWING)
        for loop in loops if role.passing else ():
            differ = (a := signals(role.passing)) - (b := signals(loop.body)) or b - a
            if differ:
                listed = ", ".join(map(str, differ))
                yield role.name, f"{loop.trip} and passing over a tile differ in {listed}"


def begun_alike(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """What begins the following work tiles ends the prologue, which begins the first."""
    for role in plan.roles:
        for loop in _loops(role.program):
            begun = role.prologue[len(role.prologue) - len(loop.body) :]
            if loop.trip == FOLLOWING and (begun != loop.body or loop.offset):
                yield role.name, "begins the first work tile otherwise than the following ones"


def products_ended(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """A role that waits at its end does so until products have released all slots of its rings."""
    by_products = {
        step.signal
        for role in plan.roles
        for step in walk(role.program)
        if isinstance(step, Arrive) and step.after == "tensor"
    }
    for role in plan.roles:
        waits = Counter(step.signal for step in role.closing if isinstance(step, Wait))
        for signal in plan.signals if role.closing else ():
            slots = signal.free if signal.name in by_products else 0
            if signal.kind != "mbarrier" or role.name not in signal.waiters:
                continue
            if waits[signal.name] != slots:
                yield (
                    role.name,
                    f"waits {waits[signal.name]}x for {signal.name} at its end; products use "
                    f"{slots} slots",
                )


def _loops(program: Program) -> Iterator[Loop]:
    for step in program:
        if isinstance(step, Loop):
            yield step
            yield from _loops(step.body)


def warps_in_one_role(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """Each warp runs one program, and the CTA has no more threads than the machine allows."""
    owners: dict[int, list[str]] = {}
    for role in plan.roles:
        if not role.warps:
            yield role.name, "has no warps"
        for warp in role.warps:
            owners.setdefault(warp, []).append(role.name)
    for warp, names in sorted(owners.items()):
        if len(names) > 1:
            yield f"warp {warp}", f"belongs to {len(names)} roles: {', '.join(names)}"
    threads = WARP * (1 + max(owners, default=-1))
    if threads > gpu.max_threads_per_cta:
        yield "warps", f"need {threads} threads; {gpu.name} allows {gpu.max_threads_per_cta}"


def aligned_warpgroups(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """Roles of four and more warps, and those that touch TMEM, are whole aligned warpgroups.

    A warp reaches the quarter of the tensor memory's lanes that its index modulo 4 names.
    """
    for role in plan.roles:
        tensor = any(
            isinstance(step, Work) and isinstance(step.amount, TmemAccess)
            for step in walk(role.steps)
        )
        if not role.warps or (len(role.warps) < GROUP_WARPS and not tensor):
            continue
        first, count = role.warps[0], len(role.warps)
        consecutive = role.warps == tuple(range(first, first + count))
        if first % GROUP_WARPS or count % GROUP_WARPS or not consecutive:
            yield role.name, f"warps {list(role.warps)} are not whole groups of 4 from 4k on"


def register_file(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """setmaxnreg's range and step, one count per warpgroup, and the sum is what a launch brings.

    A warpgroup without a role keeps the least count. Warps take registers from those in the same
    quarter of the SM (measured on an H100); a warpgroup has one in each, so sums over them count.
    """
    groups: dict[int, dict[str, int]] = {group: {} for group in range(plan.warps // GROUP_WARPS)}
    for role in plan.roles:
        count = role.registers
        if count % REGISTER_STEP or not LEAST_REGISTERS <= count <= MOST_REGISTERS:
            yield (
                role.name,
                f"{count} registers; must be a multiple of {REGISTER_STEP} in "
                f"{LEAST_REGISTERS}..{MOST_REGISTERS}",
            )
        for warp in role.warps:
            groups[warp // GROUP_WARPS][role.name] = count
    for group, counts in groups.items():
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name} {count}" for name, count in counts.items())
            yield f"warpgroup {group}", f"has several register counts: {listed}"
    each = [max(counts.values(), default=LEAST_REGISTERS) for counts in groups.values()]
    launched = launch_registers(len(each), gpu.registers_per_sm) if each else 0
    if sum(each) > len(each) * launched:
        terms = " + ".join(map(str, each))
        yield (
            "registers",
            f"warpgroups need {terms} = {sum(each)} a thread; {len(each)} of them are launched "
            f"with {launched} each, {len(each) * launched}",
        )


STRUCTURE_RULES: tuple[Rule, ...] = (
    unique_names,
    known_trips,
    closing_waits,
    passing_signals,
    begun_alike,
    signal_rules.declared_roles,
    signal_rules.known_signals,
    signal_rules.declared_arrivers,
    signal_rules.declared_waiters,
    memory_rules.known_buffers,
)
OTHER_RULES: tuple[Rule, ...] = (
    warps_in_one_role,
    aligned_warpgroups,
    register_file,
    products_ended,
    signal_rules.arrive_counts,
    signal_rules.elected_after_sync,
    signal_rules.stages_and_credits,
    signal_rules.named_barriers,
    signal_rules.told_work,
    signal_rules.transaction_bytes,
    signal_rules.committed_work,
    memory_rules.memory_fits,
    memory_rules.declared_overlaps,
    memory_rules.aligned_buffers,
    memory_rules.ring_slots,
    memory_rules.loads_fit_buffers,
    memory_rules.used_buffers,
    memory_rules.barrier_space,
    phase_rules.balanced_phases,
    phase_rules.runs_to_the_end,
    phase_rules.parity_is_enough,
    phase_rules.arrivers_in_step,
    order_rules.ordered_accesses,
    resident.launches_end,
)
