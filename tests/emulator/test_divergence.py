"""Diverged warps: every lane computes what it would compute alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.errors import EmulationFailed
from fa4.emulator.translate.flow import live_out, postdominators
from tests.emulator.kernels import kinds, run_ptx

ROUND = 0xFFFFFFFF


@dataclass(frozen=True)
class If:
    """if ((x ^ key) & 1) then ... else ..."""

    key: int
    yes: tuple[object, ...]
    no: tuple[object, ...]


@dataclass(frozen=True)
class Loop:
    """repeat (x & mask) + 1 times; `early` leaves the loop when x is a multiple of 7."""

    mask: int
    body: tuple[object, ...]
    early: bool


@dataclass(frozen=True)
class Update:
    """x = x * factor + addend"""

    factor: int
    addend: int


@dataclass(frozen=True)
class Leave:
    """return if x & 7 == key"""

    key: int


def statements(depth: int) -> st.SearchStrategy[tuple[object, ...]]:
    leaf = st.one_of(
        st.builds(Update, st.integers(1, 9), st.integers(0, 99)),
        st.builds(Leave, st.integers(0, 20)),
    )
    if depth:
        inner = statements(depth - 1)
        leaf = st.one_of(
            leaf,
            st.builds(If, st.integers(0, 3), inner, inner),
            st.builds(Loop, st.integers(0, 3), inner, st.booleans()),
        )
    return st.lists(leaf, min_size=0, max_size=3).map(tuple)


class Returned(Exception):
    """A thread left the kernel with this value of x."""


def execute(block: tuple[object, ...], x: int) -> int:
    """The meaning of a block for one thread."""
    for item in block:
        if isinstance(item, Update):
            x = (x * item.factor + item.addend) & ROUND
        elif isinstance(item, Leave):
            if x & 7 == item.key:
                raise Returned(x)
        elif isinstance(item, If):
            x = execute(item.yes if (x ^ item.key) & 1 else item.no, x)
        elif isinstance(item, Loop):
            for _ in range((x & item.mask) + 1):
                x = execute(item.body, x)
                if item.early and x % 7 == 0:
                    break
    return x


def result(block: tuple[object, ...], x: int) -> int:
    """What a thread stores: x at its end."""
    try:
        return execute(block, x)
    except Returned as left:
        return int(left.args[0])


class Writer:
    """Writes PTX for a block; x is %r1, loop counters %r10 and up."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.labels = 0

    def label(self) -> str:
        self.labels += 1
        return f"L{self.labels}"

    def write(self, block: tuple[object, ...], depth: int = 0) -> None:
        for item in block:
            if isinstance(item, Update):
                self.lines.append(f"mad.lo.u32 %r1, %r1, {item.factor}, {item.addend};")
            elif isinstance(item, Leave):
                self.lines.append("st.global.b32 [%rd3], %r1; and.b32 %r2, %r1, 7;")
                self.lines.append(f"setp.eq.u32 %p1, %r2, {item.key}; @%p1 ret;")
            elif isinstance(item, If):
                no, end = self.label(), self.label()
                self.lines.append(f"xor.b32 %r2, %r1, {item.key}; and.b32 %r2, %r2, 1;")
                self.lines.append(f"setp.eq.u32 %p1, %r2, 0; @%p1 bra {no};")
                self.write(item.yes, depth)
                self.lines.append(f"bra {end}; {no}:")
                self.write(item.no, depth)
                self.lines.append(f"{end}:")
            elif isinstance(item, Loop):
                self._loop(item, depth)

    def _loop(self, item: Loop, depth: int) -> None:
        top, end, counter = self.label(), self.label(), f"%r{10 + depth}"
        self.lines.append(f"and.b32 {counter}, %r1, {item.mask}; {top}:")
        self.write(item.body, depth + 1)
        if item.early:
            self.lines.append(f"rem.u32 %r2, %r1, 7; setp.eq.u32 %p1, %r2, 0; @%p1 bra {end};")
        self.lines.append(f"sub.u32 {counter}, {counter}, 1; setp.ge.s32 %p1, {counter}, 0;")
        self.lines.append(f"@%p1 bra {top}; {end}:")


PROLOGUE = """
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
"""
STORE = "st.global.b32 [%rd3], %r1;"


@settings(max_examples=40)
@given(statements(3), st.sampled_from(["fifo", "random", "adversarial"]), st.integers(0, 9))
def test_every_lane_for_itself(block: tuple[object, ...], schedule: str, seed: int) -> None:
    writer = Writer()
    writer.write(block)
    out = np.zeros(50, np.uint32)
    body = PROLOGUE + "\n".join(writer.lines) + STORE
    run_ptx(body, [out], block=(50, 1, 1), schedule=schedule, seed=seed)
    assert out.tolist() == [result(block, thread) for thread in range(50)]


def test_lanes_wait_for_each_other_at_sync_instructions() -> None:
    """The two halves of a warp reach one shuffle on their own."""
    body = """
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
  setp.lt.u32 %p1, %r1, 16;
  @%p1 bra LOW;
  add.u32 %r1, %r1, 1000;
LOW:
  shfl.sync.bfly.b32 %r1, %r1, 31, 31, 0xffffffff;
  st.global.b32 [%rd3], %r1;
"""
    out = np.zeros(32, np.uint32)
    run_ptx(body, [out])
    values = np.arange(32) + 1000 * (np.arange(32) >= 16)
    assert out.tolist() == values[::-1].tolist()


def test_lanes_part_right_behind_a_sync_instruction() -> None:
    """A shuffle whose result decides a branch: met by halves, left by other halves."""
    body = """
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
  setp.lt.u32 %p1, %r1, 16;
  @%p1 bra LOW;
  add.u32 %r1, %r1, 1000;
LOW:
  shfl.sync.bfly.b32 %r1, %r1, 1, 31, 0xffffffff;
  and.b32 %r2, %r1, 1;
  setp.eq.u32 %p1, %r2, 0;
  @%p1 bra EVEN;
  add.u32 %r1, %r1, 5000;
EVEN:
  st.global.b32 [%rd3], %r1;
"""
    out = np.zeros(32, np.uint32)
    run_ptx(body, [out])
    lanes = np.arange(32)
    met = (lanes ^ 1) + 1000 * (lanes >= 16)
    assert out.tolist() == (met + 5000 * (met % 2)).tolist()


def test_sync_without_the_named_lanes_is_a_deadlock() -> None:
    body = """
  mov.u32 %r1, %tid.x;
  setp.lt.u32 %p1, %r1, 16;
  @!%p1 bra DONE;
  bar.warp.sync 0xffff;
  bar.warp.sync 0xffffffff;
  st.global.b32 [%rd1], %r1;
DONE:
  bar.warp.sync 0xffffffff;
"""
    with pytest.raises(EmulationFailed) as failure:
        run_ptx(body, [np.zeros(1, np.uint32)], collect=False)
    assert kinds(failure.value.report) == {"deadlock"}
    assert "lanes 0xffff0000 of its warp" in str(failure.value)


def test_aligned_barrier_by_half_a_warp() -> None:
    body = """
  mov.u32 %r1, %tid.x;
  setp.lt.u32 %p1, %r1, 16;
  @%p1 bar.sync 0;
"""
    assert "divergence" in kinds(run_ptx(body, [], collect=True))


def test_indexed_branch() -> None:
    body = """
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
  and.b32 %r2, %r1, 3;
T: .branchtargets A, B, C, B;
  brx.idx %r2, T;
A: mov.u32 %r3, 10; bra END;
B: mov.u32 %r3, 20; bra END;
C: mov.u32 %r3, 30;
END:
  add.u32 %r3, %r3, %r1;
  st.global.b32 [%rd3], %r3;
"""
    out = np.zeros(32, np.uint32)
    run_ptx(body, [out])
    assert out.tolist() == [(10, 20, 30, 20)[t & 3] + t for t in range(32)]


@st.composite
def graphs(draw: st.DrawFn) -> list[list[int]]:
    count = draw(st.integers(1, 8))
    node = st.integers(0, count - 1)
    return [draw(st.lists(node, max_size=2, unique=True)) for _ in range(count)]


@given(graphs())
def test_postdominators_by_definition(edges: list[list[int]]) -> None:
    """p postdominates n if every path from n to an exit passes p; the immediate one is nearest."""
    count = len(edges)
    exits = {n for n in range(count) if not edges[n]}

    def reaches_exit(start: int, without: int) -> bool:
        stack, seen = [start], {start}
        while stack:
            node = stack.pop()
            if node == without:
                continue
            if node in exits:
                return True
            for target in edges[node]:
                if target not in seen:
                    seen.add(target)
                    stack.append(target)
        return False

    found = postdominators(edges)
    for node in range(count):
        if not reaches_exit(node, -1):
            assert found[node] == -1
            continue
        all_of = {p for p in range(count) if p != node and not reaches_exit(node, p)}
        nearest = [p for p in all_of if all(q == p or not reaches_exit(p, q) for q in all_of)]
        assert found[node] == (nearest[0] if nearest else -1)


@given(graphs(), st.data())
def test_live_names_by_paths(edges: list[list[int]], data: st.DataObject) -> None:
    names = st.sets(st.sampled_from("abc"))
    uses = [data.draw(names) for _ in edges]
    defines = [data.draw(names) for _ in edges]
    asked = [data.draw(names) for _ in edges]
    live = live_out(edges, uses, defines, asked)
    for node in range(len(edges)):
        assert live[node] <= asked[node]
        for name in asked[node]:
            stack, seen, expected = list(edges[node]), set(edges[node]), False
            while stack:
                here = stack.pop()
                if name in uses[here]:
                    expected = True
                    break
                if name in defines[here]:
                    continue
                fresh = set(edges[here]) - seen
                seen |= fresh
                stack.extend(fresh)
            assert (name in live[node]) == expected
