"""The tiles of Hopper problems: they fit, all rows are covered, and short problems fill the SMs."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fa4.config import Problem, WarpgroupPipeline
from fa4.designs.hopper_forward import default_warpgroups
from fa4.hardware import H200
from fa4.plan.warpgroup import warpgroup_plan
from fa4.plan.warpgroup_rates import RATES
from fa4.plan.warpgroup_tuned import (
    WarpgroupProblem,
    back_and_forth,
    padded_width,
    tiles_of,
    tuned_warpgroups,
    work_tiles,
)

DIMS = st.integers(1, 16).map(lambda n: 16 * n)


def problem(**changes: object) -> WarpgroupProblem:
    """A long one, with changes."""
    plain = dict(head_dim=128, head_dim_v=128, rows=16384, keys=16384, heads=16, batch=8)
    return WarpgroupProblem(**(plain | changes))


@given(
    DIMS, DIMS, st.integers(0, 40000), st.integers(0, 40000), st.integers(1, 64), st.booleans(),
    st.sampled_from([1, 2]), st.integers(0, 8), st.booleans(),
)  # fmt: skip
@example(16, 16, 4, 4, 2, False, 2, 0, False)
def test_every_problem_has_a_tile_that_fits(
    d, dv, rows, keys, heads, masked, size, batch, windowed
) -> None:
    """Shared memory and registers; also a call without a sequence."""
    d, dv = padded_width(d, size), padded_width(dv, size)
    sizes = {"head_dim": d, "head_dim_v": dv, "rows": rows, "keys": keys, "heads": heads,
             "kv_heads": heads, "batch": batch, "windowed": masked and windowed}  # fmt: skip
    found = tuned_warpgroups(problem(**sizes, masked=masked, element_bytes=size), H200)
    assert found.element_bytes == size
    assert (found.head_dim, found.head_dim_v) == (d, dv)
    plan = warpgroup_plan(found, H200)
    assert not any(role.spilled_registers for role in plan.roles)


@given(DIMS, st.integers(1, 40000), st.integers(1, 40000), st.booleans(), st.booleans())
def test_wider_rows_fit_too(d, rows, keys, masked, windowed) -> None:
    """No fewer columns than the head dim has, and no more than its next 64."""
    d = padded_width(d)
    sizes = {"head_dim": d, "head_dim_v": d, "rows": rows, "keys": keys, "windowed": windowed}
    found = tuned_warpgroups(problem(**sizes, masked=masked, any_width=True), H200)
    assert d <= found.head_dim == found.head_dim_v <= -(-d // 64) * 64
    assert not any(role.spilled_registers for role in warpgroup_plan(found, H200).roles)


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, 192),
        ({"rows": 40, "keys": 4096}, 64),  # padding
        ({"rows": 1024, "keys": 1024, "batch": 1, "heads": 8}, 64),  # SMs without work
        ({"head_dim": 256, "head_dim_v": 256, "heads": 8}, 128),
    ],
)
def test_tiles(changes, rows) -> None:
    """Long problems take the fastest tile; few rows, or few work tiles, one warpgroup."""
    assert tuned_warpgroups(problem(**changes), H200).block_rows == rows


@pytest.mark.parametrize("dims", RATES)
def test_the_table_is_in_order_and_fits(dims: tuple[int, int, bool]) -> None:
    """The fastest rate first; each tile of the table has room and registers as it stands there."""
    tiles = list(tiles_of(problem(head_dim=dims[0], head_dim_v=dims[1], masked=dims[2])))
    assert [tile.tflops for tile in tiles] == sorted((t.tflops for t in tiles), reverse=True)
    assert {tile.consumers for tile in tiles} >= {1, 2}
    for tile in tiles:
        pipeline = WarpgroupPipeline(
            head_dim=dims[0], head_dim_v=dims[1], causal=dims[2], tile_n=tile.tile_n,
            consumers=tile.consumers, kv_stages=tile.kv_stages, ping_pong=tile.turns,
        )  # fmt: skip
        assert not any(role.spilled_registers for role in warpgroup_plan(pipeline, H200).roles)


def test_every_class_is_in_the_table() -> None:
    """All padded widths, with and without a mask."""
    widths = {padded_width(dim) for dim in range(8, 257, 8)} - {16}
    assert {one for one in RATES if one[0] == one[1]} == {
        (width, width, masked) for width in widths for masked in (False, True)
    }
    assert padded_width(72) == 80 and padded_width(168) == 192 and padded_width(240) == 256


def test_a_pair_takes_the_next_wider_class() -> None:
    """Of both dims."""
    for dims, wider in (((192, 112), (192, 128)), ((96, 64), (96, 96)), ((64, 256), (256, 256))):
        found = tiles_of(problem(head_dim=dims[0], head_dim_v=dims[1]))
        assert [(*tile[:7],) for tile in found] == list(RATES[(*wider, False)])


def test_work_goes_back_and_forth_where_l2_keeps_what_is_read() -> None:
    """Heads that share K and V read them once."""
    short = {"rows": 2048, "keys": 2048, "heads": 32, "masked": True, "causal": True}
    assert back_and_forth(3, problem(**short), 132)
    assert not back_and_forth(3, problem(**short, ragged=True), 132)
    assert not back_and_forth(3, problem(**(short | {"batch": 1, "rows": 300})), 132)
    long = short | {"rows": 8192, "keys": 8192}
    assert not back_and_forth(3, problem(**long), 132)
    assert back_and_forth(3, problem(**long, kv_heads=4), 132)
    assert tuned_warpgroups(problem(**long), H200).scheduler == "lpt"


def test_work_tiles() -> None:
    """Blocks of rows, of all heads and sequences."""
    assert work_tiles(3, problem(rows=193, heads=5, batch=2)) == 2 * 5 * 2


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("empty", [{"batch": 0}, {"rows": 0}, {"keys": 0}, {"batch": 0, "keys": 0}])
def test_no_work_has_a_tile_too(empty: dict[str, int], size: int) -> None:
    """A batch of nothing, no queries, no keys; divided or not."""
    for more in ({}, {"num_splits": 0, "kv_heads": 2}, {"windowed": True, "masked": True}):
        given = problem(**(empty | more), element_bytes=size, any_width=True)
        assert tuned_warpgroups(given, H200).consumers in (1, 2, 3)


def test_dims_that_no_tile_has() -> None:
    with pytest.raises(ValueError, match="head dims are at most 256; got 272"):
        tuned_warpgroups(problem(head_dim=272), H200)


def test_predictions_take_the_same_choice() -> None:
    """The heads of a group share the rows of a tile, as in the kernel."""
    of = Problem(seqlen_q=40, seqlen_k=4096, heads_q=32, heads_k=4, head_dim=128, causal=True)
    found = default_warpgroups(of, H200)
    same = problem(rows=320, keys=4096, heads=4, batch=1, masked=True, causal=True)
    assert found == tuned_warpgroups(same, H200)
