"""tcgen05.alloc, dealloc and relinquish_alloc_permit (PTX ISA 9.7.16.7)."""

from __future__ import annotations

import numpy as np

from fa4.emulator.checks.conflict import Access
from fa4.emulator.machine.checks import record_shared
from fa4.emulator.machine.memory import check_alignment
from fa4.emulator.machine.shadows import WRITE, Touch
from fa4.emulator.machine.shared_memory import locate_shared
from fa4.emulator.machine.state import Fragment, Warp
from fa4.emulator.machine.tensor_access import (
    group_of,
    make_tensor_memory,
    record_free,
    tensor_memory,
)
from fa4.emulator.machine.waits import Blocked
from fa4.emulator.ptx.syntax import PtxInstruction
from fa4.emulator.tcgen05.errors import TmemError
from fa4.emulator.translate.context import Handler, KernelContext
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers
from fa4.emulator.warp_lanes import lowest

ROWS = TableRows()

CTA_GROUPS = ("cta_group::1", "cta_group::2")
ADDRESS_BYTES = 4


def require_whole_warp(fragment: Fragment, mask: int, what: str) -> None:
    """A finding unless all living lanes of the warp execute a .sync.aligned instruction."""
    warp = fragment.warp
    if mask != warp.alive:
        fragment.fault(
            "divergence",
            f"{what} by lanes {mask:#010x} alone, while {warp.alive & ~mask:#010x} of the warp "
            "are elsewhere: all lanes must execute it together",
        )


def group_size(qualifier: str) -> int:
    """1 or 2 of "cta_group::1" and "cta_group::2". Raises Unsupported if it is missing."""
    if not qualifier:
        raise Unsupported("no .cta_group")
    return int(qualifier[-1])


@ROWS.machine(
    "tcgen05.alloc", "9.7.16.7.1", "tcgen05.alloc.cta_group.sync.aligned{.shared::cta}.b32 [a], n"
)
def bind_alloc(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Blocks while the columns are not free; the two CTAs of a pair allocate together."""
    group, *_ = modifiers(
        instruction,
        "tcgen05.alloc",
        CTA_GROUPS,
        ("sync",),
        ("aligned",),
        ("shared::cta",),
        ("b32",),
    )
    size = group_size(group)
    address = context.scalar_address(instruction.operands[0])
    columns_of = context.scalar(instruction.operands[1], "u32")
    how = Access(line=instruction.line)

    def handler(fragment: Fragment, mask: int) -> Blocked | None:
        warp, lane = fragment.warp, lowest(mask)
        cta = warp.cta
        columns = columns_of(warp, lane)
        owner = group_of(cta, size)
        tensor = cta.tensor
        if tensor is None:
            tensor = make_tensor_memory(cta, owner, instruction.line)
        tensor_memory(cta, size)
        if tensor.relinquished:
            raise TmemError("tcgen05.alloc after tcgen05.relinquish_alloc_permit")
        tensor.allocator.check(columns)
        allocated = owner.allocate(cta.rank, warp.index, columns)
        if allocated is None:
            return Blocked(owner, lambda: owner.waits_for(columns))
        require_whole_warp(fragment, mask, "tcgen05.alloc")
        if columns > tensor.latest_columns:
            fragment.fault(
                "tmem",
                f"tcgen05.alloc of {columns} columns after one of {tensor.latest_columns}: sizes "
                "must not increase",
            )
        tensor.latest_columns = columns
        _write_address(warp, address(warp, lane), allocated, Touch(warp.clock, how, WRITE, lane))
        # The instruction is one of the whole warp: each of its lanes may read the address now.
        warp.clock.sync_lanes(mask)
        return None

    return handler


def _write_address(warp: Warp, address: int, value: int, touch: Touch) -> None:
    addresses = np.array([address], np.uint64)
    check_alignment(addresses, ADDRESS_BYTES, "shared")
    for target, offsets, _ in locate_shared(warp.cta, addresses, ADDRESS_BYTES):
        if target is not warp.cta:
            raise TmemError("tcgen05.alloc writes its address into its own CTA's shared memory")
        start = int(offsets[0])
        target.smem[start : start + ADDRESS_BYTES].view(np.uint32)[0] = value
        record_shared(target, offsets, ADDRESS_BYTES, touch)


@ROWS.machine(
    "tcgen05.dealloc", "9.7.16.7.1", "tcgen05.dealloc.cta_group.sync.aligned.b32 taddr, n"
)
def bind_dealloc(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Every use of the columns must be ordered before: for the checks it writes them."""
    group, *_ = modifiers(
        instruction, "tcgen05.dealloc", CTA_GROUPS, ("sync",), ("aligned",), ("b32",)
    )
    size = group_size(group)
    address_of = context.scalar(instruction.operands[0], "u32")
    columns_of = context.scalar(instruction.operands[1], "u32")
    how = Access(line=instruction.line)

    def handler(fragment: Fragment, mask: int) -> None:
        warp, lane = fragment.warp, lowest(mask)
        require_whole_warp(fragment, mask, "tcgen05.dealloc")
        tensor = tensor_memory(warp.cta, size)
        address, columns = address_of(warp, lane), columns_of(warp, lane)
        tensor.free(address, columns)
        record_free(warp, lane, address, columns, how)
        warp.cta.machine.progress += 1
        tensor.group.wake()

    return handler


@ROWS.machine(
    "tcgen05.relinquish_alloc_permit",
    "9.7.16.7.1",
    "tcgen05.relinquish_alloc_permit.cta_group.sync.aligned",
)
def bind_relinquish(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """The CTA allocates no more."""
    group, *_ = modifiers(
        instruction, "tcgen05.relinquish_alloc_permit", CTA_GROUPS, ("sync",), ("aligned",)
    )
    size = group_size(group)

    def handler(fragment: Fragment, mask: int) -> None:
        require_whole_warp(fragment, mask, "tcgen05.relinquish_alloc_permit")
        tensor_memory(fragment.warp.cta, size).relinquished = True

    return handler
