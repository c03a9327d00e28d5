"""`fa4 run`, `fa4 bench`, and what finds a GPU for them."""

from __future__ import annotations

import json
import re

import ml_dtypes
import numpy as np
import pytest
import torch

from fa4 import cli
from fa4.call import choose
from fa4.commands import bench, bench_timing, judge
from fa4.commands import run as run_module
from fa4.config import Problem
from fa4.emulator import EmulationFailed
from tests.kernel_double import BackwardDouble, stand_in


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `fa4 <arguments>`."""
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(choose.EMULATE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_run_on_the_emulator(capsys, tmp_path) -> None:
    """The kernel on a file's arrays: within the budget, no findings, results in a file."""
    rng = np.random.default_rng(0)
    shapes = {"q": (40, 2, 64), "k": (150, 1, 64), "v": (150, 1, 64)}
    np.savez(tmp_path / "in.npz", **{n: rng.standard_normal(s) for n, s in shapes.items()})
    out = tmp_path / "out.npz"
    code, text, _ = call(
        capsys, "run", str(tmp_path / "in.npz"), "--causal", "--impl", "emulator", "--json",
        "--out", str(out),
    )  # fmt: skip
    report = json.loads(text)
    assert code == 0 and report["within_budget"] and report["findings"] == []
    assert report["impl"] == "emulator" and report["tflops"] is None
    assert report["prediction"]["machine"] == "B200" and report["seconds"] > 0
    assert report["checked"] == {"rows": 40, "heads": 2, "of_rows": 40, "of_heads": 2}
    with np.load(out) as arrays:
        assert arrays["out"].shape == (1, 40, 2, 64) and arrays["lse"].shape == (1, 2, 40)


def test_run_by_the_reference(capsys, tmp_path) -> None:
    """impl auto without a GPU; for people; .safetensors keep bf16."""
    from safetensors.numpy import load_file

    out = tmp_path / "out.safetensors"
    code, text, err = call(
        capsys, "run", "--random", "1,2,70,32", "--keys", "90", "--heads-k", "1",
        "--head-dim-v", "16", "--window", "20,none", "--out", str(out),
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert text.startswith("reference: batch 1, 70 queries x 90 keys, 2 heads on 1 KV heads, d 32")
    assert "O    error" in text and "LSE  error" in text and "predicted on a B200" in text
    arrays = load_file(out)
    assert arrays["out"].dtype == ml_dtypes.bfloat16 and arrays["out"].shape == (1, 70, 2, 16)


def test_run_finds_a_wrong_result(capsys, monkeypatch) -> None:
    """Exit code 1 where the error is over the budget, in whichever head."""

    def wrong(*arrays, **options):
        result = honest(*arrays, **options)
        result.out[0, -1, 1, 3] += 0.5
        return result

    from fa4.commands import job

    honest = job.flash_attn_func
    monkeypatch.setattr(job, "flash_attn_func", wrong)
    code, text, _ = call(capsys, "run", "--random", "1,2,50,16")
    assert code == 1 and "OVER" in text
    assert call(capsys, "run", "--random", "1,2,50,16", "--no-check")[0] == 0


def test_run_reports_findings(capsys, monkeypatch) -> None:
    """What the emulator's checks found is shown, with exit code 1 and no result."""
    from fa4.emulator import KernelFinding
    from fa4.emulator.execute import Report

    finding = KernelFinding(kind="race", message="two writes", line=7, cta=0, warp=3)

    def failing(*_, **__):
        raise EmulationFailed(Report(findings=[finding]))

    monkeypatch.setattr("fa4.backends.emulated.run", failing)
    monkeypatch.setattr("fa4.compiled.build.build", lambda *_: None)
    code, text, _ = call(capsys, "run", "--random", "1,1,8,64", "--impl", "emulator")
    assert code == 1 and "two writes" in text and "emulator: 1 findings" in text


def test_large_problems_are_checked_in_part(monkeypatch) -> None:
    """The last rows of the first heads; an error there is seen."""
    monkeypatch.setattr(judge, "MOST_SCORES", 20 * 90)
    monkeypatch.setattr(judge, "MOST_HEADS", 2)
    import fa4

    arrays = run_module.draw("1,4,70,16", "90", 2, 0, "fp16", 0)
    options = {"causal": True, "softcap": 0.0, "softmax_scale": None, "window_size": (None, None)}
    result = fa4.flash_attn_func(*arrays, **options, impl="reference", return_lse=True)
    report = judge.compare(arrays, options, result, print)
    assert report["checked"] == {"rows": 20, "heads": 2, "of_rows": 70, "of_heads": 4}
    assert report["within_budget"]
    result.lse[0, 1, 60] += 0.1
    assert not judge.compare(arrays, options, result, print)["within_budget"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either FILE or --random B,H,S,D"),
        (["--random", "1,2,3"], "--random must be B,H,S,D, four whole numbers"),
        (["--random", "1,2,3,x"], "got '1,2,3,x'"),
        (["--random", "1,0,3,8"], "at least 1; got '1,0,3,8'"),
        (["--random", "1,2,3,64", "--impl", "sm100"], "--impl sm100 needs a B200 or B300: torch"),
        (["--random", "1,2,3,60", "--impl", "emulator"], "multiple of 8 up to 128"),
        (["--random", "1,2,3,64", "--impl", "sm90"], "--impl sm90 needs an H100 or H200: torch"),
        (["--random", "1,2,3,60", "--impl", "emulator_sm90"], "multiple of 8 up to 256"),
        (["--random", "1,2,3,64", "--impl", "cuda"], "impl must be one of auto, sm100, sm90, emul"),
        (["--random", "1,2,3,64", "--out", "x.txt"], "--out must end in .npz or .safetensors"),
        (["--random", "1,2,3,64", "--window", "3"], "must be LEFT,RIGHT"),
        (["missing.npz"], "No such file"),
        (["x.txt"], "FILE must end in .npz or .safetensors; got 'x.txt'"),
    ],
)
def test_run_refuses_bad_input(arguments, message, capsys) -> None:
    code, out, err = call(capsys, "run", *arguments)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


def test_layers_of_a_file(capsys, tmp_path) -> None:
    arrays = {f"{layer}.{part}": np.ones((3, 1, 8)) for layer in "ab" for part in "qkv"}
    np.savez(tmp_path / "in.npz", **arrays)
    assert "--layer must be one of a, b; got ''" in call(capsys, "run", str(tmp_path / "in.npz"))[2]
    assert call(capsys, "run", str(tmp_path / "in.npz"), "--layer", "b")[0] == 0


def test_run_with_gradients(capsys, tmp_path) -> None:
    """Errors of the gradients too, and they are in the file; for people and for machines."""
    out = tmp_path / "out.npz"
    arguments = ("run", "--random", "2,4,30,16", "--heads-k", "2", "--backward", "--impl")
    code, text, _ = call(capsys, *arguments, "reference", "--out", str(out), "--json")
    report = json.loads(text)
    assert code == 0 and report["backward"]["within_budget"] and report["tflops"] is None
    assert report["backward"]["checks"].keys() == {"dq", "dk", "dv"}
    assert report["backward"]["checked"] == {"kv_heads": 4, "of_kv_heads": 4}
    assert report["backward"]["prediction"]["seconds"] > report["prediction"]["seconds"]
    with np.load(out) as arrays:
        assert arrays["dq"].shape == (2, 30, 4, 16) and arrays["dv"].shape == (2, 30, 2, 16)
    code, text, _ = call(capsys, *arguments, "reference")
    assert code == 0 and "backward:" in text and "the worst of 4 of 4 KV heads" in text
    code, text, _ = call(capsys, *arguments, "oracle", "--json")
    assert code == 0 and "checks" not in json.loads(text)["backward"]


def test_run_with_gradients_of_the_kernel(capsys, monkeypatch) -> None:
    """The emulator is given the kernels; what it finds in them, and a wrong result, are told."""
    built = stand_in(monkeypatch)
    monkeypatch.setattr("fa4.compiled.build.build", lambda spec, arch: built.append(spec))
    arguments = ("run", "--random", "1,2,20,64", "--causal", "--impl", "emulator", "--backward")
    code, text, _ = call(capsys, *arguments, "--json")
    report = json.loads(text)["backward"]
    assert code == 0 and report["within_budget"] and report["findings"] == []
    assert report["compile_seconds"] >= 0 and report["tflops"] is None
    right = BackwardDouble._write

    def write(self, given, name, value) -> None:
        right(self, given, name, value if name != "dk" else value * value.dtype.type(1.5))

    monkeypatch.setattr(BackwardDouble, "_write", write)
    code, text, _ = call(capsys, *arguments)
    assert code == 1 and re.search(r"dK .*OVER", text) and not re.search(r"d[QV] .*OVER", text)


def test_too_many_scores_are_not_checked(capsys, monkeypatch) -> None:
    """Of gradients no part of the rows can be looked at alone; it is said."""
    monkeypatch.setattr(judge, "MOST_SCORES", 100)
    code, text, _ = call(
        capsys, "run", "--random", "1,1,11,8", "--backward", "--impl", "reference"
    )  # fmt: skip
    assert code == 0 and "too many scores for the float64 oracle: not checked" in text


def test_bench_needs_a_gpu(capsys) -> None:
    """Politely: one line, exit code 2; wrong options are told first."""
    code, out, err = call(capsys, "bench")
    assert (code, out) == (2, "")
    assert (
        err == "fa4: error: fa4 bench needs an H100, H200, B200 or B300: torch finds no CUDA GPU\n"
    )
    for arguments, message in (
        (("--masks", "some"), "--masks must be of full, causal; got 'some'"),
        (
            ("--backends", "fa4,x"),
            "--backends must be of fa4, cudnn, flash, flash-attn-4, flash-attn-3; got 'x'",
        ),
        (("--seqlens", "64k"), "--seqlens must be 1 to 32k; got 65536"),
        (("--head-dims", "1:2:3"), "--head-dims must be d or d:dv, with commas; got '1:2:3'"),
        (("--dtype", "fp8"), "--dtype must be one of bf16, fp16, e4m3, e5m2; got 'fp8'"),
        (("--backward", "--dtype", "e4m3"), "--backward needs --dtype bf16 or fp16; got 'e4m3'"),
        (("--figure", "x.pdf"), "--figure must end in .png or .svg; got 'x.pdf'"),
        (("--from", __file__), "--from needs a file that fa4 bench --json wrote; got"),
        (("--deterministic",), "--deterministic is an option of --backward; got it without"),
    ):
        code, _, err = call(capsys, "bench", *arguments)
        assert code == 2 and message in err


def test_bench_grid() -> None:
    """The paper's: 32k tokens, 2048 / dv heads."""
    grid = list(bench.make_grid(*bench.GRIDS["sm100"], "full,causal", "bf16"))
    assert len(grid) == 3 * 2 * 6
    assert all(p.batch * p.seqlen_q == 32 * 1024 for p in grid)
    assert {(p.head_dim, p.head_dim_v, p.heads_q) for p in grid} == {
        (64, 64, 32), (128, 128, 16), (192, 128, 16)
    }  # fmt: skip
    assert len(list(bench.make_grid(*bench.GRIDS["sm90"], "full,causal", "bf16"))) == 5 * 2 * 7


def test_bench_measures_and_compares(capsys, tmp_path) -> None:
    """TFLOP/s from seconds, the ratio of ours to each other, and gaps with their reasons."""
    problem = Problem(seqlen_q=1024, seqlen_k=1024, heads_q=16, heads_k=16, head_dim=128)
    seconds = {"fa4": 1e-3, "cudnn": 2e-3}

    def timer(names, problem):
        missing = {name: f"{name} is not here" for name in names if name not in seconds}
        return bench_timing.Measured({n: seconds[n] for n in names if n in seconds}, missing)

    rows = bench.measure([problem], ["fa4", "cudnn", "flash"], timer)
    assert rows[0]["tflops"]["fa4"] == pytest.approx(4 * 1024**2 * 16 * 128 / 1e-3 / 1e12)
    assert rows[0]["ratio"] == {"cudnn": pytest.approx(2.0)}
    assert rows[0]["missing"] == {"flash": "flash is not here"}
    assert rows[0]["predicted_tflops"] > 0
    from fa4.commands import emit

    backward = bench_timing.Pass(backward=True, deterministic=True)
    (row,) = bench.measure([problem], ["fa4"], timer, timed=backward)
    assert row["tflops"]["fa4"] == pytest.approx(2.5 * rows[0]["tflops"]["fa4"])
    assert backward.label == "backward pass, deterministic"
    report = {"device": "X", "impl": "sm90", "dtype": "bf16", "pass": "forward pass", "rows": rows}
    report["figure"] = None
    emit(report, False, bench.render)
    shown = capsys.readouterr().out
    assert "fa4 / cudnn: 2.000 in the geometric mean" in shown
    assert "2.00" in shown and "flash: flash is not here" in shown
    emit(report, True, bench.render)
    text = capsys.readouterr().out
    assert json.loads(text)["rows"][0]["ratio"]["cudnn"] == pytest.approx(2.0)
    saved, figure = tmp_path / "bench.json", tmp_path / "bench.svg"
    saved.write_text(text)
    code, again, err = call(capsys, "bench", "--from", str(saved), "--figure", str(figure))
    assert (code, err) == (0, "") and f"wrote {figure}" in again and "2.00" in again
    drawn = figure.read_text()
    assert drawn.startswith("<?xml") and "SDPA, cuDNN" in drawn and "d 128, no mask" in drawn


def test_bench_backends_agree() -> None:
    """torch's SDPA is called in FlashAttention's layout."""
    import fa4

    q, k, v = (torch.randn(1, 20, 2, 16) for _ in range(3))
    problem = Problem(
        batch=1, seqlen_q=20, seqlen_k=20, heads_q=2, heads_k=2, head_dim=16, causal=True
    )
    out = bench_timing.find_backend("cudnn", problem)(q, k, v).transpose(1, 2)
    expected = fa4.flash_attn_func(q, k, v, causal=True, impl="reference")
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_bench_gradients_agree(monkeypatch) -> None:
    """What is timed is the backward pass alone, with the order of sums that was asked for."""
    import fa4

    seen: list[bool] = []
    real = fa4.flash_attn_func

    def ours(*given, deterministic, impl, **options):
        seen.append(deterministic)
        return real(*given, **options, impl="reference")

    monkeypatch.setattr(fa4, "flash_attn_func", ours)
    tensors = [torch.randn(1, 20, 2, 16) for _ in range(3)]
    problem = Problem(
        batch=1, seqlen_q=20, seqlen_k=20, heads_q=2, heads_k=2, head_dim=16, causal=True
    )
    grads = []
    for name, deterministic in (("fa4", True), ("cudnn", False)):
        torch.manual_seed(0)
        timed = bench_timing.Pass(backward=True, deterministic=deterministic)
        function = bench_timing.find_backend(name, problem, timed)

        def in_our_layout(q, k, v, function=function, ours=name == "fa4"):
            out = function(q, k, v)
            return out if ours else out.transpose(1, 2).contiguous()

        run = bench_timing.gradient_of(in_our_layout, tensors)
        grads.append(run())
        assert all(torch.equal(x, y) for x, y in zip(run(), grads[-1], strict=True))
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
    assert seen == [True]
    with pytest.raises(ValueError, match="SDPA has no argument for the order of sums"):
        timed = bench_timing.Pass(backward=True, deterministic=True)
        bench_timing.find_backend("flash", problem, timed)


@pytest.mark.parametrize(
    ("capabilities", "found"),
    [([(12, 0), (10, 3)], "cuda:1"), ([(10, 0)], "cuda:0"), ([(9, 0)], "cuda:0"), ([(12, 0)], "")],
)
def test_which_gpu_is_found(capabilities, found, monkeypatch) -> None:
    """The first that a kernel runs on; of one implementation, the first of its own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: capabilities[number])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "GPU")
    device, impl, why = choose.find_gpu()
    assert device == found and bool(why) == (not found) and bool(impl) == bool(found)
    if not found:
        assert "kernels need compute capability 9.0, 10.0 or 10.3; found GPU (12.0)" in why
    hopper = (9, 0) in capabilities
    assert impl == ("sm90" if hopper else "sm100" if found else "")
    elsewhere = choose.find_gpu("sm100" if hopper else "sm90")
    assert elsewhere.device == "" and elsewhere.why.startswith("the sm")
