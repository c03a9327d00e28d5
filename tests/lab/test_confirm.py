"""Records that want a GPU are made in the time that there is, and only whole ones are taken."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab import ROOT, records
from lab.hardware import confirm
from lab.hardware.confirm import STEPS, Step, choose, pack, run, short_name, take
from lab.table import BY_NAME

DEVICE = "NVIDIA H200"
PROGRAM = """
import json, sys, time
seconds, code = float(sys.argv[1]), int(sys.argv[2])
json.dump({"left": sys.argv[4:]}, open(sys.argv[3], "w")) if len(sys.argv) > 3 else print("[1]")
if len(sys.argv) > 3:
    print("seed 7", flush=True)
print("told", file=sys.stderr, flush=True)
time.sleep(seconds)
sys.exit(code)
"""


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Step]:
    """Steps of a program that takes so long and ends with this code."""
    (tmp_path / "stand_in.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FA4_COMMIT", "HEAD")

    def make(name: str, seconds: float = 0.0, code: int = 0, rest: str = " {out} {left}",
             usual_s: float = 0.1) -> Step:  # fmt: skip
        return Step(name=name, words=f"stand_in {seconds} {code}{rest}", usual_s=usual_s)

    return make


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records and ledger are read and written in a copy."""
    for module in (records, confirm):
        monkeypatch.setattr(module, "ROOT", ROOT)
    ledger = tmp_path / "ledger.json"
    shutil.copy(records.LEDGER, ledger)
    monkeypatch.setattr(records, "LEDGER", ledger)
    monkeypatch.setattr(confirm, "record_path", lambda name: tmp_path / f"taken_{name}.json")
    return ledger


def test_every_step_makes_a_record_by_a_program_that_there_is() -> None:
    """Of either GPU; its arguments are those of the record's command."""
    for step in STEPS:
        for gpu in ("h100", "h200"):
            record = BY_NAME[step.named(gpu)]
            module = step.words.split()[0]
            assert record.command.startswith("GPU: ")
            other = {"h100": "h200", "h200": "h100"}[gpu]
            assert not record.name.endswith(other)
            if "{on}" in step.name:  # each GPU's has a file of its own
                assert record.name.endswith("_h100") == (gpu == "h100")
            assert module == "fa4" or (module in record.modules and module in record.command)
        assert 0 < step.usual_s < 540
        assert ("--rows {rows}" in step.words) == ("--random" in step.words)


def test_steps_run_in_order_and_are_kept(step: Callable[..., Step], tmp_path: Path) -> None:
    """A result file or what was printed, what was told, and a summary, in one archive."""
    steps = [step("one"), step("of_{gpu}", code=1), step("printed", rest="")]
    summary = run(tmp_path / "out", steps, DEVICE, 60.0)
    assert list(summary["steps"]) == ["one", "of_h200", "printed"] and not summary["not_begun"]
    assert [x["ended"] for x in summary["steps"].values()] == [0, 1, 0]
    left = int(json.loads((tmp_path / "out/one.json").read_text())["left"][0])
    assert 30 < left < 45  # imports, the last call and the end take the rest
    assert json.loads((tmp_path / "out/printed.json").read_text()) == [1]
    assert (tmp_path / "out/of_h200.log").read_text() == "seed 7\ntold\n"
    assert json.loads((tmp_path / "out/summary.json").read_text()) == summary
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        assert {"out/one.json", "out/one.log", "out/summary.json"} <= set(archive.getnames())


def test_what_does_not_fit_is_stopped_or_not_begun(
    step: Callable[..., Step], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And said so; what was written before stays."""
    monkeypatch.setattr(confirm, "RESERVE_S", 0.0)
    steps = [step("long", seconds=600.0), step("next"), step("large", usual_s=100.0)]
    summary = run(tmp_path / "out", steps, DEVICE, 2.0)
    assert summary["steps"]["long"]["ended"] is None and summary["steps"]["long"]["seconds"] < 60
    assert summary["steps"]["long"]["wrote"] and "large" in summary["not_begun"]


def test_whole_results_are_taken(
    step: Callable[..., Step], tmp_path: Path, copied: Path
) -> None:  # fmt: skip
    """Those of programs that ended with 0; the ledger says which commit, GPU and day."""
    steps = [step("small_transformer"), step("sanitized", code=1), step("guarded_calls_{gpu}")]
    summary = run(tmp_path / "out", steps, DEVICE, 60.0)
    before = json.loads(copied.read_text())
    assert take(tmp_path / "out") == ["small_transformer", "guarded_calls_h200"]
    assert not (tmp_path / "taken_sanitized.json").exists()
    assert "left" in json.loads((tmp_path / "taken_small_transformer.json").read_text())
    after = json.loads(copied.read_text())
    assert {name for name in after if after[name] != before.get(name)} == {
        "small_transformer", "guarded_calls_h200",
    }  # fmt: skip
    made = after["small_transformer"]
    assert (made["commit"], made["machine"], made["date"]) == ("HEAD", DEVICE, summary["date"])


@pytest.mark.parametrize(
    ("change", "message"),
    [({"commit": ""}, "nobody noted the commit"), ({"commit": "0000000"}, "has no commit"),
     (None, "has no summary")],
)  # fmt: skip
def test_nothing_is_taken_of_unknown_code(
    step: Callable[..., Step], tmp_path: Path, copied: Path, change: Any, message: str
) -> None:
    """One line, and no file is touched."""
    summary = run(tmp_path / "out", [step("small_transformer")], DEVICE, 60.0)
    before = copied.read_text()
    if change is None:
        (tmp_path / "out/summary.json").unlink()
    else:
        (tmp_path / "out/summary.json").write_text(json.dumps(summary | change))
    with pytest.raises(ValueError, match=message):
        take(tmp_path / "out")
    assert copied.read_text() == before and not list(tmp_path.glob("taken_*"))


def test_names_choose() -> None:
    """In their order, each once; other GPUs and names are refused."""
    assert choose([], "h200") == list(STEPS)
    names = ["small_transformer", "guarded_calls_h100", "small_transformer"]
    assert [step.named("h100") for step in choose(names, "h100")] == names[:2]
    with pytest.raises(ValueError, match="no program for 'guarded_calls_h100' on an h200"):
        choose(names, "h200")
    assert short_name("NVIDIA H100 80GB HBM3") == "h100"
    with pytest.raises(ValueError, match="the GPU here is 'NVIDIA A100'"):
        short_name("NVIDIA A100")


def test_an_archive_is_whole_or_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full leaves what was packed."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "a").write_text("1")
    kept = pack(folder).read_bytes()

    def fails(*given: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(tarfile.TarFile, "add", fails)
    with pytest.raises(OSError, match="no space"):
        pack(folder)
    assert (tmp_path / "out.tar.gz").read_bytes() == kept


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`list` says how old each is; `run` without a GPU says so in one line."""
    monkeypatch.setattr(sys, "argv", ["confirm", "list"])
    assert confirm.main() == 0
    assert "guarded_calls_h100" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["confirm", "run", "/nowhere"])
    monkeypatch.setattr(confirm, "query", lambda *fields: {"name": "unknown"})
    with pytest.raises(SystemExit) as ended:
        confirm.main()
    assert ended.value.code == 2 and "of an H100 or an H200" in capsys.readouterr().err


def test_a_seed_is_drawn_for_each_run(step: Callable[..., Step], tmp_path: Path) -> None:
    """Another one every time, where a program takes one."""
    drawn = []
    for name in ("a", "b"):
        run(tmp_path / name, [step("one", rest=" {out} {seed}")], DEVICE, 60.0)
        drawn.append(int(json.loads((tmp_path / name / "one.json").read_text())["left"][0]))
    assert drawn[0] != drawn[1] and all(0 <= seed < 2**32 for seed in drawn)


def test_processes_are_as_many_as_the_cores_bear(
    step: Callable[..., Step], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that this process may use, two are left free; one at least, and not too many."""
    told = []
    for cores in (1, 16, 64):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        folder = tmp_path / str(cores)
        run(folder, [step("one", rest=" {out} {jobs}")], DEVICE, 60.0)
        told.append(json.loads((folder / "one.json").read_text())["left"][0])
    assert told == ["1", "14", "40"]
