"""tensormap.replace and tensormap.cp_fenceproxy: PTX ISA 9.7.9.26 and 9.7.13.12.

They change tensor maps in memory, as grouped GEMMs do. The encoding is that of
`fa4.emulator.tma.descriptor`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fa4.emulator.checks.conflict import Access
from fa4.emulator.isa.spaces import Piece, Space, record, units
from fa4.emulator.machine.memory import check_alignment
from fa4.emulator.machine.shadows import READ, WRITE, Touch
from fa4.emulator.machine.state import Fragment
from fa4.emulator.ptx.syntax import Integer, PtxInstruction
from fa4.emulator.tma.descriptor import ELEMENTS, MAP_BYTES, TF32_CODES
from fa4.emulator.translate.context import Handler, KernelContext, ScalarReader
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers
from fa4.emulator.warp_lanes import lowest

ROWS = TableRows()

MAP_ALIGN_BYTES = 64
Fields = list[tuple[int, int, int]]  # (first bit in the map, bits, value)
# .elemtype numbers the types as the encoding does, then .tf32 and .tf32.ftz.
_ELEMENT_TYPES = (*ELEMENTS, *TF32_CODES)
# Fields with one value: first bit, bits, values allowed.
_PLAIN = {
    "global_address": (0, 64, 1 << 64),
    "rank": (68, 3, 5),
    "interleave_layout": (75, 2, 3),
    "swizzle_mode": (77, 2, 4),
    "swizzle_atomicity": (83, 2, 4),
    "fill_mode": (79, 1, 2),
}
_BY_DIMENSION = ("box_dim", "global_dim", "global_stride", "element_stride")


def fields_of(field: str, dimension: int, value: int) -> Fields:
    """What replacing a field writes into a map. Raises Unsupported for values it excludes.

    Sizes are as a program sees them (the encoding stores them minus one), strides in bytes.
    """
    if field in _PLAIN:
        first, bits, limit = _PLAIN[field]
        if value >= limit:
            raise Unsupported(f"tensormap.replace of .{field} by {value}")
        return [(first, bits, value)]
    if field == "elemtype":
        if value >= len(_ELEMENT_TYPES):
            raise Unsupported(f"tensormap.replace of .elemtype by {value}")
        name = _ELEMENT_TYPES[value]
        return [(71, 4, TF32_CODES.get(name, value)), (80, 1, int(name in TF32_CODES))]
    if field == "box_dim":
        return [(440 + 8 * dimension, 8, value - 1)]
    if field == "global_dim":
        return [(256 + 32 * dimension, 32, value - 1)]
    if field == "element_stride":
        return [(416 + 3 * dimension, 3, value - 1)]
    sixteenths = value >> 4
    return [(96 + 32 * dimension, 32, sixteenths), (224 + 4 * dimension, 4, sixteenths >> 32)]


def replace_fields(raw: bytes, fields: Fields) -> bytes:
    """The map with the fields written."""
    whole = int.from_bytes(raw, "little")
    for first, bits, value in fields:
        mask = (1 << bits) - 1
        whole = whole & ~(mask << first) | (value & mask) << first
    return whole.to_bytes(len(raw), "little")


def _map_at(fragment: Fragment, space: Space, address: int, lane: int, write: bool) -> Piece:
    place, who = np.array([address], np.uint64), np.array([lane])
    check_alignment(place, MAP_ALIGN_BYTES, "tensor map")
    (piece,) = space.resolve(fragment.warp, place, who, MAP_BYTES, write)
    return piece


def _touch(fragment: Fragment, piece: Piece, access: Access, kind: str, lane: int) -> None:
    touch = Touch(fragment.warp.clock, access, kind, np.array([lane]))
    record(fragment.warp, piece, MAP_BYTES, touch)


@ROWS.machine(
    "tensormap.replace",
    "9.7.9.26",
    "tensormap.replace.tile.{global_address rank box_dim global_dim global_stride element_stride "
    "elemtype interleave_layout swizzle_mode swizzle_atomicity fill_mode}{.global .shared::cta}"
    ".b1024.{b32 b64}",
)
def bind_replace(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Reads and writes the whole map, a weak access."""
    _, field, space, _, kind = modifiers(
        instruction,
        "tensormap.replace",
        ("tile",),
        (*_PLAIN, *_BY_DIMENSION, "elemtype"),
        ("global", "shared::cta"),
        ("b1024",),
        ("b32", "b64"),
    )
    if (kind == "b64") != (field in ("global_address", "global_stride")):
        raise Unsupported(f".{kind} for .{field}")
    operands = instruction.operands
    ordinal = operands[1] if field in _BY_DIMENSION else Integer(0)
    last = 3 if field == "global_stride" else 4
    if not isinstance(ordinal, Integer) or not 0 <= ordinal.value <= last:
        raise Unsupported(f"ordinal {ordinal} of .{field}")
    dimension = ordinal.value
    address_of = context.scalar_address(operands[0])
    value_of = context.scalar(operands[-1], kind)
    where, access = Space(space, own_cta_only=True), Access(instruction.line)

    def handler(fragment: Fragment, mask: int) -> None:
        warp, lane = fragment.warp, lowest(mask)
        piece = _map_at(fragment, where, address_of(warp, lane), lane, write=True)
        memory = units(piece.data, MAP_BYTES)
        try:
            fields = fields_of(field, dimension, value_of(warp, lane))
        except Unsupported as problem:
            raise fragment.fatal("descriptor", str(problem)) from None
        changed = replace_fields(memory[piece.offsets].tobytes(), fields)
        _touch(fragment, piece, access, WRITE, lane)
        memory[piece.offsets] = np.frombuffer(changed, memory.dtype)
        warp.cta.machine.progress += 1

    return handler


@ROWS.machine(
    "tensormap.cp_fenceproxy",
    "9.7.13.12",
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.scope.sync.aligned "
    "[dst], [src], 128",
    converges=True,
)
def bind_copy_map(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """The warp copies one map from shared to global memory and releases it to other proxies."""
    modifiers(
        instruction,
        "tensormap.cp_fenceproxy",
        ("global",),
        ("shared::cta",),
        ("tensormap::generic",),
        ("release",),
        ("cta", "cluster", "gpu", "sys"),
        ("sync",),
        ("aligned",),
    )
    target_of, source_of = (context.scalar_address(o) for o in instruction.operands[:2])
    access = Access(instruction.line)
    return _copy_handler(target_of, source_of, access)


def _copy_handler(
    target_of: ScalarReader, source_of: ScalarReader, access: Access
) -> Callable[[Fragment, int], None]:
    shared, everywhere = Space("shared::cta"), Space("global")

    def handler(fragment: Fragment, mask: int) -> None:
        warp, lane = fragment.warp, lowest(mask)
        source = _map_at(fragment, shared, source_of(warp, lane), lane, write=False)
        target = _map_at(fragment, everywhere, target_of(warp, lane), lane, write=True)
        _touch(fragment, source, access, READ, lane)
        _touch(fragment, target, access, WRITE, lane)
        raw = units(source.data, MAP_BYTES)[source.offsets]
        units(target.data, MAP_BYTES)[target.offsets] = raw
        warp.cta.machine.progress += 1

    return handler
