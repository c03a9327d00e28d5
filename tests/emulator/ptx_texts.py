"""Random PTX kernels, drawn together with the syntax tree that the parser must return."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from fa4.emulator.ptx.syntax import (
    Address,
    FloatBits,
    Integer,
    Kernel,
    Operand,
    Pair,
    PtxInstruction,
    Register,
    Sink,
    Symbol,
    Variable,
    Vector,
)

HEAD = ".version 8.8\n.target sm_100a\n.address_size 64\n"

# Few names, so that scopes shadow each other; "p" and "x" may be a register, variable or label.
REGISTER_NAMES = ["%r", "P1", "p", "x", "$a_0"]
VARIABLE_NAMES = ["x", "smem", "param0", "p"]
LABEL_NAMES = ["LAB_WAIT", "DONE", "$L__BB0_1", "x", "p"]
TYPES = {"pred": 0, "b8": 1, "u16": 2, "b32": 4, "f32": 4, "s64": 8, "b128": 16}
SPECIALS = ["%tid.x", "%ctaid.z", "%clock64", "%cluster_ctarank", "%dynamic_smem_size"]
OPCODES = [
    *("ret", "mov.b64", "add.s32", "@", "tcgen05.wait::ld.sync.aligned", "ld.global.v4.b32"),
    *("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes", "x", "p"),
]
SEPARATORS = [" ", "\n", "\t", "  \n ", " // ; { add\n", " /* } , */ ", "/*\n\n*/", "\r\n"]
TIGHT = frozenset(",;[]{}()|:!@+")
FILES = {1: "/tmp/a b//c.py", 7: "d.py"}

Written = tuple[list[str], Operand]


@dataclass
class Text:
    """Text under construction: tokens with random space between them."""

    draw: Any
    done: str = HEAD
    last: str = ";"

    def put(self, *tokens: str) -> int:
        """Appends tokens; the line of the first one."""
        first_line = 0
        for token in tokens:
            free = self.last in TIGHT or token in TIGHT
            separators = ["", *SEPARATORS] if free else SEPARATORS
            self.done += self.draw(st.sampled_from(separators))
            first_line = first_line or self.done.count("\n") + 1
            self.done += token
            self.last = token
        return first_line


@dataclass
class Names:
    """The names of the kernel, by the rule: the first keeps its name, others get @2, @3, ..."""

    scopes: list[dict[str, Operand]] = field(default_factory=lambda: [{"k": Symbol("k")}])
    uses: dict[str, int] = field(default_factory=lambda: {"k": 1})

    def free(self, names: list[str]) -> list[str]:
        return [name for name in names if name not in self.scopes[-1]]

    def declare(self, name: str, kind: type[Register] | type[Symbol]) -> str:
        self.uses[name] = self.uses.get(name, 0) + 1
        unique = name if self.uses[name] == 1 else f"{name}@{self.uses[name]}"
        self.scopes[-1][name] = kind(unique)
        return unique

    def visible(self, kind: type[Register] | type[Symbol]) -> list[tuple[str, Any]]:
        merged = {name: meaning for scope in self.scopes for name, meaning in scope.items()}
        return [(name, meaning) for name, meaning in merged.items() if isinstance(meaning, kind)]


def integers(draw: Any) -> Written:
    value = draw(st.integers(-(1 << 63) + 1, (1 << 63) - 1) | st.integers(-9, 9))
    digits = draw(st.sampled_from(["{}", "{:#x}", "{:#b}", "0{:o}", "{}U"])).format(abs(value))
    if value < 0 and not digits.endswith("U"):
        return ["-", digits], Integer(value)
    return [digits], Integer(abs(value))


def floats(draw: Any) -> Written:
    form = draw(st.sampled_from(["0f{:08X}", "0d{:016x}", "decimal"]))
    if form == "decimal":
        value = draw(st.floats(0, allow_infinity=False, allow_nan=False))
        bits = struct.unpack("<Q", struct.pack("<d", value))[0]
        negative = draw(st.booleans())
        written = [f"{value!r}" if "." in repr(value) else f"{value:.17e}"]
        return (["-"] if negative else []) + written, FloatBits(bits | negative << 63, 64)
    width = 32 if form.startswith("0f") else 64
    bits = draw(st.integers(0, (1 << width) - 1))
    return [form.format(bits)], FloatBits(bits, width)


def registers(draw: Any, names: Names) -> Written:
    choices = names.visible(Register) + [(name, Register(name)) for name in SPECIALS]
    name, register = draw(st.sampled_from(choices))
    return [name], register


def symbols(draw: Any, names: Names) -> Written:
    name, symbol = draw(st.sampled_from(names.visible(Symbol)))
    if draw(st.booleans()):
        return [name], symbol
    tokens, offset = integers(draw)
    return [name, "+", *tokens], Symbol(symbol.name, offset.value)


def comma_list(draw: Any, items: list[Written]) -> Written:
    tokens = [token for written, _ in items for token in (",", *written)][1:]
    return ["{", *tokens, "}"], Vector(tuple(operand for _, operand in items))


def addresses(draw: Any, names: Names) -> Written:
    base = draw(st.sampled_from([registers, symbols, lambda d, _: integers(d)]))
    tokens, operand = base(draw, names)
    offset = 0
    if isinstance(operand, Symbol):
        operand, offset = Symbol(operand.name), operand.offset
    elif isinstance(operand, Register) and draw(st.booleans()):
        more, number = integers(draw)
        tokens, offset = [*tokens, "+", *more], number.value
    coordinates: tuple[Operand, ...] = ()
    if draw(st.booleans()):
        either = [registers(draw, names), integers(draw)]
        items = draw(st.lists(st.sampled_from(either), min_size=1, max_size=5))
        written, vector = comma_list(draw, items)
        tokens, coordinates = [*tokens, ",", *written], vector.elements
    return ["[", *tokens, "]"], Address(operand, offset, coordinates)


def operands(draw: Any, names: Names) -> Written:
    sink = (["_"], Sink())
    register = registers(draw, names)
    kind = draw(st.sampled_from("r!nfsavp_"))
    if kind == "!":
        return ["!", *register[0]], Register(register[1].name, negated=True)
    if kind == "v":
        choices = [sink, register, integers(draw), symbols(draw, names), floats(draw)]
        return comma_list(draw, draw(st.lists(st.sampled_from(choices), min_size=1, max_size=4)))
    if kind == "p":
        first, second = draw(st.permutations([sink, register, registers(draw, names)]))[:2]
        return [*first[0], "|", *second[0]], Pair(first[1], second[1])
    if kind in "nf":
        return integers(draw) if kind == "n" else floats(draw)
    if kind in "sa":
        return symbols(draw, names) if kind == "s" else addresses(draw, names)
    return register if kind == "r" else sink


class KernelWriter:
    """Writes one random kernel and keeps the tree it stands for."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.text = Text(draw)
        self.names = Names()
        self.registers: dict[str, str] = {}
        self.variables: list[Variable] = []
        self.instructions: list[PtxInstruction] = []
        self.labels: dict[str, int] = {}
        self.location: tuple[str, int] | None = None

    def pick(self, choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def scope(self, depth: int) -> None:
        self.text.put("{")
        self.names.scopes.append({})
        labels = self.draw(st.lists(st.sampled_from(LABEL_NAMES), unique=True, max_size=2))
        pending = [(name, self.names.declare(name, Symbol)) for name in labels]
        kinds = "rrvliiii" + ("s" if depth else "")
        for kind in self.draw(st.lists(st.sampled_from(kinds), min_size=3, max_size=10)):
            if kind == "s":
                self.scope(depth - 1)
            elif kind == "l" and pending:
                self.label(*pending.pop(0))
            else:
                {"r": self.register, "v": self.variable, "l": self.loc}.get(kind, self.statement)()
        for name, unique in pending:
            self.label(name, unique)
        self.names.scopes.pop()
        self.text.put("}")

    def label(self, name: str, unique: str) -> None:
        self.text.put(name, ":")
        self.labels[unique] = len(self.instructions)

    def loc(self) -> None:
        number, line = self.pick([*FILES, 9]), self.draw(st.integers(0, 9999))
        inlined = [",", "function_name", "$L__info0", ",", "inlined_at", "1", "2", "3"]
        self.text.put(".loc", str(number), str(line), "4", *self.pick([[], inlined]))
        self.location = (FILES[number], line) if number in FILES else None

    def register(self) -> None:
        free = self.names.free(REGISTER_NAMES)
        if not free:
            return
        name, kind = self.pick(free), self.pick(["pred", *TYPES])
        count = self.pick([None, 0, 1, 3])
        written = [name] if count is None else [f"{name}{i}" for i in range(count)]
        if any(each in self.names.scopes[-1] for each in written):
            return
        size = [] if count is None else ["<", str(count), ">"]
        self.text.put(".reg", f".{kind}", name, *size, ";")
        for each in written:
            self.registers[self.names.declare(each, Register)] = kind

    def variable(self) -> None:
        free = self.names.free(VARIABLE_NAMES)
        if not free:
            return
        name, space = self.pick(free), self.pick(["shared", "local", "param", "global", "const"])
        kind = self.pick([kind for kind in TYPES if kind != "pred"])
        extents = self.draw(st.lists(st.integers(1, 40), max_size=3))
        align_bytes = self.pick([None, 1, 16, 1024])
        size_bytes = TYPES[kind]
        tokens = [f".{space}"] + ([".align", str(align_bytes)] if align_bytes else [])
        tokens += [f".{kind}", name]
        for extent in extents:
            tokens += ["[", str(extent), "]"]
            size_bytes *= extent
        self.text.put(*tokens, ";")
        unique = self.names.declare(name, Symbol)
        self.variables.append(Variable(unique, space, kind, align_bytes or TYPES[kind], size_bytes))

    def statement(self) -> None:
        predicates = [
            (name, register)
            for name, register in self.names.visible(Register)
            if self.registers[register.name] == "pred"
        ]
        guard, tokens = None, []
        if predicates and self.draw(st.booleans()):
            name, register = self.pick(predicates)
            negated = self.draw(st.booleans())
            guard = Register(register.name, negated)
            tokens = ["@", "!", name] if negated else ["@", name]
        opcode = self.pick([opcode for opcode in OPCODES if opcode != "@"])
        count = self.draw(st.integers(0, 4))
        written = [operands(self.draw, self.names) for _ in range(count)]
        listed = [token for each, _ in written for token in (",", *each)][1:]
        line = self.text.put(*tokens, opcode, *listed, ";")
        text = "".join([*tokens, opcode, *listed])
        self.instructions.append(
            PtxInstruction(
                *(opcode, tuple(opcode.split(".")), tuple(operand for _, operand in written)),
                *(guard, line, text, self.location),
            )
        )

    def kernel(self) -> Kernel:
        self.text.put(".visible", ".entry", "k", "(", ")")
        self.scope(depth=3)
        for number, name in FILES.items():
            self.text.put(".file", str(number), f'"{name}"')
        return Kernel(
            "k",
            parameters=(),
            variables=tuple(self.variables),
            registers=self.registers,
            instructions=tuple(self.instructions),
            labels=self.labels,
        )


@st.composite
def kernels(draw: Any) -> tuple[str, Kernel]:
    """(PTX text, the kernel it holds); an instruction's text is given without spaces."""
    writer = KernelWriter(draw)
    kernel = writer.kernel()
    return writer.text.done, kernel
