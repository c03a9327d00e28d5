"""Work tiles of the Hopper backward kernel under a causal mask: each is some CTA's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cutlass")

from fa4.designs.gradients import sections
from fa4.hardware import H200
from fa4.plan.warpgroup_backward import SECTION_ROUNDS
from fa4.sm90.backward import order
from fa4.sm90.backward.spec import WarpgroupBackwardSpec
from fa4.testing import Case, assert_within_budget
from tests.sm100.altered import Edit, put_in_place
from tests.sm100.backward_kernel import build, prepare
from tests.sm100.forward_kernel import make_inputs

# Heads at a time: 3 * 2 SMs over 3 KV tiles = 2 at least, of 5: sections of 3 and 2.
GPU = replace(H200, sm_count=2)
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


@given(st.integers(1, 300), st.integers(1, 200), st.integers(1, 132))
def test_sections_are_of_one_size(heads: int, blocks: int, sms: int) -> None:
    """And none is small: the last one, too, has work for all SMs, or it is the only one."""
    found = sections(np.repeat(np.arange(heads), blocks), blocks, sms)
    sizes = np.bincount(found) // blocks
    assert (np.diff(found) >= 0).all() and sizes.sum() == heads
    assert sizes.max() - sizes.min() <= 1
    assert len(sizes) == 1 or sizes.min() * blocks >= SECTION_ROUNDS * sms


@pytest.mark.parametrize(
    "edit",
    [
        Edit(order, "cutlass.select_(is_longer, width + 1, width)", "width + 1"),
        Edit(order, "first + rest % width", "rest % width"),
    ],
)
def test_a_tile_that_is_left_out_is_seen(edit: Edit, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        put_in_place([edit], tmp_path, patch)
        with pytest.raises((AssertionError, ValueError)):
            check()
