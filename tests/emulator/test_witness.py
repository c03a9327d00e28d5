"""Orders of events that are kept: replayed they lead to the same finding, and they are short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4 import cli, emulator
from fa4.emulator.machine.choices import EventChoice, RecordedOrder
from fa4.emulator.machine.schedule import make_schedule
from fa4.emulator.orders.witness import Witness, _shortest, read_witness
from lab.bug_zoo import BUGS, Bug
from tests.emulator.kernels import run_ptx
from tests.emulator.test_cli_emulate import LATE_WARP

# The warp that comes first takes number 0; if warp 1 is first, warp 0 stores where it must not.
LATE = LATE_WARP.replace("BODY", "st.global.b32 [%x+4096], %w;")


def launch_of(text: str) -> tuple[Any, Any]:
    """A launch of 64 threads, and its memory."""
    return emulator.make_launch(text, {"x": np.full(4, 9, np.uint32)}, block=(64, 1, 1))


def first_seed(text: str) -> int:
    """The first seed of the random schedule that finds something."""
    launch, memory = launch_of(text)
    options = emulator.Options(schedule="random", collect=True)
    return emulator.explore([launch], memory, options, seeds=50).seeds[-1]


def test_a_witness_is_short_and_leads_there() -> None:
    """One choice is enough: warp 1 runs first. The memory is as it was."""
    launch, memory = launch_of(LATE)
    x = memory[0].owner
    options = emulator.Options(schedule="random", seed=first_seed(LATE))
    found = emulator.find_witness([launch], memory, options)
    assert found is not None and found.kind == "out-of-bounds" and (x == 9).all()
    assert len(found.choices) + len(found.gave_up) <= 2, found
    again = read_witness(found.text())
    assert again == found
    for _ in range(2):
        x[:] = 9
        options = emulator.Options(schedule=again.schedule(), collect=True)
        findings = emulator.run([launch], memory, options).findings
        assert [(f.kind, f.line) for f in findings] == [(found.kind, found.line)]
    x[:] = 9
    assert emulator.run([launch], memory, emulator.Options()).ok


def test_what_fifo_finds_needs_no_choice() -> None:
    """And where nothing is found there is no witness."""
    launch, memory = launch_of(LATE.replace("setp.ne.u32 %p, %first, 1;", "setp.ne.u32 %p, %w, 0;"))
    options = emulator.Options(schedule="adversarial", seed=3)
    found = emulator.find_witness([launch], memory, options)
    assert found is not None and found.choices == () and found.gave_up == ()
    launch, memory = launch_of(LATE.replace("[%x+4096]", "[%x]"))
    assert emulator.find_witness([launch], memory, emulator.Options()) is None


SMALL = [bug for bug in BUGS if bug.name in ("a flag without release", "exit under a copy",
         "one arrival too few", "two counts for one barrier", "one group too few")]  # fmt: skip


@pytest.mark.parametrize("bug", SMALL, ids=lambda bug: bug.name)
@pytest.mark.parametrize("order", ["random", "adversarial"])
def test_a_whole_record_replays(bug: Bug, order: str) -> None:
    """Every choice kept: the run is the same, step for step."""
    recording = RecordedOrder(make_schedule(order, 5))
    first = bug.run(bug.broken, recording)  # type: ignore[arg-type]
    kept = Witness(
        kind="", line=0, choices=tuple(recording.choices), gave_up=tuple(recording.gave_up)
    )
    again = bug.run(bug.broken, kept.schedule())  # type: ignore[arg-type]
    assert again.steps == first.steps
    places = [[(f.kind, f.line, f.cta, f.warp) for f in r.findings] for r in (first, again)]
    assert places[0] == places[1] != []


@settings(max_examples=50)
@given(st.sets(st.integers(0, 40), max_size=4), st.integers(1, 41))
def test_what_is_not_needed_is_left_out(needed: set[int], count: int) -> None:
    """Lists of up to 41 choices of which a few are needed."""
    needed = {n for n in needed if n < count}
    kept = _shortest(list(range(count)), lambda left: needed <= set(left))
    assert needed <= set(kept) and len(kept) <= max(3 * len(needed), 1)


def test_a_choice_that_is_not_possible_is_left_out() -> None:
    """Of another kernel, or of a warp that waits."""
    choices = tuple(EventChoice(n, 7, 9, 0, 1) for n in range(50))
    kept = Witness(kind="", line=0, choices=choices, gave_up=())
    assert run_ptx("bar.sync 0;", block=(64, 1, 1), schedule=kept.schedule()).ok


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--witness writes it, --replay finds the same; what is none is refused."""
    monkeypatch.chdir(tmp_path)
    Path("late.ptx").write_text(LATE)

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main(["emulate", "late.ptx", "--block", "64", "--arg", "u32[4]=9", *arguments])
        printed = capsys.readouterr()
        return int(stop.value.code or 0), printed.out + printed.err

    code, out = run("--schedule", "random", "--seeds", "50", "--witness", "w.json")
    assert code == 1 and "witness of out-of-bounds at PTX line" in out and "warp 1 runs" in out
    code, out = run("--replay", "w.json")
    assert code == 1 and "out-of-bounds" in out and "schedule replay" in out
    assert run()[0] == 0
    Path("w.json").write_text("{}")
    assert run("--replay", "w.json") == (
        2,
        "fa4: error: w.json: no witness: --witness writes one\n",
    )
