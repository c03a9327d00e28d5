"""Work tiles of the Hopper backward kernel under a causal mask: each is some CTA's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from fa4.hardware import H200
from fa4.sm90.backward import order
from fa4.sm90.backward.spec import WarpgroupBackwardSpec
from fa4.testing import Case, assert_within_budget
from tests.sm100.altered import Edit, put_in_place
from tests.sm100.backward_kernel import build, prepare
from tests.sm100.forward_kernel import make_inputs

# Heads at a time: 2 * 4 SMs // 3 KV tiles = 2, of 5.
GPU = replace(H200, sm_count=4)
CASE = Case(batch=1, seqlen_q=150, seqlen_k=300, heads_k=5, group=1, head_dim=16, head_dim_v=16,
            dtype="bf16", causal=True)  # fmt: skip


def check() -> None:
    """Every gradient is there: what no CTA computes is NaN."""
    spec = WarpgroupBackwardSpec(head_dim=16, head_dim_v=16, causal=True, gpu=GPU)
    inputs = make_inputs(spec, CASE)
    report, outputs = build(spec).launch(inputs, prepare(spec, inputs), collect=True)
    assert not report.findings
    assert_within_budget(inputs, outputs, gradients_alone=True)


def test_every_tile_is_computed() -> None:
    check()


@pytest.mark.parametrize(
    "edit",
    [
        Edit(order, "    width = cutlass.min(width, heads - first)\n", ""),
        Edit(order, "first + rest % width", "rest % width"),
    ],
)
def test_a_tile_that_is_left_out_is_seen(edit: Edit, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        put_in_place([edit], tmp_path, patch)
        with pytest.raises((AssertionError, ValueError)):
            check()
