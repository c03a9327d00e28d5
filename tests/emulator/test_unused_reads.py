"""Kernels in place, with fewer elements than threads: who reads, and what comes of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4.emulator.checks.conflict import WRITE_AFTER_READ, Conflict
from fa4.emulator.execute import Report
from fa4.emulator.machine.unused_reads import conflicts_by_reader
from tests.emulator.kernels import run_ptx
from tests.emulator.test_isa_crosslane import shfl

# As Triton writes x = f(x) of 2^k elements: each is loaded by several threads, stored by one.
IN_PLACE = """
  mov.u32 %r1, %tid.x; and.b32 %r2, %r1, LAST; mad.wide.u32 %rd3, %r2, 4, %rd1;
  BEFORE
  ld.global.b32 %r3, [%rd3];
  fma.rn.f32 %f1, %r3, 0f40000000, 0f3F800000; mov.b32 %r4, %f1;
  and.b32 %r5, %r1, OTHERS; WHO;
  BETWEEN
  @%p1 st.global.b32 [%rd3], STORED;
  AFTER
"""
FIRST_STORE, LAST_STORE = "setp.eq.b32 %p1, %r5, 0", "setp.ge.u32 %p1, %r1, 32"


def run(
    count: int, threads: int = 64, order: str = "fifo", stored: str = "%r4",
    who: str = FIRST_STORE, **parts: str,
) -> Report:  # fmt: skip
    """The kernel on so many elements, with further instructions at its places."""
    text = IN_PLACE.replace("LAST", str(count - 1)).replace("OTHERS", str(1024 - count))
    text = text.replace("STORED", stored).replace("WHO", who)
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
        whole = (
            text.replace("BETWEEN", "")
            .replace("AFTER", after)
            .replace("STORED", "%r4")
            .replace("WHO", FIRST_STORE)
        )
        x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
        report = run_ptx(whole, [x, y], block=(64, 1, 1), collect=True)
        assert {f.severity for f in report.findings} == {expected}, after


USED = {
    "stored elsewhere": {"after": "mad.wide.u32 %rd4, %r1, 4, %rd2; st.global.b32 [%rd4], %r4;"},
    "stored elsewhere by a part": {
        "after": "setp.ge.u32 %p2, %r1, 16; mad.wide.u32 %rd4, %r1, 4, %rd2;"
        "@%p2 st.global.b32 [%rd4], %r4;"
    },
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


HANDED = {  # what the lanes that store get from those that only read, 16 elements in 32 lanes
    "by bfly": ("shfl.sync.bfly.b32 %r4, %r3, 16, 31, -1;", True),
    "in its half": ("shfl.sync.bfly.b32 %r4, %r3, 8, 31, -1;", False),
    "by down": ("shfl.sync.down.b32 %r4, %r3, 1, 31, -1;", True),
    "down in segments": ("shfl.sync.down.b32 %r4, %r3, 1, 4127, -1;", False),  # of 16 lanes
    "by up": ("shfl.sync.up.b32 %r4, %r3, 1, 0, -1;", False),
    "from lane 20": ("shfl.sync.idx.b32 %r4, %r3, 20, 31, -1;", True),
    "from lane 3": ("shfl.sync.idx.b32 %r4, %r3, 3, 31, -1;", False),
    "in two steps": ("shfl.sync.bfly.b32 %r6, %r3, 4, 31, -1;"
                     "shfl.sync.bfly.b32 %r4, %r6, 16, 31, -1;", True),
    "from a lane of a register": ("shfl.sync.idx.b32 %r4, %r3, %r5, 31, -1;", True),
    "under a predicate": ("@%p1 shfl.sync.bfly.b32 %r4, %r3, 8, 31, 0xFFFF;", True),
    "by a vote": ("setp.ne.b32 %p2, %r3, 0; vote.sync.ballot.b32 %r4, %p2, -1;", True),
    "as a distance": ("shfl.sync.idx.b32 %r4, %r2, %r3, 31, -1;", True),
}  # fmt: skip


@pytest.mark.parametrize("how", HANDED)
def test_lanes_that_store_may_get_it_by_a_shuffle(how: str) -> None:
    """Where it is not known who reads whom, they do."""
    text, used = HANDED[how]
    found = {(f.kind, f.severity) for f in run(16, 32, between=text).findings}
    assert found - {("race", "style")} == ({("race", "hazard")} if used else set())


@pytest.mark.parametrize("first", [32, 64])
@pytest.mark.parametrize("order", ["fifo", "adversarial"])
def test_a_use_is_found_behind_a_read_that_nobody_uses(first: int, order: str) -> None:
    """Two warps read what one stores, and one of them stores it elsewhere."""
    elsewhere = (
        f"and.b32 %r8, %r1, 96; setp.eq.u32 %p2, %r8, {first}; mad.wide.u32 %rd4, %r2, 4, %rd2;"
        "@%p2 st.global.b32 [%rd4], %r4;"
    )
    found = {(f.kind, f.severity) for f in run(32, 96, order, after=elsewhere).findings}
    assert found == {("race", "hazard"), ("race", "style")}


def test_reads_of_one_epoch_are_judged_together() -> None:
    """Which lines a record stands for is known by its epoch; a lane's own element is no race."""
    one = Conflict(
        kind=WRITE_AFTER_READ, granule=0, granule_bytes=4, other_id=3, other_epoch=1, other_line=7,
        other_is_write=False, my_id=5, line=9, other_lanes=0b101000,
    )  # fmt: skip
    others = replace(one, granule=4, my_id=6, other_lanes=0b1000000), replace(one, other_epoch=2)
    found = [(x.other_epoch, x.other_lanes) for x in conflicts_by_reader([one, *others])]
    assert found == [(1, 0b1000), (2, 0b1000)]
    apart = replace(one, my_id=37)
    assert [x.other_lanes for x in conflicts_by_reader([apart])] == [0b101000]


@pytest.mark.parametrize("place", ["before", "between"])
def test_a_record_of_reads_names_one_line_and_stands_for_all(place: str) -> None:
    """The first warp reads an element twice, and stores elsewhere what one of the reads gives; the
    second one overwrites it."""
    found = {(f.kind, f.severity) for f in run(32, who=LAST_STORE).findings}
    assert found == {("race", "style")}
    again = "ld.global.b32 %r9, [%rd3]; mad.wide.u32 %rd4, %r1, 4, %rd2; st.global.b32 [%rd4], %r9;"
    found = {(f.kind, f.severity) for f in run(32, who=LAST_STORE, **{place: again}).findings}
    assert ("race", "hazard") in found


@given(
    log_count=st.integers(0, 5),
    log_threads=st.integers(5, 7),
    shuffles=st.lists(
        st.tuples(st.sampled_from(["bfly", "down", "up", "idx"]), st.integers(0, 31),
                  st.sampled_from([0, 7, 31, 0x100F, 0x181F, 0x1C1F])), max_size=4
    ),
    kept=st.booleans(),
)  # fmt: skip
def test_a_race_is_style_only_if_no_store_changes_with_what_was_read(
    log_count: int, log_threads: int, shuffles: list[tuple[str, int, int]], kept: bool
) -> None:
    """Whose reads the lanes that store hold: by the manual's words for one lane."""
    count, threads = 2**log_count, 2**log_threads
    lines, held = "mov.b32 %r20, %r4;", "%r20"
    reads = [{lane} for lane in range(threads)]  # that a thread holds
    for k, (mode, offset, clamp) in enumerate(shuffles):  # each register written once, as by LLVM
        lines += f"shfl.sync.{mode}.b32 %r{11 + k}, {held}, {offset}, {clamp}, -1;"
        lines += f"add.u32 %r{21 + k}, {held if kept else 0}, %r{11 + k};"
        held = f"%r{21 + k}"
        sources = [lane // 32 * 32 + shfl(mode, None, lane % 32, offset, clamp)[0]
                   for lane in range(threads)]  # fmt: skip
        reads = [reads[s] | (reads[lane] if kept else set()) for lane, s in enumerate(sources)]
    report = run(count, threads, between=lines + f"mov.b32 %r10, {held};", stored="%r10")
    # The first `count` threads store; what the others read may be of before or after.
    used = any(lane >= count for reader in reads[:count] for lane in reader)
    found = {f.severity for f in report.findings}
    assert found - {"style"} == ({"hazard"} if used else set())
    assert bool(found) == (count < threads)


def test_what_is_used_by_nobody_is_formal_in_accesses_of_two_sizes() -> None:
    """The memory model says nothing of a race of a word with half of it."""
    places = {"LAST": "31", "OTHERS": "992", "STORED": "%r4", "WHO": FIRST_STORE,
              "st.global.b32 [%rd3]": "st.global.b16 [%rd3]",
              "BEFORE": "", "BETWEEN": "", "AFTER": ""}  # fmt: skip
    text = IN_PLACE
    for name, what in places.items():
        text = text.replace(name, what)
    arrays = [np.ones(64, np.float32), np.zeros(64, np.float32)]
    report = run_ptx(text, arrays, block=(64, 1, 1), collect=True)
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
