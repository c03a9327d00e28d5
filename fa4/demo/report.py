"""The demo's report as plain data."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from threadpoolctl import threadpool_limits

from fa4.demo.inputs import LayerSource
from fa4.demo.kernel import run_kernel
from fa4.demo.measure import DTYPE, measure, prepare
from fa4.demo.rescales import RescaleCounts
from fa4.demo.speed import predict_headline, predict_request


def build_report(
    source: LayerSource, causal: bool, progress: Callable[[str], None], *, kernel: bool = True
) -> dict[str, Any]:
    """Measure every layer of a source; `progress` gets a line after each.

    Keys: input, dtype, causal, config (of the last layer), within_budget, layers (one dict each,
    see `LayerResult.as_dict`), rescale_rate (see `RescaleCounts.as_dict`), over all layers, and
    prediction: the simulated B200 time of the last layer and of the paper's headline shape, and
    kernel: the compiled kernel on one head of the last layer (see `run_kernel`); None without it.
    """
    rescales = RescaleCounts()
    results = []
    config: dict[str, Any] = {}
    speed: dict[str, Any] | None = None
    started = time.perf_counter()
    # The oracle's products are small: a second BLAS thread gains nothing on two idle cores and
    # costs a factor of seven on cores that are busy with something else.
    with threadpool_limits(1, user_api="blas"):
        for number, layer in enumerate(source.layers, 1):
            request = prepare(layer, causal)
            results.append(measure(layer, request, causal))
            rescales.count(request)
            config = asdict(request.forward_config)
            speed = predict_request(request, causal, results[-1].counters.rescale_rate)
            seconds = time.perf_counter() - started
            progress(f"{layer.name}: {number} of {source.num_layers} layers, {seconds:.1f} s")
        rate = results[-1].counters.rescale_rate
        compiled = run_kernel(layer, request, causal, rate, progress) if kernel else None
    return {
        "input": source.about,
        "dtype": DTYPE,
        "causal": causal,
        "config": config,
        "within_budget": all(result.within for result in results),
        "layers": [result.as_dict() for result in results],
        "rescale_rate": rescales.as_dict(),
        "prediction": {"layer": speed, "headline": predict_headline()},
        "kernel": compiled,
    }
