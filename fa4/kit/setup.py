"""What every kernel does around its roles: barriers, tensor memory, meeting the others."""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from fa4.hardware import B200
from fa4.kit.signals import CTA_BARRIER, Signals, init_signals
from fa4.kit.units import WARP
from fa4.plan.schema import PipelinePlan, Role

TMEM_COLS = 512  # all of it: one CTA per SM, so that column numbers are known while compiling
SWIZZLE_ALIGN = 1024
REGISTERS_PER_SM = B200.registers_per_sm  # as of every GPU that has tensor memory


@cute.jit
def start_up(signals: Signals, warp: Int32) -> None:
    """Barriers and tensor memory are ready when every warp is past this."""
    if warp == 0:
        init_signals(signals)
    if has_role(warp, signals.plan.role("mma")):
        two_ctas = signals.plan.cta_group == 2
        cute.arch.alloc_tmem(TMEM_COLS, held_address(signals), is_two_cta=two_ctas)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=two_ctas)
    meet(signals.plan.cta_group)


@cute.jit
def close_down(signals: Signals, warp: Int32) -> None:
    """Tensor memory is given back when every warp is here."""
    meet(signals.plan.cta_group)
    if has_role(warp, signals.plan.role("mma")):
        start = cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16)
        cute.arch.dealloc_tmem(start, TMEM_COLS, is_two_cta=signals.plan.cta_group == 2)


def take_registers(plan: PipelinePlan, role: Role) -> None:
    """The role's registers in place of those that each thread is launched with."""
    if role.registers > REGISTERS_PER_SM // (plan.warps * WARP):
        cute.arch.setmaxregister_increase(role.registers)
    else:
        cute.arch.setmaxregister_decrease(role.registers)


def held_address(signals: Signals) -> cute.Pointer:
    """Shared memory, behind the barriers, of the address of the tensor memory that is held."""
    mbarriers = sum(s.stages for s in signals.plan.signals if s.kind == "mbarrier")
    return cute.recast_ptr(signals.base + mbarriers, dtype=Int32)


def meet(cta_group: int) -> None:
    """Every warp of the CTA, or of the pair, waits here for the others.

    At the start, so that nobody arrives at a barrier that its peer has not made; at the end, so
    that no CTA exits while its peer still arrives there or multiplies what it holds.
    """
    if cta_group == 2:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.barrier(barrier_id=CTA_BARRIER)


def has_role(warp: Int32, role: Role, last: Role | None = None) -> Boolean:
    """Does this warp have that role, or one up to `last`? The plan gives them consecutive warps."""
    first, final = role.warps[0], (last or role).warps[-1]
    if first == final:
        return warp == first
    return (warp >= first) & (warp <= final)
