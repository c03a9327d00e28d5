"""tcgen05.cp and tcgen05.shift: data into and within tensor memory (PTX ISA 9.7.16.9)."""

from __future__ import annotations

from functools import lru_cache

from fa4.emulator.isa.tensor_allocation import CTA_GROUPS, group_size
from fa4.emulator.isa.tensor_pipe import PipeInstruction, PipeJob, issue, issuing_lane, job_of
from fa4.emulator.machine.state import Fragment
from fa4.emulator.ptx.syntax import PtxInstruction
from fa4.emulator.tcgen05.descriptors import SmemDescriptor
from fa4.emulator.tcgen05.tmem import TmemAddress
from fa4.emulator.tcgen05.tmem_copy import plan_copy, plan_shift
from fa4.emulator.translate.context import Handler, KernelContext
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers

ROWS = TableRows()

SHAPES = ("128x256b", "4x256b", "128x128b", "64x128b", "32x128b")
MULTICASTS = ("warpx2::02_13", "warpx2::01_23", "warpx4")
SOURCE_FORMATS = ("b6x16_p32", "b4x16_p64")
# Shapes that leave lanes out say which lanes get copies.
_MULTICASTS_OF = {"64x128b": MULTICASTS[:2], "32x128b": MULTICASTS[2:]}


@lru_cache(maxsize=1024)
def _copy(
    shape: str, multicast: str, source_format: str, cta_group: int, address: int, descriptor: int
) -> PipeJob:
    place, source = TmemAddress.decode(address), SmemDescriptor.decode(descriptor)
    return job_of(plan_copy(shape, multicast, source_format, cta_group, place, source))


@lru_cache(maxsize=256)
def _shift(cta_group: int, address: int) -> PipeJob:
    return job_of(plan_shift(cta_group, TmemAddress.decode(address)))


@ROWS.machine(
    "tcgen05.cp",
    "9.7.16.9.1",
    "tcgen05.cp.cta_group.shape{.multicast}{.b8x16.{b6x16_p32,b4x16_p64}} [taddr], desc",
)
def bind_copy(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Shared to tensor memory."""
    group, shape, multicast, target_format, source_format = modifiers(
        instruction, "tcgen05.cp", CTA_GROUPS, SHAPES, MULTICASTS, ("b8x16",), SOURCE_FORMATS
    )
    if not shape or multicast not in _MULTICASTS_OF.get(shape, ("",)):
        raise Unsupported(f"shape {shape or 'none'} with multicast {multicast or 'none'}")
    if bool(target_format) != bool(source_format):
        raise Unsupported("decompression needs .b8x16 and a source format")
    formats = f"{target_format}.{source_format}" if source_format else ""
    size = group_size(group)
    address_of = context.scalar_address(instruction.operands[0])
    descriptor_of = context.scalar(instruction.operands[1], "b64")
    pipe = PipeInstruction.at("tcgen05.cp", instruction.line, size)

    def handler(fragment: Fragment, mask: int) -> None:
        warp = fragment.warp
        lane = issuing_lane(fragment, mask, pipe.name)
        address, descriptor = address_of(warp, lane), descriptor_of(warp, lane)
        issue(fragment, lane, _copy(shape, multicast, formats, size, address, descriptor), pipe)

    return handler


@ROWS.machine("tcgen05.shift", "9.7.16.9.2", "tcgen05.shift.cta_group.down [taddr]")
def bind_shift(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Moves 31 of a warp's 32 lanes down by one."""
    group, down = modifiers(instruction, "tcgen05.shift", CTA_GROUPS, ("down",))
    if not down:
        raise Unsupported("no .down")
    size = group_size(group)
    address_of = context.scalar_address(instruction.operands[0])
    pipe = PipeInstruction.at("tcgen05.shift", instruction.line, size)

    def handler(fragment: Fragment, mask: int) -> None:
        lane = issuing_lane(fragment, mask, pipe.name)
        issue(fragment, lane, _shift(size, address_of(fragment.warp, lane)), pipe)

    return handler
