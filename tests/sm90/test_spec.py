"""What a Hopper spec refuses, and what its plan is made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4.compiled.support import ForwardCall
from fa4.compiled.variants import choose_sm90_spec, tuned_warpgroup_spec, warpgroup_problem
from fa4.hardware import H200
from fa4.masks import Chunked
from fa4.plan import warpgroup_backward
from fa4.plan.warpgroup_tuned import WarpgroupProblem, tuned_warpgroups
from fa4.sm90.backward.spec import WarpgroupBackwardSpec
from fa4.sm90.forward.spec import WarpgroupSpec
from tests.sm100.altered import Edit, put_in_place


def make(**fields: Any) -> WarpgroupSpec:
    return WarpgroupSpec(**{"head_dim": 128, "head_dim_v": 128, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "fp32"}, "dtype must be bf16, fp16, e4m3 or e5m2; got 'fp32'"),
        ({"head_dim": 100}, "head_dim must be a multiple of 8; got 100"),
        ({"head_dim_v": 264}, "head_dim_v must be .*256.*; got 264"),
        ({"tile_n": 72}, "tile_n must be a multiple of 16; got 72"),
        ({"group": 96}, "a group above 64 must be a multiple of it; got 96"),
        ({"group": 3, "columns": (160, 128)}, "groups of 3, rows of Q must be whole 128 bytes"),
        ({"scheduler": "clc"}, "one of static, snake, queue, lpt, naive; got 'clc'"),
        ({"columns": (112, 128)}, r"columns must be at least \(128, 128\); got \(112, 128\)"),
        ({"causal": True, "window_right": True}, "causal has its own right bound"),
        ({"causal": True, "mask": Chunked(8)}, "mask_mod replaces causal and windows"),
        ({"softcap": True, "score_mod": max}, "softcap is a score_mod of its own"),
        ({"aux": (("fp64", 1),)}, "an aux dtype must be one of"),
    ],
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**fields)


def test_what_does_not_fit() -> None:
    """Shared memory, with the sum; turns of one."""
    with pytest.raises(ValueError, match=r"shared memory plan needs \d+ bytes: q .* has 232448"):
        make(head_dim=256, head_dim_v=256).plan  # noqa: B018
    with pytest.raises(ValueError, match="ping_pong needs at least 2 consumers; got 1"):
        make(consumers=1, ping_pong=True).plan  # noqa: B018


@pytest.mark.parametrize(("keys", "rows"), [(512, 4096), (8192, 4096)])
def test_ahead_is_for_ctas_with_several_work_tiles(keys: int, rows: int) -> None:
    """Of tuned tiles, where there are enough of them; never of a forced one, nor of O over Q."""
    problem = WarpgroupProblem(head_dim=64, head_dim_v=64, rows=rows, keys=keys, heads=32, batch=8,
                               masked=True, window=(None, 0))  # fmt: skip
    tuned = tuned_warpgroup_spec(64, 64, problem, causal=True)
    assert tuned.begins_ahead and tuned.scheduler == "queue"
    few = tuned_warpgroup_spec(64, 64, replace(problem, heads=1, batch=2), causal=True)
    assert not few.begins_ahead and few.scheduler == "lpt"
    assert not tuned_warpgroup_spec(64, 64, problem, causal=True, consumers=3).begins_ahead
    assert not tuned_warpgroup_spec(64, 64, problem, causal=True, overlap=False).begins_ahead
    modded = tuned_warpgroup_spec(64, 64, problem, causal=True, score_mod=max)
    assert not modded.begins_ahead and not modded.takes_turns
    assert make(head_dim=64, head_dim_v=64, ahead=True).begins_ahead
    assert not make(head_dim=256, head_dim_v=256, tile_n=80, ahead=True).begins_ahead


def test_rows_are_wider_than_products() -> None:
    """Of 128 bytes in shared memory, unless narrower ones were faster; products are not."""
    for d, multiplied, columns in ((136, (144, 144), 192), (40, (48, 48), 64), (64, (64, 64), 64)):
        spec = make(head_dim=d, head_dim_v=d, tile_n=64)
        assert spec.multiplied == multiplied and spec.tile_columns == (columns, columns)
        assert (spec.pipeline.head_dim, spec.pipeline.head_dim_v) == multiplied
        assert spec.pipeline.widths == (columns, columns)
        assert spec.pipeline.columns == (None if columns == d else (columns, columns))
    narrow = make(head_dim=48, head_dim_v=48, dtype="e4m3")
    assert narrow.multiplied == narrow.tile_columns == (64, 64)
    with pytest.raises(ValueError, match=r"columns must be at least \(72, 72\)"):
        make(head_dim=72, head_dim_v=72, columns=(64, 128))


@given(
    st.integers(1, 32), st.integers(1, 32), st.integers(1, 9000), st.integers(1, 9000),
    st.sampled_from([(1, 1), (6, 2), (40, 8)]), st.integers(1, 20), st.booleans(),
    st.one_of(st.none(), st.integers(0, 900)), st.booleans(),
)  # fmt: skip
def test_the_kernel_of_every_call_fits(d, dv, rows, keys, heads, batch, causal, left, used) -> None:
    """Its plan, with the columns, stages and place of O that the tile was chosen with."""
    call = ForwardCall(dtype="bf16", head_dim=8 * d, head_dim_v=8 * dv, heads_q=heads[0],
                       heads_k=heads[1], batch=batch, rows_q=rows, rows_k=keys, num_splits=0,
                       window=(left, 0 if causal else None), used_k=used)  # fmt: skip
    spec, tuned = choose_sm90_spec(call), tuned_warpgroups(warpgroup_problem(call), H200)
    assert spec.plan.bytes_used("smem") <= H200.smem_bytes_per_cta
    assert spec.pipeline.widths == tuned.widths and spec.pipeline.direct == tuned.direct
    assert (spec.tile_n, spec.kv_stages) == (tuned.tile_n, tuned.kv_stages)


def test_boxes_that_begin_earlier() -> None:
    """Of head dims that end within a sector; O goes from registers: TMA stores no such box."""
    assert make(head_dim=136, head_dim_v=64).shifts == (True, False)
    assert make(head_dim=128, head_dim_v=40).shifts == (False, True)
    assert make(head_dim=128, head_dim_v=40).stores_directly
    assert not make(head_dim=136, head_dim_v=64).stores_directly
    assert make(head_dim=128, head_dim_v=40, split=True).shifts == (False, False)
    with pytest.raises(ValueError, match="head_dim_v 40 needs direct stores; got False"):
        make(head_dim=128, head_dim_v=40, direct=False)


def test_o_of_8_bit_types_leaves_from_registers_where_it_has_no_room() -> None:
    """With 128 keys at head dim 256, not with 64; what is asked for is kept, or refused."""
    wide = {"head_dim": 256, "head_dim_v": 256, "dtype": "e4m3"}
    assert make(**wide, tile_n=128).stores_directly
    assert not make(**wide, tile_n=64).stores_directly
    assert make(**wide, tile_n=64, direct=True).stores_directly
    with pytest.raises(ValueError, match="shared memory"):
        _ = make(**wide, tile_n=128, direct=False).plan


def test_positions_that_straddle_warpgroups() -> None:
    """O goes from registers, of 8-bit types row by row; rows of Q and K have 128 bytes."""
    assert make(group=5).stores_directly and not make(group=4).stores_directly
    assert not make(group=5, split=True).stores_directly
    assert make(group=5, head_dim=32, head_dim_v=32).tile_columns == (64, 32)
    narrow = make(group=5, head_dim=64, head_dim_v=64, dtype="e4m3")
    assert narrow.tile_columns == (128, 64) and not narrow.stores_directly
    one, other = (make(group=group, consumers=3, tile_n=80).plan for group in (1, 5))
    assert other.buffer("q").size - one.buffer("q").size == 16 * 256  # 8 rows before, 8 behind
    assert other.signal("q_full").tx_bytes == 40 * 5 * 256


def test_parts_of_keys_are_not_drawn() -> None:
    with pytest.raises(ValueError, match="split keys have a CTA for each part; got scheduler"):
        make(head_dim=64, head_dim_v=64, split=True, scheduler="queue")


def test_padded_dims() -> None:
    assert make(head_dim=72, head_dim_v=40).pipeline.head_dim == 80
    assert make(head_dim=72, head_dim_v=40).pipeline.head_dim_v == 48


def check_tall_tiles() -> None:
    """128 queries where both head dims fit into 64 columns and scores are not kept beside P."""
    chosen = {"head_dim": 40, "head_dim_v": 64, "causal": True}
    assert WarpgroupBackwardSpec(**chosen).tile_rows == 128
    for change in ({"head_dim": 72}, {"head_dim_v": 72}, {"softcap": True}):
        assert WarpgroupBackwardSpec(**{**chosen, **change}).tile_rows == 64, change


def test_tiles_of_128_queries() -> None:
    check_tall_tiles()


@pytest.mark.parametrize("ignored", ["head_dim == ", "head_dim_v == "])
def test_a_choice_that_ignores_a_head_dim_is_seen(ignored: str, tmp_path: Path) -> None:
    kept = "head_dim_v == 64" if ignored == "head_dim == " else "head_dim == 64"
    edit = Edit(warpgroup_backward, "head_dim == head_dim_v == 64", kept)
    with pytest.MonkeyPatch.context() as patch:
        put_in_place([edit], tmp_path, patch)
        with pytest.raises(AssertionError):
            check_tall_tiles()
