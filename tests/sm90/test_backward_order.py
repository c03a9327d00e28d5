"""Work tiles of the Hopper backward kernel under a mask: each is some CTA's, with its queries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cutlass")

from fa4.config import Problem
from fa4.designs.gradients import last_heads, narrow_kernels
from fa4.emulator.isa import bulk_copies
from fa4.hardware import H200
from fa4.plan.warpgroup_backward import LAST_ROUNDS, WarpgroupBackwardPipeline
from fa4.sm90.backward import order
from fa4.sm90.backward.spec import WarpgroupBackwardSpec
from fa4.testing import Case, assert_within_budget
from tests.sm100.altered import Edit, put_in_place
from tests.sm100.backward_kernel import build, prepare
from tests.sm100.forward_kernel import make_inputs

# Of 5 KV heads, with 3 KV tiles each and four SMs, the longest tiles of the last two begin first.
GPU = replace(H200, sm_count=4)
CASE = Case(batch=1, seqlen_q=150, seqlen_k=300, heads_k=5, group=2, head_dim=16, head_dim_v=16,
            dtype="bf16", causal=True)  # fmt: skip


def check(case: Case = CASE, **features: bool) -> None:
    """Every gradient is there: what no CTA computes is NaN."""
    spec = WarpgroupBackwardSpec(head_dim=16, head_dim_v=16, gpu=GPU, **features)
    inputs = make_inputs(spec, case)
    report, outputs = build(spec).launch(inputs, prepare(spec, inputs), collect=True)
    assert not report.findings
    assert_within_budget(inputs, outputs, gradients_alone=True)


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_tile_is_computed(deterministic: bool) -> None:
    check(causal=True, deterministic=deterministic)


def test_every_tile_is_computed_of_heads_by_themselves() -> None:
    check(replace(CASE, group=1), causal=True)


def test_every_tile_in_a_window_is_computed() -> None:
    windows = replace(CASE, causal=False, window_size=(90, 40))
    check(windows, window_left=True, window_right=True)


def count_loads(case: Case, places: int) -> float:
    """How often a part of dQ comes to a memory of so many places, by who adds to it when.

    The one that was used least recently leaves, as in L2. 1 if none comes twice.
    """
    spec = WarpgroupBackwardSpec(head_dim=16, head_dim_v=16, gpu=GPU, causal=True)
    inputs = make_inputs(spec, case)
    kernel, space, added = build(spec), prepare(spec, inputs), []
    sides = bulk_copies._store_sides

    def add(warp: Any, start: int, *where: int) -> Any:
        added.append(start)
        return sides(warp, start, *where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk_copies, "_store_sides", add)
        kernel.launch(inputs, space, resident_clusters=GPU.sm_count)
    there: dict[int, None] = {}
    loads = 0
    for part in added:
        loads += part not in there
        there.pop(part, None)
        there[part] = None
        if len(there) > places:
            del there[next(iter(there))]
    return loads / len(set(added))


@pytest.mark.parametrize("group", [3, 4])
def test_ctas_that_begin_together_add_to_the_same_queries(group: int, tmp_path: Path) -> None:
    """Where heads share keys, dQ stays in L2 until all KV tiles have added to it.

    Four KV tiles of eight, six, four and two query tiles, of two parts each; places for six parts.
    """
    case = replace(CASE, seqlen_q=512, seqlen_k=512, heads_k=1, group=group)
    assert count_loads(case, 6) < 1.1
    one_by_one = Edit(order, "return spec.hides_first_rows and not", "return False and not")
    with pytest.MonkeyPatch.context() as patch:
        put_in_place([one_by_one], tmp_path, patch)
        assert count_loads(case, 6) > 1.8


@given(st.integers(1, 40), st.integers(1, 3000), st.sampled_from([1, 2, 6]), st.integers(1, 132))
def test_the_longest_tiles_of_the_last_heads_begin_first(
    heads: int, keys: int, group: int, sms: int
) -> None:
    """And before them, tiles of a head lie side by side."""
    problem = Problem(batch=1, seqlen_q=keys, seqlen_k=keys, heads_q=heads * group, heads_k=heads,
                      head_dim=64, head_dim_v=64, causal=True)  # fmt: skip
    pipeline = WarpgroupBackwardPipeline(head_dim=64, head_dim_v=64, causal=True)
    gpu = replace(H200, sm_count=sms)
    (kernel,) = narrow_kernels(problem, pipeline, gpu, None).mains
    blocks = -(-keys // pipeline.tile_n)
    # Where heads that share keys are divided over CTAs, each part is as a head of its own.
    parts = group // kernel.tiles.group
    heads, group = heads * parts, group // parts
    last = last_heads(heads, blocks, group, sms)
    assert last == heads or last * blocks >= LAST_ROUNDS[group > 1] * sms > (last - 1) * blocks
    found = np.stack([kernel.tiles.head, kernel.tiles.block], axis=1)
    wanted = [(h, b) for h in range(heads - last) for b in range(blocks)]
    wanted += [(h, b) for b in range(blocks) for h in range(heads - last, heads)]
    assert found.tolist() == [list(one) for one in wanted]


@pytest.mark.parametrize(
    "edit",
    [
        Edit(order, "first + rest % width", "rest % width"),
        Edit(order, "rest < 0, block, rest // width", "rest < 0, block, rest // (width + 1)"),
        Edit(order, "tile.q_stop - 1, row_tile", "tile.q_stop - 2, row_tile"),
        Edit(order, "member + 1 == tile.group", "member + 2 == tile.group"),
        Edit(order, "ended, following, row_tile", "ended, row_tile, row_tile"),
        Edit(order, "row_tile - 1, row_tile + 1", "row_tile + 1, row_tile + 1"),
        Edit(order, "cutlass.select_(ended, Int32(0), member + 1)", "member + 1"),
    ],
)
def test_a_tile_that_is_left_out_is_seen(edit: Edit, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        put_in_place([edit], tmp_path, patch)
        with pytest.raises((AssertionError, ValueError)):
            check(causal=True)
