"""What every warp role is given: the plan's signals as barriers, and its memory as addresses."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import count, product
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05

from fa4.kit.rings import Ring, phase_of, slot_of
from fa4.kit.units import WARP
from fa4.plan.schema import Arrive, PipelinePlan, Signal, Wait
from fa4.plan.signal_rules import leads_pair

CTA_BARRIER = 0  # named barrier of all warps; the plan's own start at 1
LEADER = 0  # rank in its pair of the CTA whose MMA warp issues the products of both
BOTH = 0b11  # ranks of a pair, as a mask
HALVES = "ab"  # letters of the groups of a Q tile
OWN, OTHER = "@", "^"  # stand for the letter of this group, and of the other one


def mbarrier_numbers(plan: PipelinePlan) -> dict[str, int]:
    """The first mbarrier of each signal, counted from the start of the barriers' memory."""
    numbers, total = {}, 0
    for signal in plan.signals:
        if signal.kind == "mbarrier":
            numbers[signal.name] = total
            total += signal.stages
    return numbers


def named_numbers(plan: PipelinePlan) -> dict[str, int]:
    """The first hardware barrier of each named signal."""
    numbers, total = {}, CTA_BARRIER + 1
    for signal in plan.signals:
        if signal.kind == "named":
            numbers[signal.name] = total
            total += signal.stages
    return numbers


@dataclass(frozen=True)
class Signals:
    """The signals of a plan, as one role uses them.

    Waits and arrivals are by name; every count comes from the plan. `trace` collects them as the
    plan's own steps while the kernel is traced, so that they can be compared with its program.

    Where a plan has several of a kind, their names differ by a number: code that serves all of them
    writes `#` for it, in the names of signals and of its role, and says which by `numbered`. Where
    they differ by a letter as well, that is `@`, and `^` the other of the two.

    In a CTA pair the leader's MMA warp works for both CTAs: what it waits for arrives at the
    leader's barriers (loads count their bytes there, `remote` signals their threads), and what it
    commits arrives at the barriers of both.
    """

    plan: cutlass.Constexpr
    role: cutlass.Constexpr
    trace: cutlass.Constexpr
    base: cute.Pointer
    number: Int32 | int | None = None
    half: Int32 | int | None = None

    def of(self, role: str) -> "Signals":
        """The same signals as another role uses them."""
        return replace(self, role=role)

    def numbered(self, number: Int32 | int, half: Int32 | int | None = None) -> "Signals":
        """The same signals with `number` for `#`; one that is known at run time only serves all.

        half: the number of the letter for `@`, alike.
        """
        return replace(self, number=number, half=half)

    def ring(self, name: str) -> Ring:
        """The start of the ring `<name>_full`, `<name>_empty`."""
        return Ring.of(self.plan.signal(f"{name}_full").stages)

    def pointer(self, name: str, stage: Int32 | int = 0) -> cute.Pointer:
        """The mbarrier of a signal's stage."""
        return self.base + (self._place(mbarrier_numbers(self.plan), name) + stage)

    def wait(self, name: str, at: Ring | Int32 | int = 0) -> None:
        """Wait for a phase: of a ring's slot, or number `at`, from 0; free phases have passed.

        A named barrier knows its phase, not its stage. Of a group of bulk copies, the oldest of as
        many as have places has read its memory. A warpgroup's products are waited for with their
        sums.
        """
        signal = self._record(name, Wait)
        if signal.kind == "products":
            return
        if signal.kind == "group":
            cute.arch.cp_async_bulk_wait_group(max(signal.free - 1, 0), read=True)
        elif signal.kind == "named":
            place = self._place(named_numbers(self.plan), name) + slot_of(at)
            cute.arch.barrier(barrier_id=place, number_of_threads=self._named_threads(signal))
        else:
            parity = (phase_of(at) - signal.free // signal.stages) & 1
            cute.arch.mbarrier_wait(self.pointer(name, slot_of(at)), parity)

    def arrive(self, name: str, at: Ring | Int32 | int = 0, *, after: str | None = None) -> None:
        """Arrive with every thread that calls; the plan counts them.

        after: the unit whose work the callers have waited for, where the plan has it arrive.
        """
        signal = self._record(name, Arrive, after)
        if signal.kind == "products":
            return
        if signal.kind == "group":
            cute.arch.cp_async_bulk_commit_group()
        elif signal.kind == "named":
            number = self._place(named_numbers(self.plan), name) + slot_of(at)
            threads = self._named_threads(signal)
            cute.arch.barrier_arrive(barrier_id=number, number_of_threads=threads)
        else:
            place = self.pointer(name, slot_of(at))
            cute.arch.mbarrier_arrive(place, LEADER if signal.remote else None)

    def arrive_once(self, name: str, at: Ring | Int32 | int = 0) -> None:
        """Arrive once per warp, when all of its threads are here."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.arrive(name, at)

    def hand_on(self, name: str, count: int) -> None:
        """Arrive at the named barrier `name` of the next of `count` roles in a circle.

        Each role has the number of the barrier that it waits at.
        """
        places = named_numbers(self.plan)
        found = [places[name.replace("#", str(i))] for i in range(count)]
        for i in range(count):
            step = Arrive(name.replace("#", str((i + 1) % count)))
            self.trace.append((spelled(self.role, i), step))
        number: Any = self.number
        following = cutlass.select_(number == count - 1, Int32(0), number + 1)
        threads = self._named_threads(self.plan.signal(name.replace("#", "0")))
        cute.arch.barrier_arrive(barrier_id=found[0] + following, number_of_threads=threads)

    def expect(self, name: str, num_bytes: Int32 | int, at: Ring | Int32 | int = 0) -> cute.Pointer:
        """One thread arrives for a copy of `num_bytes`; returns the barrier the copy completes.

        What the leader's MMA warp waits for, the leader's thread expects for both CTAs of a pair.
        """
        signal = self._record(name, Arrive, "tma")
        full = self.pointer(name, slot_of(at))
        for_both = any(leads_pair(self.plan.role(waiter)) for waiter in signal.waiters)
        ctas = 2 if for_both else 1
        arrive_and_expect(full, num_bytes * ctas, ctas)
        return full

    def expect_more(self, name: str, num_bytes: int) -> cute.Pointer:
        """One thread announces further bytes of the first phase, without arriving."""
        signal = self.plan.signal(name)
        for_both = any(leads_pair(self.plan.role(waiter)) for waiter in signal.waiters)
        announce(self.pointer(name), num_bytes * (2 if for_both else 1), 2 if for_both else 1)
        return self.pointer(name)

    def expect_from_peer(self, name: str, num_bytes: int) -> None:
        """One thread arrives for what the peer stores into this CTA's shared memory."""
        arrive_and_expect(self.pointer(name), num_bytes, 1)

    def stored_in_peer(self, name: str) -> cute.Pointer:
        """The barrier that stores into the peer's shared memory complete there."""
        self._record(name, Arrive, "dsmem")
        return self.pointer(name)

    def commit(self, name: str, at: Ring | int = 0) -> None:
        """Arrive when the tensor core has finished this thread's products so far."""
        self._record(name, Arrive, "tensor")
        with cute.arch.elect_one():
            if self.plan.cta_group == 2:
                tcgen05.commit(self.pointer(name, slot_of(at)), BOTH, tcgen05.CtaGroup.TWO)
            else:
                tcgen05.commit(self.pointer(name, slot_of(at)))

    def _named_threads(self, signal: Signal) -> int:
        waiting = sum(len(self.plan.role(name).warps) for name in signal.waiters) * WARP
        return signal.arrive_count + waiting

    def _place(self, places: dict[str, int], name: str) -> Int32 | int:
        """Where a signal's first barrier is; those of a kind lie at equal distances."""
        served = self._served(name, places)
        found = {one: places[spelled(name, *one)] for one in served}
        first = served[0]
        result: Any = found[first]
        steps = []
        values: tuple[Any, Any] = (self.number, self.half)
        for axis, value in enumerate(values):
            alike = [x for x in served if x[1 - axis] == first[1 - axis]]
            steps.append(found[alike[1]] - found[first] if len(alike) > 1 else 0)
            result = result + steps[axis] * value if len(alike) > 1 else result
        for (number, half), place in found.items():
            apart = steps[0] * (number or 0) + steps[1] * (half or 0)
            if place != found[first] + apart:
                raise ValueError(
                    f"the barriers of {name} must lie at equal distances; got "
                    f"{list(found.values())}"
                )
        return result

    def _served(self, name: str, known: Collection[str]) -> list[tuple[int | None, int | None]]:
        """The numbers and letters that this code serves: those known only at run time serve all."""
        numbers: Sequence[int | None] = [self.number]
        halves: Sequence[int | None] = [self.half]
        if isinstance(self.half, Int32):
            halves = range(len(HALVES)) if OWN in name or OTHER in name else [None]
        if isinstance(self.number, Int32):
            numbers = [None]
            if "#" in name:
                numbers = _numbers(name, halves[0], known)
        return list(product(numbers, halves))

    def _record(self, name: str, step: type[Wait] | type[Arrive], *after: str | None) -> Signal:
        """The signal, or the first of its kind; the step is kept of each that this code serves."""
        served = self._served(self.role, [role.name for role in self.plan.roles])
        if isinstance(self.number, Int32) and "#" not in self.role:
            raise ValueError(f"{self.role} has one number; one known at run time serves several")
        for one in served:
            role, signal = spelled(self.role, *one), self.plan.signal(spelled(name, *one))
            allowed = signal.waiters if step is Wait else signal.arrivals
            if role not in allowed:
                raise ValueError(f"the plan gives {role} no part in signal {signal.name}")
            self.trace.append((role, step(signal.name, *after)))
        return self.plan.signal(spelled(name, *served[0]))


def spelled(name: str, number: int | None, half: int | None = None) -> str:
    """A name with its number and letter. Raises ValueError if one is asked for and not given."""
    if half is not None:
        name = name.replace(OWN, HALVES[half]).replace(OTHER, HALVES[1 - half])
    if number is not None:
        name = name.replace("#", str(number))
    if any(sign in name for sign in ("#", OWN, OTHER)):
        raise ValueError(f"which {name}? say it with numbered()")
    return name


def _numbers(name: str, half: int | None, known: Collection[str]) -> range:
    """The numbers for which a name with `#` is known: from 0 on."""
    return range(next(i for i in count() if spelled(name, i, half) not in known))


def pair_rank(cta_group: int) -> Int32 | int:
    """This CTA's rank in its pair: clusters are two blocks side by side.

    From the block's index, which the compiler knows to be uniform; the MMA warp branches on it, and
    instructions of the tensor core in divergent code cost a loop each.
    """
    return cute.arch.block_idx()[0] % 2 if cta_group == 2 else LEADER


@cute.jit
def arrive_and_expect(
    barrier: cute.Pointer, num_bytes: Int32 | int, cta_group: cutlass.Constexpr
) -> None:
    """One thread of the CTA, or of the leader of a pair, arrives for `num_bytes`."""
    if pair_rank(cta_group) == LEADER:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, num_bytes)


@cute.jit
def announce(barrier: cute.Pointer, num_bytes: int, cta_group: cutlass.Constexpr) -> None:
    """One thread of the CTA, or of the leader of a pair, announces `num_bytes`."""
    if pair_rank(cta_group) == LEADER:
        with cute.arch.elect_one():
            cute.arch.mbarrier_expect_tx(barrier, num_bytes)


@cute.jit
def init_signals(signals: Signals) -> None:
    """One thread gives every mbarrier the plan's arrive count."""
    with cute.arch.elect_one():
        for signal in signals.plan.signals:
            if cutlass.const_expr(signal.kind == "mbarrier"):
                for stage in cutlass.range_constexpr(signal.stages):
                    cute.arch.mbarrier_init(signals.pointer(signal.name, stage),
                                            signal.arrive_count)  # fmt: skip
        cute.arch.mbarrier_init_fence()
