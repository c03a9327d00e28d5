"""What every warp role is given: the plan's signals as barriers, and its memory as addresses."""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05

from fa4.plan.schema import Arrive, PipelinePlan, Signal, Wait
from fa4.sm100.kit.units import WARP

CTA_BARRIER = 0  # named barrier of all warps; the plan's own start at 1
LEADER = 0  # rank in its pair of the CTA whose MMA warp issues the products of both
BOTH = 0b11  # ranks of a pair, as a mask


def mbarrier_numbers(plan: PipelinePlan) -> dict[str, int]:
    """The first mbarrier of each signal, counted from the start of the barriers' memory."""
    numbers, total = {}, 0
    for signal in plan.signals:
        if signal.kind == "mbarrier":
            numbers[signal.name] = total
            total += signal.stages
    return numbers


def named_numbers(plan: PipelinePlan) -> dict[str, int]:
    """The hardware barrier of each named signal."""
    names = [signal.name for signal in plan.signals if signal.kind == "named"]
    return {name: number for number, name in enumerate(names, CTA_BARRIER + 1)}


@dataclass(frozen=True)
class Signals:
    """The signals of a plan, as one role uses them.

    Waits and arrivals are by name; every count comes from the plan. `trace` collects them as the
    plan's own steps while the kernel is traced, so that they can be compared with its program.

    One code serves the warpgroups of both Q tiles: `{i}` in the name of a role or a signal stands
    for the number of the Q tile, `tile` is that number at run time.

    In a CTA pair the leader's MMA warp works for both CTAs: what it waits for arrives at the
    leader's barriers (loads count their bytes there, `remote` signals their threads), and what it
    commits arrives at the barriers of both.
    """

    plan: cutlass.Constexpr
    role: cutlass.Constexpr
    trace: cutlass.Constexpr
    base: cute.Pointer
    tile: Int32 | int = 0

    def of(self, role: str, tile: Int32 | int = 0) -> "Signals":
        """The same signals as another role uses them; `tile` for one of `{i}`."""
        return replace(self, role=role, tile=tile)

    def pointer(self, name: str, stage: Int32 | int = 0) -> cute.Pointer:
        """The mbarrier of a signal's stage."""
        return self.base + (self._number(mbarrier_numbers(self.plan), name) + stage)

    def wait(self, name: str, use: Int32 | int = 0, stage: Int32 | int = 0) -> None:
        """Wait for a stage's phase number `use`, from 0; free phases have passed already.

        A named barrier knows its phase.
        """
        signal = self._record(name, Wait)
        if signal.kind == "named":
            cute.arch.barrier(barrier_id=self._number(named_numbers(self.plan), name),
                              number_of_threads=self._named_threads(signal))  # fmt: skip
        else:
            phase = (use - signal.free // signal.stages) & 1
            cute.arch.mbarrier_wait(self.pointer(name, stage), phase)

    def arrive(self, name: str, after: str | None = None) -> None:
        """Arrive with every thread that calls; the plan counts them.

        after: the unit whose work the callers have waited for, where the plan has it arrive.
        """
        signal = self._record(name, Arrive, after)
        if signal.kind == "named":
            cute.arch.barrier_arrive(barrier_id=self._number(named_numbers(self.plan), name),
                                     number_of_threads=self._named_threads(signal))  # fmt: skip
        else:
            cute.arch.mbarrier_arrive(self.pointer(name), LEADER if signal.remote else None)

    def arrive_once(self, name: str) -> None:
        """Arrive once per warp, when all of its threads are here."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.arrive(name)

    def expect(self, name: str, num_bytes: int, stage: Int32 | int = 0) -> cute.Pointer:
        """One thread arrives for a copy of `num_bytes`; returns the barrier the copy completes.

        In a pair the leader's thread arrives for the copies of both CTAs.
        """
        self._record(name, Arrive, "tma")
        full = self.pointer(name, stage)
        arrive_and_expect(full, num_bytes * self.plan.cta_group, self.plan.cta_group)
        return full

    def commit(self, name: str, stage: Int32 | int = 0) -> None:
        """Arrive when the tensor core has finished this thread's products so far."""
        self._record(name, Arrive, "tensor")
        with cute.arch.elect_one():
            if self.plan.cta_group == 2:
                tcgen05.commit(self.pointer(name, stage), BOTH, tcgen05.CtaGroup.TWO)
            else:
                tcgen05.commit(self.pointer(name, stage))

    def _named_threads(self, signal: Signal) -> int:
        waiting = sum(len(self.plan.role(name).warps) for name in signal.waiters) * WARP
        return signal.arrive_count + waiting

    def _number(self, numbers: dict[str, int], name: str) -> Int32 | int:
        """The number of a signal's first barrier: of this role's Q tile, if each has its own."""
        if isinstance(self.tile, int) or "{i}" not in name:
            return numbers[name.format(i=self.tile)]
        first, second = (numbers[name.format(i=i)] for i in range(2))
        return first + (second - first) * self.tile

    def _record(self, name: str, step: type[Wait] | type[Arrive], *after: str | None) -> Signal:
        """The signal, of the first Q tile if it has one for each; the step is kept of all."""
        tiles = sum(role.name.startswith("softmax") for role in self.plan.roles)
        for i in range(tiles if "{i}" in self.role else 1):
            role, signal = self.role.format(i=i), self.plan.signal(name.format(i=i))
            allowed = signal.waiters if step is Wait else signal.arrivals
            if role not in allowed:
                raise ValueError(f"the plan gives {role} no part in signal {signal.name}")
            self.trace.append((role, step(signal.name, *after)))
        return self.plan.signal(name.format(i=0))


def pair_rank(cta_group: int) -> Int32 | int:
    """This CTA's rank in its pair: clusters are two blocks side by side.

    From the block's index, which the compiler knows to be uniform; the MMA warp branches on it, and
    instructions of the tensor core in divergent code cost a loop each.
    """
    return cute.arch.block_idx()[0] % 2 if cta_group == 2 else LEADER


@cute.jit
def arrive_and_expect(
    barrier: cute.Pointer, num_bytes: cutlass.Constexpr, cta_group: cutlass.Constexpr
) -> None:
    """One thread of the CTA, or of the leader of a pair, arrives for `num_bytes`."""
    if pair_rank(cta_group) == LEADER:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, num_bytes)


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
