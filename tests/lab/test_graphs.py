"""Programs that time calls in CUDA graphs, without a GPU: what torch would be asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from fa4.commands import bench_timing
from fa4.config import Problem
from lab.hardware import graphs
from lab.hardware.warpgroup_forward import choices, splits

torch = pytest.importorskip("torch")
SIDE, BURST = "a stream of its own", 4e-4


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What is asked of the GPU, in order, with the stream on which it is; a burst takes 0.4 ms."""
    seen: list[tuple[str, Any]] = []
    now: list[str | None] = [None]

    @contextmanager
    def on_stream(stream: str) -> Iterator[None]:
        before, now[0] = now[0], stream
        yield
        now[0] = before

    def captured(_graph: Any, stream: Any) -> Any:
        if stream is None:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        seen.append(("captured", stream))
        return nullcontext()

    def burst(call: Any, calls: int) -> float:
        call()
        seen.append(("timed", calls))
        return BURST

    graph = SimpleNamespace(replay=lambda: seen.append(("replayed", now[0])))
    for name, fake in {
        "CUDAGraph": lambda: graph, "graph": captured, "synchronize": lambda: None,
        "current_stream": lambda: now[0], "Stream": lambda: SIDE, "stream": on_stream,
        "empty_cache": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    for module in (bench_timing, graphs):
        monkeypatch.setattr(module, "time_burst", burst)
    return seen


def test_a_call_is_captured_on_a_stream_of_its_own(asked: list[tuple[str, Any]]) -> None:
    """As many calls as a burst has; each time is the replay's by their number."""
    timer = graphs.graph_timer(lambda: None)
    assert ("captured", SIDE) in asked and ("timed", 2) in asked
    del asked[:]
    assert timer() == BURST / 5  # of 2 ms
    assert asked == [("replayed", None), ("replayed", None), ("timed", 1)]


def test_choices_and_peers_are_timed(
    asked: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow call's choices and peers all have a time; who refuses says why."""

    def backend(name: str, problem: Problem, **_: Any) -> Any:
        if name == "cudnn":
            raise ValueError("cudnn has no window")
        return lambda *tensors: None

    monkeypatch.setattr(choices, "find_backend", backend)
    monkeypatch.setattr(choices, "make_tensors", lambda problem, device: (1, 2, 3))
    problem = Problem(batch=1, seqlen_q=300, seqlen_k=300, heads_q=2, heads_k=2, head_dim=64)
    found = choices.alternatives(problem, 2)
    result = choices.result_of(problem, found, ("flash-attn-4", "cudnn"))
    assert [row["us"] for row in result["choices"]] == [80.0, 80.0]
    assert result["peers"] == {"flash-attn-4": 80.0}
    assert result["missing"] == {"cudnn": "cudnn has no window"}


def test_every_number_of_parts_is_timed(
    asked: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of divided keys."""
    monkeypatch.setattr("fa4.flash_attn_func", lambda *tensors, **given: None)
    monkeypatch.setattr(splits, "make_tensors", lambda problem, device: (1, 2, 3))
    problem = Problem(batch=1, seqlen_q=1, seqlen_k=4096, heads_q=2, heads_k=2, head_dim=64)
    assert splits.times_by_parts(problem) == {str(n): 80.0 for n in (0, *splits.PARTS)}
