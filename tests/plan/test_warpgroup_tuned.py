"""The tiles of Hopper problems: they fit, all rows are covered, and short problems fill the SMs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fa4.compiled.support import ForwardCall
from fa4.compiled.variants import warpgroup_problem
from fa4.config import Problem
from fa4.designs.hopper_forward import choose
from fa4.hardware import H200
from fa4.plan.warpgroup import warpgroup_plan
from fa4.plan.warpgroup_narrow_rates import NARROW_RATES
from fa4.plan.warpgroup_packing import packings
from fa4.plan.warpgroup_rates import measured_rates
from fa4.plan.warpgroup_tuned import (
    WarpgroupProblem,
    _cost,
    _fitting,
    _memory_seconds,
    choices,
    tiles_of,
    tuned_warpgroups,
    work_tiles,
)

DIMS = st.integers(1, 32).map(lambda n: 8 * n)
SIDES = st.one_of(st.none(), st.integers(0, 3000))


def problem(**changes: object) -> WarpgroupProblem:
    """A long one, with changes."""
    plain = dict(head_dim=128, head_dim_v=128, rows=16384, keys=16384, heads=16, batch=8)
    return WarpgroupProblem(**(plain | changes))


@given(
    DIMS, DIMS, st.integers(0, 40000), st.integers(0, 40000), st.integers(1, 64), SIDES, SIDES,
    st.sampled_from([1, 2]), st.integers(0, 8), st.booleans(),
)  # fmt: skip
@example(16, 16, 4, 4, 2, None, None, 2, 0, False)
def test_every_problem_has_a_tile_that_fits(
    d, dv, rows, keys, heads, left, right, size, batch, ragged
) -> None:
    """Shared memory and registers; also a call without a sequence. Work is drawn where SMs have
    several work tiles that differ; where they have one, nothing is prepared for another."""
    masked = (left, right) != (None, None)
    sizes = {"head_dim": d, "head_dim_v": dv, "rows": rows, "keys": keys, "heads": heads,
             "kv_heads": heads, "batch": batch, "window": (left, right)}  # fmt: skip
    given = problem(**sizes, masked=masked, element_bytes=size, ragged=ragged)
    found = tuned_warpgroups(given, H200)
    depth = 16 if size == 2 else 32
    assert found.element_bytes == size
    assert found.head_dim == -(-d // depth) * depth
    assert found.head_dim_v == -(-dv // depth) * depth
    plan = warpgroup_plan(found, H200)
    assert not any(role.spilled_registers for role in plan.roles)
    several = work_tiles(found.consumers, given) > H200.sm_count
    orders = {"lpt", "queue"} if several else {"lpt"}
    alike = {"static"} if several else {"naive"}
    assert found.scheduler in (orders if masked or ragged else alike)
    assert not (found.ahead and found.scheduler in ("lpt", "naive"))


def test_more_work_never_takes_less_time() -> None:
    """Of one tile, by the costs that are compared."""
    (tile, *_) = tiles_of(problem(masked=True))
    costs = [
        _cost(tile, problem(masked=True, window=(None, 0), rows=n, keys=n, batch=1), 132)
        for n in range(100, 9000, 130)
    ]
    assert costs == sorted(costs)


def test_keys_that_a_window_hides_cost_nothing() -> None:
    """Neither products nor what comes from memory, of few queries at the end of many keys."""
    for queries in (1, 228):
        given = dict(rows=3 * queries, queries=queries, kv_heads=20, heads=20, batch=3, masked=True,
                     window=(1698, 0), num_splits=0)  # fmt: skip
        near, far = (problem(**given, keys=keys) for keys in (1920, 192_000))
        assert tuned_warpgroups(near, H200) == tuned_warpgroups(far, H200)


@given(
    st.integers(1, 4000), st.integers(1, 9000), st.integers(1, 16),
    st.sampled_from((2, 3, 5, 6, 12)), st.integers(1, 8), DIMS, st.booleans(),
    st.sampled_from((1, 2)),
)  # fmt: skip
def test_no_packing_costs_less(rows, keys, heads, group, batch, d, causal, size) -> None:
    """Than the one that is chosen, each with its own tile and parts."""
    wanted = problem(
        head_dim=d, head_dim_v=d, rows=rows, queries=rows, keys=keys, heads=heads * group,
        kv_heads=heads, batch=batch, masked=causal, window=(None, 0 if causal else None),
        num_splits=0, element_bytes=size, packings=packings(group),
    )  # fmt: skip
    assert tuned_warpgroups(wanted, H200).packed == min(
        wanted.packings, key=lambda packed: least_cost(replace(wanted, packings=(packed,)))
    )


@pytest.mark.parametrize("keys", [504, 100_000])
def test_a_tile_that_was_not_timed_has_to_fit_better(keys: int) -> None:
    """Few keys of which other tiles have padding; of many it is too little."""
    found = tuned_warpgroups(problem(rows=504, keys=keys, head_dim=256, head_dim_v=256), H200)
    timed = {tile.tile_n for tile in tiles_of(problem(head_dim=256, head_dim_v=256))}
    assert found.tile_n == (64 if keys == 504 else 80) and 64 not in timed


def least_cost(given: WarpgroupProblem) -> float:
    """Of its tiles and parts."""
    return min(one.cost for one in choices(given, H200))


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


@pytest.mark.parametrize(
    ("size", "dims"), [(2, one) for one in measured_rates()] + [(1, one) for one in NARROW_RATES]
)
def test_the_table_is_in_order_and_fits(size: int, dims: tuple[int, int, bool]) -> None:
    """The fastest rate first; each tile of the table has room and registers as it stands there."""
    given = problem(head_dim=dims[0], head_dim_v=dims[1], masked=dims[2], element_bytes=size)
    tiles = list(tiles_of(given))
    assert [tile.tflops for tile in tiles] == sorted((t.tflops for t in tiles), reverse=True)
    assert {tile.consumers for tile in tiles} >= {1, 2}
    fitting = [tile for tile, _ in _fitting(given, H200)]
    assert fitting == tiles


def test_long_sequences_of_wide_8_bit_heads_have_wide_tiles() -> None:
    """Of 128 keys, for which O has no place in shared memory; short ones have tiles of 64."""
    for dims in ((256, 256), (208, 208), (192, 128)):
        sizes = {"head_dim": dims[0], "head_dim_v": dims[1], "element_bytes": 1}
        found = {n: tuned_warpgroups(problem(**sizes, rows=n, keys=n), H200) for n in (300, 8192)}
        assert {n: (one.tile_n, one.direct) for n, one in found.items()} == {
            300: (64, False),
            8192: (128, True),
        }


def test_8_bit_keys_are_half_of_what_comes_from_memory() -> None:
    """One row on many keys waits for them; twice the bytes, twice the time."""
    times = [
        _memory_seconds(problem(rows=1, keys=65536, kv_heads=2, element_bytes=size), 132)
        for size in (1, 2)
    ]
    assert times[1] == 2 * times[0] > 0


def test_a_pair_takes_the_next_wider_class() -> None:
    """Of both dims."""
    for dims, wider in (((192, 112), (192, 128)), ((88, 64), (96, 64)), ((64, 256), (256, 256))):
        found = tiles_of(problem(head_dim=dims[0], head_dim_v=dims[1]))
        assert tuple(found) == measured_rates()[(*wider, False)]


def test_work_tiles() -> None:
    """Blocks of rows, of all heads and sequences."""
    assert work_tiles(3, problem(rows=193, heads=5, batch=2)) == 2 * 5 * 2


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("empty", [{"batch": 0}, {"rows": 0}, {"keys": 0}, {"batch": 0, "keys": 0}])
def test_no_work_has_a_tile_too(empty: dict[str, int], size: int) -> None:
    """A batch of nothing, no queries, no keys; divided or not."""
    for more in ({}, {"num_splits": 0, "kv_heads": 2}, {"window": (9, 9), "masked": True}):
        given = problem(**(empty | more), element_bytes=size)
        assert tuned_warpgroups(given, H200).consumers in (1, 2, 3)


def test_dims_that_no_tile_has() -> None:
    with pytest.raises(ValueError, match="head dims are at most 256; got 272"):
        tuned_warpgroups(problem(head_dim=272), H200)


@given(
    st.integers(1, 700), st.integers(1, 40_000), st.sampled_from((1, 2, 8)),
    st.sampled_from(((1, 1), (4, 1), (12, 4), (10, 2), (48, 8), (96, 1))),
    st.sampled_from((32, 88, 128, 192, 256)), st.booleans(),
)  # fmt: skip
def test_predictions_are_of_the_kernel_that_a_call_gets(
    rows: int, keys: int, batch: int, heads: tuple[int, int], dim: int, causal: bool
) -> None:
    """The same tile, parts of the keys and heads that share a tile's rows, except working ahead."""
    problem = Problem(batch=batch, seqlen_q=rows, seqlen_k=keys, heads_q=heads[0],
                      heads_k=heads[1], head_dim=dim, causal=causal)  # fmt: skip
    call = ForwardCall(dtype="bf16", head_dim=dim, head_dim_v=dim, heads_q=heads[0],
                       heads_k=heads[1], batch=batch, rows_q=rows, rows_k=keys,
                       window=problem.window_size, num_splits=0)  # fmt: skip
    wanted = warpgroup_problem(call)
    found = tuned_warpgroups(wanted, H200)
    if found.scheduler == "queue":
        found = replace(found, ahead=False)
    assert choose(problem, H200) == found


@given(
    DIMS, st.integers(1, 9000), st.integers(1, 40), st.integers(1, 5), st.booleans(),
    st.sampled_from((0, 1)),
)  # fmt: skip
def test_calls_of_one_wave_take_what_was_timed_in_one(d, rows, heads, batch, masked, splits):
    """So do divided keys, whose CTAs have one work tile; 8-bit types have one table for all."""
    given = problem(head_dim=d, head_dim_v=d, rows=rows, keys=rows, heads=heads, kv_heads=heads,
                    batch=batch, masked=masked, num_splits=splits)  # fmt: skip
    for one in choices(given, H200):
        alone = one.splits > 1 or work_tiles(one.tile.consumers, given) <= H200.sm_count
        assert one.tile.one_wave == alone
    narrow = replace(given, element_bytes=1)
    assert {one.tile.one_wave for one in choices(narrow, H200)} == {None}


def test_narrow_heads_take_turns_in_one_wave() -> None:
    """Of narrow heads a bad order of warpgroups lasts as long as the call; of wide ones there is
    none, and turns cost time."""
    sizes = {"rows": 583, "keys": 6927, "queries": 583, "batch": 2, "heads": 16}
    for dim, turns in ((40, True), (64, True), (256, False)):
        for masked in (False, True):
            one = problem(**sizes, head_dim=dim, head_dim_v=dim, masked=masked)
            assert tuned_warpgroups(one, H200).takes_turns == turns
            many = problem(**{**sizes, "heads": 160}, head_dim=dim, head_dim_v=dim, masked=masked)
            assert not tuned_warpgroups(many, H200).takes_turns
