"""1,000 command lines made from the commands' option tables, and proof that faults are found."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.commands import fuzz
from tests.commands.fuzz_values import make_files, value_of

LINES, PARTS = 1000, 10

# In the worker: `fa4 doctor` fails in one of four ways, so that its command lines are at fault.
PLANT = """
import os, sys, time
from pathlib import Path
from fa4.commands import doctor

def trial(kind={kind!r}):
    began = time.process_time()
    if kind == "exception":
        raise KeyError("planted")
    if kind == "printed":
        print("Traceback (most recent call last)", file=sys.stderr)
    if kind == "computing":
        while True:
            pass
    if kind == "waiting":
        time.sleep(1000)
    if kind == "dying":
        os.kill(os.getpid(), 11)
    if kind == "partial":
        Path("report.json.partial").write_text("[")
    if kind == "cut":
        Path("report.json").write_text("[1, 2")
    if kind == "refused":
        Path("o.txt").write_text("something")
        raise ValueError("no")
    if kind == "temporary":
        (Path(os.environ["TMPDIR"]) / "fa4-left").mkdir()
    if kind == "late":
        while time.process_time() < began + 0.3:
            pass
        raise ValueError("no")
    if kind == "two lines":
        raise ValueError("") if print("what", file=sys.stderr) else SystemExit(2)
    if kind == "input":
        Path(sys.argv[0])
        (Path(os.environ["HOME"]) / "files" / "my.toml").write_text("")
    return {{}}

doctor.diagnose = trial
doctor.render = lambda report: "fine"
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_command_lines(part: int, tmp_path: Path) -> None:
    """No traceback, no hang, one line for what is refused, and files that are whole."""
    found = list(fuzz.faults(seed=part, count=LINES // PARTS, folder=tmp_path))
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("exception", "KeyError: 'planted'"),
        ("printed", "Traceback (most recent call last) in stderr"),
        ("computing", "fa4 doctor --json: it did not end within 2 s"),
        ("waiting", "fa4 doctor --json: it did not end within 2 s"),
        ("dying", "fa4 doctor --json: the process died with -11"),
        ("partial", "it left 'report.json.partial', code 0"),
        ("cut", "it left 'report.json', code 0"),
        ("refused", "it left 'o.txt', code 2"),
        ("temporary", "it left fa4-left in tmp"),
        ("two lines", "refused without one clear line"),
        ("late", "refused after 0."),
        ("input", "it changed a file that it was to read"),
    ],
)
def test_planted_faults_are_found(kind: str, message: str, tmp_path: Path) -> None:
    """Each kind is named with its command line; the next command line runs in a new process."""
    worker = fuzz.Worker(tmp_path, PLANT.format(kind=kind), seconds=2.0)
    try:
        assert [x for x in worker.check(["doctor", "--json"]) if message in x]
        assert worker.check(["machines", "b200"]) == []
    finally:
        worker.stop()


def test_a_fault_is_reached_from_the_option_tables(
    tmp_path: Path,
) -> None:
    """One option that fails with one kind of value is found among generated lines."""
    plant = """
from fa4.sim import machine
right = machine.find_machine
def find_machine(name):
    return {}[name] if "cut-" in name else right(name)
machine.find_machine = find_machine
"""
    worker = fuzz.Worker(tmp_path, plant)
    generator = fuzz.Generator(10, worker.files, ("machines", "explain", "roofline"))
    found: list[str] = []
    try:
        for _ in range(1000):  # a few hundred, by the options that there are
            found += worker.check(generator.line())
            if found:
                break
    finally:
        worker.stop()
    assert found and all("KeyError" in problem for problem in found)


def test_no_path_leads_out_of_the_folders(tmp_path: Path) -> None:
    """A command that replaces what it is given must not reach this machine's files and devices."""
    make_files(tmp_path)
    generator = fuzz.Generator(5, tmp_path)
    for _ in range(3000):
        for text in generator.line():
            value = text.partition("=")[2] if text.startswith("--") else text
            assert not value.startswith(("/", "~", "x=/", "../")) or value.startswith(str(tmp_path))


def test_lines_are_the_same_for_a_seed(tmp_path: Path) -> None:
    """So that a fault that was found can be seen again."""
    make_files(tmp_path)
    lines = [[fuzz.Generator(3, tmp_path).line()] for _ in range(2)]
    assert lines[0] == lines[1]
    generator = fuzz.Generator(3, tmp_path)
    assert len({tuple(generator.line()) for _ in range(200)}) > 150


def test_values_of_every_kind_are_drawn(tmp_path: Path) -> None:
    """For an option with a few words as values: right, nearly right, empty, negative, huge, odd."""
    make_files(tmp_path)
    rng = random.Random(0)
    drawn = [value_of(rng, "--schedule", "", tmp_path) for _ in range(4000)]
    right = {"fifo", "random", "adversarial"}
    kinds = {
        "right": lambda text: text in right,
        "nearly": lambda text: text not in right and text.strip(" ,x='-").lower() in right,
        "empty": lambda text: not text.strip(),
        "negative": lambda text: text.startswith("-") and text[1:].isdigit(),
        "huge": lambda text: len(text) > 1000,
        "odd": lambda text: not text.isascii(),
    }
    assert {name: sum(map(kind, drawn)) > 20 for name, kind in kinds.items()} == dict.fromkeys(
        kinds, True
    )


def test_a_value_is_reached_behind_the_option_that_enables_it(tmp_path: Path) -> None:
    """Planted: the emulator, and nobody before it, looks at the order of events."""
    plant = """
from fa4.commands import run
run.check_schedule = lambda schedule: None
"""
    worker = fuzz.Worker(tmp_path, plant)
    generator = fuzz.Generator(1, worker.files, ("run",))
    found: list[str] = []
    try:
        for _ in range(3000):
            line = generator.line()
            if any(word.startswith("--schedule") for word in line) and "emulator" in line:
                found += worker.check(line)
            if found:
                break
    finally:
        worker.stop()
    assert found and "LaunchError" in found[0]
