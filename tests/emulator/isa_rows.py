"""Checks register instructions lane by lane against definitions on Python integers.

A `Row` names an opcode, the types of its operands and what the manual says it does. `Compiled` is
a program translated once and run on many register files.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from fa4.emulator.isa.instruction_set import TABLE
from fa4.emulator.ptx.syntax import Integer, PtxInstruction, Register
from fa4.emulator.translate.lanes import SegmentBuilder, width_of
from fa4.emulator.translate.native import compile_functions, function_text
from fa4.emulator.translate.table import find
from fa4.emulator.warp_lanes import LANES
from tests.emulator.lane_rig import FULL, INTEGERS, instruction

Values = Mapping[str, Sequence[int] | int]

# Shift amounts and field lengths around the widths, besides the ends of every type's range.
_SMALL = (0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 129, 255, 256, 257)


def adversarial(width: int) -> list[int]:
    """The values of a `width`-bit type at which instructions go wrong."""
    top = 1 << (width - 1)
    ends = (2 * top - 1, 2 * top - 2, top, top - 1, top + 1)
    patterns = (0x0123456789ABCDEF, 0xFEDCBA9876543210, 0x5555555555555555)
    return sorted({v % (2 * top) for v in (*_SMALL, *ends, *patterns)})


def signed(value: int, width: int) -> int:
    """`width` bits read as two's complement."""
    return value - (1 << width) if value >> (width - 1) & 1 else value


class Compiled:
    """A program for 32 lanes. registers: name -> PTX type; symbols: name -> address."""

    def __init__(
        self,
        program: Iterable[PtxInstruction],
        registers: Mapping[str, str],
        symbols: Mapping[str, int] | None = None,
    ) -> None:
        self.layout = {
            name: (512 * index, width_of(kind))
            for index, (name, kind) in enumerate(registers.items())
        }
        memory = np.zeros(512 * len(registers) + 64, np.uint8)
        self.memory = memory[-memory.ctypes.data % 64 :]
        builder = SegmentBuilder(self.layout, (symbols or {}).__getitem__)
        for item in program:
            guard = item.guard
            builder.guard = None
            if guard is not None:
                taken = builder.register(guard.name)
                builder.guard = ~taken if guard.negated else taken
            find(item, TABLE).function(builder, item)
        builder.store_back(set(registers))
        self.function = compile_functions({"f": function_text(builder)})["f"]

    def _view(self, name: str) -> np.ndarray:
        offset, bits = self.layout[name]
        if bits == 1:
            return self.memory[offset : offset + 4].view(np.uint32)
        return self.memory[offset : offset + 4 * bits].view(INTEGERS[bits])

    def __call__(self, inputs: Values, mask: int = FULL) -> dict[str, list[int] | int]:
        """Registers after a run: 32 bit patterns, or a 32-bit mask for a predicate."""
        for name, value in inputs.items():
            self._view(name)[:] = value if isinstance(value, int) else np.array(value, np.uint64)
        self.function(self.memory.ctypes.data, mask, 0)
        return {
            name: int(self._view(name)[0]) if bits == 1 else self._view(name).tolist()
            for name, (_, bits) in self.layout.items()
            if bits <= 64
        }


@dataclass(frozen=True)
class Row:
    """One instruction: types of d and of the sources, and d as a function of the sources' bits.

    constants: immediate operands appended after the registers.
    """

    opcode: str
    result: str
    sources: tuple[str, ...]
    meaning: Callable[..., int]
    constants: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.opcode}{list(self.constants) or ''}"


_PROGRAMS: dict[Row, Compiled] = {}


def program_of(row: Row) -> Compiled:
    """Both `@!g op d, a, b` and `op a, a, b`, where the destination is a source too."""
    if row not in _PROGRAMS:
        names = [f"a{k}" for k in range(len(row.sources))]
        immediates = [Integer(c) for c in row.constants]
        registers = dict(zip(names, row.sources, strict=True)) | {"d": row.result, "g": "pred"}
        guard = Register("g", negated=True)
        program = [instruction(row.opcode, "d", *names, *immediates, guard=guard)]
        if aliased(row):
            program.append(instruction(row.opcode, "a0", *names, *immediates))
        _PROGRAMS[row] = Compiled(program, registers)
    return _PROGRAMS[row]


def aliased(row: Row) -> bool:
    """Whether d fits in the first source's register."""
    return width_of(row.sources[0]) == width_of(row.result)


def check_row(row: Row, sources: Sequence[Sequence[int]], guard: int, mask: int) -> None:
    """Runs 32 lanes: executing ones get the definition's value, the others keep the old one."""
    old = [0xA5A5A5A5A5A5A5A5 % (1 << width_of(row.result))] * LANES
    inputs: dict[str, Sequence[int] | int] = {"d": old, "g": guard}
    inputs |= {f"a{k}": values for k, values in enumerate(sources)}
    after = program_of(row)(inputs, mask)
    for lane, values in enumerate(zip(*sources, strict=True)):
        meant = row.meaning(*values, *row.constants) % (1 << width_of(row.result))
        here = bool(mask >> lane & 1)
        wanted = meant if here and not guard >> lane & 1 else old[lane]
        assert after["d"][lane] == wanted, (str(row), lane, [hex(v) for v in values])
        if aliased(row):
            assert after["a0"][lane] == (meant if here else values[0]), (str(row), "d = a", lane)


def check_corners(row: Row) -> None:
    """Every combination of adversarial values (a sample of 2,048 for three and more sources)."""
    pools = [adversarial(width_of(kind)) for kind in row.sources]
    total = int(np.prod([len(pool) for pool in pools]))
    step = 1 if total <= 2048 else total // 2048 | 1
    combinations: Iterator[tuple[int, ...]] = itertools.islice(
        itertools.product(*pools), 0, None, step
    )
    for batch in iter(lambda: list(itertools.islice(combinations, LANES)), []):
        batch += [batch[-1]] * (LANES - len(batch))
        check_row(row, list(zip(*batch, strict=True)), guard=0, mask=FULL)


def lane_values(width: int) -> st.SearchStrategy[list[int]]:
    """32 values of `width` bits, half of them adversarial."""
    corners = adversarial(width)
    size = width // 8

    def build(data: bytes) -> list[int]:
        values = []
        for k in range(LANES):
            chooser, *rest = data[k * (size + 1) : (k + 1) * (size + 1)]
            known = corners[chooser % len(corners)]
            values.append(known if chooser & 128 else int.from_bytes(bytes(rest), "little"))
        return values

    count = LANES * (size + 1)
    return st.binary(min_size=count, max_size=count).map(build)


masks = st.sampled_from([FULL, 0, 1, 0x80000000, 0x0000FFFF, 0x55555555]) | st.integers(0, FULL)


@st.composite
def row_inputs(draw: st.DrawFn, row: Row) -> tuple[list[list[int]], int, int]:
    """(sources, guard, mask) for `check_row`."""
    sources = [draw(lane_values(width_of(kind))) for kind in row.sources]
    return sources, draw(masks), draw(masks)
