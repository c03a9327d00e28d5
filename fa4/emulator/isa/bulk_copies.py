"""cp.async.bulk, cp.reduce.async.bulk and their prefetch: PTX ISA 9.7.9.25.4.

The active lanes each issue a copy of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from fa4.emulator.isa.atomics import kind_of_update
from fa4.emulator.isa.bulk import (
    CHUNK_BYTES,
    Side,
    barrier_signal,
    begin,
    check_bulk,
    global_side,
    pass_unwritten,
    shared_chunks,
    shared_side,
    submit_drain,
    submit_fill,
)
from fa4.emulator.machine.memory import MemoryFault
from fa4.emulator.machine.shadows import READ, WRITE
from fa4.emulator.machine.state import Cta, Fragment, Warp
from fa4.emulator.ptx.syntax import PtxInstruction
from fa4.emulator.tma.reduction import SUPPORTED
from fa4.emulator.translate.context import Handler, KernelContext, Reader, ScalarReader
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers
from fa4.emulator.warp_lanes import Array, lanes_of

ROWS = TableRows()

CLUSTER, OWN = "shared::cluster", "shared::cta"
COMPLETE_TX = "mbarrier::complete_tx::bytes"
_ELEMENTS = ("f16", "bf16", "b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64")


def destinations(warp: Warp, target: Cta, mask: int | None) -> list[Cta]:
    """The CTAs that a copy writes: `target`, or those of a multicast mask.

    Raises MemoryFault for a mask that names CTAs outside the cluster.
    """
    if mask is None:
        return [target]
    ctas = warp.cta.cluster.ctas
    if mask >> len(ctas) or not mask:
        raise MemoryFault(
            "out-of-bounds", f"multicast mask {mask:#x} in a cluster of {len(ctas)} CTAs"
        )
    return [cta for cta in ctas if mask >> cta.rank & 1]


def each_lane(copy: Callable[[Fragment, int], None]) -> Handler:
    """A handler that issues one copy for each active lane."""

    def handler(fragment: Fragment, mask: int) -> None:
        for lane in lanes_of(mask).tolist():
            copy(fragment, lane)

    return handler


def each_distinct(copy: Callable[[Fragment, int], None], operands: Sequence[Reader]) -> Handler:
    """A handler that issues one copy for all active lanes with equal operands.

    For stores only: a warp that executes a store without electing a lane (NVIDIA's fmha example
    does) writes the same bytes to the same place several times, which is no race.
    """

    def handler(fragment: Fragment, mask: int) -> None:
        lanes = lanes_of(mask)
        values = np.stack([read(fragment.warp).astype(np.uint64) for read in operands])[:, lanes]
        if (values == values[:, :1]).all():
            copy(fragment, int(lanes[0]))
            return
        _, first = np.unique(values, axis=1, return_index=True)
        for lane in lanes[np.sort(first)].tolist():
            copy(fragment, lane)

    return handler


@ROWS.machine(
    "cp.async.bulk",
    "9.7.9.25.4.1",
    "cp.async.bulk.{shared::cta shared::cluster}.{global shared::cta}"
    ".mbarrier::complete_tx::bytes{.multicast::cluster}; .global.shared::cta.bulk_group{.cp_mask}; "
    "{.L2::cache_hint}",
)
def bind_bulk_copy(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Contiguous bytes; address and size are multiples of 16."""
    parts = instruction.parts[3:]
    if parts[:1] == ("global",):
        return _bind_store(instruction, context)
    if parts[1:2] == ("global",):
        return _bind_load(instruction, context)
    return _bind_exchange(instruction, context, "cp.async.bulk", "", "")


def _bind_load(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """global -> shared."""
    _, space, _, _, multicast, _ = modifiers(
        instruction,
        "cp.async",
        ("bulk",),
        (CLUSTER, OWN),
        ("global",),
        (COMPLETE_TX,),
        ("multicast::cluster",),
        ("L2::cache_hint",),
    )
    target_of, source_of, size_of, barrier_of = _addresses(instruction, context)
    mask_of = context.scalar(instruction.operands[4], "b16") if multicast else None
    line = instruction.line

    def copy(fragment: Fragment, lane: int) -> None:
        warp = fragment.warp
        start, source, size = target_of(warp, lane), source_of(warp, lane), size_of(warp, lane)
        check_bulk("shared", start, size)
        check_bulk("global", source, size)
        target, offset = shared_side(warp, start, size, own_cta=space == OWN)
        addresses = np.arange(source, source + size, 16, dtype=np.uint64)
        reads = global_side(warp, addresses, 16, write=False)
        snapshot = begin(warp, lane)
        mask = mask_of(warp, lane) if mask_of is not None else None
        for cta in destinations(warp, target, mask):
            signal = barrier_signal(fragment, cta, barrier_of(warp, lane), line)
            actor = warp.cta.pool.begin(snapshot)
            writes = shared_chunks(cta, offset, size)
            reads.touch(warp.cta, actor, line, READ)
            writes.touch(warp.cta, actor, line, WRITE)
            if (unwritten := reads.unwritten()) is not None:
                pass_unwritten(cta, writes.pieces[0].offsets[unwritten], CHUNK_BYTES)
            submit_fill(warp.cta, "bulk load", actor, partial(_move, reads, writes), (signal, size))

    return each_lane(copy)


def _move(source: Side, target: Side) -> None:
    target.scatter(source.gather())


def _addresses(instruction: PtxInstruction, context: KernelContext) -> tuple[ScalarReader, ...]:
    """Readers of the destination, the source, the size and the mbarrier."""
    operands = instruction.operands
    return (
        context.scalar_address(operands[0]),
        context.scalar_address(operands[1]),
        context.scalar(operands[2], "u32"),
        context.scalar_address(operands[3]),
    )


def _bind_exchange(
    instruction: PtxInstruction, context: KernelContext, name: str, operation: str, element: str
) -> Handler:
    """shared::cta -> shared::cluster, copied or reduced."""
    if not operation:
        modifiers(instruction, "cp.async", ("bulk",), (CLUSTER,), (OWN,), (COMPLETE_TX,))
    target_of, source_of, size_of, barrier_of = _addresses(instruction, context)
    line = instruction.line

    def copy(fragment: Fragment, lane: int) -> None:
        warp = fragment.warp
        start, source, size = target_of(warp, lane), source_of(warp, lane), size_of(warp, lane)
        check_bulk("shared", start, size)
        check_bulk("shared", source, size)
        cta, offset = shared_side(warp, start, size, own_cta=False)
        _, source_offset = shared_side(warp, source, size, own_cta=True)
        signal = barrier_signal(fragment, cta, barrier_of(warp, lane), line)
        actor = warp.cta.pool.begin(begin(warp, lane))
        reads = shared_chunks(warp.cta, source_offset, size)
        writes = shared_chunks(cta, offset, size)
        reads.touch(warp.cta, actor, line, READ)
        kind = kind_of_update(warp, operation, element) if operation else WRITE
        writes.touch(warp.cta, actor, line, kind)

        def move() -> None:
            if operation:
                writes.reduce(operation, element, reads.gather())
            else:
                writes.scatter(reads.gather())

        submit_fill(warp.cta, name, actor, move, (signal, size))

    return each_lane(copy)


def _bind_store(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """shared::cta -> global."""
    masked = modifiers(
        instruction,
        "cp.async",
        ("bulk",),
        ("global",),
        (OWN,),
        ("bulk_group",),
        ("L2::cache_hint",),
        ("cp_mask",),
    )[5]
    operands = instruction.operands
    target_of, source_of = (context.scalar_address(operand) for operand in operands[:2])
    size_of = context.scalar(operands[2], "u32")
    mask_of = context.scalar(operands[-1], "b16") if masked else None

    def copy(fragment: Fragment, lane: int) -> None:
        warp = fragment.warp
        start, source, size = target_of(warp, lane), source_of(warp, lane), size_of(warp, lane)
        reads, writes = _store_sides(warp, start, source, size)
        if mask_of is not None:
            reads, writes = _masked_sides(warp, start, source, size, mask_of(warp, lane))
        submit_drain(warp, lane, "bulk store", instruction.line, reads, writes.scatter, writes)

    return each_lane(copy)


def _store_sides(warp: Warp, start: int, source: int, size: int) -> tuple[Side, Side]:
    check_bulk("global", start, size)
    check_bulk("shared", source, size)
    _, offset = shared_side(warp, source, size, own_cta=True)
    addresses = np.arange(start, start + size, 16, dtype=np.uint64)
    return shared_chunks(warp.cta, offset, size), global_side(warp, addresses, 16, write=True)


def _masked_sides(warp: Warp, start: int, source: int, size: int, mask: int) -> tuple[Side, Side]:
    """Only byte i of each 16 where bit i of the mask is set."""
    _, offset = shared_side(warp, source, size, own_cta=True)
    chosen: Array = np.arange(size)[[bool(mask >> byte % 16 & 1) for byte in range(size)]]
    piece = shared_chunks(warp.cta, offset, size).pieces[0]
    piece.offsets = offset + chosen
    addresses = np.uint64(start) + chosen.astype(np.uint64)
    return Side([piece], len(chosen), 1), global_side(warp, addresses, 1, write=True)


@ROWS.machine(
    "cp.reduce.async.bulk",
    "9.7.9.25.4.2",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group{.L2::cache_hint} and "
    ".shared::cluster.shared::cta.mbarrier::complete_tx::bytes; .add .min .max .inc .dec .and .or "
    ".xor{.noftz}.type",
)
def bind_bulk_reduction(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Element-wise atomic updates of global or shared memory."""
    _, target, _, _, _, operation, _, element = modifiers(
        instruction,
        "cp.reduce.async",
        ("bulk",),
        ("global", CLUSTER),
        (OWN,),
        ("bulk_group", COMPLETE_TX),
        ("L2::cache_hint",),
        SUPPORTED,
        ("noftz",),
        _ELEMENTS,
    )
    if element not in SUPPORTED.get(operation, ()):
        raise Unsupported(f".{operation} of .{element}")
    if target == CLUSTER:
        return _bind_exchange(instruction, context, "bulk reduction", operation, element)
    operands = instruction.operands
    target_of, source_of = (context.scalar_address(operand) for operand in operands[:2])
    size_of = context.scalar(operands[2], "u32")

    def copy(fragment: Fragment, lane: int) -> None:
        warp = fragment.warp
        reads, writes = _store_sides(
            warp, target_of(warp, lane), source_of(warp, lane), size_of(warp, lane)
        )
        update = partial(writes.reduce, operation, element)
        kind = kind_of_update(warp, operation, element)
        submit_drain(warp, lane, "bulk reduction", instruction.line, reads, update, writes, kind)

    return each_lane(copy)


@ROWS.machine("cp.async.bulk.prefetch", "9.7.9.25.4.3", "cp.async.bulk.prefetch.L2.global")
def bind_bulk_prefetch(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Only checks the addresses."""
    address_of = context.scalar_address(instruction.operands[0])
    size_of = context.scalar(instruction.operands[1], "u32")

    def copy(fragment: Fragment, lane: int) -> None:
        warp = fragment.warp
        start, size = address_of(warp, lane), size_of(warp, lane)
        check_bulk("global", start, size)
        global_side(warp, np.arange(start, start + size, 16, dtype=np.uint64), 16, write=False)

    return each_lane(copy)
