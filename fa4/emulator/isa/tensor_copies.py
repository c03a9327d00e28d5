"""cp.async.bulk.tensor and its reducing and prefetching forms: PTX ISA 9.7.9.25.5.

The tensor map is read when the copy is issued. `fa4.emulator.tma` says which bytes a box has;
out-of-bounds elements load as zero (or NaN) and are not stored.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from fa4.emulator.isa.atomics import kind_of_update
from fa4.emulator.isa.bulk import (
    Side,
    barrier_signal,
    begin,
    global_side,
    pass_unwritten,
    shared_side,
    submit_drain,
    submit_fill,
)
from fa4.emulator.isa.bulk_copies import (
    CLUSTER,
    COMPLETE_TX,
    OWN,
    destinations,
    each_distinct,
    each_lane,
)
from fa4.emulator.isa.spaces import Piece
from fa4.emulator.isa.tensor_boxes import DIMENSIONS, MODES, bind_box
from fa4.emulator.machine.memory import MemoryFault
from fa4.emulator.machine.shadows import READ, WRITE
from fa4.emulator.machine.state import Cta, Fragment
from fa4.emulator.ptx.syntax import PtxInstruction
from fa4.emulator.tma.descriptor import TF32_CODES, TensorMap
from fa4.emulator.tma.reduction import SUPPORTED
from fa4.emulator.tma.transfer import Transfer
from fa4.emulator.tma.values import convert_loaded, fill_pattern
from fa4.emulator.translate.context import Handler, KernelContext
from fa4.emulator.translate.layout import RANK_SHIFT
from fa4.emulator.translate.table import TableRows, modifiers
from fa4.emulator.warp_lanes import Array

ROWS = TableRows()

_CHUNK_BYTES = 16


def _global(fragment: Fragment, plan: Transfer, write: bool) -> Side:
    """The units inside the tensor."""
    return global_side(fragment.warp, plan.global_addresses[plan.valid], plan.unit_bytes, write)


def _shared(cta: Cta, offsets: Array, unit_bytes: int) -> Side:
    return Side([Piece(cta.smem, offsets, None, cta)], len(offsets), unit_bytes)


def _chunks(cta: Cta, plan: Transfer) -> Side:
    """All of the box in shared memory, by 16 bytes (a chunk's units follow one another)."""
    addresses = plan.smem_addresses
    if plan.unit_bytes < _CHUNK_BYTES:
        addresses = np.unique(addresses // _CHUNK_BYTES) * _CHUNK_BYTES
    return _shared(cta, addresses, _CHUNK_BYTES)


@ROWS.machine(
    "cp.async.bulk.tensor",
    "9.7.9.25.5.2",
    "cp.async.bulk.tensor.{1d-5d}.{shared::cta shared::cluster}.global{.tile .tile::gather4 "
    ".im2col}.mbarrier::complete_tx::bytes{.multicast::cluster}{.cta_group::1 .cta_group::2} and "
    ".global.shared::cta{.tile .tile::scatter4 .im2col_no_offs}.bulk_group; {.L2::cache_hint}",
)
def bind_tensor_copy(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Copies a box of a tensor."""
    if instruction.parts[5:6] == ("global",):
        return _bind_store(instruction, context)
    return _bind_load(instruction, context)


def _bind_load(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """global -> shared. With .cta_group::2 each signal goes to the CTA of the destination's pair
    that has the parity of the mbarrier operand's CTA."""
    dimensions, space, _, mode, _, multicast, group, _ = modifiers(
        instruction,
        "cp.async.bulk.tensor",
        DIMENSIONS,
        (CLUSTER, OWN),
        ("global",),
        (*MODES[:2], "im2col"),
        (COMPLETE_TX,),
        ("multicast::cluster",),
        ("cta_group::1", "cta_group::2"),
        ("L2::cache_hint",),
    )
    operands, line = list(instruction.operands), instruction.line
    offsets = operands.pop(3) if mode == "im2col" else None
    target_of = context.scalar_address(operands[0])
    box = bind_box(operands[1], context, dimensions, mode, line, offsets)
    barrier_of = context.scalar_address(operands[2])
    mask_of = context.scalar(operands[3], "b16") if multicast else None

    def copy(fragment: Fragment, lane: int) -> None:
        warp = fragment.warp
        target, offset = shared_side(warp, target_of(warp, lane), 1, own_cta=space == OWN)
        tensor_map, plan = box.plan_load(fragment, lane, offset)
        reads = _global(fragment, plan, write=False)
        barrier = barrier_of(warp, lane)
        snapshot = begin(warp, lane)
        mask = mask_of(warp, lane) if mask_of is not None else None
        for cta in destinations(warp, target, mask):
            home = _signalled_cta(fragment, cta, barrier, group == "cta_group::2", mask is None)
            signal = barrier_signal(fragment, home, barrier, line)
            shared_side(warp, cta.rank << RANK_SHIFT | offset, plan.total_bytes, own_cta=False)
            actor = warp.cta.pool.begin(snapshot)
            reads.touch(warp.cta, actor, line, READ)
            _chunks(cta, plan).touch(warp.cta, actor, line, WRITE)
            writes = _shared(cta, plan.smem_addresses, plan.unit_bytes)
            if (unwritten := reads.unwritten()) is not None:
                held = plan.smem_addresses[plan.valid][unwritten]
                pass_unwritten(cta, held, plan.unit_bytes)
            move = partial(_fill, tensor_map, plan, reads, writes)
            stop = int(plan.smem_addresses.max()) + plan.unit_bytes
            cta.swizzles.note(offset, stop, tensor_map.swizzle, tensor_map.swizzle_atom_bytes)
            submit_fill(warp.cta, "TMA load", actor, move, (signal, plan.total_bytes))

    return each_lane(copy)


def _fill(tensor_map: TensorMap, plan: Transfer, reads: Side, writes: Side) -> None:
    data = reads.gather()
    if tensor_map.element in TF32_CODES:
        raw = data.view(np.uint8).reshape(reads.count, plan.unit_bytes)
        data = convert_loaded(tensor_map, raw).view(data.dtype).reshape(-1)
    if reads.count == writes.count:
        writes.scatter(data)
        return
    values = np.empty(writes.count, f"V{plan.unit_bytes}")
    values[:] = np.frombuffer(fill_pattern(tensor_map)[: plan.unit_bytes], values.dtype)
    values[plan.valid] = data
    writes.scatter(values)


def _signalled_cta(fragment: Fragment, target: Cta, barrier: int, paired: bool, named: bool) -> Cta:
    """The CTA whose mbarrier a copy into `target` signals.

    named: the destination operand itself names the target, so the mbarrier operand must lie there.
    """
    cta, _ = shared_side(fragment.warp, barrier, 8, own_cta=False)
    if paired:
        rank = target.rank & ~1 | cta.rank & 1
        if rank >= target.cluster.size:
            raise MemoryFault("out-of-bounds", f"CTA rank {rank}: the cluster has no such pair")
        return target.cluster.ctas[rank]
    if named and cta is not target:
        raise fragment.fatal(
            "mbarrier",
            f"the copy writes CTA {target.index} but its mbarrier {barrier:#x} is in CTA "
            f"{cta.index}; only .cta_group::2 allows that",
        )
    return target


def _bind_store(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """shared -> global."""
    dimensions, _, _, mode, _, _ = modifiers(
        instruction,
        "cp.async.bulk.tensor",
        DIMENSIONS,
        ("global",),
        (OWN,),
        (MODES[0], MODES[2], "im2col_no_offs"),
        ("bulk_group",),
        ("L2::cache_hint",),
    )
    return _bind_drain(instruction, context, dimensions, mode, "")


@ROWS.machine(
    "cp.reduce.async.bulk.tensor",
    "9.7.9.25.5.3",
    "cp.reduce.async.bulk.tensor.{1d-5d}.global.shared::cta.{add min max inc dec and or xor}"
    "{.tile .im2col_no_offs}.bulk_group{.L2::cache_hint}",
)
def bind_tensor_reduction(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Combines a box in shared memory with the tensor, element by element."""
    dimensions, _, _, operation, mode, _, _ = modifiers(
        instruction,
        "cp.reduce.async.bulk.tensor",
        DIMENSIONS,
        ("global",),
        (OWN,),
        SUPPORTED,
        (MODES[0], "im2col_no_offs"),
        ("bulk_group",),
        ("L2::cache_hint",),
    )
    return _bind_drain(instruction, context, dimensions, mode, operation)


def _bind_drain(
    instruction: PtxInstruction, context: KernelContext, dimensions: str, mode: str, operation: str
) -> Handler:
    line = instruction.line
    box = bind_box(instruction.operands[0], context, dimensions, mode, line)
    source_of = context.scalar_address(instruction.operands[1])

    def copy(fragment: Fragment, lane: int) -> None:
        warp = fragment.warp
        source = source_of(warp, lane)
        cta, offset = shared_side(warp, source, 1, own_cta=True)
        tensor_map, plan = box.plan(fragment, lane, offset, store=True)
        shared_side(warp, source, plan.total_bytes, own_cta=True)
        if operation and tensor_map.element not in SUPPORTED[operation]:
            raise fragment.fatal("descriptor", f".{operation} of {tensor_map.element} elements")
        reads = _shared(cta, plan.smem_addresses[plan.valid], plan.unit_bytes)
        writes = _global(fragment, plan, write=True)
        if operation:
            update = partial(writes.reduce, operation, tensor_map.element)
            kind = kind_of_update(warp, operation, tensor_map.element)
            submit_drain(warp, lane, "TMA reduction", line, reads, update, writes, kind)
        else:
            submit_drain(warp, lane, "TMA store", line, reads, writes.scatter, writes)

    if operation:
        return each_lane(copy)
    return each_distinct(copy, (*box.readers, context.address(instruction.operands[1])))


@ROWS.machine(
    "cp.async.bulk.prefetch.tensor",
    "9.7.9.25.5.4",
    "cp.async.bulk.prefetch.tensor.{1d-5d}.L2.global{.tile .tile::gather4 .im2col}"
    "{.L2::cache_hint}",
)
def bind_tensor_prefetch(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Only checks the tensor map and the addresses."""
    dimensions, _, _, mode, _ = modifiers(
        instruction,
        "cp.async.bulk.prefetch.tensor",
        DIMENSIONS,
        ("L2",),
        ("global",),
        (*MODES[:2], "im2col"),
        ("L2::cache_hint",),
    )
    operand, *more = instruction.operands
    offsets = more[0] if mode == "im2col" else None
    box = bind_box(operand, context, dimensions, mode, instruction.line, offsets)

    def copy(fragment: Fragment, lane: int) -> None:
        _, plan = box.plan(fragment, lane, 0)
        _global(fragment, plan, write=False)

    return each_lane(copy)
