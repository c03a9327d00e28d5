"""Matrix fragments in shared memory: ldmatrix, stmatrix, movmatrix (PTX ISA 9.7.14.5.15 to .17).

A fragment of an 8x8 matrix of 16-bit elements is one 32-bit register: lane t holds elements
2 * (t % 4) and the one behind it of row t / 4. Eight lanes give the addresses of the rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import numpy as np

from fa4.emulator.checks.conflict import Access
from fa4.emulator.isa.loads import change_of, check_same_values, store_unchecked
from fa4.emulator.isa.spaces import Elements, Piece, Space, record, units
from fa4.emulator.machine.shadows import READ, WRITE, Change, Touch
from fa4.emulator.machine.state import Fragment, Warp
from fa4.emulator.ptx.syntax import PtxInstruction
from fa4.emulator.translate.context import Handler, KernelContext, Reader
from fa4.emulator.translate.lanes import SegmentBuilder
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers
from fa4.emulator.warp_lanes import FULL_MASK, Array, lanes_of

ROWS = TableRows()

ROW_BYTES = 16
MATRIX_ROWS = 8  # in memory, of one matrix
COUNTS = {"x1": 1, "x2": 2, "x4": 4}
_SHARED = ("shared", "shared::cta")


@cache
def fragment_bytes(shape: str, trans: bool) -> Array:
    """Where the bytes of one matrix's register lie in the matrix, row after row of 16 bytes.

    Returns (32 lanes, 4 bytes). shape: "m8n8" of 16-bit elements, or "m16n8" of 8-bit elements,
    whose columns are the rows in memory: lane t holds two neighbours of row t / 4, then two of the
    row eight below (as CUTLASS describes the instruction: SM100_U8x4_STSM_T).
    """
    lanes, byte = np.arange(32)[:, None], np.arange(4)[None, :]
    if shape == "m16n8":
        column, row = 2 * (lanes % 4) + byte % 2, lanes // 4 + 8 * (byte // 2)
        return column * ROW_BYTES + row
    row, column = lanes // 4, 2 * (lanes % 4) + byte // 2
    if trans:
        row, column = column, row
    return row * ROW_BYTES + 2 * column + byte % 2


def _form(instruction: PtxInstruction, name: str) -> tuple[str, int, bool]:
    """(shape, matrices, transposed). Raises Unsupported for other forms."""
    _, _, shape, count, trans, _, kind = modifiers(
        instruction,
        name,
        ("sync",),
        ("aligned",),
        ("m8n8",) if name == "ldmatrix" else ("m8n8", "m16n8"),
        COUNTS,
        ("trans",),
        _SHARED,
        ("b16", "b8"),
    )
    if not shape or not count or kind != ("b16" if shape == "m8n8" else "b8"):
        raise Unsupported(f"{instruction.opcode}: shape, count and type do not fit together")
    if shape != "m8n8" and not trans:
        raise Unsupported(f".{shape} without .trans")
    return shape, COUNTS[count], bool(trans)


def _space(instruction: PtxInstruction) -> Space:
    named = any(part in _SHARED for part in instruction.parts)
    return Space("shared" if named else "", own_cta_only=True)


def _piece(
    fragment: Fragment, mask: int, address: Reader, rows: int, space: Space, write: bool
) -> Piece:
    """The rows in memory, one unit of 16 bytes each."""
    warp = fragment.warp
    if mask != FULL_MASK:
        raise fragment.fatal("divergence", f"{mask:#010x} execute it, all lanes of the warp must")
    lanes = lanes_of(FULL_MASK)[:rows]
    pieces = list(space.pieces(warp, address(warp)[:rows], lanes, ROW_BYTES, write))
    if len(pieces) != 1:
        raise fragment.fatal("out-of-bounds", "rows in several memories")
    return pieces[0]


def _touch(warp: Warp, access: Access, kind: str, rows: int) -> Touch:
    return Touch(warp.clock, access, kind, lanes_of(FULL_MASK)[:rows])


@ROWS.machine(
    "ldmatrix",
    "9.7.14.5.15",
    "ldmatrix.sync.aligned.m8n8{.x1 .x2 .x4}{.trans}{.shared{::cta}}.b16",
    converges=True,
)
def bind_load_matrix(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """The lane that gives a row's address reads it."""
    shape, count, trans = _form(instruction, "ldmatrix")
    rows, access, space = count * MATRIX_ROWS, Access(instruction.line), _space(instruction)
    target = Elements(context, instruction.operands[0], "b32", written=True)
    address = context.address(instruction.operands[1])
    places = fragment_bytes(shape, trans)
    if target.words != count:
        raise Unsupported(f"{target.words} registers for {instruction.opcode}")

    def handler(fragment: Fragment, mask: int) -> None:
        warp = fragment.warp
        piece = _piece(fragment, mask, address, rows, space, write=False)
        record(warp, piece, ROW_BYTES, _touch(warp, access, READ, rows))
        found = units(piece.data, ROW_BYTES)[piece.offsets].view(np.uint8).reshape(count, -1)
        # (matrix, lane, byte) -> lane, then the registers of each matrix in turn.
        values = np.ascontiguousarray(found[:, places].transpose(1, 0, 2))
        target.write(warp, values.reshape(32, -1).view(np.uint32), mask)

    return handler


@ROWS.machine(
    "stmatrix",
    "9.7.14.5.16",
    "stmatrix.sync.aligned.m8n8{.x1 .x2 .x4}{.trans}{.shared{::cta}}.b16; "
    ".m16n8{.x1 .x2 .x4}.trans.b8",
    converges=True,
)
def bind_store_matrix(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """The lane that gives a row's address writes it."""
    shape, count, trans = _form(instruction, "stmatrix")
    rows, access, space = count * MATRIX_ROWS, Access(instruction.line), _space(instruction)
    address = context.address(instruction.operands[0])
    source = Elements(context, instruction.operands[1], "b32")
    places = fragment_bytes(shape, trans)
    if source.words != count:
        raise Unsupported(f"{source.words} registers for {instruction.opcode}")

    def handler(fragment: Fragment, mask: int) -> None:
        warp = fragment.warp
        piece = _piece(fragment, mask, address, rows, space, write=True)
        values = source.read(warp).view(np.uint8).reshape(32, count, 4)
        matrices = np.empty((count, MATRIX_ROWS * ROW_BYTES), np.uint8)
        matrices[:, places] = values.transpose(1, 0, 2)
        whole = matrices.reshape(rows, ROW_BYTES).view(f"V{ROW_BYTES}").reshape(-1)
        touch = _touch(warp, access, WRITE, rows)
        record(warp, piece, ROW_BYTES, replace(touch, idle=partial(_change_of, piece, whole)))
        store_unchecked(piece, whole)
        check_same_values(fragment, piece, whole)
        warp.cta.machine.progress += 1

    return handler


def _change_of(piece: Piece, rows: Array, chosen: Array | slice) -> Change:
    """As `change_of`; the elements of rows are no floats that could be near."""
    change = change_of(piece, rows, chosen)
    return change if change is Change.NOTHING else Change.VALUES


@ROWS.lane(
    "movmatrix",
    "9.7.14.5.17",
    "movmatrix.sync.aligned.m8n8.trans.b16",
    converges=True,
)
def emit_move_matrix(b: SegmentBuilder, i: PtxInstruction) -> None:
    """Lane t receives elements (2 (t % 4), t / 4) and (2 (t % 4) + 1, t / 4) of the matrix."""
    modifiers(i, "movmatrix", ("sync",), ("aligned",), ("m8n8",), ("trans",), ("b16",))
    value = b.read(i.operands[1], "b32")
    odd_column = ((b.lane_ids() >> 2) & 1).compare("ne", 0)
    halves = []
    for half in range(2):
        sources = [4 * (2 * (t % 4) + half) + t // 8 for t in range(32)]
        order = ", ".join(f"i32 {source}" for source in sources)
        row = b.emit(
            f"shufflevector <32 x i32> {value.name}, <32 x i32> poison, <32 x i32> <{order}>", "i32"
        )
        halves.append(odd_column.select(row >> 16, row & 0xFFFF))
    b.write(i.operands[0], halves[0] | (halves[1] << 16))
