"""The plans of the Hopper backward kernels of wide heads: sound, and faults in them are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fa4.hardware import H200, Gpu
from fa4.plan.checks import check_plan
from fa4.plan.schema import Arrive, PipelinePlan, Wait
from fa4.plan.warpgroup_wide import WideBackwardPipeline
from fa4.plan.warpgroup_wide_keys import wide_keys_plan
from fa4.plan.warpgroup_wide_queries import wide_queries_plan, widest_tile
from tests.plan.test_warpgroup_backward import changed

DIMS = ((256, 256), (192, 128), (192, 192), (144, 160), (16, 256), (256, 16))
Make = Callable[[WideBackwardPipeline, Gpu], PipelinePlan]


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("make", [wide_keys_plan, wide_queries_plan])
def test_sound(make: Make, dims: tuple[int, int]) -> None:
    plan = make(widest_tile(*dims, H200), H200)
    assert check_plan(plan, H200) == []
    assert all(role.spilled_registers == 0 for role in plan.roles)


def test_tiles_are_as_wide_as_the_machine_allows() -> None:
    """One step wider does not fit, in registers or in shared memory."""
    tiles = {dims: widest_tile(*dims, H200) for dims in DIMS}
    found = {dims: (p.tile_n, p.k_stages, p.v_stages) for dims, p in tiles.items()}
    assert found[256, 256] == (64, 2, 1) and found[192, 192] == (64, 3, 2)
    assert found[256, 16] == (64, 3, 2)
    with pytest.raises(ValueError, match=r"shared memory plan needs \d+ bytes: q 2x32768"):
        wide_queries_plan(WideBackwardPipeline(tile_n=80), H200)


@pytest.mark.parametrize(
    ("make", "gone", "found"),
    [
        (wide_keys_plan, (Wait("p_full"), Arrive("p_full")), "read P, dS of keys"),
        (wide_keys_plan, (Wait("q_empty"),), "q_empty"),
        (wide_keys_plan, (Wait("keys_read"), Arrive("keys_read")), "write dV of values"),
        (wide_keys_plan, (Wait("dk_done"), Arrive("dk_done", after="tensor")), "dk"),
        (wide_keys_plan, (Arrive("do_empty"),), "do_empty"),
        (wide_queries_plan, (Wait("k_empty"),), "k_empty"),
        (wide_queries_plan, (Wait("dq0_done"), Arrive("dq0_done", after="tensor")), "dq0"),
        (wide_queries_plan, (Arrive("k_empty"),), "k_empty"),
        (wide_queries_plan, (Wait("dp0_done"), Arrive("dp0_done", after="tensor")), "dp0"),
    ],
)
def test_a_fault_is_found(make: Make, gone: tuple[Wait | Arrive, ...], found: str) -> None:
    """Steps that are left out, of all roles; with both of its ends, a signal too."""
    plan = changed(make(widest_tile(256, 256, H200), H200), gone)
    if len(gone) == 2:
        signals = tuple(one for one in plan.signals if one.name != gone[0].signal)
        plan = replace(plan, signals=signals)
    assert found in "; ".join(map(str, check_plan(plan, H200)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": 200}, "head_dim must be a multiple of 16; got 200"),
        ({"head_dim_v": 272}, "head_dim_v must be .*256.*; got 272"),
        ({"tile_n": 72}, "tile_n must be a multiple of 16; got 72"),
        ({"v_stages": 4}, "v_stages must be .*3.*; got 4"),
        ({"k_stages": 1}, "k_stages must be .*2.*; got 1"),
    ],
)
def test_refusals(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WideBackwardPipeline(**fields)
