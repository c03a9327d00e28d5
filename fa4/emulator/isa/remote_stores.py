"""st.async and red.async: stores into the cluster's shared memory that an mbarrier counts.

PTX ISA 9.7.9.13 and 9.7.13.8. They are asynchronous operations of the generic proxy.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fa4.emulator.checks.conflict import Access
from fa4.emulator.isa.atomics import in_rounds
from fa4.emulator.isa.loads import store_unchecked
from fa4.emulator.isa.mbarriers import find_barrier
from fa4.emulator.isa.signals import MBarrierSignal
from fa4.emulator.isa.spaces import VECTORS, Elements, Piece, Space, record, units
from fa4.emulator.machine.events import BarrierUse
from fa4.emulator.machine.memory import MemoryFault, check_alignment
from fa4.emulator.machine.shadows import ATOMIC, WRITE, Touch
from fa4.emulator.machine.shared_memory import locate_shared
from fa4.emulator.machine.state import Cta, Fragment
from fa4.emulator.ptx.syntax import PtxInstruction
from fa4.emulator.tma.reduction import SUPPORTED, reduce_bytes
from fa4.emulator.translate.context import Handler, KernelContext
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers
from fa4.emulator.warp_lanes import Array, lanes_of

ROWS = TableRows()

_COMPLETE_TX = ("mbarrier::complete_tx::bytes",)
_CLUSTER = ("shared::cluster",)
_WORDS = ("b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")

Update = Callable[[Piece, Array], None]


@ROWS.machine(
    "st.async",
    "9.7.9.13",
    "st.async{.weak}.shared::cluster.mbarrier::complete_tx::bytes{.v2 .v4}.{b u s f}{32 64}",
)
def bind_async_store(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Each lane's value, and as many bytes at the mbarrier it names in the same CTA."""
    _, space, _, vector, kind = modifiers(
        instruction, "st.async", ("weak",), _CLUSTER, _COMPLETE_TX, ("v2", "v4"), _WORDS
    )
    size_bytes = VECTORS[vector] * int(kind[1:]) // 8
    if not space or size_bytes > 16:
        raise Unsupported(f"{size_bytes} bytes, or another space than .shared::cluster")

    def update(piece: Piece, values: Array) -> None:
        store_unchecked(piece, values)

    return _bind(instruction, context, kind, WRITE, update)


@ROWS.machine(
    "red.async",
    "9.7.13.8",
    "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{add min max inc dec "
    "and or xor}.{u32 s32 u64 b32}",
)
def bind_async_reduction(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """As st.async, combining each value with what is there."""
    _, _, space, _, operation, kind = modifiers(
        instruction,
        "red.async",
        ("relaxed",),
        ("cluster",),
        _CLUSTER,
        _COMPLETE_TX,
        SUPPORTED,
        _WORDS,
    )
    if not space or kind not in SUPPORTED.get(operation, ()) or kind.startswith("f"):
        raise Unsupported(f".{operation} of .{kind}")

    def update(piece: Piece, values: Array) -> None:
        memory = units(piece.data, values.dtype.itemsize)
        for now in in_rounds(piece.offsets):
            place = Piece(piece.data, piece.offsets[now], None, piece.home)
            old, new = (
                np.ascontiguousarray(v).view(np.uint8).reshape(len(now), -1)
                for v in (memory[place.offsets], values[now])
            )
            total = np.ascontiguousarray(reduce_bytes(operation, kind, old, new))
            store_unchecked(place, total.view(values.dtype).reshape(-1))

    return _bind(instruction, context, kind, ATOMIC, update)


def _bind(
    instruction: PtxInstruction, context: KernelContext, kind: str, touch_kind: str, update: Update
) -> Handler:
    target, barrier = (context.address(instruction.operands[k]) for k in (0, 2))
    source = Elements(context, instruction.operands[1], kind)
    size, access, space = source.size_bytes, Access(instruction.line), Space("shared::cluster")

    def handler(fragment: Fragment, mask: int) -> None:
        warp, cta = fragment.warp, fragment.warp.cta
        lanes = lanes_of(mask)
        values = source.read(warp)[lanes].view(f"V{size}").reshape(-1)
        pieces = list(space.pieces(warp, target(warp)[lanes], lanes, size, write=True))
        places = [p.home for p in pieces for _ in range(len(p.offsets))]
        signals = _signals(fragment, barrier(warp)[lanes], instruction.line)
        if {id(home) for home in places} != {id(signal.cta) for signal in signals}:
            raise MemoryFault("out-of-bounds", "the mbarrier lies in another CTA than the data")
        actor = cta.pool.begin(warp.clock.snapshot(mask))
        for piece in pieces:
            if isinstance(piece.home, Cta):
                cta.note_moved(piece.home, instruction.line, len(piece.offsets) * size)
            record(warp, piece, size, Touch(actor, access, touch_kind, actor.lane))

        def complete() -> None:
            for piece in pieces:
                update(piece, values if piece.indices is None else values[piece.indices])
            for signal in signals:
                signal.complete(size, actor.completion(fenced=False))

        cta.submit(instruction.opcode, instruction.line, complete)

    return handler


def _signals(fragment: Fragment, addresses: Array, line: int) -> list[MBarrierSignal]:
    """The mbarrier of each lane."""
    cta = fragment.warp.cta
    check_alignment(addresses, 8, "mbarrier")
    found = []
    for target, offsets, _ in locate_shared(cta, addresses, 8):
        for offset in offsets.tolist():
            barrier = find_barrier(fragment, target, offset, BarrierUse.STORE)
            found.append(MBarrierSignal(target, offset, barrier, line))
    return found
