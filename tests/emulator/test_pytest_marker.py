"""pytest's marker `fa4_emulate`: single tests run in the emulator, and leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

# What `emulate` replaces, as it is outside; a kernel whose two warps race.
HEAD = '''
import sys
import numpy as np, pytest, torch
from fa4 import emulator
from fa4.emulator.host import device, front_ends

def stubs():
    """All that tells whether something is emulated."""
    return (
        torch.cuda.is_available(), torch.cuda.Stream, torch.Tensor.data_ptr, torch.empty,
        torch.zeros(1).device.type, device.COMPUTE_CAPABILITY, front_ends._active,
        tuple(type(finder) for finder in sys.meta_path),
    )

OUTSIDE = stubs()
RACY = """.version 8.8
.target sm_90a
.address_size 64
.visible .entry racy(.param .u64 x)
{ .reg .b32 %t; .reg .b64 %x; ld.param.u64 %x, [x]; mov.u32 %t, %tid.x;
  st.global.b32 [%x], %t; ret; }
"""

def race(session):
    x = np.zeros(4, np.uint32)
    launch, _ = emulator.make_launch(RACY, {"x": x}, block=(64, 1, 1))
    session.run_launches([launch], {"x": x})

@pytest.fixture
def broken_before():
    assert torch.cuda.is_available()
    raise RuntimeError("in a fixture, before")

@pytest.fixture
def broken_after():
    yield
    assert torch.cuda.is_available()
    raise RuntimeError("in a fixture, after")
'''
# A marked test, and its outcome as pytest counts it.
MARKED = {
    "passed": "(): assert torch.zeros(1, device='cuda').is_cuda",
    "failed": "(): assert not torch.cuda.is_available()",
    "failed by a race": "(fa4_emulation): race(fa4_emulation)",
    "error before": "(broken_before): pass",
    "error after": "(broken_after): pass",
    "skipped": "(): pytest.skip('now')",
    "xfailed": "(): pytest.xfail('now')",
    "exits": "(): sys.exit(3)",
    "nested": "():\n    with emulator.emulate(): pass",
}
WORDS = {"skipped": "", "xfailed": "XFAIL", "exits": "FAILED", "nested": "FAILED"}
OUTSIDE = "def test_outside_{}(): assert stubs() == OUTSIDE\n"


def run(folder: Path, text: str, *options: str) -> str:
    """What pytest prints of a file of tests, in a process of its own."""
    (folder / "test_marked.py").write_text(HEAD + text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *options]
    done = subprocess.run(
        [*command, "test_marked.py"], cwd=folder, capture_output=True, text=True, timeout=250
    )
    return done.stdout + done.stderr


def marked(name: str, what: str, arguments: str = "") -> str:
    """A test with the marker."""
    return f"@pytest.mark.fa4_emulate{arguments}\ndef test_{name}{what}\n"


@settings(max_examples=3, phases=[Phase.generate])
@given(outcomes=st.permutations(sorted(MARKED)), data=st.data())
def test_nothing_stays_behind(
    tmp_path_factory: pytest.TempPathFactory, outcomes: list[str], data: st.DataObject
) -> None:
    """Whatever becomes of marked tests, in whatever order: the next one is as it was before."""
    arguments = st.sampled_from(["", "()", "(arch='sm_90a')", "(schedule='random', seed=3)"])
    text = OUTSIDE.format("first")
    for index, outcome in enumerate(outcomes):
        text += marked(f"in_{index}", MARKED[outcome], data.draw(arguments))
        text += OUTSIDE.format(index)
    printed = run(tmp_path_factory.mktemp("marked"), text, "--strict-markers")
    for name in ("first", *range(len(outcomes))):
        assert f"PASSED test_marked.py::test_outside_{name}\n" in printed, printed
    for index, outcome in enumerate(outcomes):
        word = WORDS.get(outcome, outcome.split()[0].upper())
        assert not word or f"{word} test_marked.py::test_in_{index}" in printed, (outcome, printed)
    assert "race" in printed and "in a fixture, after" in printed


def test_what_the_marker_says_holds(tmp_path: Path) -> None:
    """Options of the run stand where it says nothing; the nearest marker is heeded first."""
    text = """
pytestmark = pytest.mark.fa4_emulate(arch="sm_90a", fail_on="error")

def test_arch(fa4_emulation):
    assert torch.cuda.get_device_capability() == (9, 0)
    assert fa4_emulation._options.seed == 7 and fa4_emulation._options.schedule == "random"
    race(fa4_emulation)  # a hazard

@pytest.mark.fa4_emulate(arch="sm_103a", seed=2)
def test_nearest(fa4_emulation):
    assert fa4_emulation.arch == "sm_103a" and fa4_emulation._options.seed == 2
    assert fa4_emulation._options.fail_on == "error"
"""
    options = ["--fa4-schedule=random", "--fa4-schedule-seed=7", "--fa4-sarif=found.sarif"]
    printed = run(tmp_path, text, *options)
    assert "2 passed" in printed, printed
    assert "1 launches of 1 kernels on an emulated sm_103a, sm_90a; findings: 1 hazard" in printed
    assert "wrote found.sarif" in printed and '"race"' in (tmp_path / "found.sarif").read_text()


def test_beside_the_flag(tmp_path: Path) -> None:
    """A marked test has its own emulation; those around it have that of the run."""
    around = "def test_{}():\n    assert torch.cuda.get_device_capability() == (10, 0)\n"
    own = "():\n    assert torch.cuda.get_device_capability() == (9, 0)"
    text = around.format("before") + marked("own", own, "(arch='sm_90a')")
    text += around.format("between") + marked("bad", own, "(arch='sm_20')")
    printed = run(tmp_path, text + around.format("after"), "--fa4-emulate")
    assert "4 passed, 1 error" in printed, printed


BAD = {
    "('sm_90a')": "fa4_emulate('sm_90a'): takes keyword arguments only",
    "(arch='sm_80')": "fa4_emulate(arch='sm_80'): allowed are sm_100a, sm_103a, sm_90a",
    "(arch=90)": "fa4_emulate(arch=90): allowed are",
    "(speed=3)": "fa4_emulate(speed=...): unknown argument; there are arch, schedule, fail_on",
    "(seed='x')": "fa4_emulate(seed='x'): expected int",
    "(seed=-1)": "fa4_emulate(seed=-1): 0 or more is needed",
    "(steer=True)": "fa4_emulate(steer=True): expected int",
    "(checks=0)": "fa4_emulate(checks=0): expected bool",
    "(schedule='all')": "schedule 'all': allowed are fifo, random, adversarial",
    "(fail_on='all')": "fail_on 'all': allowed are style, formal, hazard, error",
    "(max_steps=0)": "max_steps 0: a positive integer is needed",
}


def test_bad_arguments_are_refused_in_one_line(tmp_path: Path) -> None:
    """That test has an error which says what is wrong, without a traceback; others run."""
    text = "".join(marked(f"bad_{i}", "(): pass", one) for i, one in enumerate(BAD))
    printed = run(tmp_path, text + OUTSIDE.format("last"))
    assert f"1 passed, {len(BAD)} errors" in printed, printed
    lines = printed.splitlines()
    for message in BAD.values():
        assert any(message in line for line in lines), (message, printed)
    assert "Traceback" not in printed and "pytest_plugin.py" not in printed
    assert "another exception" not in printed


def test_the_marker_is_documented(tmp_path: Path) -> None:
    """pytest --markers lists it, and it does nothing where it is not used."""
    printed = run(tmp_path, "", "--markers")
    assert "@pytest.mark.fa4_emulate(arch='sm_100a', schedule='fifo', seed=0, ...): run" in printed
    printed = run(tmp_path, OUTSIDE.format("only"), "--strict-markers")
    assert "1 passed" in printed and "emulated" not in printed


def test_a_conftest_finds_the_gpu(tmp_path: Path) -> None:
    """The whole run is emulated before any conftest.py is read, and not after a broken one."""
    (tmp_path / "conftest.py").write_text("import torch\nassert torch.cuda.is_available()\n")
    assert "1 passed" in run(tmp_path, "def test_it(): pass\n", "--fa4-emulate")
    (tmp_path / "conftest.py").write_text("1 / 0\n")
    assert "ZeroDivisionError" in run(tmp_path, "def test_it(): pass\n", "--fa4-emulate")
