"""The tiles of Hopper problems: they fit, all rows are covered, and short problems fill the SMs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4.config import Problem
from fa4.hardware import H200
from fa4.plan import warpgroup_tuned
from fa4.plan.warpgroup import warpgroup_plan
from fa4.plan.warpgroup_tuned import (
    TILES,
    WarpgroupProblem,
    tuned_warpgroups,
    whole_depth,
    work_tiles,
)
from fa4.sim.defaults import default_warpgroups

DIMS = st.integers(1, 16).map(lambda n: 16 * n)


def problem(**changes: object) -> WarpgroupProblem:
    """A long one, with changes."""
    plain = dict(head_dim=128, head_dim_v=128, rows=16384, keys=16384, heads=16, batch=8)
    return WarpgroupProblem(**(plain | changes))


@given(
    DIMS, DIMS, st.integers(0, 40000), st.integers(0, 40000), st.integers(1, 64), st.booleans(),
    st.sampled_from([1, 2]),
)  # fmt: skip
def test_every_problem_has_a_tile_that_fits(d, dv, rows, keys, heads, masked, size) -> None:
    """Shared memory and registers."""
    d, dv = whole_depth(d, size), whole_depth(dv, size)
    sizes = {"head_dim": d, "head_dim_v": dv, "rows": rows, "keys": keys, "heads": heads}
    found = tuned_warpgroups(problem(**sizes, masked=masked, element_bytes=size), H200)
    assert found.element_bytes == size
    assert (found.head_dim, found.head_dim_v) == (d, dv)
    plan = warpgroup_plan(found, H200)
    assert not any(role.spilled_registers for role in plan.roles)


@pytest.mark.parametrize(
    ("changes", "rows", "keys"),
    [
        ({}, 192, 80),
        ({"rows": 1024, "keys": 1024, "batch": 16}, 128, 128),
        ({"head_dim": 64, "head_dim_v": 64, "heads": 32}, 192, 128),
        ({"head_dim": 256, "head_dim_v": 256, "heads": 8}, 128, 80),
        (
            {
                "head_dim": 64,
                "head_dim_v": 64,
                "rows": 1024,
                "keys": 1024,
                "heads": 32,
                "batch": 32,
                "masked": True,
                "causal": True,
            },
            192,
            64,
        ),
        (
            {
                "head_dim": 64,
                "head_dim_v": 64,
                "rows": 1025,
                "keys": 1025,
                "heads": 32,
                "batch": 32,
                "masked": True,
                "causal": True,
            },
            192,
            128,
        ),
        ({"rows": 40, "keys": 4096}, 64, 128),
        ({"rows": 1024, "keys": 1024, "batch": 1, "heads": 8}, 64, 128),
        ({"rows": 40, "head_dim": 192}, 64, 128),
        ({"rows": 192, "batch": 10, "head_dim": 256, "head_dim_v": 256}, 64, 80),
    ],
)
def test_tiles(changes, rows, keys) -> None:
    """The measured ones of long problems; few rows, or few work tiles, take one warpgroup."""
    found = tuned_warpgroups(problem(**changes), H200)
    assert (found.block_rows, found.tile_n) == (rows, keys)


@pytest.mark.parametrize(("widest", "masked"), TILES)
def test_the_table_is_in_order_and_fits(widest: int, masked: bool) -> None:
    """The fastest first; each tile of the table has room and registers as it stands there.

    Those of short sequences are for these alone.
    """
    listed = TILES[widest, masked]
    assert [tile.tflops for tile in listed] == sorted((t.tflops for t in listed), reverse=True)
    dims = {"head_dim": widest, "head_dim_v": 128 if widest == 192 else widest}
    for keys in (512, 16384):
        found = warpgroup_tuned._fitting(problem(**dims, masked=masked, keys=keys), H200)
        shapes = [(pipeline.consumers, pipeline.tile_n) for _, pipeline in found]
        taken = [tile for tile in listed if tile.keys_to >= keys or not tile.keys_to]
        assert shapes == [(tile.consumers, tile.tile_n) for tile in taken]
    if any(tile.keys_to for tile in listed):
        assert len(taken) < len(listed)


def test_work_tiles() -> None:
    """Blocks of rows, of all heads and sequences."""
    assert work_tiles(3, problem(rows=193, heads=5, batch=2)) == 2 * 5 * 2


def test_dims_that_no_tile_has() -> None:
    with pytest.raises(ValueError, match="head dims are at most 256; got 272"):
        tuned_warpgroups(problem(head_dim=272), H200)


def test_predictions_take_the_same_choice() -> None:
    """The heads of a group share the rows of a tile, as in the kernel."""
    of = Problem(seqlen_q=40, seqlen_k=4096, heads_q=32, heads_k=4, head_dim=128, causal=True)
    found = default_warpgroups(of, H200)
    same = problem(rows=320, keys=4096, heads=4, batch=1, masked=True, causal=True)
    assert found == tuned_warpgroups(same, H200)


def test_long_masked_problems_of_narrow_heads_take_no_turns() -> None:
    """Turns at the tensor core cost more there than they hide."""
    found = tuned_warpgroups(
        problem(head_dim=64, head_dim_v=64, heads=32, masked=True, causal=True), H200
    )
    assert (found.block_rows, found.tile_n, found.ping_pong) == (192, 128, False)
