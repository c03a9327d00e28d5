"""Fences, register reallocation, dependent launches, sleeping and stopping."""

from __future__ import annotations

from fa4.emulator.isa.mbarriers import fence_initialisations
from fa4.emulator.machine.grid import trigger
from fa4.emulator.machine.state import QUARTERS, Fragment
from fa4.emulator.machine.waits import SPIN, Blocked, Spin, wait_for
from fa4.emulator.ptx.syntax import Integer, PtxInstruction
from fa4.emulator.translate.context import Handler, KernelContext
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers
from fa4.emulator.warp_lanes import lowest

ROWS = TableRows()

SCOPES = ("cta", "cluster", "gpu", "sys")
WARP = 32


def _fence(fragment: Fragment, mask: int) -> None:
    fragment.warp.fences.fence(mask)


@ROWS.machine("fence", "9.7.13.5", "fence{.sc,.acq_rel,.acquire,.release}{.sync_restrict}.scope")
@ROWS.machine("membar", "9.7.13.5", "membar.{cta,gl,sys}")
def bind_fence(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """A fence of the generic proxy."""
    modifiers(
        instruction,
        instruction.parts[0],
        ("sc", "acq_rel", "acquire", "release"),
        (*SCOPES, "gl"),
        ("sync_restrict::shared::cta", "sync_restrict::shared::cluster"),
    )
    return _fence


@ROWS.machine("fence.proxy.async", "9.7.13.5", "fence.proxy.async{.global,.shared::{cta,cluster}}")
@ROWS.machine(
    "fence.proxy.async::generic",
    "9.7.13.5",
    "fence.proxy.async::generic.{acquire,release}.sync_restrict...",
)
@ROWS.machine("fence.proxy.alias", "9.7.13.5", "fence.proxy.alias")
@ROWS.machine(
    "fence.proxy.tensormap::generic",
    "9.7.13.5",
    "fence.proxy.tensormap::generic.{release,acquire}.scope",
)
def bind_proxy_fence(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """A fence between proxies."""
    orders_async = instruction.parts[2].startswith("async")

    def handler(fragment: Fragment, mask: int) -> None:
        if orders_async:
            fragment.warp.clock.fence_proxy(mask)
        else:
            _fence(fragment, mask)

    return handler


@ROWS.machine("fence.mbarrier_init", "9.7.13.5", "fence.mbarrier_init.release.cluster")
def bind_init_fence(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Makes mbarrier.init visible to the cluster, together with a following cluster barrier."""
    modifiers(instruction, "fence.mbarrier_init", ("release",), ("cluster",))

    def handler(fragment: Fragment, mask: int) -> None:
        fence_initialisations(fragment.warp, mask)
        _fence(fragment, mask)

    return handler


@ROWS.machine("setmaxnreg", "9.7.19.5", "setmaxnreg.{inc,dec}.sync.aligned.u32 n")
def bind_setmaxnreg(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Gives registers back to the CTA's pool in a quarter of the SM, or waits for enough there."""
    direction, _, _, _ = modifiers(
        instruction, "setmaxnreg", ("inc", "dec"), ("sync",), ("aligned",), ("u32",)
    )
    amount = instruction.operands[0]
    if not isinstance(amount, Integer) or not 24 <= amount.value <= 256 or amount.value % 8:
        raise Unsupported("setmaxnreg needs a multiple of 8 in 24..256")
    wanted = amount.value

    def handler(fragment: Fragment, mask: int) -> Blocked | None:
        warp, cta = fragment.warp, fragment.warp.cta
        if mask != warp.alive:
            fragment.fault("divergence", "setmaxnreg by a part of the warp")
        change = wanted - warp.register_budget
        if (change > 0) != (direction == "inc") and change != 0:
            fragment.fault(
                "registers",
                f"setmaxnreg.{direction} to {wanted} from {warp.register_budget}",
            )
        quarter = warp.index % QUARTERS
        if change * WARP > cta.registers_free[quarter]:
            return Blocked(
                cta.register_waiters,
                lambda: (
                    f"{change * WARP} more registers (setmaxnreg.inc to {wanted}); the CTA's "
                    f"warps {quarter}, {quarter + QUARTERS}, ... left {cta.registers_free[quarter]}"
                ),
            )
        cta.registers_free[quarter] -= change * WARP
        warp.register_budget = wanted
        cta.machine.progress += 1
        cta.register_waiters.wake()
        return None

    return handler


@ROWS.machine("griddepcontrol.launch_dependents", "9.7.13.17", "griddepcontrol.launch_dependents")
def bind_launch_dependents(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """The CTA lets the next grid in the stream start."""

    def handler(fragment: Fragment, mask: int) -> None:
        trigger(fragment.warp.cta)

    return handler


@ROWS.machine("griddepcontrol.wait", "9.7.13.17", "griddepcontrol.wait")
def bind_dependency_wait(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Waits for the grids before in the stream to end."""

    def handler(fragment: Fragment, mask: int) -> Blocked | None:
        warp = fragment.warp
        grid = warp.cta.grid
        if grid.prior is not None and not grid.prior.done:
            return wait_for(
                warp.cta.prior_waiters, "the end of the grid before (griddepcontrol.wait)"
            )
        warp.clock.finish_launches(grid.number)
        return None

    return handler


@ROWS.machine("nanosleep", "9.7.19.2", "nanosleep.u32 t")
def bind_nanosleep(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Sleeping lets other warps run."""

    def handler(fragment: Fragment, mask: int) -> Spin:
        return SPIN

    return handler


@ROWS.machine("trap", "9.7.19.4", "trap")
@ROWS.machine("brkpt", "9.7.19.1", "brkpt")
def bind_trap(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Ends the run with a finding."""
    what = instruction.parts[0]

    def handler(fragment: Fragment, mask: int) -> None:
        raise fragment.fatal(what, f"lane {lowest(mask)} executes {what}")

    return handler


@ROWS.machine("pmevent", "9.7.19.3", "pmevent a")
def bind_nothing(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """No effect here."""

    def handler(fragment: Fragment, mask: int) -> None:
        return None

    return handler
