"""The page with the whole grid: it is small enough, and nothing in it is missing."""

from __future__ import annotations

import pytest

from fa4.explore.controls import CONTROLS
from fa4.explore.packing import pack, unpack
from fa4.explore.page import MOST_BYTES, build_page
from fa4.explore.recording import record_grid
from fa4.explore.verdicts import read_verdicts


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_page() -> None:
    text = pack(record_grid(CONTROLS, lambda: None), read_verdicts())
    assert len(build_page(text).encode()) < MOST_BYTES
    head, columns = unpack(text)
    lengths = len(next(c.choices for c in CONTROLS if c.key == "seqlen"))
    assert len(columns["point_results"]) == lengths * len(columns["shape_steps"])
    assert set(range(len(columns["tflops"]))) == set(columns["point_results"].clip(0).tolist())
    shown = [one for one in head["contexts"] if "reason" not in one]
    for control in (control for control in CONTROLS if control.level == "context"):
        for choice in control.choices:
            steps = [
                columns["shape_steps"][one["first"] : one["first"] + one["shapes"]]
                for one in shown
                if one["choices"][control.key] == choice.key
            ]
            assert any((found >= 0).any() for found in steps), choice.label
