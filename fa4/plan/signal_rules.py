"""Rules on signals: who arrives and waits, arrive counts, transaction bytes, commits."""

from __future__ import annotations

from collections.abc import Iterator

from fa4.hardware import Gpu
from fa4.plan.schema import (
    Amount,
    Arrive,
    Copy,
    Mma,
    PipelinePlan,
    Role,
    Signal,
    Sync,
    Wait,
    Work,
    unroll,
    walk,
)

Broken = Iterator[tuple[str, str]]

WARP = 32
NAMED_BARRIERS = 16  # of a CTA (PTX ISA, barrier)
TOLD = "work_full"  # of plans whose work tiles are drawn or stolen
KINDS = ("mbarrier", "named", "group", "products")


def async_unit(amount: Amount) -> str | None:
    """The unit whose completions an `Arrive(after=...)` can stand for; None if there is none."""
    if isinstance(amount, Mma):
        return "tensor"
    if isinstance(amount, Copy):
        return {"reduce": "reduce", "dsmem": "dsmem"}.get(amount.kind, "tma")
    return None


def leads_pair(role: Role) -> bool:
    """Does the role issue products of a CTA pair? Then it runs in the leader CTA, for both."""
    return any(
        isinstance(step, Work) and isinstance(step.amount, Mma) and step.amount.cta_group == 2
        for step in walk(role.program)
    )


def declared_roles(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """Signals name roles of the plan, and have a kind that exists."""
    roles = {role.name for role in plan.roles}
    for signal in plan.signals:
        for name in sorted({*signal.arrivals, *signal.waiters} - roles):
            yield signal.name, f"names {name}, which is no role; roles are {sorted(roles)}"
        if signal.kind not in KINDS:
            yield signal.name, f"kind {signal.kind!r}; must be one of {', '.join(KINDS)}"
        for what, names in (("arrivers", signal.arrivals), ("waiters", signal.waiters)):
            if not names:
                yield signal.name, f"declares no {what}"


def told_work(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """Where work tiles are drawn or stolen every role is told which is next, or tells it."""
    if not any(signal.name == TOLD for signal in plan.signals):
        return
    for role in plan.roles:
        used = {step.signal for step in walk(role.program) if isinstance(step, (Wait, Arrive))}
        if role.program and TOLD not in used:
            yield role.name, f"is not told by {TOLD} which work tile is next"


def named_barriers(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """The named signals fit beside the barrier of all warps; each stage takes one."""
    stages = {signal.name: signal.stages for signal in plan.signals if signal.kind == "named"}
    if sum(stages.values()) > NAMED_BARRIERS - 1:
        listed = ", ".join(f"{name} {count}" for name, count in stages.items())
        yield (
            "named signals",
            f"take {sum(stages.values())} barriers: {listed}; a CTA has {NAMED_BARRIERS}, and all "
            f"its warps meet at one",
        )


def known_signals(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """Programs wait and arrive on signals of the plan."""
    names = {signal.name for signal in plan.signals}
    for role in plan.roles:
        used = {step.signal for step in walk(role.steps) if isinstance(step, (Wait, Arrive))}
        for name in sorted(used - names):
            yield role.name, f"uses signal {name}, which the plan does not have"


def declared_arrivers(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """Every declared arriver of a signal arrives in its program, and nobody else does."""
    yield from _compare(plan, Arrive, "arrive")


def declared_waiters(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """Every declared waiter of a signal waits in its program, and nobody else does."""
    yield from _compare(plan, Wait, "wait")


def _compare(plan: PipelinePlan, kind: type, verb: str) -> Broken:
    for signal in plan.signals:
        declared = set(signal.arrivals if kind is Arrive else signal.waiters)
        doing = {
            role.name
            for role in plan.roles
            for step in walk(role.steps)
            if not isinstance(step, Work) and (type(step), step.signal) == (kind, signal.name)
        }
        for name in sorted(declared - doing):
            yield signal.name, f"{name} is declared to {verb} and never does"
        for name in sorted(doing - declared):
            yield signal.name, f"{name} does {verb} and is not declared; {sorted(declared)} are"


def arrive_counts(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """An arrive stands for every thread of its role, one lane per warp, or one elected thread.

    Times the CTA group if the other CTA arrives too (`remote`). A commit of products is one
    arrival, wherever it comes from, and so is the completion of a load, with its issuing thread.
    """
    for signal in plan.signals:
        group = plan.cta_group if signal.remote else 1
        for name, count in signal.arrivals.items():
            warps = len(plan.role(name).warps)
            allowed = sorted({group, group * warps, group * warps * WARP})
            units = {step.after for step in _arrives(plan, signal, name)}
            if signal.kind == "mbarrier" and (
                "tensor" in units or (signal.tx_bytes and units != {None})
            ):
                allowed = [1]
            if count not in allowed:
                listed = " or ".join(map(str, allowed))
                yield signal.name, f"{name} arrives with {count}; its {warps} warps make {listed}"


def _arrives(plan: PipelinePlan, signal: Signal, role: str) -> list[Arrive]:
    owner = plan.role(role)
    steps = walk(owner.steps)
    return [s for s in steps if isinstance(s, Arrive) and s.signal == signal.name]


def elected_after_sync(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """One thread may arrive for a role of several warps only once these have met (`Sync`)."""
    for role in plan.roles:
        met = True
        for step in walk(role.steps):
            if isinstance(step, Work):
                met = isinstance(step.amount, Sync)
            elif isinstance(step, Arrive) and step.after is None and not met:
                signal = plan.signal(step.signal)
                count = signal.arrivals[role.name]
                elected = plan.cta_group if signal.remote else 1
                if len(role.warps) > 1 and count == elected:
                    yield (
                        signal.name,
                        f"{role.name} arrives with {count} for {len(role.warps)} warps that have "
                        f"not met since their last work",
                    )


def stages_and_credits(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """At most one free phase per mbarrier: a fresh one passes a wait for its previous phase."""
    for signal in plan.signals:
        if signal.stages < 1 or signal.free < 0 or min(signal.arrivals.values()) < 1:
            yield (
                signal.name,
                f"stages {signal.stages}, free {signal.free}, arrivals {dict(signal.arrivals)}; "
                f"must be at least 1, 0 and 1",
            )
        if signal.kind == "mbarrier" and signal.free > signal.stages:
            yield signal.name, f"{signal.free} free phases on {signal.stages} barriers"


def transaction_bytes(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """A signal's transaction bytes are those its producer copies per phase.

    Loads for a role that runs in the leader of a pair are counted there, for both CTAs. Where tiles
    of several sizes share a ring, the largest counts; a work tile's first phase may carry
    `first_tx_bytes` more.
    """
    for signal in plan.signals:
        filled: dict[str, list[int]] = {}
        for name in signal.arrivals:
            for what, num_bytes in _fills(plan, signal, name):
                filled.setdefault(what, []).append(num_bytes)
        if not filled:
            if signal.tx_bytes or signal.first_tx_bytes:
                yield signal.name, f"expects {signal.tx_bytes} bytes, and nobody copies any"
            continue
        extra = signal.first_tx_bytes
        for what, sizes in filled.items():
            first, later = sizes[0], sizes[1:] or [sizes[0] - extra]
            if len(set(later)) > 1 or first not in (later[0], later[0] + extra):
                yield (
                    signal.name,
                    f"{what} copies {sorted(set(sizes))} bytes; a first phase may have {extra} "
                    f"more, the others must agree",
                )
        most = max(size for sizes in filled.values() for size in (sizes[1:] or sizes))
        first = max(sizes[0] for sizes in filled.values())
        if most != signal.tx_bytes or first not in (most, most + extra):
            yield (
                signal.name,
                f"declares {signal.tx_bytes} (+ {extra}) bytes; its phases carry {most}, the "
                f"first {first}",
            )
        elif extra and first != most + extra:
            yield signal.name, f"declares {extra} more bytes in the first phase; it carries none"


def _fills(plan: PipelinePlan, signal: Signal, role: str) -> Iterator[tuple[str, int]]:
    """(what, bytes) of the copies that complete a phase of `signal` each, over two trips."""
    group = 1
    if plan.cta_group == 2 and any(leads_pair(plan.role(name)) for name in signal.waiters):
        group = 2
    copied: Work | None = None
    for step in unroll(plan.role(role).program, dict.fromkeys(plan.trips, 2)):
        if isinstance(step, Work) and isinstance(step.amount, Copy):
            copied = step
        elif isinstance(step, Arrive) and step.signal == signal.name and copied is not None:
            amount = copied.amount
            assert isinstance(amount, Copy)
            if step.after == "dsmem":  # each CTA counts what its peer pushes
                yield copied.what, amount.num_bytes
            elif step.after == "tma" and amount.kind == "load":
                yield copied.what, amount.num_bytes * group


def committed_work(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """Asynchronous work is followed by an arrive on its unit; such an arrive has work before it.

    wgmma may have ended before: a compiler without registers waits for each as it issues it.
    """
    for role in plan.roles:
        for trips in (1, 2):
            pending: dict[str, str] = {}
            issued: set[str] = set()
            for step in unroll(role.program, dict.fromkeys(plan.trips, trips)):
                if isinstance(step, Work) and step.asynchronous:
                    unit = async_unit(step.amount)
                    if unit is None:
                        yield role.name, f"{step.what} cannot be asynchronous"
                        continue
                    pending[unit] = step.what
                    issued.add(unit)
                elif isinstance(step, Work):
                    if isinstance(step.amount, Mma) and step.amount.in_registers:
                        issued.add("tensor")
                elif isinstance(step, Arrive) and step.after is not None:
                    if step.after not in issued:
                        yield (
                            role.name,
                            f"arrives on {step.signal} after {step.after}, where it has no work",
                        )
                    pending.pop(step.after, None)
            for unit, what in pending.items():
                yield role.name, f"ends before {what} on {unit} is committed"
            if pending:
                break
