"""The programs that judge the Hopper backward kernel on a GPU, without one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cutlass")

import torch

from fa4.compiled.variants import find_tuned_backward
from fa4.hardware import H200
from lab.hardware.guarded.drawing import FIXED, draw_calls, make_tensors
from lab.hardware.warpgroup_backward import random_gradients
from lab.hardware.warpgroup_backward.measure import (
    GradientInputs,
    GradientProblem,
    default_plan,
    exact,
)
from lab.hardware.warpgroup_backward.random_gradients import run
from lab.hardware.warpgroup_forward.random_launches import Drawn
from tests.kernel_double import BackwardDouble


def test_the_grid_is_the_papers() -> None:
    """16k tokens and 2,048 columns of heads; five products of two operations."""
    problems = [GradientProblem(**fields) for fields in default_plan()["problems"]]
    assert len(problems) == 20
    assert {p.batch * p.seqlen for p in problems} == {16384}
    assert {p.heads * p.head_dim for p in problems} == {2048}
    assert problems[0].flops == 5 * 2 * 16384 * 1024 * 2048


@pytest.mark.parametrize("fields", [{"deterministic": True}, {"causal": True}, {"head_dim": 136}])
def test_kernels_are_launched_with_what_they_take(fields: dict[str, Any]) -> None:
    """Each argument in its place: the kernels' double gives the gradients of the call."""
    spec = find_tuned_backward(**{"head_dim": 40, "head_dim_v": 64} | fields, gpu=H200)
    given = GradientInputs(spec, 2, 40, 50, 4, 2, device="cpu")
    out, *wanted, lse = exact(given, torch.float32)
    given.out, given.lse = out.to(given.q.dtype).contiguous(), lse.contiguous()
    given.launch(BackwardDouble(spec))
    for found, right in zip(given.grads, wanted, strict=True):
        torch.testing.assert_close(found.float(), right, rtol=2**-6, atol=0.02)


def test_right_gradients_are_in_their_bands_and_wrong_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dense and packed, by the reference; each gradient off by 5% is seen."""
    small = [one for one in draw_calls(0, 400, 70) if one.differentiates]
    packed = next(one for one in small if one.call.packed and one.call.lengths[0][0] > 8)
    dense = next(one for one in small if not one.call.packed and one.call.lengths[0][0] > 8)
    compare = random_gradients.compare_gradients
    for guarded in (packed, dense):
        one, fixed = guarded.call, guarded.work == FIXED
        assert run(one, fixed, 1, "reference") < 1
        for wrong in range(3):

            def spoiled(tensors, found, *rest, wrong=wrong):
                found = [x * (1.05 if i == wrong else 1) for i, x in enumerate(found)]
                return compare(tensors, tuple(found), *rest)

            monkeypatch.setattr(random_gradients, "compare_gradients", spoiled)
            with pytest.raises(AssertionError, match=f"{('dQ', 'dK', 'dV')[wrong]} is off"):
                run(one, fixed, 1, "reference")
            monkeypatch.setattr(random_gradients, "compare_gradients", compare)


@pytest.mark.parametrize("seed", [1627, 2695, 4967, 6008, 6409, 8192])
def test_few_numbers_have_bands_too(seed: int) -> None:
    """Of 8,000 draws those in which plain gradients are so near by chance that the reference's, as
    right as ever, are further off than twice that."""
    drawn = Drawn(dims=(96, 96), heads=(7, 7), window=(None, 0), lengths=((2, 2), (2, 2)),
                  packed=False, used=False, sink=False, softcap=0.0, dtype="bf16")  # fmt: skip
    assert run(drawn, True, seed, "reference", partial(make_tensors, "fused")) < 0.75
