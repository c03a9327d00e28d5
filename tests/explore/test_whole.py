"""The page with the whole grid: it is small enough, and nothing in it is missing."""

from __future__ import annotations

import random

import pytest

from fa4.base.role_styles import ROLES
from fa4.explore.controls import CONTROLS
from fa4.explore.packing import pack, unpack
from fa4.explore.page import MOST_BYTES, build_page
from fa4.explore.recording import record_grid
from fa4.explore.verdicts import read_verdicts
from tests.explore.conftest import Small, assert_as_predicted, points

POINTS = 300  # of the grid's tens of thousands, compared with fa4 predict


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_page() -> None:
    recording = record_grid(CONTROLS, lambda: None)
    text = pack(recording, read_verdicts())
    assert len(build_page(text).encode()) < MOST_BYTES
    head, columns = unpack(text)
    whole = Small(CONTROLS, recording, text, head, columns)
    shown = [point for point in points(whole) if point[1] >= 0]
    for point in random.Random(0).sample(shown, POINTS):
        assert_as_predicted(whole, point)
    lengths = len(next(c.choices for c in CONTROLS if c.key == "seqlen"))
    assert len(columns["point_results"]) == lengths * len(columns["shape_steps"])
    assert set(range(len(columns["tflops"]))) == set(columns["point_results"].clip(0).tolist())
    assert {role["name"] for role in head["parts"]["roles"]} == set(ROLES)
    shown = [one for one in head["contexts"] if "reason" not in one]
    for control in (control for control in CONTROLS if control.level == "context"):
        for choice in control.choices:
            steps = [
                columns["shape_steps"][one["first"] : one["first"] + one["shapes"]]
                for one in shown
                if one["choices"][control.key] == choice.key
            ]
            assert any((found >= 0).any() for found in steps), choice.label
