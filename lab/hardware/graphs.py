"""Calls timed in CUDA graphs by programs of this folder, as `fa4 bench --timing graph` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fa4.commands.bench_timing import BURST_SECONDS, MOST_CALLS, graph_of, time_burst, time_graph


def graph_timer(call: Callable[[], Any]) -> Callable[[], float]:
    """Seconds of a call, whenever asked: the mean of as many as a burst has, captured now.

    On a stream of its own, as none is captured on the default one.
    """
    import torch

    with torch.cuda.stream(torch.cuda.Stream()):
        call()
        calls = max(1, min(MOST_CALLS, round(BURST_SECONDS / time_burst(call, 2))))
        replay = graph_of(call, calls)
    return lambda: time_graph(replay) / calls
