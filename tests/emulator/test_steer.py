"""Steering: hazards that seeds do not show are shown, in few runs, by orders that replay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4 import cli, emulator
from fa4.emulator.errors import LaunchError
from fa4.emulator.machine.holds import HeldOrder, Hold
from fa4.emulator.orders.steer import Steering, steer
from fa4.emulator.orders.witness import read_witness
from lab.bug_zoo import BUGS, Bug
from tests.emulator.kernels import module_text

BY_NAME = {bug.name: bug for bug in BUGS}
LATE_WAIT = BY_NAME["a wait that nothing keeps in step"]


def prepared(body: str, threads: int) -> tuple[Any, Any]:
    """A launch of a body of `tests.emulator.kernels`, and its memory: two arrays of 256 words."""
    arrays = {name: np.arange(256, dtype=np.uint32) for name in ("first", "second")}
    text = module_text(body, 2)
    return emulator.make_launch(text, arrays, block=(threads, 1, 1), dynamic_smem_bytes=4096)


def steered(body: str, threads: int = 64, runs: int = 64) -> Steering:
    """What steering finds of a body."""
    launch, memory = prepared(body, threads)
    return steer([launch], memory, runs=runs)


def test_a_wait_that_nothing_keeps_in_step_hangs() -> None:
    """In fifo it only may; steering needs one late warp, and the file of it replays."""
    body = LATE_WAIT.text.replace("<>", LATE_WAIT.broken)
    launch, memory = prepared(body, LATE_WAIT.threads)
    found = emulator.run([launch], memory, emulator.Options(collect=True)).findings
    assert {f.kind for f in found} == {"mbarrier"}
    result = steer([launch], memory)
    assert result.unshown == [] and result.runs <= 8
    (shown,) = result.shown
    assert shown.finding is not None and shown.finding.kind == "deadlock"
    assert len(shown.witness.holds) == 1 and "warp 1 stands still" in str(shown)
    again = read_witness(shown.witness.text())
    assert again == shown.witness
    for _ in range(2):
        options = emulator.Options(schedule=again.schedule(), collect=True)
        kinds = [f.kind for f in emulator.run([launch], memory, options).findings]
        assert kinds == ["mbarrier", "deadlock"]


def test_what_is_kept_in_step_is_run_once() -> None:
    """No hazard, nothing to steer at."""
    result = steered(LATE_WAIT.text.replace("<>", LATE_WAIT.mended), LATE_WAIT.threads)
    assert (result.shown, result.unshown, result.runs) == ([], [], 1)


STORE = """mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mad.lo.u32 %r3, %r1, 4, %r2;
add.u32 %r4, %r1, 7; st.shared.b32 [%r3], %r4; <>
xor.b32 %r5, %r1, 32; mad.lo.u32 %r5, %r5, 4, %r2; ld.shared.b32 %r6, [%r5];
mul.wide.u32 %rd3, %r1, 4; add.u64 %rd3, %rd3, %rd1; st.global.b32 [%rd3], %r6;
"""


def test_a_race_is_shown_by_what_it_leaves() -> None:
    """A warp reads before the other has stored; what is shown is another memory than usual."""
    result = steered(STORE.replace("<>", ""))
    assert result.shown and result.unshown == []
    outcomes = [shown.outcome for shown in result.shown]
    assert all("first is left different, from byte" in outcome for outcome in outcomes)
    assert steered(STORE.replace("<>", "bar.sync 0;")).runs == 1


def test_a_late_copy_is_shown() -> None:
    """A bulk copy that nobody waits for ends after its memory was read."""
    bug = BY_NAME["a copy that nobody waits for"]
    keeps = "mul.wide.u32 %rd3, %r1, 4; add.u64 %rd3, %rd3, %rd2; st.global.b32 [%rd3], %r4;"
    body = bug.text.replace("<>", bug.broken) + keeps
    result = steered(body, bug.threads)
    assert {shown.hazard.kind for shown in result.shown} == {"race"} and not result.unshown


def test_memory_is_as_before_and_runs_are_bounded() -> None:
    """Whatever was tried."""
    launch, memory = prepared(STORE.replace("<>", ""), 64)
    before = memory[0].owner.copy()
    result = steer([launch], memory, runs=2)
    assert result.runs == 2 and (memory[0].owner == before).all()


def test_a_hold_that_is_not_reached_changes_nothing() -> None:
    """And a base order that does not exist is refused."""
    launch, memory = prepared(STORE.replace("<>", "bar.sync 0;"), 64)
    order = HeldOrder([Hold(5, 0, 3, 0), Hold(0, 0, 9999, 0), Hold(0, -1, 3, 0)])
    options = emulator.Options(schedule=order)
    plain = emulator.run([launch], memory)
    assert emulator.run([launch], memory, options).steps == plain.steps and not order.reached
    with pytest.raises(LaunchError, match="allowed are fifo, late"):
        HeldOrder((), "soon")


@pytest.mark.parametrize("poll", ["ld.acquire.gpu.global.b32", "ld.volatile.global.b32"])
def test_others_poll_for_what_is_held(poll: str) -> None:
    """The hold ends: a warp that polls for ever is no reason for a finding."""
    body = f"""mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bra poll;
mov.u32 %r2, 1; st.release.gpu.global.b32 [%rd1], %r2; bra end;
poll: {poll} %r3, [%rd1]; setp.ne.u32 %p2, %r3, 1; @%p2 bra poll;
end:
"""
    launch, memory = prepared(body, 64)
    line = next(i for i, text in enumerate(launch.ptx.splitlines(), 1) if "st.release" in text)
    order = HeldOrder([Hold(0, 1, line, 0)])
    report = emulator.run([launch], memory, emulator.Options(schedule=order, collect=True))
    assert order.reached and not any(f.severity == "error" for f in report.findings)


# Givers and takers of `stages` in rounds; those of whom nobody waits may be late.


@st.composite
def rings(draw: st.DrawFn) -> tuple[int, int, tuple[bool, ...], tuple[bool, ...]]:
    """(stages, rounds, givers, takers): of each warp whether others count on its arrival."""
    sides = tuple((True, *draw(st.lists(st.booleans(), max_size=1))) for _ in ("givers", "takers"))
    return draw(st.integers(1, 2)), draw(st.integers(1, 5)), sides[0], sides[1]


def programs(ring: Any) -> tuple[list[list[tuple[str, int, int]]], list[int]]:
    """What each warp does, (wait or arrive, barrier, parity), and the count of each barrier."""
    stages, rounds, givers, takers = ring
    counts = [sum(givers)] * stages + [sum(takers)] * stages
    warps = []
    for side, counted in [(0, c) for c in givers] + [(1, c) for c in takers]:
        steps = []
        for turn in range(rounds):
            stage, parity = turn % stages, turn // stages % 2
            full, room = stage, stages + stage
            steps.append(("wait", full, parity) if side else ("wait", room, 1 - parity))
            if counted:
                steps.append(("arrive", room if side else full, 0))
        warps.append(steps)
    return warps, counts


def can_hang(ring: Any) -> bool:
    """Whether some order of the steps ends with a warp that waits: all orders are tried."""
    warps, counts = programs(ring)
    start = (tuple(0 for _ in warps), tuple((0, count) for count in counts))
    seen, left = {start}, [start]
    while left:
        places, barriers = left.pop()
        moves = 0
        for warp, place in enumerate(places):
            if place == len(warps[warp]):
                continue
            what, barrier, parity = warps[warp][place]
            phase, pending = barriers[barrier]
            changed = list(barriers)
            if what == "wait" and phase & 1 == parity:
                continue
            if what == "arrive":
                ended = pending == 1
                after = (phase + 1, counts[barrier]) if ended else (phase, pending - 1)
                changed[barrier] = after
            moves += 1
            state = ((*places[:warp], place + 1, *places[warp + 1 :]), tuple(changed))
            if state not in seen:
                seen.add(state)
                left.append(state)
        if not moves and any(p < len(w) for p, w in zip(places, warps, strict=True)):
            return True
    return False


def kernel_of(ring: Any) -> tuple[str, int]:
    """The same as a kernel, and its threads."""
    warps, counts = programs(ring)
    text = ["mov.u32 %r1, %tid.x; mov.u32 %r2, smem; shr.u32 %r3, %r1, 5;"]
    text.append("setp.eq.u32 %p1, %r1, 0; and.b32 %r4, %r1, 31; setp.eq.u32 %p2, %r4, 0;")
    text += [
        f"@%p1 mbarrier.init.shared.b64 [%r2+{8 * at}], {count};" for at, count in enumerate(counts)
    ]
    text.append("bar.sync 0;")
    for index, steps in enumerate(warps):
        text.append(f"setp.ne.u32 %p3, %r3, {index}; @%p3 bra not{index};")
        for number, (what, barrier, parity) in enumerate(steps):
            if what == "wait":
                text.append(
                    f"w{index}_{number}: mbarrier.try_wait.parity.shared.b64 %p4,"
                    f" [%r2+{8 * barrier}], {parity}; @!%p4 bra w{index}_{number};"
                )
            else:
                text.append(f"@%p2 mbarrier.arrive.shared.b64 _, [%r2+{8 * barrier}];")
        text.append(f"not{index}:")
    return "\n".join(text), 32 * len(warps)


@settings(max_examples=40)
@given(rings())
def test_it_hangs_where_an_order_hangs(ring: Any) -> None:
    """Steering finds a deadlock in rings of barriers if, and only if, some order has one."""
    result = steered(*kernel_of(ring), runs=200)
    hangs = [s for s in result.shown if s.finding is not None and s.finding.kind == "deadlock"]
    assert bool(hangs) == can_hang(ring)


def test_both_answers_occur() -> None:
    """In the rings that are drawn."""
    assert can_hang((1, 4, (True, False), (True,)))
    assert not can_hang((1, 4, (True, True), (True,)))
    assert not can_hang((1, 1, (True,), (True, False)))


# Two lanes of one instruction have no order that could be turned round.
HAZARDS = [bug for bug in BUGS if bug.kind == "race" and bug.name != "two lanes, one place"]


@pytest.mark.parametrize("bug", HAZARDS, ids=lambda bug: bug.name)
def test_hazards_of_the_zoo(bug: Bug) -> None:
    """What no order changes is left unshown, not called right."""
    launch, memory = prepared(bug.text.replace("<>", bug.broken), bug.threads)
    shape = (bug.grid, 1, 1), (bug.cluster, 1, 1)
    result = steer([replace(launch, grid=shape[0], cluster=shape[1])], memory, runs=24)
    assert len(result.shown) + len(result.unshown) >= 1 and result.runs <= 24


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and output of `fa4 emulate`."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["emulate", *arguments])
    printed = capsys.readouterr()
    return int(stop.value.code or 0), printed.out + printed.err


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--steer finds the hang, --witness keeps its order, --replay hangs; no clash passes."""
    monkeypatch.chdir(tmp_path)
    text = module_text(LATE_WAIT.text.replace("<>", ""), 2)
    Path("ring.ptx").write_text(text)
    kernel = ["ring.ptx", "--block", "96", "--smem", "4096", *("--arg", "u32[256]=0") * 2]
    code, out = command(capsys, *kernel, "--steer", "16", "--witness", "w.json")
    assert code == 1 and "shown by steering: deadlock at PTX line" in out
    assert "hazards shown: 1, not shown: 0" in out and "in this order: CTA 0 warp 1 stands" in out
    code, out = command(capsys, *kernel, "--replay", "w.json")
    assert code == 1 and "deadlock: nothing can go on" in out
    code, out = command(capsys, *kernel)
    assert code == 1 and "deadlock" not in out
    code, out = command(capsys, *kernel, "--steer", "16", "--replay", "w.json")
    assert (code, out) == (2, "fa4: error: --replay cannot be used with --steer\n")
    Path("w.json").write_text(Path("w.json").read_text().replace('"fifo"', '"soon"'))
    assert command(capsys, *kernel, "--replay", "w.json")[0] == 2


def test_a_script_is_steered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its launches; a witness is replayed in each of them."""
    monkeypatch.chdir(tmp_path)
    launch, memory = prepared(LATE_WAIT.text.replace("<>", ""), 96)
    reports = []
    with emulator.emulate(steer=16, collect=True) as session:
        session.run_launches([launch], {a.name: a.owner for a in memory})
        reports += session.reports
    (report,) = reports
    assert [f.kind for f in report.findings] == ["mbarrier", "deadlock"]
    witness = report.steering.shown[0].witness
    with emulator.emulate(replay=witness, collect=True) as session:
        for _ in range(2):
            session.run_launches([launch], {a.name: a.owner for a in memory})
    assert [[f.kind for f in r.findings] for r in session.reports] == [["mbarrier", "deadlock"]] * 2
    with pytest.raises(emulator.EmulationFailed), emulator.emulate(steer=4) as session:
        session.run_launches([launch], {a.name: a.owner for a in memory})
    Path("s.py").write_text("")
    assert command(capsys, "s.py", "--witness", "w.json")[0] == 2
    assert command(capsys, "s.py", "--steer", "4", "--witness", "w.json")[0] == 0
