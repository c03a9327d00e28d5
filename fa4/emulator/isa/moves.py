"""Moves between registers and the arithmetic of addresses: PTX ISA 9.7.9.

A shared address holds the rank of its CTA in the cluster from bit 24 on. The manual does not say
so, but kernels rely on it: NVIDIA's clear bit 24 of an own shared address to name the even CTA of a
pair. A generic address in shared memory is the base of the window,
symbols("%shared_window"), plus the shared address. Global addresses are generic addresses already,
and so are constant, parameter and local ones of 64 bits; of 32 bits they lack their window.
"""

from __future__ import annotations

from fa4.emulator.isa.formula import BITS, INTEGERS, spell
from fa4.emulator.ptx.syntax import PtxInstruction, Vector
from fa4.emulator.translate.lanes import Lanes, SegmentBuilder, width_of
from fa4.emulator.translate.layout import WINDOW_BYTES, WINDOWS
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers

ROWS = TableRows()

RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
SHARED = ("shared", "shared::cta", "shared::cluster")
IDENTICAL = ("global", "const", "local", "param", "param::entry")
MOVED = ("pred", *BITS, "b128", *INTEGERS, "f32", "f64")

# For each value of the control's low two bits, the source byte of every result byte (lowest
# result byte in the lowest nibble).
_PERMUTE_MODES = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


def _pack(b: SegmentBuilder, vector: Vector, kind: str) -> Lanes:
    """The elements side by side, the first in the lowest bits."""
    width = width_of(kind)
    part = width // len(vector.elements)
    value = b.constant(0, f"i{width}")
    for k, element in enumerate(vector.elements):
        value = value | (b.read(element, f"b{part}").resize(width) << (k * part))
    return value


@ROWS.lane("mov", "9.7.9.3", spell(MOVED))
def emit_mov(b: SegmentBuilder, i: PtxInstruction) -> None:
    """Registers, special registers, constants, addresses of variables; {a, b} packs or unpacks."""
    (kind,) = modifiers(i, "mov", MOVED)
    target, source = i.operands
    value = _pack(b, source, kind) if isinstance(source, Vector) else b.read(source, kind)
    if not isinstance(target, Vector):
        b.write(target, value)
        return
    part = width_of(kind) // len(target.elements)
    for k, element in enumerate(target.elements):
        b.write(element, (value >> (k * part)).resize(part))


@ROWS.lane("prmt", "9.7.9.7", f".b32 {{{spell(_PERMUTE_MODES)}}}")
def emit_prmt(b: SegmentBuilder, i: PtxInstruction) -> None:
    """Result byte k is the byte of b:a that nibble k of the control names.

    Bit 3 of a nibble asks for eight copies of that byte's sign instead.
    """
    _, mode = modifiers(i, "prmt", ("b32",), _PERMUTE_MODES)
    low, high, control = (b.read(operand, "b32") for operand in i.operands[1:])
    source = low.resize(64) | (high.resize(64) << 32)
    control = control.resize(64)
    if mode:
        table = sum(word << (16 * k) for k, word in enumerate(_PERMUTE_MODES[mode]))
        control = b.constant(table, "i64") >> ((control & 3) << 4)
    result = b.constant(0, "i64")
    for k in range(4):
        nibble = control >> (4 * k)
        byte = (source >> ((nibble & 7) << 3)) & 0xFF
        sign = (byte >> 7) * 0xFF
        result = result | ((nibble & 8).compare("ne", 0).select(sign, byte) << (8 * k))
    b.write(i.operands[0], result.resize(32))


@ROWS.lane("cvta", "9.7.9.20", f"{{.to}} ({spell(SHARED + IDENTICAL)}) .u64")
def emit_cvta(b: SegmentBuilder, i: PtxInstruction) -> None:
    """An address in a state space as a generic address, or with .to the other way round."""
    to, space, _ = modifiers(i, "cvta", ("to",), SHARED + IDENTICAL, ("u64",))
    address = b.read(i.operands[1], "u64")
    if space in SHARED:
        window = b.symbols("%shared_window")
        address = address - window if to else address + window
    elif space in WINDOWS and not to:
        address = address.compare("ult", WINDOW_BYTES).select(address + WINDOWS[space], address)
    b.write(i.operands[0], address)


@ROWS.lane("isspacep", "9.7.9.19", f"({spell(('global', *SHARED))})")
def emit_isspacep(b: SegmentBuilder, i: PtxInstruction) -> None:
    """Whether a generic address lies in the shared window; every other address is global.

    Without a suffix, .shared means the own CTA's part of the window. Constant, local and
    parameter memory have no window of their own, so the question about them has no answer here.
    """
    (space,) = modifiers(i, "isspacep", ("global", *SHARED))
    shared = b.read(i.operands[1], "u64") - b.symbols("%shared_window")
    inside = shared.compare("ult", WINDOW_BYTES)
    if space in ("shared", "shared::cta"):
        own = b.register("%cluster_ctarank").resize(64)
        inside = inside & (shared >> RANK_SHIFT).compare("eq", own)
    b.write(i.operands[0], ~inside if space == "global" else inside)


def _window(b: SegmentBuilder, space: str, kind: str) -> int:
    """What to take off an operand of mapa or getctarank to have a shared::cluster address."""
    if space:
        return 0
    if kind != "u64":
        raise Unsupported("32-bit generic addresses")
    return b.symbols("%shared_window")


@ROWS.lane("mapa", "9.7.9.23", "{.shared::cluster} .u32 .u64; without space .u64")
def emit_mapa(b: SegmentBuilder, i: PtxInstruction) -> None:
    """The address of the same variable in the CTA of the given rank."""
    space, kind = modifiers(i, "mapa", ("shared::cluster",), ("u32", "u64"))
    window = _window(b, space, kind)
    offset = (b.read(i.operands[1], kind) - window) & OFFSET_MASK
    rank = b.read(i.operands[2], "u32").resize(width_of(kind))
    b.write(i.operands[0], ((rank << RANK_SHIFT) | offset) + window)


@ROWS.lane("getctarank", "9.7.9.24", "{.shared::cluster} .u32 .u64; without space .u64")
def emit_getctarank(b: SegmentBuilder, i: PtxInstruction) -> None:
    """The rank of the CTA that an address belongs to."""
    space, kind = modifiers(i, "getctarank", ("shared::cluster",), ("u32", "u64"))
    address = b.read(i.operands[1], kind) - _window(b, space, kind)
    b.write(i.operands[0], address.resize(32) >> RANK_SHIFT)
