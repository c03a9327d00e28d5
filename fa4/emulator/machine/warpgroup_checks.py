"""The rules for registers that wgmma uses asynchronously (PTX ISA 9.7.15.4 and 9.7.15.7.1)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from fa4.emulator.machine.state import Fragment, Warp
from fa4.emulator.machine.warpgroups import Product
from fa4.emulator.ptx.syntax import PtxInstruction
from fa4.emulator.translate.program import Program, Step, registers_of


def note_use(warp: Warp, step: Step) -> None:
    """Threads of a warp touch registers that products use: none may be under way."""
    products = warp.products
    if products.held & step.held:
        _report_use(warp, step)
    products.unfenced |= step.held
    products.touching[step.index] = None


def _report_use(warp: Warp, step: Step) -> None:
    for product in warp.products.under_way:
        bits = (product.d | product.a) & step.held
        found = _first_touching(warp.program, step.instructions, bits) if bits else None
        if found is not None:
            instruction, name = found
            what = "the accumulator" if product.d & warp.program.held_registers[name] else "A"
            warp.cta.report(
                "missing-wait",
                f"touches {name}, which the wgmma.mma_async at PTX line {product.line} holds as "
                f"part of {what}: a wgmma.wait_group must wait for its group first",
                instruction.line,
                warp.index,
            )
            return


def _first_touching(
    program: Program, instructions: Iterable[PtxInstruction], bits: int
) -> tuple[PtxInstruction, str] | None:
    """The first instruction that touches one of these registers, and which."""
    names = {name for name, bit in program.held_registers.items() if bit & bits}
    for instruction in instructions:
        guard = {instruction.guard.name} if instruction.guard is not None else set()
        touched = names & guard.union(*(registers_of(o) for o in instruction.operands))
        if touched:
            return instruction, sorted(touched)[0]
    return None


def check_product(fragment: Fragment, shape: Hashable, d: int, a: int) -> None:
    """A product is about to be issued on these registers."""
    products = fragment.warp.products
    if products.held & (d | a):
        for other in products.under_way:
            if _collide(other, shape, d, a):
                _report_collision(fragment, other)
                return
    if products.unfenced & (d | a):
        _report_unfenced(fragment, d | a)
        return
    for other in products.since_fence.values():
        if _collide(other, shape, d, a):
            fragment.fault(
                "missing-fence",
                f"uses registers of the wgmma.mma_async at PTX line {other.line} in another way: "
                "only accumulators of the same shape need no wgmma.fence in between",
            )
            return


def _collide(other: Product, shape: Hashable, d: int, a: int) -> bool:
    """Whether a later product may not use these registers as it does: both reading A is fine."""
    if other.a & d or other.d & a:
        return True
    return bool(other.d & d) and (other.shape != shape or other.d != d)


def _report_collision(fragment: Fragment, other: Product) -> None:
    fragment.fault(
        "missing-wait",
        f"uses registers that the wgmma.mma_async at PTX line {other.line} still holds, and not as "
        "accumulators of the same shape: a wgmma.wait_group must wait for its group first",
    )


def _report_unfenced(fragment: Fragment, bits: int) -> None:
    warp = fragment.warp
    products, program = warp.products, warp.program
    for index in products.touching if products.unfenced != -1 else ():
        step = program.steps[index]
        found = _first_touching(program, step.instructions, bits)
        if found is not None:
            instruction, name = found
            fragment.fault(
                "missing-fence",
                f"uses {name}, which {program.describe_line(instruction.line)} has touched: a "
                "wgmma.fence must stand between the two",
            )
            return
    fragment.fault("missing-fence", "the first wgmma.mma_async without a wgmma.fence before it")
