"""The compiled transfer of loads and stores against the general handlers: same memory, same
registers, same findings, over random programs with races, faults and uninitialised reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from fa4.emulator import execute
from fa4.emulator.isa import direct_access
from fa4.emulator.machine.direct import DONE, MISSED
from fa4.emulator.machine.engine import Engine
from tests.emulator.kernels import aligned, run_ptx

SLOTS, SLOT_BYTES = 64, 32  # places of the memories that a program uses
SHARED_BYTES = GLOBAL_BYTES = SLOTS * SLOT_BYTES - 8  # a unit can lie across the end
MEMORIES = ("shared", "shared::cta", "global", "", "generic global")
# Bytes -> types of a register element, and the registers that may hold them.
TYPES = {"u8": 1, "s8": 1, "b16": 2, "s16": 2, "b32": 4, "f32": 4, "u64": 8}
REGISTERS = {
    "u8": "%r", "s8": "%rd", "b16": "%h", "s16": "%r", "b32": "%r", "f32": "%f", "u64": "%rd",
}  # fmt: skip
MOVED = {"%r": "cvt.u64.u32", "%h": "cvt.u64.u16", "%f": "mov.b64", "%rd": "mov.b64"}

# What is done before a program: %rd10.. are the bases of the memories, %r1 the thread, %rd30 what
# the loads read, %p1 the even lanes, %p2 none, %p3 all.
SETUP = """
  mov.u32 %r1, %tid.x; mov.u32 %r2, smem; cvt.u64.u32 %rd10, %r2; cvta.shared.u64 %rd11, %rd10;
  mov.u32 %r6, %ctaid.x; mad.lo.u32 %r7, %r6, 96, %r1; mul.wide.u32 %rd12, %r7, 8;
  add.s64 %rd13, %rd2, %rd12; mov.u64 %rd30, 0; and.b32 %r3, %r1, 1; setp.eq.u32 %p1, %r3, 0;
  setp.gt.u32 %p2, %r1, 4096; setp.lt.u32 %p3, %r1, 4096;
  mul.lo.u32 %r40, %r7, 2654435761; cvt.u64.u32 %rd40, %r40; mov.b32 %f40, %r40;
  cvt.u16.u32 %h40, %r1;
"""
FINISH = "st.global.b64 [%rd13], %rd30;"


@dataclass(frozen=True)
class Place:
    """Slot (tid * factor + shift) % SLOTS, plus bytes."""

    factor: int
    shift: int
    extra_bytes: int


@st.composite
def places(draw: Any) -> Place:
    """Mostly each thread its own slot; seldom misaligned or outside."""
    factor = draw(st.sampled_from((1, 1, 1, 1, 63, 3, 2, 0)))
    shift = draw(st.sampled_from((0, 0, 0, 1, 32)))
    extra = draw(st.sampled_from((*[0] * 30, 16, 16, 8, 4, 2, SHARED_BYTES, -SLOT_BYTES)))
    return Place(factor, shift, extra)


@st.composite
def accesses(draw: Any, number: int, memories: list[str]) -> str:
    """One load or store, with the arithmetic of its address."""
    kind = draw(st.sampled_from(sorted(TYPES)))
    memory = draw(st.sampled_from(memories))
    largest = 32 if memory == "global" and TYPES[kind] >= 4 else 16
    vector = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n * TYPES[kind] <= largest]))
    place = draw(places())
    guard = draw(st.sampled_from(("", "", "", "@%p1 ", "@!%p1 ", "@%p2 ", "@%p3 ")))
    base = {"": "%rd11", "global": "%rd1", "generic global": "%rd1"}.get(memory, "%rd10")
    offset, prefix = place.extra_bytes, REGISTERS[kind]
    text = (
        f"mad.lo.u32 %r8, %r1, {place.factor}, {place.shift}; rem.u32 %r8, %r8, {SLOTS};"
        f"mul.wide.u32 %rd20, %r8, {SLOT_BYTES}; add.s64 %rd20, %rd20, {base};"
    )
    address = f"[%rd20+{offset}]"
    if base == "%rd10" and draw(st.booleans()):
        text, address = text + "cvt.u32.u64 %r9, %rd20;", f"[%r9+{offset}]"
    space = f".{memory}" if memory not in ("", "generic global") else ""
    shape = f".v{vector}" if vector > 1 else ""
    if draw(st.booleans()):
        names = [f"{prefix}{50 + k}" for k in range(vector)]
        if vector == 8 and draw(st.booleans()):
            names[3] = "_"
        operand = "{" + ", ".join(names) + "}" if shape else names[0]
        text += f"\n{guard}ld{space}{shape}.{kind} {operand}, {address};\n"
        for name in names:
            if name != "_":
                source = name if prefix != "%f" else "{" + name + ", %r1}"
                text += f"{MOVED[prefix]} %rd31, {source}; mad.lo.u64 %rd30, %rd30, 31, %rd31;"
        return text
    constant = f"{number}" if prefix != "%f" else f"0f3F80{number:04X}"
    values = draw(st.lists(st.sampled_from((f"{prefix}40", constant)), min_size=8, max_size=8))
    operand = "{" + ", ".join(values[:vector]) + "}" if shape else values[0]
    return f"{text}\n{guard}st{space}{shape}.{kind} {address}, {operand};\n"


@st.composite
def programs(draw: Any) -> str:
    """A body: accesses, with barriers between some of them."""
    lines = [SETUP]
    # A thread can fill its slot first, so that not every load is of what nothing has written.
    if draw(st.booleans()):
        lines += [
            "mul.lo.u32 %r8, %r1, 32; add.u32 %r8, %r8, %r2; setp.lt.u32 %p4, %r1, 64;",
            "@%p4 st.shared.v2.b64 [%r8], {%rd40, %rd40};",
            "@%p4 st.shared.v4.b32 [%r8+16], {%r40, %r40, %r40, %r1}; bar.sync 0;",
        ]
    memories = draw(st.lists(st.sampled_from(MEMORIES), min_size=1, max_size=3))
    for number in range(draw(st.integers(1, 8))):
        lines.append(draw(accesses(number, memories)))
        lines.append(draw(st.sampled_from(("", "", "bar.sync 0;", "bar.warp.sync 0xffffffff;"))))
    lines.append(FINISH)
    return "\n".join(lines)


@dataclass(frozen=True)
class Outcome:
    """All that a run leaves behind."""

    memory: tuple[bytes, ...]
    findings: tuple[Any, ...]
    steps: int
    progress: int
    instructions: Counter[str]


def outcome(body: str, arrays: list[np.ndarray], **options: Any) -> Outcome:
    """Runs a body from the same state of memory and of the numbering of clusters."""
    for k, array in enumerate(arrays):
        array[...] = np.random.default_rng(k).integers(0, 256, array.shape, np.uint8)
    machines: list[Engine] = []

    def make(*arguments: Any) -> Engine:
        machines.append(Engine(*arguments))
        return machines[-1]

    execute.load_program.cache_clear()
    with (
        patch.object(execute, "_next_cluster_number", 1),
        patch.object(execute, "Engine", make),
    ):
        report = run_ptx(body, arrays, smem=SHARED_BYTES, collect=True, **options)
    execute.load_program.cache_clear()
    findings = tuple(astuple(finding) for finding in report.findings)
    memory = tuple(array.tobytes() for array in arrays)
    progress = machines[0].progress
    return Outcome(memory, findings, report.steps, progress, report.instructions)


def both_ways(body: str, **options: Any) -> tuple[Outcome, Outcome, Counter[int]]:
    """(with the compiled transfer, without it, how often it answered what)."""
    arrays = [aligned(np.zeros(n, np.uint8)) for n in (GLOBAL_BYTES, 2 * 96 * 8)]
    answers: Counter[int] = Counter()
    move = direct_access.transfer()

    def counted(*arguments: int) -> int:
        answer: int = move(*arguments)
        answers[answer] += 1
        return answer

    with patch.object(direct_access, "transfer", lambda: counted):
        fast = outcome(body, arrays, **options)
    with patch.object(direct_access, "_plan", lambda *_: None):
        general = outcome(body, arrays, **options)
    return fast, general, answers


@settings(max_examples=120)
@given(
    body=programs(),
    threads=st.sampled_from((32, 64, 96, 40)),
    ctas=st.sampled_from(((1, 1), (2, 1), (2, 2))),
    schedule=st.sampled_from((("fifo", 0), ("random", 1), ("random", 2), ("adversarial", 3))),
    checks=st.sampled_from((True, True, True, False)),
)
def test_same_as_the_general_handlers(
    body: str,
    threads: int,
    ctas: tuple[int, int],
    schedule: tuple[str, int],
    checks: bool,
) -> None:
    fast, general, answers = both_ways(
        body,
        block=(threads, 1, 1),
        grid=(ctas[0], 1, 1),
        cluster=(ctas[1], 1, 1),
        schedule=schedule[0],
        seed=schedule[1],
        checks=checks,
    )
    assert fast == general
    event("findings" if general.findings else "clean")
    event(f"answers {sorted(answers)}")


CLEAN = (
    SETUP
    + "mul.lo.u32 %r8, %r1, 32; add.u32 %r8, %r8, %r2; mul.wide.u32 %rd20, %r1, 32;"
    + ("add.s64 %rd20, %rd20, %rd1; add.s64 %rd21, %rd11, 64;")
)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("st.shared.b32 [%r8], %r1; ld.shared.b32 %r50, [%r8];", set()),
        ("st.global.v4.b32 [%rd20], {%r1, %r1, 7, %r1};", set()),
        ("ld.global.v8.b32 {%r50, %r51, %r52, %r53, %r54, %r55, _, %r57}, [%rd20];", set()),
        ("@%p1 ld.global.b64 %rd50, [%rd20];", set()),
        ("sub.u32 %r9, %r8, 5000; st.shared.b32 [%r9+5000], %r1;", set()),
        ("ld.shared.b32 %r50, [%r8];", {"uninitialised"}),
        ("ld.shared.b32 %r50, [%r8+2];", {"misaligned"}),
        ("ld.global.b32 %r50, [%rd20+2];", {"misaligned"}),
        ("st.shared.b64 [%r8], %rd20; ld.shared.v2.b16 {%h50, %h51}, [%r8+2];", {"misaligned"}),
        ("ld.global.b32 %r50, [%rd20+-4];", {"out-of-bounds"}),
        ("st.global.b32 [%rd20+2048], %r50;", {"out-of-bounds"}),
        ("ld.global.b32 %r50, [%rd10];", {"out-of-bounds"}),
        ("st.shared.b32 [%r8+-4], %r1;", {"out-of-bounds"}),
        ("st.shared.v4.b32 [%r8+1040], {%r1, %r1, %r1, %r1};", {"out-of-bounds"}),
        ("st.global.v4.b32 [%rd20+1040], {%r1, %r1, %r1, %r1};", {"out-of-bounds"}),
        ("st.shared.b32 [%r8], %r1; ld.shared.b32 %r50, [smem+32];", {"race"}),
        (
            "ld.global.b32 %r50, [%rd20]; st.global.b32 [%rd20], %r1;"
            "ld.global.b32 %r50, [%rd1+32];",
            {"race"},
        ),
        ("ld.global.b32 %r50, [%rd1+32]; st.global.b32 [%rd20], %r1;", {"race"}),
        ("st.shared.b32 [%r2], %r1;", {"race"}),
    ],
)
def test_finds_what_is_planted(body: str, found: set[str]) -> None:
    fast, general, answers = both_ways(CLEAN + body + "\n" + body + FINISH)
    assert fast == general
    assert {finding[0] for finding in fast.findings} == found
    if not found:  # the first access to a buffer makes its shadow
        assert answers[MISSED] <= 2
        assert answers[DONE] >= 1
