"""cp.async.bulk.tensor and its reducing and prefetching forms: PTX ISA 9.7.9.25.5.

The tensor map is read when the copy is issued. `fa4.emulator.tma` says which bytes a box has;
out-of-bounds elements load as zero (or NaN) and are not stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from fa4.emulator.checks.conflict import Access
from fa4.emulator.errors import EmulatorError
from fa4.emulator.isa.bulk import (
    Side,
    barrier_signal,
    begin,
    global_side,
    shared_side,
    submit_drain,
    submit_fill,
)
from fa4.emulator.isa.bulk_copies import CLUSTER, COMPLETE_TX, OWN, destinations, each_lane
from fa4.emulator.isa.spaces import Piece, Space, record, units
from fa4.emulator.isa.table import Unsupported, machine, modifiers
from fa4.emulator.layout import RANK_SHIFT
from fa4.emulator.machine.checks import ATOMIC, READ, WRITE, Touch
from fa4.emulator.machine.context import Array, Handler, KernelContext, ScalarReader
from fa4.emulator.machine.memory import MemoryFault
from fa4.emulator.machine.state import Cta, Fragment
from fa4.emulator.ptx.syntax import Address, Instruction, Operand
from fa4.emulator.tma.descriptor import FLOATS, MAP_BYTES, TensorMap
from fa4.emulator.tma.reduction import SUPPORTED
from fa4.emulator.tma.transfer import SMEM_ALIGN_BYTES, Transfer, plan_gather4, plan_tile

MAP_ALIGN_BYTES = 64
_DIMENSIONS = ("1d", "2d", "3d", "4d", "5d")
_MODES = ("tile", "tile::gather4", "tile::scatter4")
_GENERIC = Space("")
_CHUNK_BYTES = 16


@dataclass(frozen=True)
class Box:
    """The operand [tensorMap, {coordinates}] of an instruction, and its mode."""

    address: ScalarReader
    coordinates: tuple[ScalarReader, ...]
    packed_rows: bool
    access: Access

    def plan(self, fragment: Fragment, lane: int, smem_offset: int) -> tuple[TensorMap, Transfer]:
        """The map and the bytes that a copy of one lane moves.

        Raises MemoryFault for a misaligned shared address; a bad map is a fatal finding.
        """
        if smem_offset % SMEM_ALIGN_BYTES:
            raise MemoryFault(
                "misaligned",
                f"shared address {smem_offset:#x} of a tensor copy is not a multiple of "
                f"{SMEM_ALIGN_BYTES}",
            )
        raw = self.read_map(fragment, lane)
        values = tuple(_signed(read(fragment.warp, lane)) for read in self.coordinates)
        try:
            tensor_map = TensorMap.decode(raw)
            plan = plan_gather4 if self.packed_rows else plan_tile
            return tensor_map, plan(tensor_map, values, smem_offset)
        except EmulatorError as error:
            raise fragment.warp.cta.machine.fatal(fragment, "descriptor", str(error)) from None

    def read_map(self, fragment: Fragment, lane: int) -> bytes:
        """The 128 bytes of the tensor map."""
        warp = fragment.warp
        address = self.address(warp, lane)
        if address % MAP_ALIGN_BYTES:
            raise warp.cta.machine.fatal(
                fragment, "descriptor", f"a tensor map at {address:#x}, not a multiple of 64"
            )
        place, who = np.array([address], np.uint64), np.array([lane])
        (piece,) = _GENERIC.resolve(warp, place, who, MAP_BYTES, write=False)
        record(warp, piece, MAP_BYTES, Touch(warp.clock, self.access, READ, who))
        return bytes(units(piece.data, MAP_BYTES)[piece.offsets].tobytes())


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _bind_box(
    operand: Operand, context: KernelContext, dimensions: str, mode: str, line: int
) -> Box:
    if not isinstance(operand, Address):
        raise Unsupported(f"tensor operand {operand}")
    packed = mode in ("tile::gather4", "tile::scatter4")
    if packed and dimensions != "2d":
        raise Unsupported(f".{dimensions} with .{mode}")
    expected = 5 if packed else int(dimensions[0])
    if len(operand.coordinates) != expected:
        raise Unsupported(f"{len(operand.coordinates)} coordinates, {expected} are needed")
    base = Address(operand.base, operand.offset)
    coordinates = tuple(context.scalar(c, "s32") for c in operand.coordinates)
    return Box(context.scalar_address(base), coordinates, packed, Access(line))


@lru_cache(maxsize=16)
def fill_bytes(element: str, element_bytes: int, fill_nan: bool, unit_bytes: int) -> Array:
    """The unit (dtype V, shape ()) that out-of-bounds elements load as: zeros, or NaN with all
    bits but the sign set."""
    nan = ((1 << (8 * element_bytes - 1)) - 1).to_bytes(element_bytes, "little")
    one = nan if fill_nan and element in FLOATS else bytes(element_bytes)
    return np.frombuffer(one * (unit_bytes // element_bytes), f"V{unit_bytes}")


def _global(fragment: Fragment, plan: Transfer, write: bool) -> Side:
    """The units inside the tensor."""
    return global_side(fragment.warp, plan.global_addresses[plan.valid], plan.unit_bytes, write)


def _shared(cta: Cta, offsets: Array, unit_bytes: int) -> Side:
    return Side([Piece(cta.smem, offsets, None, cta)], len(offsets), unit_bytes)


def _chunks(cta: Cta, plan: Transfer) -> Side:
    """All of the box in shared memory, by 16 bytes (a chunk's units follow one another)."""
    return _shared(cta, plan.smem_addresses[:: _CHUNK_BYTES // plan.unit_bytes], _CHUNK_BYTES)


@machine(
    "cp.async.bulk.tensor",
    "9.7.9.25.5.2",
    "cp.async.bulk.tensor.{1d-5d}.{shared::cta shared::cluster}.global{.tile .tile::gather4}"
    ".mbarrier::complete_tx::bytes{.multicast::cluster}{.cta_group::1 .cta_group::2} and "
    ".global.shared::cta{.tile .tile::scatter4}.bulk_group; {.L2::cache_hint}; no im2col",
)
def bind_tensor_copy(instruction: Instruction, context: KernelContext) -> Handler:
    """Copies a box of a tensor."""
    if instruction.parts[5:6] == ("global",):
        return _bind_store(instruction, context)
    return _bind_load(instruction, context)


def _bind_load(instruction: Instruction, context: KernelContext) -> Handler:
    """global -> shared. With .cta_group::2 each signal goes to the CTA of the destination's pair
    that has the parity of the mbarrier operand's CTA."""
    dimensions, space, _, mode, _, multicast, group, _ = modifiers(
        instruction,
        "cp.async.bulk.tensor",
        _DIMENSIONS,
        (CLUSTER, OWN),
        ("global",),
        _MODES[:2],
        (COMPLETE_TX,),
        ("multicast::cluster",),
        ("cta_group::1", "cta_group::2"),
        ("L2::cache_hint",),
    )
    operands, line = instruction.operands, instruction.line
    target_of = context.scalar_address(operands[0])
    box = _bind_box(operands[1], context, dimensions, mode, line)
    barrier_of = context.scalar_address(operands[2])
    mask_of = context.scalar(operands[3], "b16") if multicast else None

    def copy(fragment: Fragment, lane: int) -> None:
        warp = fragment.warp
        target, offset = shared_side(warp, target_of(warp, lane), 1, own_cta=space == OWN)
        tensor_map, plan = box.plan(fragment, lane, offset)
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
            move = partial(_fill, tensor_map, plan, reads, writes)
            submit_fill(warp.cta, "TMA load", actor, move, (signal, plan.total_bytes))

    return each_lane(copy)


def _fill(tensor_map: TensorMap, plan: Transfer, reads: Side, writes: Side) -> None:
    if reads.count == writes.count:
        writes.scatter(reads.gather())
        return
    values = np.empty(writes.count, f"V{plan.unit_bytes}")
    values[:] = fill_bytes(
        tensor_map.element, tensor_map.element_bytes, tensor_map.fill_nan, plan.unit_bytes
    )
    values[plan.valid] = reads.gather()
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
        raise fragment.warp.cta.machine.fatal(
            fragment,
            "mbarrier",
            f"the copy writes CTA {target.index} but its mbarrier {barrier:#x} is in CTA "
            f"{cta.index}; only .cta_group::2 allows that",
        )
    return target


def _bind_store(instruction: Instruction, context: KernelContext) -> Handler:
    """shared -> global."""
    dimensions, _, _, mode, _, _ = modifiers(
        instruction,
        "cp.async.bulk.tensor",
        _DIMENSIONS,
        ("global",),
        (OWN,),
        (_MODES[0], _MODES[2]),
        ("bulk_group",),
        ("L2::cache_hint",),
    )
    return _bind_drain(instruction, context, dimensions, mode, "")


@machine(
    "cp.reduce.async.bulk.tensor",
    "9.7.9.25.5.3",
    "cp.reduce.async.bulk.tensor.{1d-5d}.global.shared::cta.{add min max inc dec and or xor}"
    "{.tile}.bulk_group{.L2::cache_hint}",
)
def bind_tensor_reduction(instruction: Instruction, context: KernelContext) -> Handler:
    """Combines a box in shared memory with the tensor, element by element."""
    dimensions, _, _, operation, mode, _, _ = modifiers(
        instruction,
        "cp.reduce.async.bulk.tensor",
        _DIMENSIONS,
        ("global",),
        (OWN,),
        SUPPORTED,
        ("tile",),
        ("bulk_group",),
        ("L2::cache_hint",),
    )
    return _bind_drain(instruction, context, dimensions, mode, operation)


def _bind_drain(
    instruction: Instruction, context: KernelContext, dimensions: str, mode: str, operation: str
) -> Handler:
    line = instruction.line
    box = _bind_box(instruction.operands[0], context, dimensions, mode, line)
    source_of = context.scalar_address(instruction.operands[1])

    def copy(fragment: Fragment, lane: int) -> None:
        warp = fragment.warp
        source = source_of(warp, lane)
        cta, offset = shared_side(warp, source, 1, own_cta=True)
        tensor_map, plan = box.plan(fragment, lane, offset)
        shared_side(warp, source, plan.total_bytes, own_cta=True)
        if operation and tensor_map.element not in SUPPORTED[operation]:
            raise cta.machine.fatal(
                fragment, "descriptor", f".{operation} of {tensor_map.element} elements"
            )
        reads = _shared(cta, plan.smem_addresses[plan.valid], plan.unit_bytes)
        writes = _global(fragment, plan, write=True)
        if operation:
            update = partial(writes.reduce, operation, tensor_map.element)
            submit_drain(warp, lane, "TMA reduction", line, reads, update, writes, ATOMIC)
        else:
            submit_drain(warp, lane, "TMA store", line, reads, writes.scatter, writes)

    return each_lane(copy)


@machine(
    "cp.async.bulk.prefetch.tensor",
    "9.7.9.25.5.4",
    "cp.async.bulk.prefetch.tensor.{1d-5d}.L2.global{.tile .tile::gather4}{.L2::cache_hint}",
)
def bind_tensor_prefetch(instruction: Instruction, context: KernelContext) -> Handler:
    """Only checks the tensor map and the addresses."""
    dimensions, _, _, mode, _ = modifiers(
        instruction,
        "cp.async.bulk.prefetch.tensor",
        _DIMENSIONS,
        ("L2",),
        ("global",),
        _MODES[:2],
        ("L2::cache_hint",),
    )
    box = _bind_box(instruction.operands[0], context, dimensions, mode, instruction.line)

    def copy(fragment: Fragment, lane: int) -> None:
        _, plan = box.plan(fragment, lane, 0)
        _global(fragment, plan, write=False)

    return each_lane(copy)
