"""The calls whose predicted TFLOP/s the pages quote, page by page, as their programs ask for them.

`lab/pages/throughput_tables.py` lists them all on docs/throughput.md; the tests hold each page to
its list and each list to its page.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from fa4.designs.ideas import FORWARD_IDEAS
from fa4.hardware import B200
from fa4.sim.ablate import OFF_RESCALE_RATE
from fa4.sim.options import SimulationRequest, build
from fa4.sim.predict import Prediction

Settings = Mapping[str, Any]
ONE_CTA: Settings = {"cta_group": 1}
GROUPED: Settings = {"heads_q": 32, "heads_k": 8, "head_dim": 128, "causal": True}
SHOWN = {"how-to": 4, "notebook": 3, "hopper": 4}  # of the best choices that a page prints


@dataclass(frozen=True)
class Quote:
    """A page and a call that it quotes the predicted throughput of."""

    page: str
    settings: tuple[tuple[str, Any], ...]

    @property
    def request(self) -> SimulationRequest:
        """The call. Raises ValueError where it cannot run."""
        return build(dict(self.settings))

    @property
    def prediction(self) -> Prediction:
        """What is quoted of it."""
        return _predict(self.settings)


@cache
def _predict(settings: tuple[tuple[str, Any], ...]) -> Prediction:
    return build(dict(settings)).predict()


def quote(page: str, settings: Settings) -> Quote:
    """A quote; settings in any order."""
    return Quote(page, tuple(sorted(settings.items())))


def fitting(page: str, calls: Iterator[Settings], most: int) -> list[Quote]:
    """The fastest of some calls, without those that cannot run."""
    found = []
    for settings in calls:
        one = quote(page, settings)
        try:
            found.append((one.prediction.tflops, one))
        except ValueError:
            continue
    return [one for _, one in sorted(found, key=lambda pair: -pair[0])[:most]]


def choices(shape: Settings, **axes: tuple[Any, ...]) -> Iterator[Settings]:
    """A shape with every combination of some settings."""
    for values in itertools.product(*axes.values()):
        yield {**shape, **dict(zip(axes, values, strict=True))}


def of_ladder() -> Iterator[Quote]:
    """Chapters 3, 4, 7, 8, 9 and 10."""
    page = "docs/ladder/03-rescaling.md"
    yield quote(page, {**ONE_CTA, "rescale_rate": 0.08})
    yield quote(page, {**ONE_CTA, "rescale_rate": 1.0, "tau": 0})
    page = "docs/ladder/04-exp2.md"
    yield quote(page, {**ONE_CTA, "exp2_frequency": 0})
    residue = build(ONE_CTA).pipeline.numerics.exp2.residue  # type: ignore[union-attr]
    for frequency in (32, 16, 10, 8, 6, 4):
        yield quote(page, {**ONE_CTA, "exp2_frequency": frequency, "exp2_residue": residue})
    page = "docs/ladder/07-tensor-memory.md"
    yield quote(page, ONE_CTA)
    pipeline = build(ONE_CTA).pipeline
    without = [idea for idea in FORWARD_IDEAS if idea.used(pipeline)]
    for idea in without:
        rate = {"rescale_rate": OFF_RESCALE_RATE} if "tau" in idea.settings else {}
        yield from fitting(page, iter([{**ONE_CTA, **idea.settings, **rate}]), 1)
    page = "docs/ladder/08-backward.md"
    backward = {"pass": "bwd", "seqlen": 8192, "batch": 4}
    for settings in (ONE_CTA, {}, {"deterministic": True}):
        yield quote(page, {**backward, **settings})
    page = "docs/ladder/09-schedulers.md"
    for name in ("static", "naive", "lpt", "clc"):
        yield quote(page, {**ONE_CTA, "seqlen": 8192, "causal": True, "scheduler": name})
    page = "docs/ladder/10-balance.md"
    for machine in ("h100", "b200", "b300"):
        yield quote(page, {"machine": machine})
    yield from (quote(page, settings) for settings in of_next_machines())


def of_next_machines() -> Iterator[Settings]:
    """B200 with one figure changed after the other, as chapter 10 does."""
    changes: dict[str, Any] = {"exp2_frequency": 0}
    for figures in (
        {"gpu.mma_flops_per_clk": 2 * B200.mma_flops_per_clk},
        {"gpu.exp_per_clk": 4 * B200.exp_per_clk},
        {"gpu.smem_bytes_per_clk": 2 * B200.smem_bytes_per_clk},
        {
            "gpu.fma_lanes_per_clk": 2 * B200.fma_lanes_per_clk,
            "costs.alu_lanes_per_clk": 128,
            "costs.issue_per_clk": 8,
        },
    ):
        changes |= figures
        yield dict(changes)


def of_tiles() -> Iterator[Quote]:
    """The how-to and the notebook on tiles."""
    page, shape = "docs/how-to/tiles.md", {**GROUPED, "seqlen": "4k", "batch": 2}
    yield quote(page, shape)
    axes = {"tile_n": (64, 128, 192), "kv_stages": (2, 3, 6), "cta_group": (1, 2)}
    yield from fitting(page, choices(shape, **axes), SHOWN["how-to"])
    page, axes = "docs/notebooks/tiles.md", axes | {"kv_stages": (2, 3, 4)}
    for seqlen in (1024, 4096, 16384):
        shape = {**GROUPED, "batch": 4, "seqlen": seqlen, "machine": "b200"}
        yield quote(page, shape)
        yield from fitting(page, choices(shape, **axes), SHOWN["notebook"])
    shape = {**GROUPED, "batch": 4, "seqlen": 4096, "machine": "h200"}
    axes = {"tile_m": (64, 128, 192), "tile_n": (64, 128, 176)}
    yield from fitting(page, choices(shape, **axes), SHOWN["hopper"])


@cache
def quotes() -> tuple[Quote, ...]:
    """All of them, in the order of the pages."""
    readme = {**ONE_CTA, "machine": "b200", "seqlen": "32k"}
    found = [
        *(quote("README.md", readme | x) for x in ({}, {"ping_pong": False}, {"q_tiles": 1})),
        quote("docs/simulator.md", {}),
        *of_ladder(),
        *of_tiles(),
    ]
    return tuple(found)
