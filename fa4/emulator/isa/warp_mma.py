"""Matrix products of one warp on registers: mma.sync (PTX ISA 9.7.14.5).

Sums are those of Hopper's tensor core, measured with m16n8k16 of 16-bit types (see
`fa4.emulator.wgmma.sums`); other shapes and types are assumed to add up as those of wgmma do.
"""

from __future__ import annotations

import numpy as np

from fa4.emulator.machine.state import Fragment
from fa4.emulator.masks import Array
from fa4.emulator.ptx.syntax import PtxInstruction
from fa4.emulator.tcgen05.formats import Format
from fa4.emulator.translate.context import Handler, KernelContext
from fa4.emulator.translate.table import TableRows, Unsupported
from fa4.emulator.wgmma.forms import ProductForm
from fa4.emulator.wgmma.sums import multiply

ROWS = TableRows()

RESULT_ROWS, RESULT_COLUMNS = 16, 8
_LANE = np.arange(32)
_GROUP, _IN_GROUP = _LANE >> 2, _LANE & 3
_SHAPES = {f"m16n8k{depth}": depth for depth in (4, 8, 16, 32)}
_K_BYTES = (16, 32)  # of one instruction: a register of each lane for A's rows, or two
_FORMATS = {str(one): one for one in Format}
# Types of A and B -> types of the sums.
_SUMS = {
    Format.F16: ("f32", "f16"),
    Format.BF16: ("f32",),
    Format.TF32: ("f32",),
    Format.E4M3: ("f32", "f16"),
    Format.E5M2: ("f32", "f16"),
    Format.S8: ("s32",),
    Format.U8: ("s32",),
}
_MIXED = ({Format.E4M3, Format.E5M2}, {Format.S8, Format.U8})


def _operand_places(registers: int, row_step: bool) -> tuple[Array, Array]:
    """(row of A or column of B, word of K) of each register of each lane: (32, registers).

    The figures of PTX ISA 9.7.14.5 are one for all types: a register holds 4 bytes of K, those of
    the lane's place in its group; of A registers alternate between the two halves of the rows, and
    advance 16 bytes in K after each pair, of B after each.
    """
    register = np.arange(registers)
    half, step = (register & 1, register >> 1) if row_step else (0 * register, register)
    return _GROUP[:, None] + 8 * half, _IN_GROUP[:, None] + 4 * step


_C_ROW = _GROUP[:, None] + 8 * (np.arange(4) >> 1)
_C_COLUMN = 2 * _IN_GROUP[:, None] + (np.arange(4) & 1)


def _halves(words: Array) -> Array:
    """(32, n) packed pairs of 16-bit floats -> (32, 2 n) of their codes."""
    return words.astype(np.uint32).view(np.uint16).reshape(32, -1)


def _form_of(parts: tuple[str, ...]) -> tuple[ProductForm, int]:
    """The form of an opcode, and the bytes of K of its instruction. Raises Unsupported."""
    if parts[2] != "aligned" or parts[3] not in _SHAPES or parts[4:6] != ("row", "col"):
        raise Unsupported(f"the form .{'.'.join(parts[2:6])}")
    saturate = parts[6] == "satfinite"
    types = parts[7:] if saturate else parts[6:]
    named = f"types {'.'.join(types)}"
    if len(types) != 4 or any(name not in _FORMATS for name in types):
        raise Unsupported(named)
    a, b = _FORMATS[types[1]], _FORMATS[types[2]]
    alike = a is b or {a, b} in _MIXED
    if not alike or types[0] != types[3] or types[0] not in _SUMS.get(a, ()):
        raise Unsupported(named)
    form = ProductForm(RESULT_COLUMNS, a, b, _FORMATS[types[0]], saturate)
    if saturate and not form.is_integer:
        raise Unsupported(f".satfinite with {named}")
    k_bytes = _SHAPES[parts[3]] * a.container_bytes
    if k_bytes not in _K_BYTES:
        raise Unsupported(f".{parts[3]} with {named}")
    return form, k_bytes


@ROWS.machine(
    "mma.sync",
    "9.7.14.5",
    "mma.sync.aligned.m16n8kK.row.col{.satfinite}.d.a.b.c: f16, bf16 (k8, k16), tf32 (k4, k8), "
    "e4m3, e5m2, s8, u8 (k16, k32); sums f32, f16, s32",
)
def bind_mma(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """D = A * B + C with A 16 x K by rows, B K x 8 by columns."""
    form, k_bytes = _form_of(instruction.parts)
    d, a, b, c = (context.elements(operand) for operand in instruction.operands)
    packs = form.d is Format.F16
    for name, vector, count in (
        ("D", d, 2 if packs else 4),
        ("A", a, k_bytes // 8),
        ("B", b, k_bytes // 16),
        ("C", c, 2 if packs else 4),
    ):
        if len(vector) != count:
            raise Unsupported(f"{len(vector)} registers for {name}, not {count}")
    readers = [[context.reader(o, "b32") for o in operands] for operands in (a, b, c)]
    writers = [context.writer(o, "b32") for o in d]
    a_places, b_places = _operand_places(len(a), True), _operand_places(len(b), False)

    def handler(fragment: Fragment, mask: int) -> None:
        warp = fragment.warp
        if mask != warp.alive:
            fragment.fault("divergence", "mma.sync by a part of the warp")
        words = [np.stack([read(warp) for read in row], axis=1) for row in readers]
        left = np.empty((RESULT_ROWS, k_bytes // 4), np.uint32)
        right = np.empty((RESULT_COLUMNS, k_bytes // 4), np.uint32)
        total = np.empty((RESULT_ROWS, RESULT_COLUMNS), np.uint32)
        left[a_places], right[b_places] = words[0], words[1]
        total[_C_ROW, _C_COLUMN] = _halves(words[2]) if packs else words[2]
        found = multiply(form, left.view(np.uint8), right.view(np.uint8), total)
        packed = found[_C_ROW, _C_COLUMN]
        if packs:
            packed = packed.astype(np.uint16).view(np.uint32)
        for index, write in enumerate(writers):
            write(warp, packed[:, index], mask)

    return handler
