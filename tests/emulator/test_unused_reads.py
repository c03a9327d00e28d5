"""Kernels in place, with fewer elements than threads: who reads, and what comes of it."""

from __future__ import annotations

import numpy as np
import pytest

from fa4.emulator.execute import Report
from tests.emulator.kernels import run_ptx

# As Triton writes x = f(x) of 2^k elements: each is loaded by several threads, stored by one.
IN_PLACE = """
  mov.u32 %r1, %tid.x; and.b32 %r2, %r1, LAST; mad.wide.u32 %rd3, %r2, 4, %rd1;
  BEFORE
  ld.global.b32 %r3, [%rd3];
  fma.rn.f32 %f1, %r3, 0f40000000, 0f3F800000; mov.b32 %r4, %f1;
  and.b32 %r5, %r1, OTHERS; setp.eq.b32 %p1, %r5, 0;
  BETWEEN
  @%p1 st.global.b32 [%rd3], %r4;
  AFTER
"""


def run(count: int, threads: int = 64, order: str = "fifo", **parts: str) -> Report:
    """The kernel on so many elements, with further instructions at its places."""
    text = IN_PLACE.replace("LAST", str(count - 1)).replace("OTHERS", str(1024 - count))
    for place in ("BEFORE", "BETWEEN", "AFTER"):
        text = text.replace(place, parts.get(place.lower(), ""))
    x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
    return run_ptx(text, [x, y], block=(threads, 1, 1), schedule=order, collect=True)


@pytest.mark.parametrize("count", [1, 4, 16, 32])
@pytest.mark.parametrize("threads", [32, 64, 128])
@pytest.mark.parametrize("order", ["fifo", "adversarial"])
def test_what_is_used_by_nobody_is_style(count: int, threads: int, order: str) -> None:
    """The loads of threads that store nothing; none at all where each has its own element."""
    report = run(count, threads, order)
    expected = set() if count == threads else {("race", "style")}
    assert {(f.kind, f.severity) for f in report.findings} == expected
    assert all("the reading threads do not make" in f.message for f in report.findings)


@pytest.mark.parametrize("count", [4, 16, 32])
def test_a_masked_load_is_one_like_any(count: int) -> None:
    """As Triton masks what is behind the end; used elsewhere it is a race as ever."""
    text = IN_PLACE.replace("  ld.global.b32 %r3", "  @%p2 ld.global.b32 %r3")
    text = text.replace("BEFORE", f"mov.b32 %r3, 0; setp.lt.u32 %p2, %r2, {count - 1};")
    text = text.replace("LAST", str(count - 1)).replace("OTHERS", str(1024 - count))
    for after, expected in (("", "style"), (USED["stored elsewhere"]["after"], "hazard")):
        whole = text.replace("BETWEEN", "").replace("AFTER", after)
        x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
        report = run_ptx(whole, [x, y], block=(64, 1, 1), collect=True)
        assert {f.severity for f in report.findings} == {expected}, after


USED = {
    "stored elsewhere": {"after": "mad.wide.u32 %rd4, %r1, 4, %rd2; st.global.b32 [%rd4], %r4;"},
    "stored elsewhere by a part": {
        "after": "setp.ge.u32 %p2, %r1, 16; mad.wide.u32 %rd4, %r1, 4, %rd2;"
        "@%p2 st.global.b32 [%rd4], %r4;"
    },
    "handed to another lane": {"between": "shfl.sync.bfly.b32 %r4, %r3, 1, 31, -1;"},
    "it decides": {"between": "setp.gt.and.f32 %p1, %f1, 0f00000000, %p1;"},
    "it is an address": {"after": "mad.wide.u32 %rd4, %r3, 0, %rd2; @%p1 st.global.b32 [%rd4], 1;"},
    "it is branched on": {"after": "setp.eq.b32 %p2, %r3, 0; @%p2 bra end; mov.u32 %r9, 1; end:"},
    "the predicate is written twice": {"after": "setp.eq.b32 %p1, %r5, 0;"},
    "a guarded predicate": {"between": "@%p1 setp.eq.b32 %p1, %r5, 0;"},
    "added by an atomic": {"after": "@%p1 red.global.add.u32 [%rd2], %r3;"},
}


@pytest.mark.parametrize("what", USED)
def test_what_is_used_or_may_be_is_a_race(what: str) -> None:
    """By a thread that others store under; each beside the kernel without it."""
    found = {(f.kind, f.severity) for f in run(32, **USED[what]).findings}
    assert ("race", "hazard") in found
    assert {(f.kind, f.severity) for f in run(32).findings} == {("race", "style")}


def test_what_is_used_by_nobody_is_formal_in_accesses_of_two_sizes() -> None:
    """The memory model says nothing of a race of a word with half of it."""
    wide, narrow = "st.global.b32 [%rd3], %r4", "st.global.b16 [%rd3], %r4"
    report = run_ptx(
        IN_PLACE.replace("LAST", "31").replace("OTHERS", "992").replace(wide, narrow)
        .replace("BEFORE", "").replace("BETWEEN", "").replace("AFTER", ""),
        [np.ones(64, np.float32), np.zeros(64, np.float32)], block=(64, 1, 1), collect=True,
    )  # fmt: skip
    assert {(f.kind, f.severity) for f in report.findings} == {("race", "formal")}
    assert "sizes of the two accesses differ" in report.findings[0].why


def test_a_predicate_in_a_loop_is_not_relied_on() -> None:
    """Its register holds what the last round made of it."""
    loop = "mov.u32 %r8, 0; LOOP:"
    again = "add.u32 %r8, %r8, 1; setp.lt.u32 %p3, %r8, 2; @%p3 bra LOOP;"
    found = run(32, before=loop, after=again).findings
    assert ("race", "hazard") in {(f.kind, f.severity) for f in found}


def test_a_run_that_ends_early_is_judged_as_it_stands() -> None:
    """The predicate of a warp that did not come so far says nothing."""
    found = run(32, between="bar.sync 1, 64; trap;").findings
    assert {f.kind for f in found} == {"trap"}
    early = "setp.lt.u32 %p4, %r1, 32; @!%p4 bar.sync 1, 64; @%p4 bra go; go:"
    kinds = {(f.kind, f.severity) for f in run(32, between=early).findings}
    assert ("deadlock", "error") in kinds and ("race", "hazard") not in kinds
