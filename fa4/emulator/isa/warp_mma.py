"""Matrix products of one warp on registers: mma.sync (PTX ISA 9.7.14.5).

Sums are those of Hopper's tensor core, measured with m16n8k16 (see `fa4.emulator.wgmma.sums`).
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
_FORMATS = {"f16": Format.F16, "bf16": Format.BF16, "f32": Format.F32}
_DEPTHS = {"m16n8k8": 8, "m16n8k16": 16}


def _half_places(count: int, row_step: bool) -> tuple[Array, Array]:
    """(group-wise index, k index) of each of `count` 16-bit elements a lane holds: (32, count).

    The figures of PTX ISA 9.7.14.5.7/8: elements alternate between the two halves of the rows
    (for A) every two elements, and advance eight in k.
    """
    element = np.arange(count)
    if row_step:
        outer = _GROUP[:, None] + 8 * (element >> 1 & 1)
        k = 2 * _IN_GROUP[:, None] + (element & 1) + 8 * (element >> 2)
    else:
        outer = _GROUP[:, None] + 0 * element
        k = 2 * _IN_GROUP[:, None] + (element & 1) + 8 * (element >> 1)
    return outer, k


_C_ROW = _GROUP[:, None] + 8 * (np.arange(4) >> 1)
_C_COLUMN = 2 * _IN_GROUP[:, None] + (np.arange(4) & 1)


def _halves(words: Array) -> Array:
    """(32, n) packed pairs of 16-bit floats -> (32, 2 n) of their codes."""
    return words.astype(np.uint32).view(np.uint16).reshape(32, -1)


@ROWS.machine(
    "mma.sync",
    "9.7.14.5",
    "mma.sync.aligned.{m16n8k8,m16n8k16}.row.col.{f32,f16}.{f16,bf16}.{f16,bf16}.{f32,f16}",
)
def bind_mma(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """D = A * B + C with A 16 x K by rows, B K x 8 by columns."""
    parts = instruction.parts
    if parts[2] != "aligned" or parts[3] not in _DEPTHS or parts[4:6] != ("row", "col"):
        raise Unsupported(f"the form .{'.'.join(parts[2:6])}")
    shape, types = parts[3], parts[6:]
    if len(types) != 4 or types[1] != types[2] or types[1] not in ("f16", "bf16"):
        raise Unsupported(f"types {'.'.join(types)}")
    if types[0] != types[3] or types[0] not in (("f32", "f16") if types[1] == "f16" else ("f32",)):
        raise Unsupported(f"types {'.'.join(types)}")
    depth, sums, element = _DEPTHS[shape], types[0], _FORMATS[types[1]]
    form = ProductForm(RESULT_COLUMNS, element, element, _FORMATS[sums])
    d, a, b, c = (context.elements(operand) for operand in instruction.operands)
    readers = [[context.reader(o, "b32") for o in operands] for operands in (a, b, c)]
    writers = [context.writer(o, "b32") for o in d]
    a_places, b_places = _half_places(depth // 2, True), _half_places(depth // 4, False)

    def handler(fragment: Fragment, mask: int) -> None:
        warp = fragment.warp
        if mask != warp.alive:
            fragment.fault("divergence", "mma.sync by a part of the warp")
        words = [np.stack([read(warp) for read in row], axis=1) for row in readers]
        left = np.empty((RESULT_ROWS, depth), np.uint16)
        right = np.empty((RESULT_COLUMNS, depth), np.uint16)
        total = np.empty((RESULT_ROWS, RESULT_COLUMNS), np.uint32)
        left[a_places] = _halves(words[0])
        right[b_places] = _halves(words[1])
        total[_C_ROW, _C_COLUMN] = words[2] if sums == "f32" else _halves(words[2])
        found = multiply(form, left.view(np.uint8), right.view(np.uint8), total)
        packed = found[_C_ROW, _C_COLUMN]
        if sums == "f16":
            packed = packed.astype(np.uint16).view(np.uint32)
        for index, write in enumerate(writers):
            write(warp, packed[:, index], mask)

    return handler
