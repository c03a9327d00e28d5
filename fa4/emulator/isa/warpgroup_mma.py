"""wgmma: products of a warpgroup, asynchronous, on registers (PTX ISA 9.7.15).

Four warps execute each instruction. It reads shared memory when it is issued as far as the checks
go, by each warp for itself: its 16 rows of A, and B. Its data moves when it completes, at any time
after the last of the four has issued it; accumulators are then read and written in the registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from fa4.emulator.checks.conflict import Access
from fa4.emulator.isa.swizzles import Pages, check_swizzle, pages_of
from fa4.emulator.isa.tensor_registers import RegisterBlock
from fa4.emulator.machine.checks import record_shared
from fa4.emulator.machine.memory import MemoryFault
from fa4.emulator.machine.shadows import READ, Touch
from fa4.emulator.machine.state import Cta, Fragment, Warp
from fa4.emulator.machine.waits import Blocked
from fa4.emulator.machine.warpgroup_checks import check_product
from fa4.emulator.machine.warpgroups import WARPS, Meeting, WarpgroupUnit
from fa4.emulator.ptx.syntax import Integer, Operand, PtxInstruction, Vector
from fa4.emulator.tcgen05.operands import UNIT_BYTES
from fa4.emulator.tcgen05.sparse import places_from, wrong_code
from fa4.emulator.translate.context import Handler, KernelContext
from fa4.emulator.translate.layout import SHARED_BASE
from fa4.emulator.translate.program import Program
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers
from fa4.emulator.warp_lanes import FULL_MASK, Array
from fa4.emulator.wgmma.forms import (
    A_REGISTERS,
    K_BYTES,
    FormError,
    ProductForm,
    gather_a,
    gather_d,
    parse_types,
    scatter_d,
)
from fa4.emulator.wgmma.operands import MatrixInSmem, operand_at
from fa4.emulator.wgmma.sparse import codes_from, metadata_lanes, multiply_sparse
from fa4.emulator.wgmma.sums import multiply

ROWS = TableRows()

LANES_OF_QUAD = 4


@dataclass(frozen=True, eq=False)
class ProductInstruction:
    """What all executions of an instruction share.

    a: its registers of A, None: shared memory. metadata: reads the codes of a warp's rows of a
    sparse A, None: A is dense. held: the bits of the registers of D and of A.
    """

    line: int
    form: ProductForm
    d: RegisterBlock
    a: RegisterBlock | None
    smem: Access
    held: Callable[[Program], tuple[int, int]]
    metadata: Callable[[Fragment], Array] | None = None


def _immediates(operands: list[Operand], count: int, allowed: tuple[int, int]) -> list[int]:
    """Takes the next `count` operands, which must be integers of which two are allowed."""
    taken = [operands.pop(0) for _ in range(count)]
    values = [operand.value for operand in taken if isinstance(operand, Integer)]
    if len(values) != count or any(value not in allowed for value in values):
        raise Unsupported(f"immediates that are not {allowed[0]} or {allowed[1]}")
    return values


def _form_of(instruction: PtxInstruction, operands: list[Operand], sparse: bool) -> ProductForm:
    """The form; `operands`: those behind scale-d, all of which it must take."""
    parts = list(instruction.parts[2 + sparse :])
    if parts[:2] != ["sync", "aligned"] or len(parts) < 3:
        raise Unsupported("wgmma.mma_async without .sync.aligned")
    saturate = "satfinite" in parts
    types = tuple(part for part in parts[3:] if part != "satfinite")
    try:
        form = parse_types(parts[2], types, saturate, sparse)
    except FormError as error:
        raise Unsupported(str(error)) from None
    in_registers = isinstance(instruction.operands[1], Vector)
    scales, transposes = [1, 1], [0, 0]
    if not form.is_integer:
        scales = _immediates(operands, 2, (1, -1))
        if form.a.container_bytes == 2:
            transposes = _immediates(operands, 1 if in_registers else 2, (0, 1))
            transposes = [0, *transposes][-2:]
    if operands:
        raise Unsupported(f"{len(operands)} operands too many")
    return ProductForm(
        form.n, form.a, form.b, form.d, saturate, in_registers,
        scales[0] < 0, scales[1] < 0, bool(transposes[0]), bool(transposes[1]), sparse,
    )  # fmt: skip


@ROWS.machine(
    "wgmma.mma_async",
    "9.7.15.5.2",
    "wgmma.mma_async.sync.aligned.m64nNk{8,16,32}{.satfinite}.d.a.b d, a|a-desc, b-desc, p"
    "{, scale-a, scale-b{, trans-a}{, trans-b}}; f16, bf16, tf32, e4m3, e5m2, s8, u8",
    holds=True,
)
def bind_product(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Matrix multiply and accumulate; dense."""
    operands = list(instruction.operands)
    if len(operands) < 4:
        raise Unsupported(f"{len(operands)} operands")
    form = _form_of(instruction, operands[4:], sparse=False)
    return _product_handler(instruction, context, operands, form, None)


@ROWS.machine(
    "wgmma.mma_async.sp",
    "9.7.15.6",
    "wgmma.mma_async.sp.sync.aligned.m64nNk{16,32,64}{.satfinite}.d.a.b d, a|a-desc, b-desc, "
    "metadata, selector, p and so on as wgmma.mma_async",
    holds=True,
)
def bind_sparse_product(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """The same with an A of which half the elements are there; metadata is read at the issue."""
    operands = list(instruction.operands)
    if len(operands) < 6:
        raise Unsupported(f"{len(operands)} operands")
    metadata, selector = operands.pop(3), operands.pop(3)
    form = _form_of(instruction, operands[4:], sparse=True)
    lanes = metadata_lanes(form.a, K_BYTES)
    choices = LANES_OF_QUAD // lanes
    if not isinstance(selector, Integer) or not 0 <= selector.value < choices:
        raise Unsupported(f"a sparsity selector that is not an immediate below {choices}")
    first, read = selector.value * lanes, context.reader(metadata, "b32")

    def codes(fragment: Fragment) -> Array:
        words = read(fragment.warp).reshape(-1, LANES_OF_QUAD)[:, first : first + lanes]
        found = codes_from(form.a, words.astype(np.uint32))
        wrong = wrong_code(form.a, found, ordered=False)
        if wrong:
            raise fragment.fatal("fault", wrong)
        return found

    return _product_handler(instruction, context, operands, form, codes)


def _product_handler(
    instruction: PtxInstruction,
    context: KernelContext,
    operands: list[Operand],
    form: ProductForm,
    metadata: Callable[[Fragment], Array] | None,
) -> Handler:
    """operands: D, A, B, scale-d, and what the form has read."""
    opcode = "wgmma.mma_async" + ".sp" * form.sparse
    d = RegisterBlock(context, operands[0], written=True)
    a = RegisterBlock(context, operands[1], written=False) if form.a_in_registers else None
    for name, block, count in (("D", d, form.d_registers), ("A", a, A_REGISTERS)):
        if block is not None and (block.count != count or len(block.names) != count):
            raise Unsupported(f"{len(block.names)} registers for {name}, not {count}")

    @cache
    def held(program: Program) -> tuple[int, int]:
        return program.held_bits(d.names), program.held_bits(a.names if a is not None else ())

    smem_access = Access(instruction.line, async_proxy=True)
    own = ProductInstruction(instruction.line, form, d, a, smem_access, held, metadata)
    readers = [context.reader(operands[2], "b64"), context.reader(operands[3], "pred")]
    if a is None:
        readers.insert(0, context.reader(operands[1], "b64"))

    def handler(fragment: Fragment, mask: int) -> None:
        warp = fragment.warp
        group = warpgroup_of(fragment, mask, opcode)
        found = []
        for read in readers:
            lanes = read(warp).tolist()
            if lanes.count(lanes[0]) != len(lanes):
                raise fragment.fatal(
                    "divergence", f"{opcode}: the lanes give different descriptors or scale-d"
                )
            found.append(lanes[0])
        smem = [operand_at(form, "b", found[-2])]
        if a is None:
            smem.append(operand_at(form, "a", found[0]))
        _issue(fragment, group, own, smem, bool(found[-1]))

    return handler


def warpgroup_of(fragment: Fragment, mask: int, what: str) -> WarpgroupUnit:
    """The group of a warp that executes a wgmma instruction, all of it together.

    Raises Stop with a finding if a part of the warp does, or the CTA lacks warps of the group.
    """
    warp, cta = fragment.warp, fragment.warp.cta
    if mask != FULL_MASK:
        raise fragment.fatal(
            "divergence", f"{what} by lanes {mask:#010x}: all of the warp must execute it together"
        )
    number = warp.index // WARPS
    known = cta.warpgroups.get(number)
    if known is not None:
        return known
    first = number * WARPS
    members = cta.warps[first : first + WARPS]
    if len(members) < WARPS or any(member.threads != FULL_MASK for member in members):
        raise fragment.fatal(
            "warpgroup",
            f"{what} needs four whole warps from a multiple of four on: the CTA has "
            f"{cta.grid.thread_count - 32 * first} threads from warp {first} on",
        )
    cta.warpgroups[number] = WarpgroupUnit(first)
    return cta.warpgroups[number]


def _issue(
    fragment: Fragment,
    group: WarpgroupUnit,
    own: ProductInstruction,
    smem: list[MatrixInSmem],
    accumulate: bool,
) -> None:
    warp, cta = fragment.warp, fragment.warp.cta
    products = warp.products
    for operand in smem:
        if operand.first < SHARED_BASE or operand.stop > cta.shared_end:
            raise MemoryFault(
                "out-of-bounds",
                f"wgmma.mma_async reads shared bytes {operand.first:#x}..{operand.stop - 1:#x}: "
                f"the CTA's shared memory is {SHARED_BASE:#x}..{cta.shared_end - 1:#x}",
            )
    shape = own.form.n, own.form.k, own.form.d
    d, a = own.held(warp.program)
    check_product(fragment, shape, d, a)
    products.begin(own.line, shape, d, a)
    place = warp.index - group.first_warp
    actor = products.actors.begin()
    if cta.machine.shadows.enabled:
        touch = Touch(actor, own.smem, READ, actor.lane)
        for operand in smem:
            record_shared(cta, operand.by_warp[place], UNIT_BYTES, touch)
    if cta.swizzles:
        check_swizzle(fragment, [cta], [_pages(operand) for operand in smem])
    key = own.line, accumulate, tuple(operand.descriptor for operand in smem)
    words = own.a.read(warp) if own.a is not None else None
    codes = own.metadata(fragment) if own.metadata is not None else None
    meeting = group.join(place, products.issued, own.line, key, words, codes)
    if meeting is None:
        other = group.meetings[products.issued - group.met - 1]
        raise fragment.fatal(
            "warpgroup",
            f"its warpgroup executes the wgmma.mma_async at PTX line {other.line} here, or this "
            "one with other descriptors: all four warps must execute the same",
        )
    absent = [group.first_warp + k for k in range(WARPS) if k not in meeting.a]
    exited = [index for index in absent if not cta.warps[index].alive]
    if exited:
        text = f"warp {exited[0]} of its warpgroup has exited without it"
        raise fragment.fatal("warpgroup", text)
    if not absent:
        _launch(cta, group, own, smem, accumulate)


@lru_cache(maxsize=4096)
def _pages(operand: MatrixInSmem) -> Pages:
    return pages_of(operand.name.upper(), operand.units, operand.descriptor.swizzle)


def _launch(
    cta: Cta,
    group: WarpgroupUnit,
    own: ProductInstruction,
    smem: list[MatrixInSmem],
    accumulate: bool,
) -> None:
    """All four warps have issued: the tensor cores have the product."""
    meeting = group.meetings.popleft()
    group.met += 1
    cta.note_moved(cta, own.line, sum(operand.units.size for operand in smem) * UNIT_BYTES)
    cta.note_product(own.line, own.form.macs)
    warps = cta.warps[group.first_warp : group.first_warp + WARPS]
    complete = _completion(group, own, smem, accumulate, meeting, warps)
    cta.submit("wgmma.mma_async", own.line, complete, group.queue)


def _completion(
    group: WarpgroupUnit, own: ProductInstruction, smem: list[MatrixInSmem], accumulate: bool,
    meeting: Meeting, warps: list[Warp],
) -> Callable[[], None]:  # fmt: skip
    form, memory = own.form, warps[0].cta.smem

    def complete() -> None:
        b = smem[0].read(memory)
        if form.a_in_registers:
            held = [meeting.a[place] for place in range(WARPS)]
            a = gather_a(np.stack([words for words in held if words is not None]))
        else:
            a = smem[1].read(memory)
        d = gather_d(form, np.stack([own.d.read(warp) for warp in warps])) if accumulate else None
        if form.sparse:
            codes = np.concatenate([meeting.codes[place] for place in range(WARPS)])
            result: Array = multiply_sparse(form, a, b, d, places_from(form.a, codes))
        else:
            result = multiply(form, a, b, d)
        result = scatter_d(form, result)
        for warp, words in zip(warps, result, strict=True):
            own.d.write(warp, words, FULL_MASK)
        group.complete()

    return complete


@ROWS.machine("wgmma.fence", "9.7.15.7.1", "wgmma.fence.sync.aligned")
def bind_fence(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Orders what threads did to registers before the products that use them."""
    modifiers(instruction, "wgmma.fence", ("sync",), ("aligned",))

    def handler(fragment: Fragment, mask: int) -> None:
        warpgroup_of(fragment, mask, "wgmma.fence")
        fragment.warp.products.fence()

    return handler


@ROWS.machine("wgmma.commit_group", "9.7.15.7.2", "wgmma.commit_group.sync.aligned")
def bind_commit(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Makes a group of the products that are in none."""
    modifiers(instruction, "wgmma.commit_group", ("sync",), ("aligned",))

    def handler(fragment: Fragment, mask: int) -> None:
        warpgroup_of(fragment, mask, "wgmma.commit_group")
        fragment.warp.products.commit()

    return handler


@ROWS.machine("wgmma.wait_group", "9.7.15.7.3", "wgmma.wait_group.sync.aligned N")
def bind_wait(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Waits until at most the N latest groups are under way."""
    modifiers(instruction, "wgmma.wait_group", ("sync",), ("aligned",))
    count = instruction.operands[0]
    if not isinstance(count, Integer) or not 0 <= count.value <= 7:
        raise Unsupported("wgmma.wait_group needs a number from 0 to 7")
    left = count.value

    def handler(fragment: Fragment, mask: int) -> Blocked | None:
        group = warpgroup_of(fragment, mask, "wgmma.wait_group")
        products = fragment.warp.products
        number = products.needed(left)
        if number > group.completed:
            return Blocked(group, lambda: f"{group.waits_for(number)} at wgmma.wait_group {left}")
        products.settle(number)
        return None

    return handler
