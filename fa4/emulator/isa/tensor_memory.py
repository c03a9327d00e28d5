"""tcgen05.ld, tcgen05.st, their waits, and tcgen05.fence (PTX ISA 9.7.16.8).

tcgen05.ld and .st are asynchronous: a load reads tensor memory and writes its registers when it
completes, a store takes its registers at once and writes tensor memory when it completes. Each is
an actor of its own for the checks until tcgen05.wait of its warp takes over what it did, or the
first use of a register that the load delivers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fa4.emulator.checks.conflict import Access
from fa4.emulator.isa.tensor_allocation import require_whole_warp
from fa4.emulator.isa.tensor_registers import RegisterBlock
from fa4.emulator.machine.checks import record_tensor
from fa4.emulator.machine.shadows import READ, WRITE, Touch
from fa4.emulator.machine.state import Fragment, TmemStream, Warp
from fa4.emulator.machine.tensor import TensorMemory, granules_of
from fa4.emulator.machine.tensor_access import tensor_memory
from fa4.emulator.machine.waits import Blocked
from fa4.emulator.ptx.syntax import Integer, Operand, PtxInstruction
from fa4.emulator.tcgen05.errors import TmemError
from fa4.emulator.tcgen05.tmem import COLUMNS, WARP_LANES
from fa4.emulator.tcgen05.tmem_access import (
    access_map,
    names_own_lanes,
    pack16,
    reduce_registers,
    register_count,
    unpack16,
)
from fa4.emulator.translate.context import Handler, KernelContext
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers
from fa4.emulator.warp_lanes import Array, lowest

ROWS = TableRows()

SHAPES = ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")
COUNTS = tuple(f"x{1 << power}" for power in range(8))


@dataclass(frozen=True)
class TmemForm:
    """The shape of a load or store. half_split: columns, for .16x32bx2. packed: 16-bit halves."""

    shape: str
    count: int
    half_split: int | None
    packed: bool


@dataclass(frozen=True, eq=False)
class Cells:
    """What a warp touches. words: lane * 512 + column of each register of each lane, (registers,
    32), with packing (2 * registers, 32). granules: the same for the checks. first_column,
    columns: the run of columns that they lie in."""

    words: Array
    granules: Array
    first_column: int
    columns: int


@lru_cache(maxsize=1024)
def cells_of(form: TmemForm, warp_in_group: int, address: int) -> Cells:
    """The cells at an address. Raises TmemError if the warp may not touch them."""
    places = access_map(
        form.shape, form.count, warp_in_group, address, form.half_split, form.packed
    )
    words = np.ascontiguousarray((places.lanes * COLUMNS + places.columns).T)
    halves = (slice(0, 16), slice(16, 32)) if form.half_split is not None else (slice(0, 32),)
    granules = [granules_of(places.lanes[half], places.columns[half]) for half in halves]
    first, last = int(places.columns.min()), int(places.columns.max())
    return Cells(words, np.concatenate(granules), first, last - first + 1)


def _form(shape: str, count: str, packing: str, rest: tuple[Operand, ...]) -> TmemForm:
    """rest: what stands behind the address and the registers, the half-split offset."""
    if not shape or not count:
        raise Unsupported("no shape or no count")
    if len(rest) > 1 or any(not isinstance(operand, Integer) for operand in rest):
        raise Unsupported("the half-split offset must be one immediate")
    split = rest[0].value if rest and isinstance(rest[0], Integer) else None
    if (split is None) != (shape != "16x32bx2"):
        raise Unsupported("a half-split offset belongs to .16x32bx2, and only to it")
    return TmemForm(shape, int(count[1:]), split, bool(packing))


def _registers(
    context: KernelContext, operand: Operand, form: TmemForm, written: bool
) -> RegisterBlock:
    block = RegisterBlock(context, operand, written)
    try:
        needed = register_count(form.shape, form.count)
    except TmemError as error:
        raise Unsupported(str(error)) from None
    if needed != block.count:
        raise Unsupported(f".{form.shape}.x{form.count} has {needed} registers, not {block.count}")
    return block


def _located(
    fragment: Fragment, mask: int, form: TmemForm, addresses: Array, what: str
) -> tuple[TensorMemory, Cells]:
    """The tensor memory and the cells of an access. Raises TmemError if it is not allowed."""
    warp, address = fragment.warp, int(addresses[lowest(mask)])
    quarter = warp.index % 4
    require_whole_warp(fragment, mask, what)
    if mask == 0xFFFFFFFF and (addresses != addresses[0]).any():
        raise TmemError(f"{what}: the lanes of the warp give different addresses")
    if warp.cta.machine.options.strict_tmem_lanes and not names_own_lanes(quarter, address):
        fragment.fault(
            "tmem",
            f"{what} at lane {address >> 16} by warp {quarter} of its warpgroup, whose lanes are "
            f"{WARP_LANES * quarter}..{WARP_LANES * quarter + WARP_LANES - 1}: the hardware takes "
            "these, and code compiled for debugging traps",
        )
    tensor = tensor_memory(warp.cta)
    cells = cells_of(form, quarter, address)
    tensor.require(cells.first_column, cells.columns)
    return tensor, cells


@ROWS.machine(
    "tcgen05.ld",
    "9.7.16.8.3",
    "tcgen05.ld.sync.aligned.shape.num{.pack::16b}.b32 r, [taddr]{, halfSplit}",
)
def bind_load(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Tensor memory to registers."""
    _, _, shape, count, packing, _ = modifiers(
        instruction, "tcgen05.ld", ("sync",), ("aligned",), SHAPES, COUNTS, ("pack::16b",), ("b32",)
    )
    target, address, *rest = instruction.operands
    form = _form(shape, count, packing, tuple(rest))
    block = _registers(context, target, form, written=True)
    return _load_handler(instruction, context, form, address, block.names, block.write)


@ROWS.machine(
    "tcgen05.ld.red",
    "9.7.16.8.3",
    "tcgen05.ld.red.sync.aligned.{32x32b,16x32bx2}.num.{min,max}{.abs}{.NaN}.{f32,u32,s32} r, v, "
    "[taddr]{, halfSplit}",
)
def bind_reducing_load(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """A load that also gives each thread the minimum or maximum of its registers."""
    _, _, shape, count, operation, absolute, nan, element = modifiers(
        instruction, "tcgen05.ld.red", ("sync",), ("aligned",), ("32x32b", "16x32bx2"), COUNTS,
        ("min", "max"), ("abs",), ("NaN",), ("f32", "u32", "s32"),
    )  # fmt: skip
    target, result, address, *rest = instruction.operands
    form = _form(shape, count, "", tuple(rest))
    block = _registers(context, target, form, written=True)
    reduced = RegisterBlock(context, result, written=True)
    try:  # refuses combinations that do not exist
        reduce_registers(
            np.zeros((1, block.count), np.uint32), operation, element, bool(absolute), bool(nan)
        )
    except TmemError as error:
        raise Unsupported(str(error)) from None

    def deliver(warp: Warp, values: Array, mask: int) -> None:
        block.write(warp, values, mask)
        found = reduce_registers(
            np.ascontiguousarray(values.T), operation, element, bool(absolute), bool(nan)
        )
        reduced.write(warp, found[None], mask)

    names = block.names + reduced.names
    return _load_handler(instruction, context, form, address, names, deliver)


def _load_handler(
    instruction: PtxInstruction,
    context: KernelContext,
    form: TmemForm,
    address: Operand,
    names: tuple[str, ...],
    deliver: Callable[[Warp, Array, int], None],
) -> Handler:
    """deliver: writes (registers, 32) when they have come. names: of all registers it writes."""
    addresses = context.address(address)
    how, line = Access(line=instruction.line), instruction.line
    due = dict.fromkeys(names, line)

    def handler(fragment: Fragment, mask: int) -> None:
        warp, cta = fragment.warp, fragment.warp.cta
        tensor, cells = _located(fragment, mask, form, addresses(warp), "tcgen05.ld")
        actor = warp.tmem_loading.actors.begin()
        touch = Touch(actor, how, READ, actor.lane)
        record_tensor(cta, cells.granules, touch, warp)
        warp.tmem_loads.update(due)
        warp.tmem_loading.started()

        def complete() -> None:
            values = tensor.data.reshape(-1).take(cells.words)
            if form.packed:
                values = pack16(values.T).T
            deliver(warp, values, mask)
            warp.tmem_loading.finished()

        cta.submit("tcgen05.ld", line, complete)

    return handler


@ROWS.machine(
    "tcgen05.st",
    "9.7.16.8.4",
    "tcgen05.st.sync.aligned.shape.num{.unpack::16b}.b32 [taddr]{, halfSplit}, r",
)
def bind_store(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Registers to tensor memory."""
    _, _, shape, count, packing, _ = modifiers(
        instruction, "tcgen05.st", ("sync",), ("aligned",), SHAPES, COUNTS, ("unpack::16b",),
        ("b32",),
    )  # fmt: skip
    address, *rest, source = instruction.operands
    form = _form(shape, count, packing, tuple(rest))
    block = _registers(context, source, form, written=False)
    addresses = context.address(address)
    how, line = Access(line=instruction.line), instruction.line

    def handler(fragment: Fragment, mask: int) -> None:
        warp, cta = fragment.warp, fragment.warp.cta
        tensor, cells = _located(fragment, mask, form, addresses(warp), "tcgen05.st")
        actor = warp.tmem_storing.actors.begin()
        touch = Touch(actor, how, WRITE, actor.lane)
        record_tensor(cta, cells.granules, touch, warp)
        values = block.read(warp)
        warp.tmem_storing.started()

        def complete() -> None:
            words = unpack16(values.T).T if form.packed else values
            tensor.data.reshape(-1)[cells.words] = words
            warp.tmem_storing.finished()

        cta.submit("tcgen05.st", line, complete)

    return handler


@ROWS.machine("tcgen05.wait::ld", "9.7.16.8.5", "tcgen05.wait::ld.sync.aligned")
def bind_wait_load(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Waits until all earlier tcgen05.ld of the threads have delivered."""
    modifiers(instruction, "tcgen05.wait::ld", ("sync",), ("aligned",))
    return _wait_handler("tcgen05.wait::ld", lambda warp: warp.tmem_loading)


@ROWS.machine("tcgen05.wait::st", "9.7.16.8.5", "tcgen05.wait::st.sync.aligned")
def bind_wait_store(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Waits until all earlier tcgen05.st of the threads are done."""
    modifiers(instruction, "tcgen05.wait::st", ("sync",), ("aligned",))
    return _wait_handler("tcgen05.wait::st", lambda warp: warp.tmem_storing)


def _wait_handler(what: str, pending_of: Callable[[Warp], TmemStream]) -> Handler:
    def handler(fragment: Fragment, mask: int) -> Blocked | None:
        warp = fragment.warp
        pending = pending_of(warp)
        if pending.count:
            return Blocked(pending, lambda: f"{pending.count} operations at {what}")
        require_whole_warp(fragment, mask, what)
        pending.actors.wait()
        warp.settle(pending)
        return None

    return handler


@ROWS.machine(
    "tcgen05.fence::before_thread_sync", "9.7.16.11.1", "tcgen05.fence::before_thread_sync"
)
@ROWS.machine("tcgen05.fence::after_thread_sync", "9.7.16.11.1", "tcgen05.fence::after_thread_sync")
def bind_fence(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Orders the operations on tensor memory of one thread before those of another."""
    if len(instruction.parts) > 2:
        raise Unsupported(f"modifier .{instruction.parts[2]}")
    before = instruction.parts[1] == "fence::before_thread_sync"

    def handler(fragment: Fragment, mask: int) -> None:
        warp = fragment.warp
        if before:
            issued = (actor.epoch for actor in warp.pipe_latest.values())
            warp.fences.before_thread_sync(max(issued, default=0))
        else:
            warp.fences.after_thread_sync()

    return handler
