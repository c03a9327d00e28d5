"""Registers of two and four elements give what a register for each element gives."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.errors import PtxError
from fa4.emulator.ptx.parser import parse
from tests.emulator.kernels import aligned, module_text, run_ptx

AXES, COLOURS = "xyzw", "rgba"
WIDTHS = {"v0": 2, "v1": 4, "pair0": 2}
DECLARED = ".reg .v2 .b32 v0;\n.reg .v4 .b32 v1;\n.reg .v2 .b32 pair<1>;\n"
ELEMENTS = [f"{name}.{AXES[i]}" for name, width in WIDTHS.items() for i in range(width)]


def lists(name: str, depth: int) -> str:
    """The brace list of scalars that stand for a vector which `depth` scopes declare."""
    return "{" + ", ".join(f"{name}_{depth}_{axis}" for axis in AXES[: WIDTHS[name]]) + "}"


def _scalar_line(line: str, depth: int) -> str:
    def element(found: re.Match[str]) -> str:
        return f"{found[1]}_{depth}_{(2 * AXES)[(AXES + COLOURS).index(found[2])]}"

    line = re.sub(r"\b(v0|v1|pair0)\.([xyzwrgba])\b", element, line)
    return re.sub(r"\b(v0|v1|pair0)\b(?!_)", lambda found: lists(found[1], depth), line)


def in_scalars(text: str) -> str:
    """The same program with a register for each element, of other names in each scope."""
    written, depth = [], 0
    for line in text.splitlines():
        if line.startswith(".reg .v"):
            if line == ".reg .v2 .b32 v0;":
                depth += 1
                names = [re.sub(r"\.", f"_{depth}_", one) for one in ELEMENTS]
                written.append(f".reg .b32 {', '.join(names)};")
            continue
        written.append(_scalar_line(line, depth))
        depth -= line.startswith("}")
    return "\n".join(written)


@st.composite
def programs(draw: st.DrawFn, depth: int = 0) -> str:
    """Loads, arithmetic of elements, packing and stores; with other vectors in inner scopes."""
    coloured = [one[:-1] + COLOURS[AXES.index(one[-1])] for one in ELEMENTS]
    element = st.sampled_from(ELEMENTS + coloured)
    lines = [DECLARED.rstrip()]
    lines += [f"ld.global.v{width}.b32 {name}, [%rd1+{16 * draw(st.integers(0, 3))}];"
              for name, width in WIDTHS.items()]  # fmt: skip
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["add", "mov", "pack", "store", "load", "scope"]))
        name = draw(st.sampled_from(sorted(WIDTHS)))
        offset = 16 * draw(st.integers(0, 3))
        if kind == "add":
            lines.append(f"add.u32 {draw(element)}, {draw(element)}, {draw(element)};")
        elif kind == "mov":
            lines.append(f"mov.b32 {draw(element)}, {draw(st.integers(0, 2**31))};")
        elif kind == "pack":
            lines += ["mov.b64 %rd5, v0;", "mov.b64 pair0, %rd5;"]
        elif kind == "scope" and depth < 2:
            lines += ["{", draw(programs(depth + 1)), "}"]
        elif kind == "load":
            lines.append(f"ld.global.v{WIDTHS[name]}.b32 {name}, [%rd1+{offset}];")
        else:
            lines.append(f"st.global.v{WIDTHS[name]}.b32 [%rd1+{offset}], {name};")
    lines += [f"st.global.v{width}.b32 [%rd1+{16 * (4 + i)}], {name};"
              for i, (name, width) in enumerate(WIDTHS.items())]  # fmt: skip
    return "\n".join(lines)


def tree(text: str) -> list[tuple[str, str]]:
    """Opcodes and operands, registers numbered as they appear."""
    numbers: dict[str, str] = {}
    (kernel,) = parse(module_text(text, 1, [])).kernels.values()
    return [
        (
            one.opcode,
            re.sub(
                r"'[^']+'",
                lambda m: numbers.setdefault(m[0], f"{len(numbers)}"),
                repr(one.operands),
            ),
        )
        for one in kernel.instructions
    ]


@given(text=programs())
def test_they_are_read_as_a_register_for_each_element(text: str) -> None:
    """Whole, by element, under both kinds of names, shadowed by inner scopes."""
    assert tree(text) == tree(in_scalars(text))


@settings(max_examples=20)
@given(text=programs(), seed=st.integers(0, 2**32 - 1))
def test_a_register_for_each_element_gives_the_same(text: str, seed: int) -> None:
    """Byte for byte."""
    start = np.random.default_rng(seed).integers(0, 2**32, 32, dtype=np.uint32)
    one, other = aligned(start.copy()), aligned(start.copy())
    run_ptx(text, [one], block=(1, 1, 1))
    run_ptx(in_scalars(text), [other], block=(1, 1, 1))
    assert one.tobytes() == other.tobytes()
    assert one[16:].tobytes() != start[16:].tobytes()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (".reg .v4 .b64 v;", r"a register \.v4 \.b64 has more than 128 bits"),
        (".reg .v2 .pred p2;", "expected a type"),
        (".reg .v8 .b16 v;", "expected a type"),
        (".reg .v2 .b32 v, v;", "is declared already, on line"),
        (".reg .v2 .b32 v; .reg .b32 a; mov.b32 a, v.z;", r"v\.z is not declared"),
        (".reg .v2 .b32 v; mov.b64 {v, v}, 0;", "the elements of a vector must be registers"),
        (".reg .v2 .b64 v; ld.b32 %r1, [v];", "an address must begin with a register"),
        (".reg .v2 .b32 v; @v ret;", "expected a register"),
        ("{ .reg .v2 .b32 v; } mov.b32 %r1, v.r;", r"v\.r is not declared"),
    ],
)
def test_what_no_vector_can_be(body: str, words: str) -> None:
    """One line that names it."""
    with pytest.raises(PtxError, match=words):
        parse(module_text(body, 1, []))
