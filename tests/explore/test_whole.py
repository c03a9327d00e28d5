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
    for control in CONTROLS:
        if control.level != "context":
            continue
        for choice in control.choices:
            found = [one for one in head["contexts"] if one["choices"][control.key] == choice.key]
            shown = [one for one in found if "reason" not in one]
            first, last = ((one["first"], one["first"] + one["shapes"]) for one in
                           (shown[0], shown[-1]))  # fmt: skip
            assert (columns["shape_steps"][first[0] : last[1]] >= 0).any(), choice.label
