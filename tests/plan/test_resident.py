"""What is resident at a time, and launch orders that never end: the plan's rule and its walk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4 import cli
from fa4.config import BackwardConfig, BackwardPipeline
from fa4.designs.tiles import clusters
from fa4.hardware import B200, B300, H200
from fa4.plan import backward_plan, check_plan
from fa4.plan import resident as resident_module
from fa4.plan.resident import ctas_per_sm, find_stuck, resident_clusters
from fa4.plan.schema import Role, Turns
from fa4.plan.warpgroup import warpgroup_plan
from fa4.sim.limits import modelled
from fa4.sim.options import build
from tests.plan.plans import BACKWARD, FORWARD, PUBLISHED
from tests.sim.choices import default_hopper

MASKS = ((None, None), (None, 0), (300, None), (None, 200), (500, 100))


def rounds(before: Sequence[int], resident: int) -> bool:
    """Do all end? Round by round: who may end does, then as many start as there is room for."""
    started, ended = min(resident, len(before)), set[int]()
    while True:
        ending = {x for x in range(started) if x not in ended and
                  (before[x] < 0 or before[x] in ended)}  # fmt: skip
        if not ending:
            return len(ended) == len(before)
        ended |= ending
        started = min(len(before), len(ended) + resident)


@st.composite
def chains(draw: st.DrawFn) -> list[int]:
    """Some chains of CTAs that wait for each other, launched in a drawn order."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    places = draw(st.permutations(range(sum(lengths))))
    before, first = [-1] * len(places), 0
    for length in lengths:
        chain = places[first : first + length]
        for one, two in pairwise(chain):
            before[two] = one
        first += length
    return before


@given(chains(), st.integers(1, 8))
def test_the_walk_finds_what_never_ends(before: list[int], resident: int) -> None:
    """It says which wait: as many as are resident, one of them for a CTA that has not started."""
    stuck = find_stuck(before, resident)
    assert (stuck is None) == rounds(before, resident)
    if stuck is not None:
        assert len(stuck.waiting) == resident
        assert all(before[x] >= 0 for x in stuck.waiting)
        assert any(before[x] >= stuck.launched for x in stuck.waiting)


@given(st.integers(1, 20))
def test_each_waits_for_its_neighbour(blocks: int) -> None:
    """In the order of launches for the one before, else for the one behind: a mirror image."""
    same, other = resident_module._before(blocks, True), resident_module._before(blocks, False)
    assert same == [-1, *range(blocks - 1)]
    turned = [-1 if cta < 0 else blocks - 1 - cta for cta in other[::-1]]
    assert turned == same


@pytest.mark.parametrize("window", MASKS)
@pytest.mark.parametrize("kind", ["blackwell", "published"])
def test_the_defaults_end(window: tuple[int | None, int | None], kind: str) -> None:
    """The plan's order of sums is the one that the simulator takes from the mask; nothing is found.

    The other order of launches never ends, and is found.
    """
    asked = {"pass": "bwd", "deterministic": True, "kernel": kind, "window": window}
    request = build(asked)
    pipeline = request.pipeline
    assert isinstance(pipeline, BackwardPipeline)
    plan = backward_plan(pipeline, B200)
    assert plan.turns is not None
    last_first = modelled(pipeline).last_first(request.problem, pipeline)
    assert plan.turns.order == ("descending" if last_first else "ascending")
    assert check_plan(plan, B200) == []
    other = Turns(order=plan.turns.order, launches=("ascending" if last_first else "descending",))
    (found,) = check_plan(replace(plan, turns=other), B200)
    resident = resident_clusters(plan, B200)
    assert found.rule == "launches_end" and f"all {resident} resident CTA pairs" in found.message
    assert f"of {resident + 1} KV tiles" in found.message
    assert backward_plan(replace(pipeline, deterministic=False), B200).turns is None


def test_the_kernels_specs_end() -> None:
    """What is compiled has the same order of sums as what is predicted."""
    pytest.importorskip("cutlass")
    from fa4.sm100.backward.spec import BackwardSpec

    for features in ({}, {"causal": True}, {"window_left": True}, {"window_right": True}):
        for deterministic in (False, True):
            plan = BackwardSpec(head_dim=64, head_dim_v=64, deterministic=deterministic,
                                **features).plan  # fmt: skip
            assert (plan.turns is not None) == deterministic
            assert check_plan(plan, B200) == []
            if plan.turns is not None:
                last_first = bool({"causal", "window_right"} & features.keys())
                assert plan.turns.order == ("descending" if last_first else "ascending")


def test_longest_first_depends_on_the_mask() -> None:
    """Without one all KV tiles are alike; under one the plan does not know which come first."""
    pipeline = BackwardPipeline(deterministic=True, scheduler="lpt")
    assert check_plan(backward_plan(pipeline, B200), B200) == []
    for order in ("ascending", "descending"):
        masked = replace(pipeline, causal=True, numerics=BackwardConfig(dq_order=order))
        (found,) = check_plan(backward_plan(masked, B200), B200)
        assert found.rule == "launches_end"


@pytest.mark.parametrize("gpu", [B200, B300], ids=lambda gpu: gpu.name)
def test_one_cta_per_sm(gpu) -> None:  # type: ignore[no-untyped-def]
    """Every plan of Blackwell fills an SM, as the simulator takes it; so does Hopper's default."""
    for plan in (*FORWARD.values(), *BACKWARD.values(), *PUBLISHED.values()):
        assert ctas_per_sm(plan, gpu) == 1, plan.name
        assert resident_clusters(plan, gpu) == clusters(gpu, plan.cta_group)
    problem = build({"machine": "h200"}).problem
    plan = warpgroup_plan(default_hopper(problem, published=True), H200)
    assert ctas_per_sm(plan, H200) == 1


def test_each_resource_counts() -> None:
    """Shared memory, tensor memory, registers, threads: the scarcest decides."""
    plan = FORWARD["one Q tile"]
    role = Role(name="alone", warps=(0, 1, 2, 3), registers=32, program=())
    small = replace(plan, roles=(role,), signals=(), buffers=())
    assert ctas_per_sm(small, B200) == min(32, 2048 // 128, 65536 // (32 * 128))
    wide = replace(small, roles=(replace(role, registers=128),))
    assert ctas_per_sm(wide, B200) == 4
    tmem = tuple(b for b in plan.buffers if b.space == "tmem")
    assert ctas_per_sm(replace(small, buffers=tmem), B200) == 512 // 256
    column = (replace(tmem[0], size=8, start=0),)  # what is allocated has 32 columns at least
    assert ctas_per_sm(replace(small, buffers=column), replace(B200, tmem_cols=128)) == 4
    smem = tuple(b for b in plan.buffers if b.space == "smem")
    assert ctas_per_sm(replace(small, buffers=smem), B200) == 1


def test_a_chip_without_room() -> None:
    """A pair needs two SMs."""
    (found,) = check_plan(FORWARD["pair"], replace(B200, sm_count=1))
    assert (found.rule, found.subject) == ("launches_end", "chip") and "1 SM" in found.message


def test_explain_refuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    """With its name, and exit code 1; the default order passes."""
    call = ("explain", "--pass", "backward", "--deterministic", "--causal", "--json")
    for scheduler, code in (("spt", 0), ("naive", 1)):
        with pytest.raises(SystemExit) as stop:
            cli.main([*call, "--scheduler", scheduler])
        report = json.loads(capsys.readouterr().out)
        assert stop.value.code == code and report["resident"] == 74
        assert [row["rule"] for row in report["findings"]] == ["launches_end"] * code
