"""Sweeps: axes, rows, infeasible points, files that continue, processes, dask, `fa4 sweep`."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.testing

from fa4.commands import sweep as command
from fa4.sim import cluster
from fa4.sim import sweep as sweeps
from fa4.sim.options import build
from fa4.sim.sweep import Row, Sweep, evaluate, make_sweep, parse_axis, run_points
from fa4.sim.sweep_file import SweepFile

ROOT = Path(__file__).resolve().parents[2]
AXES = ("seqlen=1k,2k", "tile_n=64,128,256", "kv_stages=2:3:1")


def rows_of(sweep: Sweep, **how: Any) -> dict[int, Row]:
    """Results of every point."""
    return dict(run_points(sweep, range(len(sweep)), **how))


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("head_dim", "64,128", ("64", "128")),
        ("head_dim", "64, 128,64", ("64", "128")),
        ("seqlen", "1k,2K,1.5k", ("1024", "2048", "1536")),
        ("seqlen", "1k:4k:1k", ("1024", "2048", "3072", "4096")),
        ("seqlen", "1k:6k:x2,5", ("1024", "2048", "4096", "5")),
        ("kv_stages", "2:4", ("2", "3", "4")),
        ("split_p", "0.25:1:0.25", ("0.25", "0.5", "0.75", "1.0")),
        ("costs.sync_cycles", "0:0.3:0.1", ("0", "0.1", "0.2", "0.3")),
        ("costs.sync_cycles", "0:1e-7:5e-8", ("0", "5e-08", "1e-07")),
        ("seqlen", "4k:1k:1k", ()),
        ("causal", "on,off", ("yes", "no")),
        ("window", "512,0", ("512,0",)),
        ("window", "512,0;none,0", ("512,0", "none,0")),
        ("scheduler", "lpt;naive", ("lpt", "naive")),
        ("gpu.sm_count", "132,148", ("132", "148")),
    ],
)
def test_axes(name: str, text: str, values: tuple[str, ...]) -> None:
    """Lists, ranges with a step or a factor, suffixes, each value once and in one spelling."""
    assert parse_axis(name, text) == values


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "no points: give --set"),
        (["seqlen=8k:1k:1k"], "no points: 'seqlen=8k:1k:1k' is an empty range"),
        (["seqlen"], "takes FIELD=VALUES; got 'seqlen'"),
        (["seqlen="], "takes FIELD=VALUES; got 'seqlen='"),
        (["=1"], "takes FIELD=VALUES"),
        (["nope=1"], "unknown field 'nope'; allowed: machine, pass"),
        (["seqlen=1k", "seqlen=2k"], "names seqlen twice"),
        (["seqlen=1k,x"], "at most 9223372036854775807; got 'x'"),
        (["seqlen=1k,,2k"], "at most 9223372036854775807; got ''"),
        (["correction=none"], "correction must be one of warpgroup, inline; got 'none'"),
        (["seqlen=1:2:0"], "positive step"),
        (["seqlen=1:2:3:4"], "first:last:step"),
        (["seqlen=0:8:x2"], "factor over 1"),
        (["seqlen=1:8:x1"], "factor over 1"),
        (["seqlen=1:inf:1"], "first:last:step"),
        (["gpu.sm_count=many"], "gpu.sm_count must be a number; got 'many'"),
        (["seqlen=1:2000", "heads=1:2000"], "at most 1000000 points; this one has 4000000"),
        (["seqlen=1:100m:1"], "a range has at most 1000000 values"),
    ],
)
def test_wrong_axes_are_refused(texts: list[str], message: str) -> None:
    """One sentence with the rule and the value."""
    with pytest.raises(ValueError) as caught:
        make_sweep(texts)
    assert message in str(caught.value)


def test_points_are_the_product_with_the_last_axis_fastest() -> None:
    """Numbered like nested loops."""
    sweep = make_sweep(AXES)
    assert len(sweep) == 12
    assert sweep.settings(0) == {"seqlen": "1024", "tile_n": "64", "kv_stages": "2"}
    assert sweep.settings(1) == {"seqlen": "1024", "tile_n": "64", "kv_stages": "3"}
    assert sweep.settings(11) == {"seqlen": "2048", "tile_n": "256", "kv_stages": "3"}
    assert len({tuple(sweep.settings(i).values()) for i in range(12)}) == 12


def test_a_row_is_the_prediction() -> None:
    """The same numbers as `build(...).predict()`, compared with FlashAttention-4's choice."""
    settings = {"seqlen": "2048", "tile_n": "64"}
    row, expected = evaluate(settings), build(settings).predict()
    assert row["status"] == "ok" and row["reason"] == ""
    assert row["microseconds"] == expected.seconds * 1e6
    assert row["tflops"] == expected.tflops and row["bound_by"] == expected.bound_by
    default = build({"seqlen": "2048"}).predict()
    assert row["speedup"] == default.seconds / expected.seconds < 1.0


def test_the_default_keeps_problem_and_machine_only() -> None:
    """What FlashAttention-4 chooses itself, and the rescale rate, are left out."""
    kept = {"machine": "b300", "pass": "bwd", "seqlen": "2048", "clock_ghz": "1.5", "exact": "no"}
    tuning = {"cta_group": "1", "tau": "0", "exp2_frequency": "8", "rescale_rate": "0.5"}
    assert sweeps.default_settings(kept | tuning) == kept


def test_infeasible_points_have_a_reason() -> None:
    """The plan's own sentence; the other points are not affected."""
    rows = rows_of(make_sweep(AXES), jobs=1)
    failed = {point: row for point, row in rows.items() if row["status"] == "infeasible"}
    assert sorted(failed) == [4, 5, 10, 11]
    assert failed[4]["reason"].startswith("TMEM plan needs 768 columns: s0 256 + s1 256")
    assert failed[4]["reason"].endswith("B200 has 512") and failed[4]["microseconds"] == ""
    assert all(row["tflops"] > 0 for point, row in rows.items() if point not in failed)


def test_a_problem_whose_default_cannot_run_has_no_speedup() -> None:
    """Head dim 448 fits only with fewer keys, and one Q tile."""
    settings = {"head_dim": "448", "q_tiles": "1", "tile_n": "32", "seqlen": "1024"}
    row = evaluate(settings)
    assert row["status"] == "ok" and row["speedup"] == ""
    report = command.build_report(make_sweep(["head_dim=448"]), {0: row}, 0)
    assert report["best_speedup"] is None
    lines = command.render(report | {"csv": None})
    assert any(str(line).startswith("best: head_dim=448: ") for line in lines)


def test_processes_give_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Content and order do not depend on the number of processes."""
    monkeypatch.setattr(sweeps, "FEW_POINTS", 0)
    sweep = make_sweep(AXES)
    alone, two = (list(run_points(sweep, range(12), jobs=jobs)) for jobs in (1, 2))
    assert alone == two
    with pytest.raises(ValueError, match="jobs must be at least 1; got 0"):
        rows_of(sweep, jobs=0)


def test_workers_end_with_a_killed_parent() -> None:
    """Otherwise they would wait for work for ever (and hold the pipe that is read here)."""
    script = (
        "from fa4.sim.sweep import make_sweep, run_points\n"
        "if __name__ == '__main__':\n"
        "    sweep = make_sweep(['clock_ghz=1:1.9:0.0001', 'seqlen=1k'])\n"
        "    for point, row in run_points(sweep, range(9001), jobs=2):\n"
        "        print(point, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "0\n"
        parent.kill()
        parent.communicate(timeout=60)
    assert parent.returncode != 0


def fill(path: Path, sweep: Sweep, points: range) -> None:
    """A file with the rows of some points."""
    file = SweepFile(path, sweep)
    for point, row in run_points(sweep, points, jobs=1):
        file.add(point, row)
    file.close()


def test_a_file_reads_back_what_was_written(tmp_path: Path) -> None:
    """Typed values, floats to the last bit, reasons with commas."""
    path, sweep = tmp_path / "new" / "s.csv", make_sweep(AXES)
    fill(path, sweep, range(12))
    again = SweepFile(path, sweep)
    again.close()
    assert again.rows == rows_of(sweep, jobs=1)
    with path.open(newline="") as lines:
        table = list(csv.DictReader(lines))
    assert [row["point"] for row in table] == [str(i) for i in range(12)]
    assert {row["schema_version"] for row in table} == {"1"}
    assert {row["sweep"] for row in table} == {sweep.digest}


@pytest.mark.parametrize("cut", [0, 1, 7, 60, 250, 900], ids=lambda cut: f"{cut}-bytes-lost")
def test_an_interrupted_sweep_continues(
    cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much of the end is lost, only missing points run, and the file ends up the same."""
    sweep = make_sweep(AXES)
    fill(tmp_path / "whole.csv", sweep, range(12))
    whole = (tmp_path / "whole.csv").read_bytes()
    path = tmp_path / "part.csv"
    fill(path, sweep, range(7))
    part = path.read_bytes()
    path.write_bytes(part[: max(0, len(part) - cut)])
    kept = path.read_bytes().count(b"\n") - 1
    ran: list[dict[str, str]] = []

    def counted(settings: dict[str, str]) -> Row:
        ran.append(settings)
        return evaluate(settings)

    monkeypatch.setattr(sweeps, "evaluate", counted)
    rows, reused = command.collect(sweep, path, {"jobs": 1, "dask": None}, lambda steps: None)
    assert len(rows) == 12
    assert reused == max(0, kept) and len(ran) == 12 - reused
    assert path.read_bytes() == whole


def test_rows_are_on_disk_when_interrupted(tmp_path: Path) -> None:
    """Ctrl-C after five points leaves five whole rows."""
    sweep, path = make_sweep(AXES), tmp_path / "s.csv"
    seen = 0

    def interrupt(steps: int) -> None:
        nonlocal seen
        seen += steps
        assert len(path.read_text().splitlines()) == 1 + seen
        if seen == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        command.collect(sweep, path, {"jobs": 1, "dask": None}, interrupt)
    file = SweepFile(path, sweep)
    file.close()
    assert sorted(file.rows) == [0, 1, 2, 3, 4]


HEADER = ",".join(make_sweep(AXES).columns)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("my notes", "is not the CSV file of a sweep"),
        ("a,b\n1,2\n", "holds another sweep: without schema_version"),
        (HEADER.replace("tile_n", "head_dim") + "\n", "without tile_n and with head_dim"),
        (HEADER.replace("seqlen,tile_n", "tile_n,seqlen") + "\n", "another order"),
        (HEADER + "\n1,0123456789ab,0" + "," * 13 + "\n", "other values, another version of fa4"),
        (HEADER + "\n1,2\n", "line 2 must have 16 values; got 2"),
        (HEADER + f"\n1,{make_sweep(AXES).digest},12" + "," * 13 + "\n", "no point '12'"),
    ],
)
def test_files_of_others_are_refused_and_left_alone(
    content: str, message: str, tmp_path: Path
) -> None:
    """Another definition is an error that names the difference; not a byte changes."""
    path = tmp_path / "s.csv"
    path.write_text(content)
    with pytest.raises(ValueError) as caught:
        SweepFile(path, make_sweep(AXES))
    assert message in str(caught.value) and str(path) in str(caught.value)
    assert path.read_text() == content


def test_the_digest_covers_what_rows_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, version, and the content of machine and length files."""
    machine, lengths = tmp_path / "m.toml", tmp_path / "l.txt"
    machine.write_text('base = "b200"\n[costs]\nsync_cycles = 100.0\n')
    lengths.write_text("100\n")
    sweep = make_sweep([f"machine={machine}", f"lengths={lengths}", "heads=1,2"])
    found = {sweep.digest, make_sweep(AXES).digest, make_sweep(AXES[:2]).digest}
    machine.write_text('base = "b200"\n[costs]\nsync_cycles = 101.0\n')
    found.add(sweep.digest)
    lengths.write_text("200\n")
    found.add(sweep.digest)
    monkeypatch.setattr(sweeps, "model_version", lambda: "another")
    found.add(sweep.digest)
    assert len(found) == 6


def run(*arguments: str) -> typer.testing.Result:
    """`fa4 sweep <arguments>`, run in this process."""
    app = typer.Typer()
    app.command()(command.sweep)
    return typer.testing.CliRunner().invoke(app, arguments)


def test_command(tmp_path: Path) -> None:
    """Best point, gain, reasons, file; a second run takes everything from the file."""
    path = tmp_path / "s.csv"
    arguments = [x for axis in AXES for x in ("--set", axis)] + ["--csv", str(path)]
    first, second = run(*arguments), run(*arguments)
    assert first.exit_code == second.exit_code == 0, first.output
    assert first.stdout.startswith("12 points: 8 predicted, 4 cannot run\n")
    assert "cannot run: seqlen=1024 tile_n=256 kv_stages=2 and 3 more: TMEM plan" in first.stdout
    assert "best: seqlen=2048 tile_n=128" in first.stdout
    assert f"12 taken from {path}" in second.stdout.replace("\n", "")
    assert second.stdout.endswith(first.stdout[-200:])


def test_many_settings_are_listed_not_tabulated() -> None:
    """A table of so many columns would not fit into 80."""
    axes = ("seqlen=1k", "heads=2,4", "head_dim=64", "batch=1", "causal=yes")
    done = run(*(x for axis in axes for x in ("--set", axis)))
    assert "\nseqlen=1024 heads=4 head_dim=64 batch=1 causal=yes: " in done.stdout


def test_command_as_json() -> None:
    """Rows in order, the best one, the schema version."""
    done = run("--set", "kv_stages=2,3", "--set", "seqlen=1k", "--json", "--jobs", "1")
    report = json.loads(done.stdout)
    assert report["schema_version"] == 1 and report["points"] == report["feasible"] == 2
    assert [row["settings"]["kv_stages"] for row in report["rows"]] == ["2", "3"]
    assert report["best"]["tflops"] == max(row["tflops"] for row in report["rows"])
    assert report["csv"] is None


def test_command_when_nothing_can_run() -> None:
    """Not an error: the reasons are the answer."""
    done = run("--set", "tile_n=256", "--set", "seqlen=1k")
    assert done.exit_code == 0
    assert "1 points: 0 predicted, 1 cannot run" in done.stdout and "best" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no points"),
        (("--set", "seqlen=2:1"), "empty range"),
        (
            ("--set", "seqlen=1k", "--jobs", "0", "--csv", "s.csv"),
            "--jobs must be between 1 and 1024",
        ),
        (("--set", "seqlen=1k", "--jobs", "2", "--dask", "x"), "exclude each other"),
        (("--set", "machine=b999", "--csv", "s.csv"), "machine must be a .toml file or one of"),
    ],
)
def test_bad_input_writes_nothing(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ValueError, which `fa4` turns into one line and exit code 2."""
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert isinstance(done.exception, ValueError) and message in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_dask_missing_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the pip command."""
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ImportError, match=r"needs dask\.distributed .*: pip install distributed"):
        rows_of(make_sweep(["seqlen=1k"]), dask="tcp://127.0.0.1:1")


@pytest.fixture
def dask_cluster() -> Iterator[Any]:
    """Two local workers, each a process."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as local:
        yield local


@pytest.mark.filterwarnings("default::ResourceWarning", "default::DeprecationWarning")
def test_dask_gives_the_same_rows(dask_cluster: Any) -> None:
    """Same content, same order, from two workers."""
    sweep = make_sweep(AXES)
    address = dask_cluster.scheduler_address
    assert list(run_points(sweep, range(12), dask=address)) == list(rows_of(sweep).items())


class OtherVersion:
    """A dask client whose worker has another version of fa4, or that has no workers."""

    def __init__(self, versions: dict[str, str]) -> None:
        self.versions = versions

    def run(self, function: object) -> dict[str, str]:
        """What each worker answers."""
        return self.versions


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({}, "has no workers"),
        ({"tcp://a": "0.0.1"}, "tcp://a has another version of fa4: model 0.0.1, here "),
    ],
)
def test_unfit_clusters_are_refused(versions: dict[str, str], message: str) -> None:
    """Before any work is sent."""
    with pytest.raises(ValueError, match=message):
        cluster.check_workers(OtherVersion(versions), "tcp://x")


def test_no_scheduler_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names the address; not a traceback of dask's."""
    pytest.importorskip("distributed")
    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 0.2)
    with pytest.raises(OSError, match="no dask scheduler answers at tcp://127"):
        rows_of(make_sweep(["seqlen=1k"]), dask="tcp://127.0.0.1:9")


def test_a_file_that_takes_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is refused, which reading would never end; a full disk is named."""
    with pytest.raises(ValueError, match="/dev/full must be a regular file"):
        SweepFile(Path("/dev/full"), make_sweep(AXES))
    path = tmp_path / "rows.csv"
    file = SweepFile(path, make_sweep(AXES))
    file._file.close()

    class FullDisk:
        def write(self, line: str) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(file, "_file", FullDisk())
    with pytest.raises(OSError, match=r"No space left on device: '.*rows\.csv'"):
        file.add(0, dict.fromkeys(sweeps.RESULTS, ""))
