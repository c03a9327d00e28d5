"""What each role of a plan knows to have ended when it touches memory; `order_rules` says more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fa4.plan.phase_rules import trip_counts
from fa4.plan.places import MemoryRegion, Resolver
from fa4.plan.schema import (
    GROUP_WARPS,
    Arrive,
    Copy,
    Math,
    Mma,
    PipelinePlan,
    Role,
    Signal,
    SmemAccess,
    Sync,
    Wait,
    Work,
    in_order,
    unroll,
    walk,
)
from fa4.plan.signal_rules import async_unit, leads_pair

Known = int  # a set of accesses that have ended, one bit each


@dataclass(frozen=True)
class MemoryUse:
    """Work on memory, by one warpgroup: regions by their numbers."""

    work: Work
    group: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]


Step = Wait | Arrive | MemoryUse | Sync


@dataclass
class RoleInCta:
    """A role in one CTA: where it is, and what each of its warpgroups knows to have ended."""

    role: Role
    cta: int
    leads: bool
    steps: list[Step]
    known: list[Known]
    position: int = 0
    own_bytes: Known = 0  # accesses to shared memory by its threads
    products: Known = 0  # what is known when those issued so far have ended
    copies: dict[str, Known] = field(default_factory=dict)  # likewise, by unit; see `fresh`
    telling: dict[str, list[list[Known]]] = field(default_factory=dict)  # its arrivals, by barrier
    fresh: set[str] = field(default_factory=set)  # units with work since an arrival after them


class AccessReplay:
    """All roles of all CTAs over some work tiles, one after the other as far as each can go."""

    def __init__(self, plan: PipelinePlan, totals: Sequence[int]) -> None:
        self.plan, self.ctas = plan, tuple(range(plan.cta_group))
        self.signals = {signal.name: signal for signal in plan.signals}
        self.leads = {role.name: leads_pair(role) for role in plan.roles}
        self.regions: dict[MemoryRegion, int] = {}
        programs = self._programs(totals)
        self.actors = [
            RoleInCta(role, cta, self.leads[role.name], programs[role.name], [0] * _groups(role))
            for role in plan.roles
            for cta in (self.ctas[:1] if self.leads[role.name] else self.ctas)
        ]
        self.meets = [[j for other, j in self.regions.items() if region.meets(other)]
                      for region in self.regions]  # fmt: skip
        self.read = [[0] * len(self.regions) for _ in self.ctas]
        self.written = [[0] * len(self.regions) for _ in self.ctas]
        self.accesses: list[tuple[RoleInCta, MemoryUse]] = []
        # What has been told at each CTA's barrier by each arriver, and which barriers one reaches.
        self.told: dict[tuple[str, int], list[list[Known]]] = {}
        for actor in self.actors:
            for signal in plan.signals:
                if actor.role.name in signal.arrivals:
                    mine = actor.telling[signal.name] = []
                    for cta in self._targets(signal, actor):
                        mine.append([])
                        self.told.setdefault((signal.name, cta), []).append(mine[-1])
        self.waited: dict[tuple[str, int, str], int] = {}
        self.found: dict[tuple[str, ...], str] = {}

    def _programs(self, totals: Sequence[int]) -> dict[str, list[Step]]:
        """Steps of every role; those that fill rings are resolved first."""
        cuts = [trip_counts(self.plan, total) for total in totals]
        tiles = [some[len(some) // 2] for some in cuts]  # some masked, some not
        resolver, programs = Resolver(self.plan), {}
        for role in sorted(self.plan.roles, key=lambda role: not _fills_rings(role)):
            steps: list[Step] = []
            programs_of = (unroll(role.program, trips) for trips in in_order(tiles))
            every = (unroll(role.prologue, {}), *programs_of, unroll(role.closing, {}))
            for step in (step for program in every for step in program):
                if isinstance(step, Work):
                    steps += self._uses(resolver, role, step)
                else:
                    if isinstance(step, Wait):
                        resolver.wait(role.name, step.signal)
                    steps.append(step)
            programs[role.name] = steps
        return programs

    def _uses(self, resolver: Resolver, role: Role, work: Work) -> list[Step]:
        """A barrier, or what each warpgroup accesses."""
        if isinstance(work.amount, Sync):
            return [work.amount]
        if not (work.reads or work.writes):
            return []
        reads, writes = (
            [self.regions.setdefault(region, len(self.regions))
             for region in resolver.resolve(role.name, work, names)]
            for names in (work.reads, work.writes)
        )  # fmt: skip
        groups = _groups(role)
        if work.by_group:
            return [MemoryUse(work, g, tuple(reads[g : g + 1]), tuple(writes[g : g + 1]))
                    for g in range(groups)]  # fmt: skip
        # One thread issues copies and products.
        one = isinstance(work.amount, (Copy, Mma))
        return [
            MemoryUse(work, g, tuple(reads), tuple(writes)) for g in range(1 if one else groups)
        ]

    def _targets(self, signal: Signal, actor: RoleInCta) -> tuple[int, ...]:
        """CTAs whose barrier an arrival reaches; only the leader's, where its products wait."""
        if actor.leads or len(self.ctas) == 1:
            return self.ctas
        led = any(self.leads[name] for name in signal.waiters)
        after = {s.after for s in actor.steps if isinstance(s, Arrive) and s.signal == signal.name}
        if led:  # a relay to the leader, of what came by dsmem, may be left out of a plan
            both = signal.remote or after & {"tma", "dsmem"}
            return (0,) if both or actor.cta == 0 else ()
        return (1 - actor.cta,) if "dsmem" in after else (actor.cta,)

    def run(self) -> None:
        """Let every actor go as far as it can."""
        progress = True
        while progress:
            progress = False
            for actor in self.actors:
                while actor.position < len(actor.steps) and self._advance(actor):
                    progress = True

    def stuck(self) -> str | None:
        """An actor that waits for ever, and for what."""
        for actor in self.actors:
            if actor.position < len(actor.steps):
                return f"{self._name(actor)} on {actor.steps[actor.position]}"
        return None

    def _advance(self, actor: RoleInCta) -> bool:
        step = actor.steps[actor.position]
        if isinstance(step, Wait):
            if not self._wait(actor, step):
                return False
        elif isinstance(step, Arrive):
            self._arrive(actor, step)
        elif isinstance(step, MemoryUse):
            self._access(actor, step)
        else:
            actor.known = [_join(actor.known)] * len(actor.known)
        actor.position += 1
        return True

    def _wait(self, actor: RoleInCta, step: Wait) -> bool:
        key = (actor.role.name, actor.cta, step.signal)
        phase = self.waited.get(key, 0) - self.signals[step.signal].free
        if phase >= 0:
            arrivals = self.told.get((step.signal, actor.cta), [])
            if not arrivals or any(len(some) <= phase for some in arrivals):
                return False
            told = _join([some[phase] for some in arrivals])
            actor.known = [known | told for known in actor.known]
        self.waited[key] = self.waited.get(key, 0) + 1
        return True

    def _arrive(self, actor: RoleInCta, step: Arrive) -> None:
        if step.after is None:
            told = _join(actor.known)
        elif step.after == "tensor":
            told = actor.products
        else:
            told = actor.copies.get(step.after, 0)
            actor.fresh.discard(step.after)
        for barrier in actor.telling[step.signal]:
            barrier.append(told)

    def _access(self, actor: RoleInCta, use: MemoryUse) -> None:
        amount, bit = use.work.amount, 1 << len(self.accesses)
        self.accesses.append((actor, use))
        before = actor.known[use.group]
        ctas: tuple[int, ...] = (actor.cta,)
        if isinstance(amount, Mma):
            before |= actor.products
            ctas = self.ctas if amount.cta_group == 2 else ctas
        by_threads = isinstance(amount, (SmemAccess, Math))
        peer = isinstance(amount, Copy) and amount.kind == "dsmem"
        self._check(actor, use, before | (actor.own_bytes if by_threads else 0),
                    ctas, (1 - actor.cta,) if peer else ctas)  # fmt: skip
        for cta in ctas:
            for place in use.reads:
                self.read[cta][place] |= bit
        for cta in (1 - actor.cta,) if peer else ctas:
            for place in use.writes:
                self.written[cta][place] |= bit
        if by_threads:
            actor.own_bytes |= bit
        unit = async_unit(amount)
        if not use.work.asynchronous or unit is None:
            actor.known[use.group] |= bit
        elif unit == "tensor":
            actor.products = before | bit
        else:
            # Stores are waited for in groups, one behind the other; a load tells of itself.
            load = isinstance(amount, Copy) and amount.kind in ("load", "dsmem")
            earlier = 0 if load and unit not in actor.fresh else actor.copies.get(unit, 0)
            actor.copies[unit] = earlier | before | bit
            actor.fresh.add(unit)

    def _check(
        self,
        actor: RoleInCta,
        use: MemoryUse,
        before: Known,
        at: tuple[int, ...],
        into: tuple[int, ...],
    ) -> None:
        """Note every access to the same memory that this one does not know to have ended."""
        for cta in at:
            for place in use.reads:
                for other in self.meets[place]:
                    self._compare(actor, use, self.written[cta][other] & ~before, other)
        for cta in into:
            for place in use.writes:
                for other in self.meets[place]:
                    hit = (self.written[cta][other] | self.read[cta][other]) & ~before
                    self._compare(actor, use, hit, other)

    def _compare(self, actor: RoleInCta, use: MemoryUse, unknown: Known, place: int) -> None:
        while unknown:
            number = (unknown & -unknown).bit_length() - 1
            unknown &= unknown - 1
            first, earlier = self.accesses[number]
            names = [f"{some.work.what} of {self._name(who)}"
                     for who, some in ((first, earlier), (actor, use))]  # fmt: skip
            region = list(self.regions)[place]
            key = (region.name, *names)
            self.found.setdefault(
                key, f"{names[1]} may come before {names[0]} has ended: no signal orders them"
            )

    def _name(self, actor: RoleInCta) -> str:
        return actor.role.name if len(self.ctas) == 1 else f"{actor.role.name} {actor.cta}"


def _groups(role: Role) -> int:
    return max(1, len(role.warps) // GROUP_WARPS)


def _fills_rings(role: Role) -> bool:
    works = (step for step in walk(role.program) if isinstance(step, Work))
    return any(isinstance(work.amount, Copy) and work.amount.kind == "load" for work in works)


def _join(some: Sequence[Known]) -> Known:
    every = 0
    for known in some:
        every |= known
    return every
