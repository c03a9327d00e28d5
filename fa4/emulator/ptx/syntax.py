"""The syntax tree of a PTX module: what the parser returns and everything else reads.

str() of an operand is PTX, for messages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeAlias

# Begins the name of a `.param` variable of a function or a body, in a linked kernel.
CALL_PARAMETER = "param:"


@dataclass(frozen=True, slots=True)
class Register:
    """A register or special register ("%r1", "%tid.x"), unique in its kernel.

    A register declared in an inner scope is renamed ("name@2"), so names never clash.
    negated: written "!%p1".
    """

    name: str
    negated: bool = False

    def __str__(self) -> str:
        return "!" * self.negated + _written(self.name)


@dataclass(frozen=True, slots=True)
class Integer:
    """An integer immediate, as written (it may be negative); WARP_SZ and constant expressions."""

    value: int

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True)
class FloatBits:
    """A floating-point immediate: bits of its value in `width` bits.

    width 32 for 0fXXXXXXXX, 64 for 0dXXXXXXXXXXXXXXXX and decimal literals such as 1.5.
    """

    bits: int
    width: int

    def __str__(self) -> str:
        return f"0{'f' if self.width == 32 else 'd'}{self.bits:0{self.width // 4}X}"


@dataclass(frozen=True, slots=True)
class Symbol:
    """The name of a variable, parameter, function or label, plus a byte offset."""

    name: str
    offset: int = 0

    def __str__(self) -> str:
        return _written(self.name) + _sum(self.offset)


@dataclass(frozen=True, slots=True)
class Address:
    """[base + offset], or a tensor operand [base, {coordinates}].

    base is a Register, Symbol or Integer; offset in bytes; coordinates () if there are none.
    """

    base: Register | Symbol | Integer
    offset: int = 0
    coordinates: tuple[Register | Integer, ...] = ()

    def __str__(self) -> str:
        listed = f", {{{_list(self.coordinates)}}}" if self.coordinates else ""
        return f"[{self.base}{_sum(self.offset)}{listed}]"


@dataclass(frozen=True, slots=True)
class Vector:
    """{a, b, ...}; an element may be Sink."""

    elements: tuple[Operand, ...]

    def __str__(self) -> str:
        return f"{{{_list(self.elements)}}}"


@dataclass(frozen=True, slots=True)
class Pair:
    """d|p, the two destinations of setp, shfl, elect, match. Either may be Sink."""

    first: Operand
    second: Operand

    def __str__(self) -> str:
        return f"{self.first}|{self.second}"


@dataclass(frozen=True, slots=True)
class Sink:
    """The operand "_": the value is dropped."""

    def __str__(self) -> str:
        return "_"


Operand: TypeAlias = Register | Integer | FloatBits | Symbol | Address | Vector | Pair | Sink


def _written(name: str) -> str:
    """A name as it stands in the text: those of inner scopes and functions are renamed."""
    return re.sub(r"@.*$", "", name).removeprefix(CALL_PARAMETER)


def _sum(offset: int) -> str:
    return f"{offset:+}" if offset else ""


def _list(operands: tuple[Operand, ...]) -> str:
    return ", ".join(map(str, operands))


@dataclass(frozen=True, slots=True)
class PtxInstruction:
    """One instruction. `opcode` is the full dotted name, e.g. "add.rn.f32x2".

    parts: opcode split at the dots ("shared::cta" stays one part).
    operands: in source order; the parenthesised lists of `call` become Vectors.
    guard: predicate register of "@%p" / "@!%p" (negated), or None.
    line: 1-based line in the PTX text, by which findings tell instructions apart. Where several
    stand on one line, all but the first have a number of their own, above those of all lines, and
    their line is in `shared_line`. location: (file, line) of the nearest .loc above, or None.
    """

    opcode: str
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None
    line: int
    text: str
    location: tuple[str, int] | None = None
    shared_line: int = 0

    @property
    def written_line(self) -> int:
        """The line that it stands on."""
        return self.shared_line or self.line


@dataclass(frozen=True, slots=True)
class Variable:
    """A .param, .shared, .global, .const or .local variable.

    size_bytes is None for an unsized extern array (dynamic shared memory); type is the element
    type ("b8", "u64", ...); initial holds the bytes of an initialiser, or None. addresses: (byte
    offset, name) of those of its values that are addresses of functions.
    """

    name: str
    space: str
    type: str
    align_bytes: int
    size_bytes: int | None
    extern: bool = False
    initial: bytes | None = None
    addresses: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Kernel:
    """An .entry (or .func): parameters, variables, registers, straight list of instructions.

    has_body is False for a declaration such as `.extern .func vprintf(...);`.

    registers: name -> type ("b32", "pred", "f16x2", ...), specials not included.
    labels: label name -> index of the instruction it stands before (may equal len(instructions)).
    directives: "reqntid" -> (128, 1, 1), "maxntid", "minnctapersm", "reqnctapercluster",
    "maxnreg", "explicitcluster" -> ().
    branch_targets: name -> labels of a .branchtargets list (for brx.idx).
    """

    name: str
    parameters: tuple[Variable, ...]
    variables: tuple[Variable, ...]
    registers: dict[str, str]
    instructions: tuple[PtxInstruction, ...]
    labels: dict[str, int]
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    results: tuple[Variable, ...] = ()
    is_entry: bool = True
    has_body: bool = True


@dataclass(frozen=True)
class Module:
    """A PTX module. target is e.g. "sm_100a"; version e.g. (8, 8)."""

    version: tuple[int, int]
    target: str
    address_size: int
    kernels: dict[str, Kernel]
    functions: dict[str, Kernel]
    variables: tuple[Variable, ...]
    files: dict[int, str]
    text: str
