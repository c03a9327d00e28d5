"""Guarded memory, and the programs that find out what TMA touches, without a GPU."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.hardware.guarded import first_tensor
from lab.hardware.guarded.drawing import (
    LEVELS,
    NARROW_LEVELS,
    GuardedCall,
    all_pairs,
    draw_calls,
    pairs_of,
)
from lab.hardware.guarded.memory import GuardedMemory, HostDriver
from lab.hardware.guarded.outside_boxes import (
    EDGES,
    OK,
    STARTS,
    TOUCHED,
    OutsideCase,
    all_cases,
    emulate_here,
)
from lab.records import read_record


@given(st.lists(st.integers(0, 70_000), min_size=1, max_size=8))
def test_allocations_are_whole_and_apart(sizes: list[int]) -> None:
    """All of each can be written; each keeps what was written; in turn they border on nothing."""
    memory = GuardedMemory(HostDriver())
    addresses = [memory.allocate(size) for size in sizes]
    for number, (address, size) in enumerate(zip(addresses, sizes, strict=True)):
        ctypes.memset(address, number + 1, size)
        _, _, mapped, mapped_bytes = memory.live[address]
        assert address % 16 == 0
        if number % 2 == 0:
            assert address == mapped
        else:
            assert 0 <= mapped + mapped_bytes - (address + size) < 16
    for number, (address, size) in enumerate(zip(addresses, sizes, strict=True)):
        assert ctypes.string_at(address, size) == bytes([number + 1]) * size
        memory.free(address)
    assert not memory.live


TOUCH = """
import ctypes, sys
from lab.hardware.guarded.memory import GuardedMemory, HostDriver
memory = GuardedMemory(HostDriver(), at_end=sys.argv[1] == "end")
address = memory.allocate(4096 * 3)
print(ctypes.string_at(address, 4096 * 3)[:1], flush=True)
ctypes.string_at(address + int(sys.argv[2]), 1)
"""


@pytest.mark.parametrize(
    ("side", "offset", "ends"),
    [("start", -1, True), ("end", 4096 * 3, True), ("start", 0, False),
     ("end", 4096 * 3 - 1, False), ("start", -4096 * 3, True), ("end", 4096 * 6 - 1, True)],
)  # fmt: skip
def test_what_touches_the_guard_ends(side: str, offset: int, ends: bool) -> None:
    """A read one byte in front of an allocation, or behind it, or as far as it is long."""
    command = [sys.executable, "-c", TOUCH, side, str(offset)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.stdout == b"b'\\x00'\n"
    assert done.returncode == (-signal.SIGSEGV if ends else 0)


MEASURED = [read_record(f"outside_boxes_{gpu}")["verdicts"] for gpu in ("h100", "h200")]


@pytest.mark.parametrize(
    "case", [case for case in all_cases() if case.edge == EDGES[0]], ids=lambda case: case.name
)
def test_the_emulators_verdict(case: OutsideCase) -> None:
    """Nothing mapped in front of a tensor: what two GPUs did with the same program."""
    assert [verdicts[case.name] for verdicts in MEASURED] == [emulate_here(case)] * 2


def test_what_the_gpus_did() -> None:
    """A load with nothing in the tensor, or that begins before it, touches where its map begins."""
    for case in all_cases():
        touching = case.is_outside or case.place.startswith("entering")
        touched = case.operation == "load" and touching and case.start != STARTS[0]
        expected = TOUCHED if touched and case.edge == EDGES[0] else OK
        assert [verdicts[case.name] for verdicts in MEASURED] == [expected] * 2


def choice_of(one: GuardedCall, name: str) -> object:
    """Of a level, in a call that was drawn."""
    return getattr(one if hasattr(one, name) else one.call, name)


@given(st.integers(0, 2**32))
@settings(max_examples=3)
def test_every_two_choices_meet_and_sequences_are_empty_anywhere(seed: int) -> None:
    calls = draw_calls(seed, 500, 1100)
    for levels in (LEVELS, NARROW_LEVELS):
        met = set()
        for one in calls:
            if one.call.dtype in levels["dtype"]:
                met |= pairs_of({name: choice_of(one, name) for name in levels})
        assert met >= all_pairs(levels)
    packed = [one.call.lengths for one in calls if one.call.packed]
    for side in range(2):
        for place in (0, 1, -1):
            assert any(len(x) > 1 and x[place][side] == 0 for x in packed)


WRONG = """
import fa4
right = fa4.flash_attn_varlen_func
def attend(*arrays, **options):
    found = right(*arrays, **options)
    {fault}
    return found
fa4.flash_attn_varlen_func = attend
"""


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("", ""),
        ("found.out.mul_(2)", "O is off by"),
        ("import os; os.abort()", "the process ended"),
    ],
)
def test_a_run_says_which_calls_are_wrong(fault: str, error: str, tmp_path: Path) -> None:
    """Four calls; those of packed or partly used sequences have a fault, or end the process."""
    (tmp_path / "sitecustomize.py").write_text(WRONG.format(fault=fault or "pass"))
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "lab.hardware.guarded.random_calls", str(out), "--calls", "4"]
    done = subprocess.run([*command, "--impl", "reference", "--longest", "4", "--seed", "58"],
                          env=os.environ | {"PYTHONPATH": f"{tmp_path}:."}, check=False,
                          capture_output=True, text=True)  # fmt: skip
    report = json.loads(out.read_text())
    assert done.returncode == bool(error), done.stderr
    assert bool(report["wrong"]) == bool(error)
    assert all(entry["error"].startswith(error) for entry in report["wrong"])
    assert "seed 58\n" in done.stdout and len(report["wrong"]) < 4


def test_without_time_nothing_is_judged(tmp_path: Path) -> None:
    """No call is made, and that is no success."""
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "lab.hardware.guarded.random_calls", str(out), "--calls", "4"]
    done = subprocess.run([*command, "--impl", "reference", "--longest", "4", "--seconds", "0"],
                          check=False, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 1, done.stderr
    report = json.loads(out.read_text())
    assert report["calls"] == 0 and report["wrong"] == [] and report["worst_share"] is None


@pytest.mark.parametrize("fault", ["", "the first is another", "the call is wrong"])
def test_first_tensors(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each call has a process; one that ends badly is written down, whatever the others do."""
    calls = first_tensor.all_calls(6, 1)
    assert {call.first for call in calls[-6:]} == set("qkv")
    assert all(any(0 in pair for pair in call.one.call.lengths) for call in calls)
    started = []

    def stand_in(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        started.append(command[command.index("--number") + 1])
        if fault and started[-1] == "3":
            return subprocess.CompletedProcess(command, -6, "", f"line\nAssertionError: {fault}")
        return subprocess.CompletedProcess(command, 0, "0.5\n", "")

    monkeypatch.setattr(first_tensor.subprocess, "run", stand_in)
    out = tmp_path / "out.json"
    options = ["--impl", "reference", "--drawn", "6", "--seed", "1", "--processes", "2"]
    monkeypatch.setattr(sys, "argv", ["first_tensor", str(out), *options])
    assert first_tensor.main() == bool(fault)
    assert sorted(map(int, started)) == list(range(len(calls)))
    wrong = json.loads(out.read_text())["wrong"]
    assert [row["error"] for row in wrong] == ([f"AssertionError: {fault}"] if fault else [])
    assert ("WRONG" in capsys.readouterr().out) == bool(fault)


def test_a_first_tensor_is_made_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """K here, whose one row is that of the first of two sequences."""
    call = first_tensor.all_calls(0, 1)[2]
    made, empty = [], torch.empty

    def noted(shape: tuple[int, ...], **options: object) -> torch.Tensor:
        made.append(shape)
        return empty(shape, **options)

    monkeypatch.setattr(torch, "empty", noted)
    assert 0 < first_tensor.make_call(call, 0, "reference") <= 1
    assert call.first == "k"
    assert made[0] == (1, 2, 128)
