"""`fa4 predict`, `machines`, `validate` and `calibrate` from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fa4 import cli
from fa4.commands import SCHEMA_VERSION
from fa4.figures import accuracy
from fa4.hardware import GPUS
from fa4.sim.fields import FIELDS
from fa4.sim.options import build
from lab.hardware.warpgroup_forward.repeated import sustained_calls

COMMANDS = ("predict", "machines", "validate", "calibrate")
DATA = Path(__file__).parent / "data"
B200_FILE = str(accuracy.B200_FILE)
SMALL = ("--seqlen", "1k", "--heads", "4")


@pytest.fixture(autouse=True)
def with_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """These commands alone, so that a fault in another one does not show here."""
    monkeypatch.setattr(cli, "COMMANDS", COMMANDS)
    monkeypatch.setenv("COLUMNS", "80")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `fa4 <arguments>`, run in this process."""
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err  # type: ignore[return-value]


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON report of a command that succeeds."""
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["schema_version"] == SCHEMA_VERSION
    return report


def test_predict_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The report holds what the model says, in plain types."""
    report = run_json(capsys, "predict", *SMALL, "--causal")
    expected = build({"seqlen": 1024, "heads": 4, "causal": True}).predict()
    assert report["seconds"] == expected.seconds
    assert report["tflops"] == expected.tflops
    assert report["unit_busy"] == dict(expected.unit_busy)
    assert report["problem"]["causal"] is True
    assert report["machine"]["name"] == "B200" and report["machine"]["clock_hz"] == 1.85e9
    assert report["bound"]["by"] in {*report["unit_busy"], "hbm"}
    assert 0 < report["bound"]["share"] <= 1
    assert [kernel["name"] for kernel in report["kernels"]] == ["forward"]
    assert report["accuracy"]["measured"] is True
    assert report["settings"] == {"seqlen": "1k", "heads": "4", "causal": "True"}


def test_predict_screen(capsys: pytest.CaptureFixture[str]) -> None:
    """One screen with figures, units, stalls, machine, clock and the model's error."""
    code, out, _ = run(capsys, "predict", "--pass", "bwd", "--deterministic")
    assert code == 0
    for text in (
        "backward, batch 1, 32768 queries",
        "B200, 148 SMs at 1.850 GHz",
        "TFLOP/s",
        "% of peak",
        "limited by   semaphore_cycles: 10% more of it makes the call",
        "busiest",
        "postprocess",
        "model error",
        "tensor ",
        "mma ",
        "hbm ",
        "critical chain of",
        "best single change: ",
    ):
        assert text in out
    assert len(out.splitlines()) <= 68 and max(map(len, out.splitlines())) <= 80
    code, short, _ = run(capsys, "predict", "--pass", "bwd", "--deterministic", "--no-why")
    assert code == 0 and len(short.splitlines()) <= 42 and "limited by" not in short


def test_predict_why(capsys: pytest.CaptureFixture[str]) -> None:
    """All of the why is in the report; it is left out where asked, compared or too much to do."""
    report = run_json(capsys, "predict", *SMALL)
    why = report["why"]
    assert report["bottleneck"] == why["limit"] and "busiest" in report["busiest"]
    assert why["limited_by"] == why["elasticities"][0]["name"] and why["limited_by"] in why["limit"]
    assert why["chain"]["cycles"] == pytest.approx(sum(x["cycles"] for x in why["chain"]["rows"]))
    assert {found["setting"] for found in why["neighbours"]} >= {"tile_n", "cta_group", "q_tiles"}
    for arguments in (("--no-why",), ("--compare", "tau=0"), ("--batch", "0"), ("--batch", "8k")):
        report = run_json(capsys, "predict", *SMALL, *arguments)
        assert "why" not in report and "why" not in report.get("a", {})
        assert report.get("a", report)["bottleneck"] is None
    code, out, _ = run(capsys, "predict", *SMALL, "--compare", "tau=0", "--why")
    assert code == 0 and "limited by" in out


def test_every_field_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    """The help names all of them."""
    code, out, _ = run(capsys, "predict", "--help")
    assert code == 0
    for name in FIELDS:
        assert f"--{name.replace('_', '-')}" in out


def test_exact_agrees_with_the_shortcut(capsys: pytest.CaptureFixture[str]) -> None:
    """Every step simulated, or long loops extended: the same within a thousandth."""
    short = run_json(capsys, "predict", *SMALL)
    exact = run_json(capsys, "predict", *SMALL, "--exact")
    assert exact["exact"] and not short["exact"]
    assert exact["seconds"] == pytest.approx(short["seconds"], rel=1e-3)


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    """A beside B, changed in several settings, with the ratio of their times."""
    what_if = ("--compare", "tau=0 ping-pong=no", "--compare", "gpu.sm_count=100")
    report = run_json(capsys, "predict", *SMALL, *what_if)
    assert report["changes"] == {"tau": "0", "ping_pong": "no"}
    assert report["b"]["pipeline"]["ping_pong"] is False
    assert report["b"]["machine"]["sm_count"] == 148
    assert report["speedup"] == report["a"]["seconds"] / report["b"]["seconds"]
    (second,) = report["further"]
    assert second["changes"] == {"gpu.sm_count": "100"}
    assert second["b"]["machine"]["sm_count"] == 100 and second["b"]["pipeline"]["ping_pong"]
    assert second["speedup"] == report["a"]["seconds"] / second["b"]["seconds"]
    code, out, _ = run(capsys, "predict", *SMALL, *what_if)
    assert code == 0 and out.count("times as fast as A") == 2
    assert "A with tau=0, ping_pong=no;" in out and "A with gpu.sm_count=100;" in out
    code, out, _ = run(capsys, "predict", *SMALL, "--compare", "clock_ghz=2")
    assert code == 0
    assert "times as fast as A" in out and "B / A" in out


def test_set_changes_a_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """--set takes the machine's figures too."""
    report = run_json(capsys, "predict", *SMALL, "--set", "gpu.sm_count=10")
    assert report["machine"]["sm_count"] == 10
    assert report["accuracy"]["applies"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("predict", "--machine", "b100"), "b200, b300, gb300, rubin, h100, h200; got 'b100'"),
        (("predict", "--machine", "no.toml"), "No such file or directory: no.toml"),
        (("predict", "--set", "tile=3"), "unknown field 'tile'; allowed: machine"),
        (("predict", "--set", "tile"), "expected NAME=VALUE"),
        (("predict", "--compare", "x=1"), "unknown field 'x'"),
        (("predict", "tau=0"), "unexpected extra argument"),
        (("predict", "--compare", "tau=0", "cta_group=1"), "unexpected extra argument"),
        (("predict", "--compare", ""), "--compare: expected NAME=VALUE"),
        (("predict", "--set", "seqlen=8k", "--seqlen", "4k"), "seqlen is set twice"),
        (("predict", "--set", "seqlen=8k", "--set", "seqlen=8k"), "--set sets seqlen twice"),
        (("predict", "--compare", "tau=1 tau=2"), "--compare sets tau twice"),
        (("predict", "--seqlen", "4k", "--seqlen", "4k"), "--seqlen is given twice"),
        (("predict", "--ping-pong", "--no-ping-pong"), "--ping-pong is given twice"),
        (("predict", "--seqlen", "8q"), "seqlen must be a whole number"),
        (("predict", "--dtype", "fp64"), "dtype must be one of bf16"),
        (("predict", "--tile-n", "100"), "tile_n"),
        (("predict", "--head-dim", "512"), "512"),
        (("predict", "--pass", "bwd", "--tau", "3"), "tau does not apply"),
        (("machines", "b100"), "got 'b100'"),
        (("machines", "b200", "--toml", "b200"), "give neither NAME nor --json"),
        (("validate", "--measurements", "no.csv"), "No such file or directory: no.csv"),
        (("validate", "--measurements", B200_FILE, "--max-mape", "-1"), "--max-mape must be"),
        (("validate", "--measurements", B200_FILE, "--software", "x"), "no row is for gpu B200"),
        (("calibrate", "--measurements", B200_FILE, "--constants", "x"), "got 'x'"),
        (("calibrate", "--measurements", B200_FILE, "--output", "x.txt"), "--output must be"),
        (("calibrate", "--measurements", B200_FILE, "--seed", "-1"), "seed must be at least 0"),
    ],
    ids=lambda x: " ".join(x)[:40] if isinstance(x, tuple) else None,
)
def test_bad_input(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and one line."""
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("fa4: error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[gpu]\nname = 'x'\n", "gpu.arch is missing (or name a base)"),
        ("base = 'b200'\n[gpu]\nhbm_bytes_per_s = -1.0\n", "hbm_bytes_per_s must be positive"),
    ],
)
def test_bad_machine_files(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same for a machine of one's own."""
    path = tmp_path / "my.toml"
    path.write_text(text)
    code, out, err = run(capsys, "predict", "--machine", str(path))
    assert (code, out, err) == (2, "", err)
    assert f"{path}: {message}" in err and err.count("\n") == 1


def test_bad_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong values and columns: file, line and column in one line."""
    text = Path(B200_FILE).read_text()
    path = tmp_path / "measured.csv"
    path.write_text(text.replace("1601", "fast"))
    for command in ("validate", "calibrate"):
        code, _, err = run(capsys, command, "--measurements", str(path))
        assert (code, err) == (
            2,
            f"fa4: error: {path} line 4, column tflops: must be a positive number; got 'fast'\n",
        )
    path.write_text(text.replace("seqlen", "length"))
    code, _, err = run(capsys, "validate", "--measurements", str(path))
    assert code == 2 and f"{path} line 1: missing column seqlen" in err
    path.write_text("\n".join(text.splitlines()[:1]))
    assert run(capsys, "validate", "--measurements", str(path))[0] == 2


def test_machines(capsys: pytest.CaptureFixture[str]) -> None:
    """All of them, one with its sources, and a file to start from that predict takes."""
    report = run_json(capsys, "machines")
    assert [row["name"].lower() for row in report["machines"]] == list(GPUS)
    one = run_json(capsys, "machines", "b200")
    assert one["figures"]["sm_count"]["value"] == 148
    assert all(row["source"] for table in ("figures", "costs") for row in one[table].values())
    assert one["costs"]["vector_efficiency"]["fitted"] is True
    start = one["costs"]["cta_start_cycles"]
    assert start["least"] < start["value"] < start["most"] and not start["fitted"]
    assert "585.0 to 1312.0" in " ".join(run(capsys, "machines", "b200")[1].split())
    assert run(capsys, "machines")[0] == run(capsys, "machines", "h200")[0] == 0


def test_own_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """machines --toml > file; predict --machine file."""
    code, out, _ = run(capsys, "machines", "--toml", "B200")
    assert code == 0
    path = tmp_path / "my.toml"
    path.write_text(out.replace("# exp_per_clk = 16 ", "exp_per_clk = 32 "))
    report = run_json(capsys, "predict", *SMALL, "--machine", str(path))
    expected = build({"seqlen": 1024, "heads": 4, "gpu.exp_per_clk": 32}).predict()
    assert report["seconds"] == expected.seconds
    assert report["machine"]["name"] == "B200 (my)"
    assert report["accuracy"]["measured"] is False


def test_validate(capsys: pytest.CaptureFixture[str]) -> None:
    """Each point with its error; limits decide the exit code."""
    report = run_json(capsys, "validate", "--measurements", B200_FILE)
    points = report["points"]
    assert len(points) == 15 and points[0]["line"] == 2
    errors = [point["predicted_tflops"] / point["measured_tflops"] - 1 for point in points]
    assert [point["error"] for point in points] == pytest.approx(errors)
    assert report["mape"] == pytest.approx(sum(map(abs, errors)) / 15)
    assert abs(report["worst"]["error"]) == pytest.approx(max(map(abs, errors)))
    arguments = ("validate", "--measurements", B200_FILE)
    assert run(capsys, *arguments, "--max-mape", "4", "--max-error", "10")[0] == 0
    code, out, err = run(capsys, *arguments, "--max-mape", "0.1")
    assert (code, err) == (1, "") and "is more than 0.1 %" in out
    code, out, _ = run(capsys, *arguments, "--max-error", "0.1")
    assert code == 1 and "worst error" in out


def test_validate_other_software(capsys: pytest.CaptureFixture[str]) -> None:
    """The Hopper kernel beside cuDNN's on an H200; skipped rows are listed."""
    report = run_json(
        capsys, "validate", "--measurements", str(DATA / "h200_cudnn.csv"), "--software", "torch"
    )
    assert report["machine"] == "H200" and len(report["points"]) == 20
    assert report["skipped"] == []


def test_calibrate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A small fit: the report, and a machine file that gives the fitted error again."""
    output, few = tmp_path / "my.toml", tmp_path / "few.csv"
    lines = Path(B200_FILE).read_text().splitlines()
    few.write_text("\n".join([lines[0], *(line for line in lines if ",1024,32," in line)]))
    constants = "vector_efficiency, math_latency_cycles"
    arguments = ("calibrate", "--measurements", str(few), "--constants", constants)
    report = run_json(capsys, *arguments, "--output", str(output))
    assert [row["name"] for row in report["constants"]] == [
        "vector_efficiency",
        "math_latency_cycles",
    ]
    assert all(row["least"] <= row["value"] <= row["most"] for row in report["constants"])
    assert len(report["left_out"]["points"]) == 3
    again = run_json(capsys, "validate", "--measurements", str(few), "--machine", str(output))
    assert again["mape"] == pytest.approx(report["after"]["mape"])
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "") and "left out" in out


def test_measurements_without_a_pause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`fa4 validate --sustained`; refused in one line where nothing is known."""
    call = next(sustained_calls())
    header = "gpu,software,pass,head_dim,causal,seqlen,batch,heads,dtype,tflops,tile_m,tile_n\n"
    path = tmp_path / "mine.csv"
    measured = f"fwd,128,0,4096,4,16,bf16,{call.sustained}"
    path.write_text(f"{header}H200,fa4 sm_90a,{measured},192,80\n")
    burst, sustained = (
        run_json(capsys, "validate", "--measurements", str(path), *options)["mape"]
        for options in ((), ("--sustained",))
    )
    assert burst > 0.1 and sustained < 0.06
    path.write_text(f"{header}GB300,FA4,{measured},,\n")
    code, out, err = run(capsys, "validate", "--measurements", str(path), "--sustained")
    assert (code, out) == (2, "") and err.count("\n") == 1 and "power of GB300" in err
