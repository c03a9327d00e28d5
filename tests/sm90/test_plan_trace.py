"""The compiled Hopper kernel is its plan: steps as traced, counts and registers in the code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("cutlass")

from fa4.compiled.forward import compile_warpgroup
from fa4.inspect.codegen import read_kernels
from fa4.inspect.products import read_products
from fa4.plan.schema import Arrive, Program, Wait, walk
from fa4.sm90.forward.spec import WarpgroupSpec

SPECS: dict[str, dict[str, Any]] = {
    "turns": {"head_dim": 128, "head_dim_v": 128, "causal": True, "scheduler": "snake"},
    "no turns": {"head_dim": 64, "head_dim_v": 64, "consumers": 3, "ping_pong": False},
    "serial": {"head_dim": 96, "head_dim_v": 64, "overlap": False, "p_source": "smem"},
    "one": {"head_dim": 64, "head_dim_v": 128, "consumers": 1, "kv_stages": 3, "used_q": True},
    "ahead": {"head_dim": 64, "head_dim_v": 64, "consumers": 3, "causal": True, "ahead": True},
    "queue": {
        "head_dim": 136,
        "head_dim_v": 40,
        "causal": True,
        "ahead": True,
        "packed_q": True,
        "tile_n": 64,
        "scheduler": "queue",
    },
    "queue, O over Q": {
        "head_dim": 200,
        "head_dim_v": 200,
        "tile_n": 80,
        "causal": True,
        "scheduler": "queue",
    },
    "ahead, one Q": {
        "head_dim": 128,
        "head_dim_v": 128,
        "consumers": 3,
        "tile_n": 80,
        "ping_pong": False,
        "ahead": True,
        "packed_q": True,
    },
    "parts": {"head_dim": 64, "head_dim_v": 128, "consumers": 1, "group": 5, "split": True},
    "positions straddle": {
        "head_dim": 72,
        "head_dim_v": 64,
        "tile_n": 64,
        "causal": True,
        "group": 3,
        "ahead": True,
        "scheduler": "queue",
    },
    "O over Q": {"head_dim": 256, "head_dim_v": 256, "tile_n": 80, "dtype": "fp16"},
    "8 bits": {
        "head_dim": 128,
        "head_dim_v": 64,
        "dtype": "e4m3",
        "consumers": 3,
        "tile_n": 96,
        "kv_stages": 3,
        "causal": True,
        "descale": "qkv",
    },
    "8 bits, promoted": {
        "head_dim": 128,
        "head_dim_v": 128,
        "dtype": "e5m2",
        "tile_n": 96,
        "promote": 2,
        "ahead": True,
    },
    "8 bits, promoted in O's rows": {
        "head_dim": 256,
        "head_dim_v": 256,
        "dtype": "e4m3",
        "promote": 2,
        "causal": True,
        "scheduler": "queue",
    },
}


@dataclass(frozen=True)
class Traced:
    """A compiled spec and its steps, (role, Wait or Arrive), in the order of the code."""

    spec: WarpgroupSpec
    compiled: Any
    steps: list[tuple[str, Wait | Arrive]]

    @property
    def ptx(self) -> str:
        """Of its kernel, and of the one that combines parts."""
        return self.compiled.artifacts.PTX


@pytest.fixture(scope="module", params=SPECS)
def traced(request: pytest.FixtureRequest) -> Traced:
    spec = WarpgroupSpec(**SPECS[request.param])
    steps: list[tuple[str, Wait | Arrive]] = []
    return Traced(spec, compile_warpgroup(spec, trace=steps), steps)


def signalled(program: Program) -> list[Wait | Arrive]:
    """Its steps that are signals."""
    return [step for step in walk(program) if isinstance(step, (Wait, Arrive))]


def check_steps(spec: WarpgroupSpec, steps: list[tuple[str, Wait | Arrive]]) -> None:
    """Each role's, in the order of its program."""
    for role in spec.plan.roles:
        found = [step for name, step in steps if name == role.name]
        assert found == signalled(role.steps), role.name
    assert {name for name, _ in steps} == {role.name for role in spec.plan.roles}


def test_steps_are_the_plans(traced: Traced) -> None:
    check_steps(traced.spec, traced.steps)


@pytest.mark.parametrize("number", [0, 9, -1])
def test_a_step_that_is_missing_is_seen(traced: Traced, number: int) -> None:
    del (shorter := list(traced.steps))[number]
    with pytest.raises(AssertionError):
        check_steps(traced.spec, shorter)


def test_counts_and_registers_are_the_plans(traced: Traced) -> None:
    """Arrive counts, register budgets and threads; nothing is spilled."""
    plan, ptx = traced.spec.plan, traced.ptx
    counts = [s.arrive_count for s in plan.signals for _ in range(s.stages) if s.kind == "mbarrier"]
    assert sorted(init_counts(ptx)) == sorted(counts)
    budgets = [int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)]
    wanted = {role.registers for role in plan.roles} | set(plan.idle_warps.values())
    assert set(budgets) == wanted
    assert f".reqntid {plan.warps * 32}" in ptx
    artifacts = traced.compiled.artifacts
    codes = read_kernels(artifacts.CUBIN)
    assert len(codes) == 1 + traced.spec.split
    assert all(x.resources.stack_bytes == x.resources.frame_bytes == 0 for x in codes)
    products = read_products(artifacts.CUBIN, artifacts.PTX)
    assert len(products) == len(codes) and not any(x.wait for x in products.values())


def init_counts(ptx: str) -> list[int]:
    """Arrive counts of the barriers that are made."""
    made = re.findall(r"mbarrier\.init\.shared(?:::cta)?\.b64\s+\[[^\]]+\], (%?\w+);", ptx)
    constants = dict(re.findall(r"mov\.b32\s+(%\w+), (\d+);", ptx))
    return [int(constants.get(one, one)) for one in made]


def test_products_are_the_plans(traced: Traced) -> None:
    """wgmma of the plan's shapes, and of no others."""
    spec = traced.spec
    shape = rf"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k{spec.depth}"
    shapes = set(re.findall(shape, traced.ptx))
    assert shapes == {str(spec.tile_n), str(spec.pipeline.head_dim_v)}
    found = read_products(traced.compiled.artifacts.CUBIN, traced.ptx).values()
    (products,) = (one for one in found if one.instructions)
    assert products.exponentials == products.ptx_exponentials
    assert not products.late and not products.by_threads


def test_l2_fetches_what_has_no_place_yet(traced: Traced) -> None:
    """Q of the next work tile, and nothing else, where a CTA has one place for Q that no O lies
    over: a box for each warpgroup's rows and run of 128 bytes."""
    spec, plan = traced.spec, traced.spec.plan
    found = traced.ptx.count("cp.async.bulk.prefetch.tensor")
    over = any(buffer.name == "o" and buffer.overlaps for buffer in plan.buffers)
    several = spec.scheduler in ("static", "queue")
    assert (found > 0) == (several and plan.buffer("q").stages == 1 and not over)
    assert found <= spec.consumers * -(-spec.tile_columns[0] * spec.element_bytes // 128)


def test_spills_are_seen() -> None:
    """Three warpgroups with 112 keys at head dim 128 do not fit their registers."""
    spec = WarpgroupSpec(head_dim=128, head_dim_v=128, consumers=3, tile_n=112)
    (code,) = read_kernels(compile_warpgroup(spec).artifacts.CUBIN)
    assert code.resources.stack_bytes + code.resources.frame_bytes > 0
