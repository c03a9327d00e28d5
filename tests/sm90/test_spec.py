"""What a Hopper spec refuses, and what its plan is made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fa4.compiled.variants import tuned_warpgroup_spec
from fa4.masks import Chunked
from fa4.plan.warpgroup_tuned import WarpgroupProblem
from fa4.sm90.forward.spec import WarpgroupSpec


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
        ({"scheduler": "clc"}, "scheduler must be one of static, snake, lpt, naive; got 'clc'"),
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
                               masked=True, causal=True)  # fmt: skip
    tuned = tuned_warpgroup_spec(64, 64, problem, causal=True)
    assert tuned.begins_ahead == (tuned.scheduler == "snake") == (keys == 512)
    assert not tuned_warpgroup_spec(64, 64, problem, causal=True, consumers=3).begins_ahead
    assert not tuned_warpgroup_spec(64, 64, problem, causal=True, overlap=False).begins_ahead
    modded = tuned_warpgroup_spec(64, 64, problem, causal=True, score_mod=max)
    assert not modded.begins_ahead and not modded.takes_turns
    assert make(head_dim=64, head_dim_v=64, ahead=True).begins_ahead
    assert not make(head_dim=256, head_dim_v=256, tile_n=80, ahead=True).begins_ahead


def test_calls_of_few_keys_take_wider_rows() -> None:
    """112 columns of a long call, 128 of a short one, which a forced tile is not given."""

    def chosen(keys: int, **fields: Any) -> WarpgroupSpec:
        problem = WarpgroupProblem(head_dim=112, head_dim_v=112, rows=keys, keys=keys, heads=12,
                                   batch=31, any_width=True)  # fmt: skip
        return tuned_warpgroup_spec(112, 112, problem, **fields)

    assert chosen(585).columns == (128, 128) == chosen(585).tile_columns
    assert chosen(585).pipeline.head_dim == 128 and chosen(585).head_dim == 112
    assert chosen(20000).columns is None and chosen(20000).pipeline.head_dim == 112
    assert chosen(585, tile_n=64, consumers=2).columns is None


def test_work_tiles_of_a_window_are_alike() -> None:
    """CTAs stride over them, but where there are few or sequences differ."""
    problem = WarpgroupProblem(head_dim=256, head_dim_v=256, rows=7000, keys=149, heads=60,
                               batch=1, masked=True, windowed=True)  # fmt: skip
    for changes, scheduler in (
        ({}, "snake"), ({"windowed": False}, "lpt"), ({"ragged": True}, "lpt"),
        ({"heads": 1}, "lpt"), ({"keys": 2000}, "lpt"),
    ):  # fmt: skip
        given = replace(problem, **changes)
        found = tuned_warpgroup_spec(256, 256, given, causal=True, window_left=True)
        assert found.scheduler == scheduler


def test_padded_dims() -> None:
    assert make(head_dim=72, head_dim_v=40).pipeline.head_dim == 80
    assert make(head_dim=72, head_dim_v=40).pipeline.head_dim_v == 48
