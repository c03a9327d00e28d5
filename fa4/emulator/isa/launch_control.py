"""clusterlaunchcontrol: a running cluster takes over one that has not started (PTX ISA 9.7.13.18).

The manual calls the 16-byte response opaque. It is not to kernels that read it themselves: word 0
is x of the cancelled cluster's first CTA, the halves of word 1 are y (low) and z, bit 0 of word 2
says whether a cluster was cancelled. So ptxas 13.0 translates query_cancel for sm_100a: two words,
`& 0xffff`, `>> 16` and `& 1`.
"""

from __future__ import annotations

import numpy as np

from fa4.emulator.checks.conflict import Access
from fa4.emulator.isa.mbarriers import find_barrier
from fa4.emulator.machine.checks import record_shared
from fa4.emulator.machine.events import BarrierUse
from fa4.emulator.machine.grid import take_cluster
from fa4.emulator.machine.shadows import WRITE, Touch
from fa4.emulator.machine.shared_memory import locate_shared
from fa4.emulator.machine.state import Cta, Fragment
from fa4.emulator.ptx.syntax import PtxInstruction, Vector
from fa4.emulator.translate.context import Handler, KernelContext
from fa4.emulator.translate.lanes import Lanes, SegmentBuilder
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers
from fa4.emulator.warp_lanes import Array, lowest

ROWS = TableRows()

RESPONSE_BYTES = 16
_TRY = "clusterlaunchcontrol.try_cancel"
_QUERY = "clusterlaunchcontrol.query_cancel"
# axis -> (first bit, bits) in the response
_FIELDS = {"x": (0, 32), "y": (32, 16), "z": (48, 16)}
_CANCELLED = (64, 1)


def _cancel(cta: Cta) -> Array:
    """Takes a cluster off the grid; the response for it."""
    grid = cta.grid
    index = take_cluster(grid)
    if index is None:
        return np.zeros(4, np.uint32)
    position = grid.cluster_position(index)
    x, y, z = (p * s for p, s in zip(position, grid.launch.cluster, strict=True))
    return np.array([x, y | z << 16, 1, 0], np.uint32)


@ROWS.machine(
    _TRY,
    "9.7.13.18.1",
    "clusterlaunchcontrol.try_cancel.async{.shared::cta}.mbarrier::complete_tx::bytes"
    "{.multicast::cluster::all}.b128 [a], [mbar]",
)
def bind_try_cancel(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Asynchronous: the response is written and 16 bytes are completed on the mbarrier later."""
    _, _, _, multicast, _ = modifiers(
        instruction,
        _TRY,
        ("async",),
        ("shared::cta",),
        ("mbarrier::complete_tx::bytes",),
        ("multicast::cluster::all",),
        ("b128",),
    )
    target_of = context.scalar_address(instruction.operands[0])
    barrier_of = context.scalar_address(instruction.operands[1])
    how = Access(line=instruction.line, async_proxy=True)

    def handler(fragment: Fragment, mask: int) -> None:
        warp = fragment.warp
        first = lowest(mask)
        addresses = [target_of(warp, first), barrier_of(warp, first)]
        ((own, places, _),) = locate_shared(
            warp.cta, np.array(addresses, np.uint64), RESPONSE_BYTES // 2
        )
        offset, barrier_offset = (int(place) for place in places)
        targets = own.cluster.ctas if multicast else [own]
        actor = own.pool.begin(warp.clock.snapshot(mask))
        for cta in targets:
            record_shared(
                cta, np.array([offset]), RESPONSE_BYTES, Touch(actor, how, WRITE, actor.lane)
            )
            find_barrier(fragment, cta, barrier_offset, BarrierUse.CANCEL)

        def complete() -> None:
            response = _cancel(own).view(np.uint8)
            for cta in targets:
                cta.smem[offset : offset + RESPONSE_BYTES] = response
                cta.mbarriers[barrier_offset].complete(RESPONSE_BYTES, actor.completion())

        own.submit(_TRY, instruction.line, complete)

    return handler


def _field(builder: SegmentBuilder, instruction: PtxInstruction, place: tuple[int, int]) -> Lanes:
    first, bits = place
    response = builder.read(instruction.operands[1], "b128")
    return (response >> first).resize(32) & ((1 << bits) - 1)


@ROWS.lane(f"{_QUERY}.is_canceled", "9.7.13.18.2", f"{_QUERY}.is_canceled.pred.b128 p, response")
def emit_is_canceled(builder: SegmentBuilder, instruction: PtxInstruction) -> None:
    """Whether the request took a cluster."""
    modifiers(instruction, f"{_QUERY}.is_canceled", ("pred",), ("b128",))
    cancelled = _field(builder, instruction, _CANCELLED)
    builder.write(instruction.operands[0], cancelled.compare("ne", 0))


@ROWS.lane(
    f"{_QUERY}.get_first_ctaid",
    "9.7.13.18.2",
    f"{_QUERY}.get_first_ctaid{{::x,::y,::z}}.{{v4.b32,b32}}.b128",
)
def emit_first_ctaid(builder: SegmentBuilder, instruction: PtxInstruction) -> None:
    """All coordinates of the cancelled cluster's first CTA."""
    target = instruction.operands[0]
    if not isinstance(target, Vector) or len(target.elements) != 4:
        raise Unsupported("get_first_ctaid needs a vector of four")
    for element, place in zip(target.elements, _FIELDS.values(), strict=False):
        builder.write(element, _field(builder, instruction, place))
    builder.write(target.elements[3], builder.constant(0, "i32"))


def _register_single(axis: str) -> None:
    name = f"{_QUERY}.get_first_ctaid::{axis}"

    @ROWS.lane(name, "9.7.13.18.2", f"{name}.b32.b128 d, response")
    def emit_one(builder: SegmentBuilder, instruction: PtxInstruction) -> None:
        builder.write(instruction.operands[0], _field(builder, instruction, _FIELDS[axis]))


for _axis in _FIELDS:
    _register_single(_axis)
