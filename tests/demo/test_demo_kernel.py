"""The demo's compiled kernel: what it reports, what makes it wrong, what it leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import fa4.backends.emulator
from fa4 import cli
from fa4.commands import demo as demo_command
from fa4.compiled.support import NotSupported
from fa4.demo.inputs import Layer
from fa4.demo.kernel import MOST_ROWS, run_kernel
from fa4.demo.measure import prepare
from fa4.emulator import EmulationFailed, Report
from fa4.emulator.errors import KernelFinding


def draw_layer(rows: int, dim: int, heads: int = 2) -> Layer:
    """A layer of normal numbers, one sequence."""
    rng = np.random.default_rng(7)
    q, k, v = rng.standard_normal((3, 1, rows, heads, dim), dtype=np.float32)
    return Layer("layer0", "here", q, k, v)


@pytest.fixture
def plain_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the emulator: results that are all zero, and no report."""

    def zeros(arguments: Any, **options: Any) -> tuple[Any, Any, list[Any]]:
        out = np.zeros(arguments.out_shape, arguments.q.dtype)
        return out, np.zeros(arguments.lse_shape, np.float32), []

    monkeypatch.setattr(fa4.backends.emulator, "run", zeros)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A head dim that is padded: the whole way, from the command to the report and the lines."""
    layer = draw_layer(150, 24)
    np.savez(tmp_path / "x.npz", q=layer.q, k=layer.k, v=layer.v)
    arguments = ["--input", str(tmp_path / "x.npz"), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", *arguments])
    captured = capsys.readouterr()
    assert not stop.value.code
    assert "emulating under schedule adversarial" in captured.err
    assert "head dim 24 (padded to 32): ok" in captured.out
    assert "schedule: fifo 0, random 0, adversarial 0" in captured.out
    kernel = json.loads((tmp_path / "out/report.json").read_text("utf-8"))["kernel"]
    assert (kernel["problem"], kernel["ok"], kernel["rows"], kernel["keys"]) == (
        None, True, 150, 150,
    )  # fmt: skip
    for check in kernel["checks"].values():
        assert 0 < check["error"] <= check["budget"]
    assert {row["schedule"] for row in kernel["schedules"]} == {"fifo", "random", "adversarial"}
    used = kernel["resources"]
    assert 0 < used["smem_bytes"] <= used["smem_bytes_limit"]
    assert 0 < used["tmem_columns_used"] <= used["tmem_columns"] <= used["tmem_columns_limit"]
    assert used["registers"].keys() >= {"softmax0", "correction", "mma", "load", "epilogue"}
    assert set(used["registers"].values()) == set(used["setmaxnreg"])
    assert kernel["prediction"]["microseconds"] > 0 and kernel["prediction"]["head_dim"] == 24
    backward = kernel["backward"]
    assert backward["ok"] and backward["same_bits"] and backward["problem"] is None
    assert backward["checks"].keys() == {"dq", "dk", "dv"}
    assert [row["findings"] for row in backward["schedules"]] == [[], []]


def run(layer: Layer, causal: bool = False) -> tuple[dict[str, Any], list[str]]:
    """The kernel's report, and what was said on the way."""
    said: list[str] = []
    return run_kernel(layer, prepare(layer, causal), causal, 0.0, said.append), said


def test_wrong_results_and_long_inputs(
    plain_front: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Zeros are over the budget, which is exit code 1; of a long sequence one chunk is taken."""
    layer = draw_layer(MOST_ROWS + 88, 24)
    np.savez(tmp_path / "x.npz", q=layer.q, k=layer.k, v=layer.v)
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", "--input", str(tmp_path / "x.npz"), "--out", str(tmp_path), "--json"])
    kernel = json.loads(capsys.readouterr().out)["kernel"]
    assert stop.value.code == 1 and not kernel["ok"]
    assert not kernel["checks"]["out"]["within_budget"]
    assert (kernel["rows"], kernel["keys"]) == (MOST_ROWS, MOST_ROWS)


def test_findings_make_it_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A race under one schedule; the other schedules still run."""
    real = fa4.backends.emulator.run

    def racy(arguments: Any, **options: Any) -> Any:
        if options["schedule"] == "random":
            raise EmulationFailed(Report(findings=[KernelFinding(kind="race", message="planted")]))
        return real(arguments, **options)

    monkeypatch.setattr(fa4.backends.emulator, "run", racy)
    kernel, _ = run(draw_layer(150, 24))
    assert [len(row["findings"]) for row in kernel["schedules"]] == [0, 1, 0]
    assert not kernel["ok"] and kernel["checks"]["out"]["within_budget"]


WRONG_GRADIENTS = {
    "over the budget": (2.0, 2.0, "dV error"),
    "other bits": (1.0, 1.0078125, "DIFFERENT BITS"),
}


@pytest.mark.parametrize("kind", WRONG_GRADIENTS)
def test_wrong_gradients(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the backward kernels too: an error, or bits that differ between schedules."""
    real = fa4.backends.emulator.run_backward
    first, other, message = WRONG_GRADIENTS[kind]

    def wrong(*given: Any, schedule: str, **options: Any) -> Any:
        grads, reports = real(*given, schedule=schedule, **options)
        factor = first if schedule == "fifo" else other
        return grads._replace(dv=(grads.dv * factor).astype(grads.dv.dtype)), reports

    monkeypatch.setattr(fa4.backends.emulator, "run_backward", wrong)
    kernel, _ = run(draw_layer(20, 24))
    assert not kernel["ok"] and not kernel["backward"]["ok"]
    assert kernel["backward"]["same_bits"] == (first == other)
    assert kernel["backward"]["checks"]["dv"]["within_budget"] == (first == 1.0)
    assert message in "\n".join(demo_command.render_kernel(kernel))


def test_gradients_that_the_kernels_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward kernel is shown all the same."""

    def refuse(call: Any) -> None:
        raise NotSupported("config", "not these")

    monkeypatch.setattr("fa4.backends.kernel_backward.check_gradient", refuse)
    kernel, _ = run(draw_layer(20, 24))
    assert kernel["ok"] and "left out: not these" in kernel["backward"]["problem"]
    assert not any("Backward" in line for line in demo_command.render_kernel(kernel))


def test_what_the_kernel_refuses_is_left_out() -> None:
    """One sentence with the reason, and nothing is compiled."""
    kernel, said = run(draw_layer(20, 20))
    assert list(kernel) == ["problem"] and not said
    assert "left out" in kernel["problem"] and "multiple of 8" in kernel["problem"]
