"""A recording of a small grid, made once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from fa4.base.role_styles import UNITS
from fa4.commands.predict import describe
from fa4.explore.controls import Control, combinations, controls, settings_of, shape_keys
from fa4.explore.packing import pack, unpack
from fa4.explore.recording import BOUNDS, SHARES, Recording, contexts, record_grid
from fa4.explore.verdicts import read_verdicts

# Fewer points than --quick: one call, and choices that are refused.
FEW = {
    "machine": ("b200", "h200"), "head_dim": ("128",), "seqlen": ("1k",), "q_tiles": ("2",),
    "kernel": ("blackwell", "hopper"), "kv_stages": ("fit",), "tile_n": ("128", "256"),
    "exp2": ("tuned",),
    "rescale_rate": ("0", "1"), "scheduler": ("static", "lpt"),
}  # fmt: skip


@dataclass(frozen=True)
class Small:
    """A recording, its packed text, and what the page reads of it."""

    controls: tuple[Control, ...]
    recording: Recording
    text: str
    head: Mapping[str, Any]
    columns: Mapping[str, np.ndarray]


@pytest.fixture(scope="session")
def small() -> Small:
    few = tuple(c.only(*FEW[c.key]) if c.key in FEW else c for c in controls())
    recording = record_grid(few, lambda: None)
    text = pack(recording, read_verdicts())
    return Small(few, recording, text, *unpack(text))


Point = tuple[dict[str, str], int, int]  # settings, number of its result, number of its step


def points(small: Small) -> Iterator[Point]:
    """Every point that the page can look up, in the order of its numbers."""
    lengths = next(c.choices for c in small.controls if c.key == "seqlen")
    for context, entry in zip(contexts(small.controls), small.head["contexts"], strict=True):
        keys = shape_keys(context["pass"].key, context["kernel"].key)
        for at, shape in enumerate(combinations(small.controls, keys)):
            for number, length in enumerate(lengths):
                settings = settings_of({**context, **shape, "seqlen": length})
                if "reason" in entry:
                    yield settings, -1 - entry["reason"], -1 - entry["reason"]
                    continue
                point = entry["first"] + at
                found = small.columns["point_results"][point * len(lengths) + number]
                yield settings, int(found), int(small.columns["shape_steps"][point])


def assert_as_predicted(small: Small, point: Point) -> None:
    """The page's numbers of a point are those that `fa4 predict --json` prints."""
    settings, result, step = point
    report, columns = describe(settings), small.columns
    assert columns["tflops"][result] == pytest.approx(report["tflops"], rel=1e-6), settings
    assert columns["kernel_cycles"][result] == pytest.approx(report["cycles"], rel=1e-6)
    shares = {"imbalance_share": report["imbalance"], "bound_share": report["bound"]["share"]}
    for name, value in shares.items():
        assert columns[name][result] / SHARES == pytest.approx(value, abs=1 / SHARES), name
    assert BOUNDS[columns["bound_by"][result]] == report["bound"]["by"]
    for unit, row in zip(UNITS, columns["busy_share"], strict=True):
        busy = report["unit_busy"].get(unit, 0.0)
        assert row[result] / SHARES == pytest.approx(busy, abs=1 / SHARES), unit
    assert small.head["steps"][step]["clock_hz"] == report["machine"]["clock_hz"]
