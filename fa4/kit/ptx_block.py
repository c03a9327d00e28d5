"""PTX without branches: many instructions that are traced as one operation.

A row has 128 scores. Traced one by one, their instructions would take longer than all the rest of
the compilation, and the compiler's middle end has nothing to add to arithmetic that is spelled out.
"""

import re
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

CONSTRAINTS = {"f32": "f", "b32": "r", "b64": "l"}  # of inline assembly, by kind of register
VALUES = {"f32": Float32, "b32": Int32, "b64": Int64}
ANY_BIT = "0xFE"  # lop3's table of a | b | c
_REGISTER = re.compile(r"%(f32|b32|b64|pred)_\d+")


class PtxBlock:
    """Instructions in the order they are called; registers are their names.

        code = PtxBlock()
        a, b = code.read_all([x, y])  # traced values
        (largest,) = code.trace(code.do("max.f32", a, b))

    Kinds of registers: f32, b32, b64 (two f32, for packed instructions) and pred.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._inputs: list[tuple[str, Any]] = []
        self._updated: set[str] = set()
        self._count: Counter[str] = Counter()

    def read(self, value: Any) -> str:
        """A register with a traced Float32, Int32 or Int64, or a Python float."""
        value = Float32(value) if isinstance(value, float) else value
        kinds = [kind for kind, held in VALUES.items() if isinstance(value, held)]
        register = self.register(kinds[0] if kinds else "f32")
        self._inputs.append((register, value))
        return register

    def read_all(self, values: Sequence[Any]) -> list[str]:
        """A register for each value."""
        return [self.read(value) for value in values]

    def update_all(self, values: Sequence[Any]) -> list[str]:
        """A register for each value, to be changed in place: results of `trace` as well."""
        registers = self.read_all(values)
        self._updated.update(registers)
        return registers

    def do(self, opcode: str, *sources: str, kind: str = "f32") -> str:
        """One instruction; returns its result."""
        target = self.register(kind)
        self._lines.append(f"{opcode} {target}, {', '.join(sources)};")
        return target

    def load(self, opcode: str, words: int, address: str) -> list[str]:
        """An instruction that fills a list of registers from an address."""
        targets = [self.register("f32") for _ in range(words)]
        self._lines.append(f"{opcode} {{{', '.join(targets)}}}, [{address}];")
        return targets

    def effect(self, line: str) -> None:
        """An instruction without a result."""
        self._lines.append(line)

    def pair(self, low: str, high: str) -> str:
        """Two f32 as an operand of packed instructions."""
        return self.do("mov.b64", f"{{{low}, {high}}}", kind="b64")

    def halves(self, pair: str, kind: str = "f32") -> tuple[str, str]:
        """The two halves of a packed result."""
        low, high = self.register(kind), self.register(kind)
        self._lines.append(f"mov.b64 {{{low}, {high}}}, {pair};")
        return low, high

    def packed(self, opcode: str, *pairs: str) -> str:
        """One arithmetic instruction on two f32 at once, as fma.rn."""
        return self.do(f"{opcode}.f32x2", *pairs, kind="b64")

    def trace(self, *results: str, effects: bool = False) -> list[Any]:
        """Make it an operation of the kernel; the values of `results`, Float32 or Int32.

        effects: it does more than to compute them, so it stays where it is.
        """
        names = {name: f"${number}" for number, name in enumerate(results)}
        kept = [name for name, _ in self._inputs if name in names]
        if len(names) < len(results) or set(kept) != self._updated:
            raise ValueError("a result is asked for twice, or is an input")
        places = [
            names[name][1:] if name in names else CONSTRAINTS[_kind(name)]
            for name, _ in self._inputs
        ]
        for number, (name, _) in enumerate(self._inputs, len(results)):
            names.setdefault(name, f"${number}")
        declared = [
            f".reg .{kind} %{kind}_<{count}>;" for kind, count in sorted(self._count.items())
        ]
        lines = [
            _REGISTER.sub(lambda found: names.get(found[0], found[0]), line) for line in self._lines
        ]
        kinds = [_kind(name) for name in results]
        constraints = [f"=&{CONSTRAINTS[kind]}" for kind in kinds]
        constraints += places
        text = "\n\t".join(["{", *declared, *lines, "}"])
        values = [value for _, value in self._inputs]
        return _trace(text, ",".join(constraints), values, kinds, effects)

    def register(self, kind: str) -> str:
        """A new one, for an instruction of `effect`."""
        self._count[kind] += 1
        return f"%{kind}_{self._count[kind] - 1}"


def stand_apart(never: Int32) -> None:
    """A branch between what comes before and after; not taken, as `never` is not negative.

    ptxas arranges what lies between two branches as it likes. Without these it starts the
    exponentials of a whole row before it stores the first part of P, and spills registers.
    """
    code = PtxBlock()
    code.effect(f"@{code.do('setp.lt.s32', code.read(never), '0', kind='pred')} exit;")
    code.trace(effects=True)


def hold_before(values: Sequence[Any]) -> None:
    """What is traced before is computed before what is traced after; values: of it, not negative.

    ptxas moves arithmetic as it likes, past waits for the tensor core too, but not past an
    instruction that sleeps if a value is negative, which is never. Before the `exit` of
    `stand_apart` it waits for products that are under way, and where it cannot tell which these
    are, all products are computed one after the other.
    """
    code = PtxBlock()
    first, *others = code.read_all(values)
    signs = code.do("mov.b32", first, kind="b32")
    for place in range(0, len(others), 2):
        a, b = (others[place : place + 2] * 2)[:2]
        signs = code.do("lop3.b32", signs, a, b, ANY_BIT, kind="b32")
    negative = code.do("setp.lt.s32", signs, "0", kind="pred")
    code.effect(f"@{negative} nanosleep.u32 1;")
    code.trace(effects=True)


def literal(value: float) -> str:
    """A float32 constant as an operand."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def _kind(register: str) -> str:
    return register[1:].split("_")[0]


@dsl_user_op
def _trace(
    text: str, constraints: str, values: list[Any], kinds: list[str], effects: bool,
    *, loc: Any = None, ip: Any = None,
) -> list[Any]:  # fmt: skip
    """The operation of inline assembly, and its results as traced values."""
    place = {"loc": loc, "ip": ip}
    types = [VALUES[kind].mlir_type for kind in kinds]
    result = llvm.StructType.get_literal(types) if len(types) > 1 else (types or [None])[0]
    done = llvm.inline_asm(
        result, [value.ir_value(**place) for value in values], text, constraints,
        has_side_effects=effects, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, **place,
    )  # fmt: skip
    if len(types) < 2:
        return [VALUES[kind](done) for kind in kinds]
    return [
        VALUES[kind](llvm.extractvalue(one, done, [number], **place))
        for number, (kind, one) in enumerate(zip(kinds, types, strict=True))
    ]
