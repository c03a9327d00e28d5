"""Reads declarations: registers, variables, parameters, initialisers (PTX ISA 5)."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from fa4.emulator.errors import PtxError
from fa4.emulator.ptx.constants import read_constant
from fa4.emulator.ptx.lexer import Cursor, is_name
from fa4.emulator.ptx.names import Names
from fa4.emulator.ptx.syntax import FloatBits, Integer, Symbol, Variable

SPACES = frozenset({".param", ".shared", ".global", ".const", ".local"})
_VECTOR_BYTES = 16  # the longest vector
_MOST_REGISTERS = 1 << 20  # in one declaration; kernels have some thousands
_POINTEE_SPACES = frozenset({".global", ".shared", ".const", ".local"})

TYPE_BYTES: dict[str, int] = {
    **dict.fromkeys(("b8", "u8", "s8"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), 8),
    "b128": 16,
}


def read_registers(cursor: Cursor, names: Names) -> dict[str, str]:
    """The rest of `.reg .b32 %r<100>, x;`: unique register name -> type. PtxError if malformed.

    Of vectors (PTX ISA 5.4.2) each element is a register.
    """
    start = cursor.line
    width = int(cursor.take()[2:]) if cursor.token in (".v2", ".v4") else 1
    kind = _read_type(cursor, also=("pred",) if width == 1 else ())
    if width > 1 and width * TYPE_BYTES[kind] > _VECTOR_BYTES:
        raise PtxError(f"a register .v{width} .{kind} has more than 128 bits", start)
    registers: dict[str, str] = {}
    while True:
        line = cursor.line
        name = cursor.take_name("the name of a register")
        written = [name]
        if cursor.accept("<"):
            count = cursor.take_count("the number of registers")
            if count > _MOST_REGISTERS:
                raise PtxError(f"{count} registers, more than {_MOST_REGISTERS}", line)
            written = [f"{name}{i}" for i in range(count)]
            cursor.expect(">")
        if width == 1:
            unique = names.declare_registers(written, line)
        else:
            unique = [part for one in written for part in names.declare_vector(one, width, line)]
        registers.update(dict.fromkeys(unique, kind))
        if not cursor.accept(","):
            cursor.expect(";")
            return registers


def read_variables(cursor: Cursor, names: Names, extern: bool = False) -> list[Variable]:
    """The variables of `.shared .align 16 .b8 x[64], y;`, from the state space on.

    PtxError if the declaration is malformed or its initialiser is not supported.
    """
    space = cursor.take()[1:]
    align_bytes, vector, kind = _read_variable_type(cursor)
    variables = []
    while True:
        line = cursor.line
        name = cursor.take_name("the name of a variable")
        dimensions = _read_dimensions(cursor)
        if vector > 1:
            dimensions.append(vector)
        initial = None
        if cursor.accept("="):
            if space not in ("global", "const"):
                raise PtxError(f"a .{space} variable cannot have an initialiser", line)
            initial = _read_initialiser(cursor, names, kind, dimensions)
        size_bytes = _size_bytes(kind, dimensions, initial)
        if size_bytes is None and not extern:
            raise PtxError(f"{name} has no size: only an extern array may be unsized", line)
        unique = names.declare_symbol(name, line)
        data, addresses = (initial.data, initial.addresses) if initial else (None, ())
        variables.append(
            Variable(unique, space, kind, align_bytes, size_bytes, extern, data, addresses)
        )
        if not cursor.accept(","):
            cursor.expect(";")
            return variables


def read_parameters(cursor: Cursor, names: Names) -> tuple[Variable, ...]:
    """The parameters after "(", up to and past ")"."""
    parameters: list[Variable] = []
    if cursor.accept(")"):
        return ()
    while True:
        if cursor.token == ".reg":
            raise PtxError("parameters in registers are not supported", cursor.line)
        cursor.expect(".param")
        align_bytes, vector, kind = _read_variable_type(cursor)
        line = cursor.line
        name = cursor.take_name("the name of a parameter")
        dimensions = _read_dimensions(cursor)
        if vector > 1:
            dimensions.append(vector)
        unique = names.declare_symbol(name, line)
        size_bytes = _size_bytes(kind, dimensions, None)
        parameters.append(Variable(unique, "param", kind, align_bytes, size_bytes))
        if not cursor.accept(","):
            cursor.expect(")")
            return tuple(parameters)


def _read_type(cursor: Cursor, also: tuple[str, ...] = ()) -> str:
    kind = cursor.token[1:]
    if cursor.token[:1] != "." or (kind not in TYPE_BYTES and kind not in also):
        cursor.fail("a type (" + ", ".join(f".{name}" for name in (*TYPE_BYTES, *also)) + ")")
    cursor.index += 1
    return kind


def _read_variable_type(cursor: Cursor) -> tuple[int, int, str]:
    """The alignment in bytes, the length of the vector (1: none) and the element type."""
    align_bytes = None
    vector = 1
    kind = None
    while cursor.token[:1] == ".":
        if cursor.accept(".align"):
            align_bytes = _read_alignment(cursor)
        elif cursor.token in (".v2", ".v4"):
            vector = int(cursor.take()[2:])
        elif cursor.accept(".attribute"):
            cursor.skip_past(")")
        elif cursor.accept(".ptr"):
            # What the pointer points to, not the parameter itself.
            if cursor.token in _POINTEE_SPACES:
                cursor.index += 1
            if cursor.accept(".align"):
                _read_alignment(cursor)
        else:
            kind = _read_type(cursor)
    if kind is None:
        cursor.fail("a type")
    return align_bytes or TYPE_BYTES[kind] * vector, vector, kind


def _read_alignment(cursor: Cursor) -> int:
    line = cursor.line
    align_bytes = cursor.take_count("an alignment in bytes")
    if align_bytes < 1 or align_bytes & (align_bytes - 1):
        raise PtxError(f"alignment {align_bytes} is not a power of two", line)
    return align_bytes


def _read_dimensions(cursor: Cursor) -> list[int | None]:
    """The extents of `[4][8]`; None for the first one of `[]`."""
    dimensions: list[int | None] = []
    while cursor.accept("["):
        if cursor.accept("]"):
            if dimensions:
                raise PtxError("only the first extent of an array may be left out", cursor.line)
            dimensions.append(None)
        else:
            line = cursor.line
            dimensions.append(cursor.take_count("the extent of an array"))
            if dimensions[-1] == 0:
                raise PtxError("an array of no elements", line)
            cursor.expect("]")
    return dimensions


@dataclass(frozen=True)
class _Initial:
    """Bytes of an initialiser, and (byte offset, name) of the addresses among them."""

    data: bytes
    addresses: tuple[tuple[int, str], ...] = ()

    @staticmethod
    def joined(parts: Iterable[_Initial]) -> _Initial:
        data, addresses = b"", list[tuple[int, str]]()
        for part in parts:
            addresses += [(len(data) + at, name) for at, name in part.addresses]
            data += part.data
        return _Initial(data, tuple(addresses))


def _size_bytes(kind: str, dimensions: list[int | None], initial: _Initial | None) -> int | None:
    if initial is not None:
        return len(initial.data)
    extents = [extent for extent in dimensions if extent is not None]
    if len(extents) < len(dimensions):
        return None
    return TYPE_BYTES[kind] * math.prod(extents)


def _read_initialiser(
    cursor: Cursor, names: Names, kind: str, dimensions: list[int | None]
) -> _Initial:
    """The bytes after "=": one value, or lists nested as deep as the array has dimensions.

    Values missing at the end of the outermost list are 0. ptxas packs the values of an incomplete
    inner list against the next one: refused rather than guessed.
    """
    if not dimensions:
        return _read_value(cursor, names, kind)
    extent, *inner = dimensions
    line = cursor.line
    values = _read_list(cursor, names, kind, inner)
    read = _Initial.joined(values)
    if extent is None:
        return read
    if len(values) > extent:
        raise PtxError(f"{len(values)} values for {extent} elements", line)
    element_bytes = TYPE_BYTES[kind] * math.prod(length for length in inner if length is not None)
    return _Initial(read.data.ljust(extent * element_bytes, b"\0"), read.addresses)


def _read_list(cursor: Cursor, names: Names, kind: str, inner: list[int | None]) -> list[_Initial]:
    cursor.expect("{")
    values: list[_Initial] = []
    while not cursor.accept("}"):
        if values:
            cursor.expect(",")
        if not inner:
            values.append(_read_value(cursor, names, kind))
            continue
        line = cursor.line
        nested = _read_list(cursor, names, kind, inner[1:])
        if len(nested) != inner[0]:
            raise PtxError(f"an inner list of {len(nested)} values, not {inner[0]}", line)
        values.append(_Initial.joined(nested))
    return values


def _read_value(cursor: Cursor, names: Names, kind: str) -> _Initial:
    """One value: a number, or the address of a function or variable (PTX ISA 5.4.4)."""
    named = names.meaning.get(cursor.token)
    if isinstance(named, Symbol) and TYPE_BYTES[kind] == 8 and kind[0] in "bu":
        cursor.index += 1
        return _Initial(bytes(8), ((0, named.name),))
    return _Initial(_read_number(cursor, kind))


def _read_number(cursor: Cursor, kind: str) -> bytes:
    """The bytes of a number. Bit types take numbers of both kinds, as in ptxas."""
    line = cursor.line
    if cursor.token.startswith('"') or (cursor.token != "WARP_SZ" and is_name(cursor.token)):
        text = f"an initialiser with {cursor.token} is not supported: only numbers and addresses"
        raise PtxError(text, line)
    constant = read_constant(cursor)
    size_bytes = TYPE_BYTES[kind]
    if isinstance(constant, Integer) and kind[0] in "bus":
        return (constant.value & ((1 << 8 * size_bytes) - 1)).to_bytes(size_bytes, "little")
    if isinstance(constant, FloatBits) and kind in ("b32", "b64", "f32", "f64"):
        bits = constant.bits.to_bytes(constant.width // 8, "little")
        if len(bits) == size_bytes:
            return bits
        if size_bytes == 4:
            return _rounded_to_f32(bits, line)
    raise PtxError(f"this number cannot initialise a .{kind} variable", line)


def _rounded_to_f32(double: bytes, line: int) -> bytes:
    try:
        return struct.pack("<f", *struct.unpack("<d", double))
    except OverflowError:
        raise PtxError("the number is too large for 32 bits", line) from None
