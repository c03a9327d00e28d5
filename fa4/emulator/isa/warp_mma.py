"""Matrix products of one warp on registers: mma.sync and, with sparse A, mma.sp (PTX ISA 9.7.14).

Sums are those of Hopper's tensor core, measured with m16n8k16 of 16-bit types (see
`fa4.emulator.wgmma.sums`); other shapes and types are assumed to add up as those of wgmma do.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fa4.emulator.machine.state import Fragment, Warp
from fa4.emulator.ptx.syntax import Integer, Operand, PtxInstruction
from fa4.emulator.tcgen05.formats import Format
from fa4.emulator.tcgen05.sparse import places_from, wrong_code
from fa4.emulator.tcgen05.tmem import Bytes, Words
from fa4.emulator.translate.context import Handler, KernelContext
from fa4.emulator.translate.table import TableRows, Unsupported
from fa4.emulator.warp_lanes import Array
from fa4.emulator.wgmma.forms import ProductForm
from fa4.emulator.wgmma.sparse import codes_from, metadata_lanes, multiply_sparse
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
    registers = _Registers(context, instruction.operands, form, k_bytes, k_bytes)

    def handler(fragment: Fragment, mask: int) -> None:
        _check_whole(fragment, mask, "mma.sync")
        a, b, c = registers.read(fragment.warp)
        registers.write(fragment.warp, multiply(form, a, b, c), mask)

    return handler


_SPARSE_FORMS = (
    "f16, bf16 (k16, k32), tf32 (k8, k16), s8, u8 (k32, k64), e4m3, e5m2 (k64); sums f32, f16, s32"
)


@ROWS.machine(
    "mma.sp",
    "9.7.14.6",
    f"mma.sp.sync.aligned.m16n8kK.row.col{{.satfinite}}.d.a.b.c: {_SPARSE_FORMS}",
)
@ROWS.machine("mma.sp::ordered_metadata", "9.7.14.6", "mma.sp::ordered_metadata as mma.sp")
def bind_sparse(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """The same with an A of which half the elements are there."""
    ordered = instruction.parts[1] != "sp"
    form, k_bytes = _sparse_form_of(instruction.parts)
    if len(instruction.operands) != 6:
        raise Unsupported(
            f"{len(instruction.operands)} operands, not d, a, b, c, metadata, selector"
        )
    *matrices, metadata, selector = instruction.operands
    registers = _Registers(context, tuple(matrices), form, k_bytes, 2 * k_bytes)
    lanes = metadata_lanes(form.a, k_bytes)
    choices = 4 // lanes
    if not isinstance(selector, Integer) or not 0 <= selector.value < choices:
        raise Unsupported(f"a sparsity selector that is not an immediate below {choices}")
    first, read_metadata = selector.value * lanes, context.reader(metadata, "b32")

    def handler(fragment: Fragment, mask: int) -> None:
        warp = fragment.warp
        _check_whole(fragment, mask, instruction.parts[0] + "." + instruction.parts[1])
        words = read_metadata(warp).astype(np.uint32).reshape(-1, 4)[:, first : first + lanes]
        codes = codes_from(form.a, words)
        wrong = wrong_code(form.a, codes, ordered)
        if wrong:
            raise fragment.fatal("fault", wrong)
        a, b, c = registers.read(warp)
        registers.write(warp, multiply_sparse(form, a, b, c, places_from(form.a, codes)), mask)

    return handler


def _sparse_form_of(parts: tuple[str, ...]) -> tuple[ProductForm, int]:
    """The form, and the bytes of K of A as it is there: those of an mma.sync with half of K."""
    if len(parts) < 5 or not parts[4].startswith("m16n8k") or not parts[4][6:].isdigit():
        raise Unsupported(f"the form .{'.'.join(parts[2:5])}")
    half = f"m16n8k{int(parts[4][6:]) // 2}"
    try:
        form, k_bytes = _form_of(("mma", *parts[2:4], half, *parts[5:]))
    except Unsupported:
        raise Unsupported(f"the form .{'.'.join(parts[4:])}") from None
    if form.a in _MIXED[0] and (k_bytes != _K_BYTES[1] or form.d is Format.F16):
        raise Unsupported(f"8-bit floats are .m16n8k64 with sums .f32, not .{'.'.join(parts[4:])}")
    return form, k_bytes


def _check_whole(fragment: Fragment, mask: int, what: str) -> None:
    if mask != fragment.warp.alive:
        fragment.fault("divergence", f"{what} by a part of the warp")


class _Registers:
    """The registers of one instruction: matrices from those of all lanes, and back.

    a_bytes, b_bytes: of a row of A and of a column of B.
    """

    def __init__(
        self,
        context: KernelContext,
        operands: tuple[Operand, ...],
        form: ProductForm,
        a_bytes: int,
        b_bytes: int,
    ) -> None:
        if len(operands) != 4:
            raise Unsupported(f"{len(operands)} operands, not d, a, b, c")
        d, a, b, c = (context.elements(operand) for operand in operands)
        self._packs = form.d is Format.F16
        sums = 2 if self._packs else 4
        counts = {"D": (d, sums), "A": (a, a_bytes // 8), "B": (b, b_bytes // 16), "C": (c, sums)}
        for name, (vector, count) in counts.items():
            if len(vector) != count:
                raise Unsupported(f"{len(vector)} registers for {name}, not {count}")
        self._readers: list[list[Callable[[Warp], Array]]] = [
            [context.reader(o, "b32") for o in operands] for operands in (a, b, c)
        ]
        self._writers = [context.writer(o, "b32") for o in d]
        self._a, self._b = _operand_places(len(a), True), _operand_places(len(b), False)
        self._shapes = (RESULT_ROWS, a_bytes // 4), (RESULT_COLUMNS, b_bytes // 4)

    def read(self, warp: Warp) -> tuple[Bytes, Bytes, Words]:
        """A (16, bytes of a row), B (8, bytes of a column), the bits of C (16, 8)."""
        words = [np.stack([read(warp) for read in row], axis=1) for row in self._readers]
        left, right = (np.empty(shape, np.uint32) for shape in self._shapes)
        total = np.empty((RESULT_ROWS, RESULT_COLUMNS), np.uint32)
        left[self._a], right[self._b] = words[0], words[1]
        total[_C_ROW, _C_COLUMN] = _halves(words[2]) if self._packs else words[2]
        return left.view(np.uint8), right.view(np.uint8), total

    def write(self, warp: Warp, found: Words, mask: int) -> None:
        """D from its bits (16, 8)."""
        packed = found[_C_ROW, _C_COLUMN]
        if self._packs:
            packed = packed.astype(np.uint16).view(np.uint32)
        for index, write in enumerate(self._writers):
            write(warp, packed[:, index], mask)
