"""The programs that judge the Hopper backward kernel on a GPU, without one."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from hardware.warpgroup_backward import random_launches
from hardware.warpgroup_backward.measure import GradientProblem, default_plan
from hardware.warpgroup_backward.random_launches import draw_gradients, run


def test_the_grid_is_the_papers() -> None:
    """16k tokens and 2,048 columns of heads; five products of two operations."""
    problems = [GradientProblem(**fields) for fields in default_plan()["problems"]]
    assert len(problems) == 20
    assert {p.batch * p.seqlen for p in problems} == {16384}
    assert {p.heads * p.head_dim for p in problems} == {2048}
    assert problems[0].flops == 5 * 2 * 16384 * 1024 * 2048


def test_right_gradients_are_in_their_bands_and_wrong_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dense and packed, by the reference; each gradient off by 5% is seen."""
    drawn = draw_gradients(0, 40)
    small = [item for item in drawn if max(max(pair) for pair in item[0].lengths) < 70]
    packed = next(item for item in small if item[0].packed and item[0].lengths[0][0] > 8)
    dense = next(item for item in small if not item[0].packed)
    compare = random_launches.compare_gradients
    for one, fixed in (packed, dense):
        assert run(one, fixed, 1, "reference") < 1
        for wrong in range(3):

            def spoiled(tensors, found, *rest, wrong=wrong):
                found = [x * (1.05 if i == wrong else 1) for i, x in enumerate(found)]
                return compare(tensors, tuple(found), *rest)

            monkeypatch.setattr(random_launches, "compare_gradients", spoiled)
            with pytest.raises(AssertionError, match=f"{('dQ', 'dK', 'dV')[wrong]} is off"):
                run(one, fixed, 1, "reference")
            monkeypatch.setattr(random_launches, "compare_gradients", compare)
