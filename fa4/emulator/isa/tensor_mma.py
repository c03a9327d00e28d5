"""tcgen05.mma, tcgen05.mma.ws and tcgen05.commit (PTX ISA 9.7.16.10 and 9.7.16.12)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fa4.emulator.checks.clocks import Message
from fa4.emulator.checks.conflict import Access
from fa4.emulator.isa.mbarriers import OBJECT_BYTES, describe_barrier, find_barrier
from fa4.emulator.isa.swizzles import Pages, check_swizzle, pages_of
from fa4.emulator.isa.tensor_allocation import CTA_GROUPS, group_size
from fa4.emulator.isa.tensor_pipe import (
    PipeInstruction,
    PipeJob,
    committed_by,
    issue,
    issuing_lane,
    job_of,
)
from fa4.emulator.machine.checks import record_shared
from fa4.emulator.machine.events import BarrierUse
from fa4.emulator.machine.machine_state import Stop
from fa4.emulator.machine.mbarrier import MBarrierFault
from fa4.emulator.machine.memory import check_alignment
from fa4.emulator.machine.shadows import ATOMIC, Touch
from fa4.emulator.machine.shared_memory import locate_shared
from fa4.emulator.machine.state import Cta, Fragment, Warp
from fa4.emulator.machine.tensor_access import group_of, members_of
from fa4.emulator.ptx.syntax import Address, Integer, Operand, PtxInstruction, Vector
from fa4.emulator.tcgen05.descriptors import InstructionDescriptor, SmemDescriptor
from fa4.emulator.tcgen05.errors import DescriptorError
from fa4.emulator.tcgen05.mma import MmaOperation, MmaPlan, SmemOperand, plan_mma
from fa4.emulator.tcgen05.scaled import VECTORS, decode_scaled, scales_of
from fa4.emulator.tcgen05.sparse import metadata_at
from fa4.emulator.tcgen05.tmem import TmemAddress
from fa4.emulator.translate.context import Handler, KernelContext, ScalarReader
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers
from fa4.emulator.warp_lanes import lanes_of

ROWS = TableRows()

KINDS = ("kind::f16", "kind::tf32", "kind::f8f6f4", "kind::i8")
SCALE_VECTORS = ("scale_vec::1X", "scale_vec::2X", "scale_vec::4X", "block16", "block32")
# Hints to the collector buffers, which keep an operand from one MMA to the next.
COLLECTOR_USES = ("fill", "use", "lastuse", "discard")
COLLECTORS_A = tuple(f"collector::a::{use}" for use in COLLECTOR_USES)
COLLECTORS_B = tuple(f"collector::b{n}::{use}" for n in range(4) for use in COLLECTOR_USES)
# Bits of a shared address that a CTA of a pair shares with its peer.
_RANK_BITS = 24


@dataclass(frozen=True)
class MmaForm:
    """What the opcode of an MMA says. a_in_tmem: matrix A is in tensor memory. vector: the
    modifier of block scaling, None without. sparse: matrix A is."""

    kind: str
    cta_group: int
    ws: bool
    a_in_tmem: bool
    vector: str | None = None
    sparse: bool = False


@lru_cache(maxsize=4096)
def prepare(
    form: MmaForm,
    operands: tuple[int, ...],
    descriptor: int,
    accumulate: bool,
    scale_input_d: int,
    disable_lanes: tuple[int, ...],
) -> tuple[PipeJob, tuple[Pages, ...], int]:
    """An MMA with these operand values, and how many multiplications it is.

    operands: addresses or descriptors of D, A and B, and of the factors, or metadata, if there are
    some.
    Raises DescriptorError or TmemError if it is invalid.
    """
    d, a, b, *factors = operands
    metadata = None
    if form.vector is None:
        shape, scales = InstructionDescriptor.decode(descriptor, form.kind), None
        if shape.sparse != form.sparse:
            raise DescriptorError(
                f"instruction descriptor {descriptor:#010x}: bit 2, sparsity, is "
                f"{int(shape.sparse)}, and the instruction has {'' if form.sparse else 'no '}.sp"
            )
        if form.sparse:
            rows = shape.m // form.cta_group
            metadata = metadata_at(factors[0], shape.a_format, rows, shape.selector)
    else:
        shape, *ids, kind = decode_scaled(descriptor, form.kind, form.vector)
        vector = VECTORS[form.kind][form.vector]
        scales = scales_of((factors[0], factors[1]), (ids[0], ids[1]), vector, kind, shape.n)
    operation = MmaOperation(
        cta_group=form.cta_group,
        instruction=shape,
        a=TmemAddress.decode(a) if form.a_in_tmem else SmemDescriptor.decode(a),
        b=SmemDescriptor.decode(b),
        d=TmemAddress.decode(d),
        accumulate=accumulate,
        scale_input_d=scale_input_d,
        disable_lanes=disable_lanes,
        ws=form.ws,
        scales=scales,
        metadata=metadata,
    )
    plan = plan_mma(operation)
    return job_of(plan), _pages(plan), shape.m * shape.n * shape.a_elements


def _pages(plan: MmaPlan) -> tuple[Pages, ...]:
    found = []
    descriptors = {"A": plan.operation.a, "B": plan.operation.b}
    for name, operand in (("A", plan.a), ("B", plan.b)):
        descriptor = descriptors[name]
        if isinstance(operand, SmemOperand) and isinstance(descriptor, SmemDescriptor):
            found.append(pages_of(name, operand.units, descriptor.swizzle))
    return tuple(found)


def is_scaled(instruction: PtxInstruction) -> bool:
    """Whether an MMA has block scaling."""
    return "block_scale" in instruction.parts


@ROWS.machine(
    "tcgen05.mma",
    "9.7.16.10.9.1",
    "tcgen05.mma.cta_group.kind.block_scale{.scale_vec::1X,2X,4X,.block16,.block32}"
    "{.collector::a::use} [d], a|[a], b, idesc, [scale-a], [scale-b], p; kinds mxf8f6f4, mxf4, "
    "mxf4nvf4",
    accepts=is_scaled,
)
def bind_scaled_mma(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """With a factor for each block of a row of A and of a column of B."""
    kinds = tuple(f"kind::{kind}" for kind in VECTORS)
    group, kind, _, vector, _ = modifiers(
        instruction, "tcgen05.mma", CTA_GROUPS, kinds, ("block_scale",), SCALE_VECTORS, COLLECTORS_A
    )
    if vector not in VECTORS.get(kind.removeprefix("kind::"), {}):
        raise Unsupported(f"{kind or 'no .kind'} with .{vector or 'block_scale alone'}")
    operands = list(instruction.operands)
    if len(operands) != 7:
        raise Unsupported(f"{len(operands)} operands")
    scales = [context.scalar_address(operands.pop(4)) for _ in range(2)]
    opcode = kind, group_size(group), False
    return _mma_handler(instruction, context, opcode, operands, [], None, (vector, scales))


@ROWS.machine(
    "tcgen05.mma",
    "9.7.16.10.9.1",
    "tcgen05.mma.cta_group.kind{.collector::a::use} [d], a|[a], b, idesc{, disable-output-lane}, "
    "p{, scale-input-d}; kinds f16, tf32, f8f6f4, i8",
)
def bind_mma(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Matrix multiply and accumulate; dense, without block scaling."""
    return _bind_plain(instruction, context, list(instruction.operands), None)


@ROWS.machine(
    "tcgen05.mma.sp",
    "9.7.16.10.9.2",
    "tcgen05.mma.sp as tcgen05.mma with [metadata] behind b; kinds f16, f8f6f4, i8, M of 128 in "
    "each CTA, no block scaling",
)
def bind_sparse_mma(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """The same with an A of which half the elements are there."""
    if "block_scale" in instruction.parts or "kind::tf32" in instruction.parts:
        raise Unsupported("sparse A with block scaling, or of tf32")
    operands = list(instruction.operands)
    metadata = context.scalar_address(operands.pop(3))
    return _bind_plain(instruction, context, operands, metadata)


def _bind_plain(
    instruction: PtxInstruction,
    context: KernelContext,
    operands: list[Operand],
    metadata: ScalarReader | None,
) -> Handler:
    name = "tcgen05.mma.sp" if metadata is not None else "tcgen05.mma"
    group, kind, _ = modifiers(instruction, name, CTA_GROUPS, KINDS, COLLECTORS_A)
    size = group_size(group)
    disable: list[ScalarReader] = []
    if len(operands) > 4 and isinstance(operands[4], Vector):
        disable = [context.scalar(word, "b32") for word in context.elements(operands.pop(4))]
        if len(disable) != 4 * size:
            raise Unsupported(f"{len(disable)} words of disable-output-lane, not {4 * size}")
    if len(operands) not in (5, 6):
        raise Unsupported(f"{len(operands)} operands")
    scale = context.scalar(operands.pop(5), "u32") if len(operands) == 6 else None
    more = None, [metadata] if metadata is not None else []
    return _mma_handler(instruction, context, (kind, size, False), operands, disable, scale, more)


@ROWS.machine(
    "tcgen05.mma.ws",
    "9.7.16.10.9.3",
    "tcgen05.mma.ws.cta_group::1.kind{.collector::bN::use} [d], a|[a], b, idesc, p{, 0}; "
    "kinds f16, tf32, f8f6f4, i8",
)
def bind_mma_ws(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """The weight-stationary form; no columns are masked."""
    _, kind, _ = modifiers(
        instruction, "tcgen05.mma.ws", ("cta_group::1",), KINDS, (*COLLECTORS_A, *COLLECTORS_B)
    )
    operands = list(instruction.operands)
    if len(operands) == 6 and operands.pop() != Integer(0):
        raise Unsupported("a zero-column mask")
    if len(operands) != 5:
        raise Unsupported(f"{len(operands)} operands")
    return _mma_handler(instruction, context, (kind, 1, True), operands, [], None)


def _mma_handler(
    instruction: PtxInstruction,
    context: KernelContext,
    opcode: tuple[str, int, bool],
    operands: list[Operand],
    disable: list[ScalarReader],
    scale: ScalarReader | None,
    more: tuple[str | None, list[ScalarReader]] = (None, []),
) -> Handler:
    """opcode: kind, CTAs, .ws. operands: D, A, B, instruction descriptor, enable-input-d.

    more: the modifier of block scaling, and the addresses of the factors, or of metadata.
    """
    kind, size, ws = opcode
    if not kind:
        raise Unsupported("no .kind")
    vector, addresses = more
    a_in_tmem = isinstance(operands[1], Address)
    sparse = vector is None and bool(addresses)
    form = MmaForm(kind.removeprefix("kind::"), size, ws, a_in_tmem, vector, sparse)
    d_of = context.scalar_address(operands[0])
    a_of = (
        context.scalar_address(operands[1])
        if form.a_in_tmem
        else context.scalar(operands[1], "b64")
    )
    b_of = context.scalar(operands[2], "b64")
    descriptor_of = context.scalar(operands[3], "b32")
    accumulate_of = context.scalar(operands[4], "pred")
    name = "tcgen05.mma" + ".ws" * ws + ".sp" * sparse
    pipe = PipeInstruction.at(name, instruction.line, size)

    def handler(fragment: Fragment, mask: int) -> None:
        warp = fragment.warp
        lane = issuing_lane(fragment, mask, name)
        job, pages, macs = prepare(
            form,
            tuple([value(warp, lane) for value in (d_of, a_of, b_of, *addresses)]),
            descriptor_of(warp, lane),
            bool(accumulate_of(warp, lane)),
            scale(warp, lane) if scale is not None else 0,
            tuple([word(warp, lane) for word in disable]),
        )
        issue(fragment, lane, job, pipe)
        own = warp.cta
        own.note_product(instruction.line, macs)
        check_swizzle(fragment, members_of(own, group_of(own, size)), pages)

    return handler


@ROWS.machine(
    "tcgen05.commit",
    "9.7.16.12.1",
    "tcgen05.commit.cta_group.mbarrier::arrive::one{.shared::cluster}{.multicast::cluster}.b64 "
    "[mbar]{, mask}",
)
def bind_commit(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Arrives at an mbarrier when the earlier operations of the thread are complete."""
    group, mechanism, _, multicast, _ = modifiers(
        instruction, "tcgen05.commit", CTA_GROUPS, ("mbarrier::arrive::one",),
        ("shared::cluster",), ("multicast::cluster",), ("b64",),
    )  # fmt: skip
    if not mechanism:
        raise Unsupported("no completion mechanism")
    size = group_size(group)
    address_of = context.scalar_address(instruction.operands[0])
    ranks_of = context.scalar(instruction.operands[1], "b16") if multicast else None
    how, line = Access(line=instruction.line, strong=True), instruction.line

    def handler(fragment: Fragment, mask: int) -> None:
        warp, cta = fragment.warp, fragment.warp.cta
        queue = group_of(cta, size).queue
        for lane in lanes_of(mask).tolist():
            ranks = ranks_of(warp, lane) if ranks_of is not None else None
            targets = _targets(fragment, address_of(warp, lane), ranks)
            for target, offset in targets:
                barrier = find_barrier(fragment, target, offset, BarrierUse.COMMIT)
                barrier.arrivers.add(warp.name)
                touch = Touch(warp.clock, how, ATOMIC, lane)
                record_shared(target, np.array([offset]), OBJECT_BYTES, touch)
            message = committed_by(fragment, lane, group_of(cta, size))

            def complete(
                targets: list[tuple[Cta, int]] = targets, message: Message = message
            ) -> None:
                for target, offset in targets:
                    _arrive(warp, line, target, offset, message)

            cta.submit("tcgen05.commit", line, complete, queue)

    return handler


def _targets(fragment: Fragment, address: int, ranks: int | None) -> list[tuple[Cta, int]]:
    """(CTA, offset) of each mbarrier; with multicast the same offset in each CTA of the mask."""
    addresses = np.array([address], np.uint64)
    check_alignment(addresses, OBJECT_BYTES, "mbarrier")
    if ranks is not None:
        own = int(addresses[0]) & ~(0xFF << _RANK_BITS)
        listed = [rank for rank in range(16) if ranks >> rank & 1]
        addresses = np.array([own | rank << _RANK_BITS for rank in listed], np.uint64)
    found = []
    for cta, offsets, _ in locate_shared(fragment.warp.cta, addresses, OBJECT_BYTES):
        found += [(cta, int(offset)) for offset in offsets]
    return found


def _arrive(warp: Warp, line: int, cta: Cta, offset: int, message: Message) -> None:
    """One arrival, at completion; the mbarrier may be gone or full by then."""
    barrier = cta.mbarriers.get(offset)
    if cta.done or barrier is None:
        why = "has exited" if cta.done else "holds no mbarrier there any more"
        text = f"tcgen05.commit arrives at shared address {offset:#x} of CTA {cta.index}, which "
        kind = "exit" if cta.done else "mbarrier"
        warp.cta.report(kind, text + why, line, warp.index)
        return
    try:
        barrier.arrive(1, message)
    except MBarrierFault as fault:
        text = f"{describe_barrier(cta, barrier)}: {fault}"
        warp.cta.report("mbarrier", text, line, warp.index)
        raise Stop from None


@ROWS.machine("tcgen05.mma.ws.sp", "9.7.16.10.9.4", "tcgen05.mma.ws.sp not supported: sparse A")
def refuse_sparse(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """The weight-stationary form, whose layouts of metadata are not known here."""
    raise Unsupported("sparse A of the weight-stationary form")
