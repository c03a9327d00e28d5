"""`fa4 figures`: its numbers, its files, and what it says of bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fa4 import cli
from fa4.commands.figures import HIDDEN
from fa4.figures.accuracy import collect_measured, is_modelled, read_sweep
from fa4.figures.catalogue import FIGURES, choose
from fa4.figures.ideas import collect_ablation, collect_roofline
from fa4.figures.kernels import collect_smem
from fa4.figures.numerics import collect_budget, collect_exp2
from fa4.hardware import GPUS
from fa4.sim.ablate import ablate
from fa4.sim.predict import REAL_RESCALE_RATE
from fa4.sim.validation import MEASURED


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `fa4 figures <arguments>`."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["figures", *arguments])
    printed = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, printed.out, printed.err


# Numbers


def test_the_waterfall_is_whole() -> None:
    """Each step begins where the one before ends; its top is what `fa4 ablate` starts from."""
    rows = collect_ablation()["rows"]
    assert [row[1] for row in rows[1:]] == [row[2] for row in rows[:-1]]
    done = ablate({"seqlen": "8k", "causal": "yes", "rescale_rate": REAL_RESCALE_RATE})
    assert rows[-1][2] == pytest.approx(done.base.tflops)
    alone = {outcome.idea.name: outcome for outcome in done.outcomes if outcome.prediction}
    last = alone[rows[-1][0]]  # the only step that removes one idea from the whole kernel
    assert last.prediction is not None
    assert rows[-1][1] == pytest.approx(last.prediction.tflops)
    assert {row[0] for row in rows[1:]} < {outcome.idea.name for outcome in done.outcomes}


def test_the_roofline_is_what_the_tables_say() -> None:
    """By hand: 4 x 128^3 operations, 128^2 exponentials; at each machine's rates and clock."""
    rows = {
        (machine, unit): (cycles, ns) for machine, unit, cycles, ns in collect_roofline()["rows"]
    }
    for name in ("b200", "b300"):
        gpu = GPUS[name]
        cycles, ns = rows[gpu.name, "tensor"]
        assert cycles == 4 * 128**3 / gpu.mma_flops_per_clk
        assert ns == pytest.approx(1e9 * cycles / gpu.clock_hz)
        assert rows[gpu.name, "mufu"][0] == 128**2 / gpu.exp_per_clk
    assert rows["H200", "tensor"][0] == 4 * 128**3 / GPUS["h200"].mma_flops_per_clk


def test_predictions_stand_beside_measurements() -> None:
    """All published points, and every point of the sweep that the simulator can know."""
    data = collect_measured()
    groups = [row[0] for row in data["rows"]]
    assert (groups.count("b200 fwd"), groups.count("b200 bwd")) == (8, 7)
    known = [row for row in read_sweep() if is_modelled(row)]
    swept = [row for row in data["rows"] if row[0] == "h200 fwd"]
    assert len(swept) == len(known) > 500
    assert [row[2] for row in swept] == [float(row["tflops"]) for row in known]
    quoted = [MEASURED["b200", direction] for direction in ("fwd", "bwd")]
    mean = sum(x.points * x.mape for x in quoted) / sum(x.points for x in quoted)
    assert data["mean_error"]["B200"] == pytest.approx(mean, abs=0.001)
    assert data["mean_error"]["H200"] < 0.1
    assert not is_modelled(known[0] | {"spread": "2.0"})
    assert not is_modelled(known[0] | {"frame_bytes": "96"})
    assert not is_modelled(known[0] | {"scheduler": "fold"})


def test_a_pair_reads_half_of_the_second_operands() -> None:
    """KiB by hand: operands of five products of 128 x 128 x 128 in bf16, B halved in a pair."""
    rows = {(group, name): kib for group, name, kib in collect_smem()["rows"]}
    assert (rows[1, "products"], rows[2, "products"]) == (8 * 32, 8 * 32 - 4 * 16)
    assert (rows[1, "stores from a peer"], rows[2, "stores from a peer"]) == (0, 16)


def test_degrees_lose_to_bf16_and_fp16() -> None:
    """Monotone; 3 is below half a step of both, 2 only of bf16, 1 of neither."""
    data = collect_exp2()
    worst = [row[2] for row in data["rows"]]
    assert worst == sorted(worst, reverse=True)
    steps = data["fp16_half_step"], data["bf16_half_step"]
    assert worst[2] < steps[0] < worst[1] < steps[1] < worst[0]
    for curve, most in zip(data["error"], worst, strict=True):
        assert max(curve) <= most * 1.001


def test_wrong_kernels_are_over_budget_and_right_ones_are_not() -> None:
    """Degree 3 never, degree 1 always, degree 2 where fp16 can tell."""
    over: dict[Any, list[bool]] = {}
    for dtype, _, degree, budget, error in collect_budget()["rows"]:
        over.setdefault((dtype, degree), []).append(error > budget)
    assert all(over["bf16", 1]) and all(over["fp16", 1])
    assert all(over["fp16", 2]) and not any(over["bf16", 2])
    assert not any(over["bf16", 3]) and not any(over["fp16", 3])


# The command


def test_list(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every figure with a line; nothing is drawn or written."""
    code, out, _ = call(capsys, "--list", "--out", str(tmp_path / "x"))
    assert code == 0 and not list(tmp_path.iterdir())
    assert all(name in out for name in FIGURES)
    _, out, _ = call(capsys, "smem", "--list", "--json")
    (entry,) = json.loads(out)["figures"]
    assert entry["command"] == "fa4 figures smem" and entry["sources"]


def test_files_and_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Both formats; the same SVG twice; JSON has the table; the caption the source and command."""
    pytest.importorskip("matplotlib")
    for kind, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        code, _, _ = call(capsys, "smem", "exp2", "smem", "--out", str(tmp_path), "--format", kind)
        assert code == 0
        assert all((tmp_path / f"{name}.{kind}").read_bytes().startswith(start)
                   for name in ("smem", "exp2"))  # fmt: skip
    assert len(list(tmp_path.iterdir())) == 4
    before = (tmp_path / "smem.svg").read_text()
    code, out, _ = call(capsys, "smem", "--out", str(tmp_path), "--format", "svg", "--json")
    assert (tmp_path / "smem.svg").read_text() == before
    (entry,) = json.loads(out)["figures"]
    assert len(entry["data"]["columns"]) == len(entry["data"]["rows"][0])
    assert "Made by: fa4 figures smem" in before and "Sources: " in before
    assert f"{entry['data']['title']}" in before


def test_a_timeline_is_drawn_but_not_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its objects are no JSON; its unit shares are."""
    pytest.importorskip("matplotlib")
    code, out, _ = call(capsys, "timeline", "--out", str(tmp_path), "--json")
    (entry,) = json.loads(out)["figures"]
    assert code == 0 and not set(HIDDEN) & set(entry["data"])
    assert {"tensor", "tma"} <= {row[0] for row in entry["data"]["rows"]}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nothing",), "unknown figure 'nothing'; there are ablation, roofline"),
        (("smem", "Smem"), "unknown figure 'Smem'"),
        (("smem", "--format", "pdf"), "--format must be one of png, svg; got 'pdf'"),
        (("smem", "--out", "file/x"), "Not a directory: "),
        (("smem", "--out", "file"), "Not a directory: "),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Before anything is computed, with nothing written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    code, out, error = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert error.startswith("fa4: error: ") and said in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_in_the_place_of_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Is refused before the first figure is written."""
    (tmp_path / "smem.png").mkdir()
    code, _, error = call(capsys, "exp2", "smem", "--out", str(tmp_path))
    assert code == 2 and "Is a directory" in error
    assert [path.name for path in tmp_path.iterdir()] == ["smem.png"]


def test_without_matplotlib(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that says how to get it."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, error = call(capsys, "exp2", "--out", str(tmp_path))
    assert (code, out) == (2, "") and error.count("\n") == 1
    assert "pip install matplotlib" in error and not list(tmp_path.iterdir())


def test_without_the_model_the_other_figures_are_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line for the one that is missing, exit code 2, and no file for it."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("fa4.demo.minilm.PACKAGE", "no_such_package")
    code, out, error = call(capsys, "rescales", "smem", "--out", str(tmp_path))
    assert code == 2 and error.count("\n") == 1
    assert "figure rescales: the example model needs no-such-package" in error
    assert "smem.png" in out
    assert [path.name for path in tmp_path.iterdir()] == ["smem.png"]


def test_choose_keeps_the_order_asked_for() -> None:
    """Each once; all without a name."""
    assert [entry.name for entry in choose(["smem", "exp2", "smem"])] == ["smem", "exp2"]
    assert [entry.name for entry in choose([])] == list(FIGURES)


def test_the_rate_of_a_real_model_is_the_measured_one() -> None:
    """At tau 8, of the figure's text: what pages and ablations call a real model's share."""
    try:
        data = FIGURES["rescales"].collect()
    except ImportError as error:
        pytest.skip(str(error))
    rates = dict(data["rows"])
    assert rates[8.0] == pytest.approx(REAL_RESCALE_RATE, abs=0.005)
