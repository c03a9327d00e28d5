"""Emits LLVM vector code for a straight run of register instructions: 32 lanes at a time.

`SegmentBuilder` keeps the registers of a segment as SSA values; `Lanes` is one value with Python
operators, so that an instruction's meaning reads like a formula:

    b.write(i.operands[0], b.read(i.operands[1], "u32") + b.read(i.operands[2], "u32"))

The text of the function is later compiled by `fa4.emulator.translate.native`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass

from fa4.emulator.ptx.syntax import FloatBits, Integer, Operand, Register, Sink, Symbol
from fa4.emulator.translate.table import Unsupported
from fa4.emulator.warp_lanes import LANES

WIDTHS = {"8": 8, "16": 16, "32": 32, "64": 64, "128": 128}
# name -> LLVM function, its result type, the definitions and declarations that a call needs
_subroutines: dict[str, tuple[str, str, frozenset[str]]] = {}
INTEGER_COMPARISONS = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")


def width_of(ptx_type: str) -> int:
    """Bits of a PTX type: "u32" 32, "pred" 1, "f16x2" 32, "f32x2" 64."""
    if ptx_type == "pred":
        return 1
    if ptx_type in ("f16x2", "bf16x2", "u16x2", "s16x2", "b32x1"):
        return 32
    if ptx_type == "f32x2":
        return 64
    if ptx_type == "tf32":
        return 32
    digits = ptx_type.lstrip("bfsu")
    if digits not in WIDTHS:
        raise Unsupported(f"type .{ptx_type}")
    return WIDTHS[digits]


def is_signed(ptx_type: str) -> bool:
    """Whether a PTX type is a signed integer."""
    return ptx_type.startswith("s")


@dataclass(frozen=True, slots=True)
class Lanes:
    """32 values of one LLVM scalar type ("i1", "i32", "i64", "float", "double", "half")."""

    builder: SegmentBuilder
    type: str
    name: str

    def _binary(self, opcode: str, other: Lanes | int) -> Lanes:
        right = self.builder.constant(other, self.type) if isinstance(other, int) else other
        if right.type != self.type:
            raise TypeError(f"{opcode} of {self.type} and {right.type}")
        return self.builder.emit(
            f"{opcode} <32 x {self.type}> {self.name}, {right.name}", self.type
        )

    @property
    def is_float(self) -> bool:
        """Whether the type is a floating-point type."""
        return self.type in ("float", "double", "half", "bfloat")

    def __add__(self, other: Lanes | int) -> Lanes:
        return self._binary("fadd" if self.is_float else "add", other)

    def __sub__(self, other: Lanes | int) -> Lanes:
        return self._binary("fsub" if self.is_float else "sub", other)

    def __mul__(self, other: Lanes | int) -> Lanes:
        return self._binary("fmul" if self.is_float else "mul", other)

    def __and__(self, other: Lanes | int) -> Lanes:
        return self._binary("and", other)

    def __or__(self, other: Lanes | int) -> Lanes:
        return self._binary("or", other)

    def __xor__(self, other: Lanes | int) -> Lanes:
        return self._binary("xor", other)

    def __lshift__(self, other: Lanes | int) -> Lanes:
        return self._binary("shl", other)

    def __rshift__(self, other: Lanes | int) -> Lanes:
        """Logical shift right; `ashr` is the arithmetic one. Shifts >= the width are undefined."""
        return self._binary("lshr", other)

    def ashr(self, other: Lanes | int) -> Lanes:
        """Arithmetic shift right; shifts >= the width are undefined."""
        return self._binary("ashr", other)

    def udiv(self, other: Lanes) -> Lanes:
        """Unsigned quotient; no lane may divide by zero."""
        return self._binary("udiv", other)

    def sdiv(self, other: Lanes) -> Lanes:
        """Signed quotient; no lane may divide by zero or overflow."""
        return self._binary("sdiv", other)

    def urem(self, other: Lanes) -> Lanes:
        """Unsigned remainder; no lane may divide by zero."""
        return self._binary("urem", other)

    def srem(self, other: Lanes) -> Lanes:
        """Signed remainder; no lane may divide by zero or overflow."""
        return self._binary("srem", other)

    def fdiv(self, other: Lanes) -> Lanes:
        """Floating-point quotient."""
        return self._binary("fdiv", other)

    def __invert__(self) -> Lanes:
        return self ^ (1 if self.type == "i1" else -1)

    def __neg__(self) -> Lanes:
        if self.is_float:
            return self.builder.emit(f"fneg <32 x {self.type}> {self.name}", self.type)
        return self.builder.constant(0, self.type) - self

    def compare(self, relation: str, other: Lanes | int) -> Lanes:
        """i1 result. relation: an LLVM icmp ("slt", "ult") or fcmp ("olt", "uno") code."""
        right = self.builder.constant(other, self.type) if isinstance(other, int) else other
        opcode = "fcmp" if self.is_float else "icmp"
        text = f"{opcode} {relation} <32 x {self.type}> {self.name}, {right.name}"
        return self.builder.emit(text, "i1")

    def select(self, yes: Lanes, no: Lanes) -> Lanes:
        """self must be i1: yes where it is true."""
        if yes.type != no.type:
            raise TypeError(f"select of {yes.type} and {no.type}")
        return self.builder.emit(
            f"select <32 x i1> {self.name}, <32 x {yes.type}> {yes.name}, "
            f"<32 x {no.type}> {no.name}",
            yes.type,
        )

    def convert(self, opcode: str, to: str) -> Lanes:
        """LLVM cast: trunc, zext, sext, fptrunc, fpext, sitofp, uitofp, fptosi, bitcast, ..."""
        if self.type == to:
            return self
        return self.builder.emit(f"{opcode} <32 x {self.type}> {self.name} to <32 x {to}>", to)

    def bitcast(self, to: str) -> Lanes:
        """The same bits as another type of the same width."""
        return self.convert("bitcast", to)

    def resize(self, bits: int, signed: bool = False) -> Lanes:
        """An integer vector of `bits` bits: truncated, or zero- or sign-extended."""
        mine = int(self.type[1:])
        if bits < mine:
            return self.convert("trunc", f"i{bits}")
        return self.convert("sext" if signed else "zext", f"i{bits}")

    def as_float(self) -> Lanes:
        """The bits of an i32 or i64 vector as float or double."""
        return self.bitcast({"i16": "half", "i32": "float", "i64": "double"}[self.type])

    def as_integer(self) -> Lanes:
        """The bits of a float vector as integers."""
        return self.bitcast({"half": "i16", "float": "i32", "double": "i64"}[self.type])


class SegmentBuilder:
    """Collects the body of one segment's function.

    layout: register name -> (byte offset in the warp's register file, bits). symbols: name ->
    address, for operands that are the address of a variable; those in `shared_symbols` also carry
    the CTA's rank in its cluster in bits 24 and up, as on hardware; to those in `framed_symbols`
    the thread's frame is added. `guard` is the i1 Lanes of the current instruction's predicate or
    None; writes blend with the old value where it is false.
    """

    def __init__(
        self,
        layout: dict[str, tuple[int, int]],
        symbols: Callable[[str], int],
        shared_symbols: frozenset[str] = frozenset(),
        framed_symbols: frozenset[str] = frozenset(),
    ) -> None:
        self.layout = layout
        self.symbols = symbols
        self.shared_symbols = shared_symbols
        self.framed_symbols = framed_symbols
        self.lines: list[str] = []
        self.values: dict[str, Lanes] = {}  # by register, in the order in which they are met
        self.written: set[str] = set()
        self.read_first: set[str] = set()
        self.declarations: set[str] = set()
        self.guard: Lanes | None = None
        self.places: dict[int, int] = {}  # byte offset of a register -> its entry in the table
        self._pointers: dict[int, str] = {}
        self._names = 0

    def fresh(self) -> str:
        """A new SSA name."""
        self._names += 1
        return f"%t{self._names}"

    def emit(self, text: str, result_type: str) -> Lanes:
        """Appends `%fresh = text` and returns it as 32 lanes of `result_type`."""
        name = self.fresh()
        self.lines.append(f"  {name} = {text}")
        return Lanes(self, result_type, name)

    def scalar(self, text: str) -> str:
        """Appends `%fresh = text` for a scalar value; returns its name."""
        name = self.fresh()
        self.lines.append(f"  {name} = {text}")
        return name

    def call(self, function: str, result_type: str, *arguments: Lanes) -> Lanes:
        """Calls an LLVM intrinsic on whole vectors, e.g. "llvm.fma.v32f32"."""
        types = ", ".join(f"<32 x {a.type}>" for a in arguments)
        values = ", ".join(f"<32 x {a.type}> {a.name}" for a in arguments)
        self.declarations.add(f"declare <32 x {result_type}> @{function}({types})")
        return self.emit(f"call <32 x {result_type}> @{function}({values})", result_type)

    def subroutine(self, name: str, body: Callable[..., Lanes], *arguments: Lanes) -> Lanes:
        """Calls `body(*arguments)` as a function of its own, compiled once for many uses.

        Worth it from a few operations on: inlined, they would be compiled at every use. name:
        unique to the body and its settings. The body may use nothing but its arguments.
        """
        if name not in _subroutines:
            inner = SegmentBuilder({}, self.symbols)
            parameters = [Lanes(inner, a.type, f"%a{k}") for k, a in enumerate(arguments)]
            signature = ", ".join(f"<32 x {p.type}> {p.name}" for p in parameters)
            result = body(*parameters)
            lines = "\n".join(inner.lines)
            text = f"{lines}\n  ret <32 x {result.type}> {result.name}\n}}\n"
            # The text is part of the label, so that a segment's text says what it computes.
            label = f"{name}#{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
            head = f'define private fastcc <32 x {result.type}> @"{label}"({signature}) noinline {{'
            definitions = frozenset({f"{head}\n{text}"} | inner.declarations)
            _subroutines[name] = (label, result.type, definitions)
        label, kind, declarations = _subroutines[name]
        self.declarations |= declarations
        values = ", ".join(f"<32 x {a.type}> {a.name}" for a in arguments)
        return self.emit(f'call fastcc <32 x {kind}> @"{label}"({values})', kind)

    def constant(self, value: int | float, llvm_type: str) -> Lanes:
        """The same constant in all lanes. Floats are written by their bits."""
        if llvm_type == "i1":
            text = "true" if value else "false"
        elif llvm_type.startswith("i"):
            bits = int(llvm_type[1:])
            text = str(int(value) & ((1 << bits) - 1))
        else:
            # LLVM spells both float and double constants as the bits of a double.
            text = f"0x{struct.unpack('<Q', struct.pack('<d', float(value)))[0]:016X}"
        return Lanes(self, llvm_type, f"splat ({llvm_type} {text})")

    def lane_ids(self) -> Lanes:
        """0, 1, ..., 31 as i32."""
        items = ", ".join(f"i32 {lane}" for lane in range(LANES))
        return Lanes(self, "i32", f"<{items}>")

    def active(self) -> Lanes:
        """i1: the lanes that execute the segment (and pass the guard, if there is one)."""
        if "mask" not in self.values:
            self.values["mask"] = self.emit("bitcast i32 %mask to <32 x i1>", "i1")
        mask = self.values["mask"]
        return mask if self.guard is None else mask & self.guard

    def ballot(self, predicate: Lanes) -> str:
        """The name of a scalar i32 with bit l set where lane l of an i1 vector is true."""
        return self.scalar(f"bitcast <32 x i1> {predicate.name} to i32")

    def splat(self, scalar_name: str, llvm_type: str) -> Lanes:
        """A scalar SSA value in all lanes."""
        one = self.scalar(
            f"insertelement <32 x {llvm_type}> poison, {llvm_type} {scalar_name}, i32 0"
        )
        return self.emit(
            f"shufflevector <32 x {llvm_type}> {one}, <32 x {llvm_type}> poison, "
            "<32 x i32> zeroinitializer",
            llvm_type,
        )

    def register(self, name: str) -> Lanes:
        """The current value of a register, in its full width (i1, i16, i32, i64, i128)."""
        if name not in self.values:
            if name not in self.layout:
                raise Unsupported(f"special register {name}")
            offset, bits = self.layout[name]
            self.read_first.add(name)
            pointer = self._pointer(offset)
            if bits == 1:
                word = self.scalar(f"load i32, ptr {pointer}, align 4")
                self.values[name] = self.emit(f"bitcast i32 {word} to <32 x i1>", "i1")
            else:
                self.values[name] = self.emit(
                    f"load <32 x i{bits}>, ptr {pointer}, align 64", f"i{bits}"
                )
        return self.values[name]

    def _pointer(self, offset: int) -> str:
        """Where a register lies: a table says it, so that code serves for other registers, too."""
        if offset not in self._pointers:
            entry = self.places.setdefault(offset, len(self.places))
            place = self.scalar(f"getelementptr i64, ptr %places, i64 {entry}")
            distance = self.scalar(f"load i64, ptr {place}, align 8")
            self._pointers[offset] = self.scalar(
                f"getelementptr i8, ptr %registers, i64 {distance}"
            )
        return self._pointers[offset]

    def read(self, operand: Operand, ptx_type: str) -> Lanes:
        """A source operand as the integer vector that holds `ptx_type` (f32 comes as i32 bits).

        A register wider than the type is truncated; a narrower one is an error. A symbol is its
        address. Raises Unsupported for operands that are not values.
        """
        bits = width_of(ptx_type)
        if isinstance(operand, Register):
            value = self.register(operand.name)
            if operand.negated:
                value = ~value
            mine = int(value.type[1:])
            if mine < bits:
                raise Unsupported(f"{operand.name} has {mine} bits, .{ptx_type} needs {bits}")
            return value.resize(bits)
        if isinstance(operand, Integer):
            if ptx_type.startswith("f") and width_of(ptx_type) in (32, 64):
                return self.constant(_float_bits(float(operand.value), bits), f"i{bits}")
            return self.constant(operand.value, f"i{bits}")
        if isinstance(operand, FloatBits):
            return self.constant(_immediate_bits(operand, bits), f"i{bits}")
        if isinstance(operand, Symbol):
            address = self.constant(self.symbols(operand.name) + operand.offset, f"i{bits}")
            if operand.name in self.framed_symbols:
                return address + self.register("%frame").resize(bits)
            if operand.name not in self.shared_symbols:
                return address
            return address | (self.register("%cluster_ctarank").resize(bits) << 24)
        raise Unsupported(f"operand {operand}")

    def read_float(self, operand: Operand, ptx_type: str) -> Lanes:
        """A source operand of type f32 or f64 as a float or double vector."""
        return self.read(operand, ptx_type).as_float()

    def write(self, operand: Operand, value: Lanes, signed: bool = False) -> None:
        """Writes a destination register (or drops the value for "_").

        Float values are stored by their bits. A register wider than the value receives it zero-
        or sign-extended; a narrower one is an error.
        """
        if isinstance(operand, Sink):
            return
        if not isinstance(operand, Register):
            raise Unsupported(f"destination {operand}")
        if operand.name not in self.layout:
            raise Unsupported(f"destination {operand.name}")
        bits = self.layout[operand.name][1]
        integer = value.as_integer() if value.is_float else value
        if int(integer.type[1:]) > bits:
            raise Unsupported(f"{operand.name} has {bits} bits, the result {integer.type[1:]}")
        integer = integer.resize(bits, signed)
        if self.guard is not None:
            integer = self.guard.select(integer, self.register(operand.name))
        self.values[operand.name] = integer
        self.written.add(operand.name)

    def store_back(self, live: set[str]) -> None:
        """Stores every written register that is in `live`, for the active lanes only."""
        self.guard = None
        kept = self.written & live
        for name in [name for name in self.values if name in kept]:
            value = self.values[name]
            offset, bits = self.layout[name]
            pointer = self._pointer(offset)
            mask = self.active()
            if bits == 1:
                old = self.scalar(f"load i32, ptr {pointer}, align 4")
                before = self.emit(f"bitcast i32 {old} to <32 x i1>", "i1")
                word = self.ballot(mask.select(value, before))
                self.lines.append(f"  store i32 {word}, ptr {pointer}, align 4")
            else:
                old_value = self.emit(f"load <32 x i{bits}>, ptr {pointer}, align 64", f"i{bits}")
                blended = mask.select(value, old_value)
                self.lines.append(f"  store <32 x i{bits}> {blended.name}, ptr {pointer}, align 64")


def _float_bits(value: float, bits: int) -> int:
    if bits == 32:
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    return int(struct.unpack("<Q", struct.pack("<d", value))[0])


def _immediate_bits(literal: FloatBits, bits: int) -> int:
    """The bits of a float literal in a register of `bits` bits; a double literal is rounded."""
    if literal.width == bits:
        return literal.bits
    if literal.width == 64 and bits == 32:
        return _float_bits(struct.unpack("<d", struct.pack("<Q", literal.bits))[0], 32)
    raise Unsupported(f"a {literal.width}-bit float literal where {bits} bits are needed")
