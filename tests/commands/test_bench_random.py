"""`fa4 bench --random`: calls within their bounds, the same for a seed; what is said of times."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fa4.commands import bench_random, bench_timing, emit
from fa4.commands.bench import BACKENDS, read_dims, render
from fa4.commands.bench_report import checked_report
from fa4.commands.bench_timing import measure_one
from fa4.config import Problem
from tests.commands.support import refused

DIMS = [read_dims(text) for text in ("80", "192:128")]
PROBLEM = Problem(batch=1, seqlen_q=300, seqlen_k=300, heads_q=4, heads_k=2, head_dim=72)


def test_calls_are_drawn_within_their_bounds() -> None:
    """No power of two is a length; a seed's first calls do not depend on their number."""
    problems = bench_random.draw(300, 5)
    assert bench_random.draw(40, 5) == problems[:40] != bench_random.draw(40, 6)
    for p in problems:
        assert p.head_dim % 8 == 0 and p.head_dim_v % 8 == 0 and p.head_dim <= 256
        assert all(n & (n - 1) and n >= 200 for n in (p.seqlen_q, p.seqlen_k))
        assert bench_random.LEAST_FLOPS <= p.forward_flops <= bench_random.MOST_FLOPS
        assert p.window_size[1] is None or p.seqlen_k >= p.seqlen_q
    assert {p.heads_q // p.heads_k for p in problems} >= {1, 2, 3, 5, 6, 16}
    assert len({p.head_dim for p in problems}) > 25
    assert {(p.head_dim, p.head_dim_v) for p in bench_random.draw(9, 0, "fp16", DIMS)} == {
        (80, 80), (192, 128)
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_calls_of_8_bits(dtype: str) -> None:
    """Head dims that the kernel has; tensors of the type; torch's SDPA says why it has no time."""
    torch = pytest.importorskip("torch")
    problems = bench_random.draw(50, 5, dtype)
    assert all(p.head_dim % 16 == p.head_dim_v % 16 == 0 for p in problems)
    small = replace(PROBLEM, head_dim=64, head_dim_v=32, dtype=dtype)
    q, _, v = bench_timing.make_tensors(small, "cpu")
    assert q.dtype == v.dtype == {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[dtype]
    assert v.shape == (1, 300, 2, 32) and q.float().std() > 0.9
    with pytest.raises(ValueError, match=f"SDPA has no {dtype}"):
        bench_timing.find_backend("cudnn", small)


def row(problem: Problem, ours: float, **others: float) -> dict[str, Any]:
    """As measured, from seconds."""
    return measure_one(
        problem, [], lambda names, p: bench_timing.Measured({"fa4": ours, **others}, {}, {})
    )


def test_the_best_of_the_others_counts(capsys: Any) -> None:
    """Mean, share of slower calls and the worst, of all and of each group."""
    window = replace(PROBLEM, window_size=(64, 0), heads_k=4)
    rows = [row(PROBLEM, 1.0, cudnn=2.0, flash=4.0), row(window, 1.0, cudnn=0.5)]
    found = {one["group"]: one for one in bench_random.summarize(rows)}
    assert found["all"] == {
        "group": "all", "calls": 2, "mean": pytest.approx(1.0), "slower": 1, "worst": 0.5
    }  # fmt: skip
    assert found["window"]["calls"] == found["grouped heads"]["calls"] == 1
    assert found["window"]["worst"] == 0.5 and found["grouped heads"]["mean"] == 2.0
    report = {
        "device": "X",
        "impl": "sm90",
        "dtype": "bf16",
        "pass": "forward pass",
        "timing": "graph",
        "random": {"calls": 2, "seed": 7},
        "rows": rows,
        "figure": None,
    }
    emit(report, False, render)
    shown = capsys.readouterr().out
    assert "2 of 2 random calls, seed 7" in shown and "0.50: 1 x 300 x 300 keys" in shown
    emit(report, True, render)
    again = checked_report(json.loads(capsys.readouterr().out), BACKENDS)
    assert bench_random.summarize(again["rows"]) == bench_random.summarize(rows)


def test_flash_attention_3_is_asked_where_it_is(monkeypatch: Any) -> None:
    """With its own window of -1; without the module nobody asks by default."""
    seen: dict[str, Any] = {}
    module = SimpleNamespace(flash_attn_func=lambda q, k, v, **given: seen.update(given))
    assert bench_random.without_missing(["fa4", "flash-attn-3"], asked=False) == ["fa4"]
    monkeypatch.setitem(sys.modules, bench_timing.FA3_MODULE, module)
    window = replace(PROBLEM, window_size=(64, None))
    bench_timing.find_backend("flash-attn-3", window)(None, None, None)
    assert seen == {"causal": False, "window_size": (64, -1), "deterministic": False}


def test_others_are_not_asked_for_what_they_lack() -> None:
    """torch's SDPA has no window, and its causal mask begins at the first key."""
    with pytest.raises(ValueError, match="no window"):
        bench_timing.find_backend("flash", replace(PROBLEM, window_size=(64, 0)))
    with pytest.raises(ValueError, match="aligns a causal mask"):
        bench_timing.find_backend("flash", replace(PROBLEM, causal=True, seqlen_k=400))


def test_options_that_do_not_belong_together() -> None:
    """Each with one line."""
    assert "--timing must be one of burst, graph; got 'x'" in refused("bench", "--timing", "x")
    assert "a figure is of the grid" in refused("bench", "--random", "3", "--figure", "a.png")


def test_rows_are_kept_as_they_come(monkeypatch: Any, tmp_path: Any) -> None:
    """No call begins after the time is over; what could not be compiled is said, not called."""
    problems = bench_random.draw(3, 1)
    refused_kernel = bench_random.kernel_of(problems[1], "flash-attn-4")
    late = {bench_random.kernel_of(problems[0], "fa4")}
    found_kernels = bench_random.Compiled({refused_kernel: "no such"}, late)
    monkeypatch.setattr(bench_random, "compile_all", lambda *given: found_kernels)
    asked: list[Any] = []

    def timer(names: Any, problem: Problem) -> bench_timing.Measured:
        asked.append(list(names))
        return bench_timing.Measured(dict.fromkeys(names, 1.0), {}, {"fa4": (1980.0, 500.0)})

    names, file = ["fa4", "flash-attn-4"], tmp_path / "rows.jsonl"
    found = SimpleNamespace(device="cuda:0", impl="sm90")
    limits = bench_random.Limits(1000.0, file)
    rows = bench_random.measure_random(problems, names, timer, lambda *x: None, found, limits)
    assert [json.loads(line)["ratio"] for line in file.read_text().splitlines()] == [
        row["ratio"] for row in rows
    ]
    assert asked[0] == ["fa4"] and rows[0]["missing"] == {"flash-attn-4": "no such"}
    assert [row["problem"] for row in rows] == [problems[i].__dict__ for i in (1, 2, 0)]
    assert rows[0]["clock_mhz"] == {"fa4": 1980.0} and rows[0]["power_w"] == {"fa4": 500.0}
    gradients = bench_timing.Pass(backward=True)
    of_gradients = bench_random.measure_random(
        problems, names, timer, lambda *x: None, found, limits, gradients
    )
    assert [row["tflops"]["fa4"] for row in of_gradients] == [
        problems[i].backward_flops / 1e12 for i in (1, 2, 0)
    ]
    limits = bench_random.Limits(-1.0)
    assert bench_random.measure_random(problems, names, timer, lambda *x: None, found, limits) == []


@pytest.mark.parametrize("backward", [False, True])
def test_what_is_timed_of_a_call(backward: bool) -> None:
    """The forward pass without what gradients need; of gradients, nothing but themselves."""
    torch = pytest.importorskip("torch")
    made: list[bool] = []

    def attention(q: Any, k: Any, v: Any) -> Any:
        made.append(torch.is_grad_enabled())
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    tensors = tuple(torch.randn(2, 5, 4) for _ in range(3))
    call = bench_timing.call_of(attention, tensors, bench_timing.Pass(backward=backward))
    first, second = call(), call()
    assert made == ([True] if backward else [False, False])
    if backward:
        assert [x.shape for x in first] == [x.shape for x in tensors]
        assert all(
            torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(first, second, strict=True)
        )


def test_a_graph_keeps_what_it_was_captured_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of a call live as long as its graph may be run."""
    torch = pytest.importorskip("torch")
    replayed: list[bool] = []

    class Held:
        def __call__(self) -> None:
            pass

    held = Held()
    alive = weakref.ref(held)
    graph = SimpleNamespace(replay=lambda: replayed.append(alive() is not None))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda made, stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    replay = bench_timing.graph_of(held, 2)
    del held
    gc.collect()
    replay()
    assert replayed == [True, True]


def test_a_graph_is_timed_behind_a_run_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host launches it while the GPU is at work, so that its launch is no part of the time."""
    seen: list[str] = []

    def burst(call: Any, calls: int) -> float:
        seen.append(f"timed {calls}")
        call()
        return 0.5

    monkeypatch.setattr(bench_timing, "time_burst", burst)
    assert bench_timing.time_graph(lambda: seen.append("run")) == 0.5
    assert seen == ["run", "timed 1", "run"]
