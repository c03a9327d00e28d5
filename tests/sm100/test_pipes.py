"""From PTX opcodes to execution pipes, and the counts of a compiled kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa4.compiled.prediction import measured_plan, tile_amounts
from fa4.compiled.variants import tuned_spec
from fa4.config import Exp2Split, Problem
from fa4.inspect.pipes import pipe_amounts
from fa4.plan.counted_math import loop_math
from fa4.sim.machine import find_machine
from fa4.sim.predict import predict


@pytest.mark.parametrize(
    ("counts", "used"),
    [
        ({"ex2.approx.ftz.f32": 3, "rcp.approx.ftz.f32": 1}, (4, 0, 0, 0)),
        ({"fma.rn.f32x2": 2, "add.rm.ftz.f32x2": 1, "sub.rn.f32x2": 1}, (0, 8, 0, 0)),
        ({"mul.f32": 2, "fma.rn.f32": 1}, (0, 3, 0, 0)),
        ({"max.f32": 128}, (0, 0, 64, 0)),
        ({"cvt.rn.bf16x2.f32": 5, "setp.ge.f32": 1, "selp.f32": 1, "max.s32": 1}, (0, 0, 8, 0)),
        ({"shl.b32": 4, "add.s32": 4}, (0, 0, 4, 0)),
        ({"shl.b32": 1, "add.s32": 4}, (0, 0, 4, 0)),
        ({"mov.b64": 300, "mov.b32": 9, "ld.param.b32": 2}, (0, 0, 0, 0)),
        ({"bra": 2, "mbarrier.arrive.shared.b64": 1, "exit": 1, "ld.shared.b32": 1}, (0, 0, 0, 5)),
    ],
    ids=str,
)
def test_rules(counts: dict[str, int], used: tuple[float, ...]) -> None:
    """Each rule alone: (mufu, fma, alu, other)."""
    amount = pipe_amounts(counts)
    assert (amount.mufu, amount.fma, amount.alu, amount.other) == used


def test_lone_maxima() -> None:
    """The clamp of an emulated exponential is an instruction of its own."""
    assert pipe_amounts({"max.f32": 152}, 24).alu == 24 + 64
    assert pipe_amounts({"max.f32": 10}, 24).alu == 10


def test_counts_of_a_kernel() -> None:
    """The compiled kernel at head dim 64: what its row needs by definition, and near the plan."""
    pytest.importorskip("cutlass")
    pytest.importorskip("tvm_ffi")
    spec = tuned_spec(64, 64, causal=True, scheduler="lpt")
    spec = replace(
        spec, numerics=replace(spec.numerics, exp2=Exp2Split(frequency=16, start_fragment=1))
    )
    amounts = tile_amounts(spec)
    assert amounts.keys() == {"softmax0", "softmax1", "correction"}
    for tile in ("softmax0", "softmax1"):
        found = amounts[tile]
        assert found.mufu == 128 - 16 + 1  # and alpha
        # Scale, sum and six packed instructions for a pair of emulated ones; a few for the row.
        assert 128 + 126 + 16 * 6 <= found.fma <= 128 + 128 + 16 * 6 + 8
        # Maxima, conversions, and clamp and exponent of the emulated ones.
        assert 64 + 64 + 32 <= found.alu <= 64 + 64 + 32 + 40
        planned = sum(part.alu for part in loop_math(spec.plan.role(tile)).values())
        assert found.alu == pytest.approx(planned, rel=0.2)
    plan, b200 = measured_plan(spec), find_machine("b200")
    assert sum(part.mufu for part in loop_math(plan.role("softmax0")).values()) == 113
    problem = Problem(
        batch=2, seqlen_q=8192, seqlen_k=8192, heads_q=16, heads_k=16, head_dim=64, causal=True
    )
    counted, own = (predict(problem, spec.pipeline, b200, plan=p) for p in (plan, None))
    assert counted.cycles == pytest.approx(own.cycles, rel=0.1) and counted.cycles != own.cycles


@pytest.mark.parametrize("feature", ["sink", "window_left", "packed_q"])
def test_kernels_that_are_not_counted(feature: str) -> None:
    """They need more than q, k and v."""
    with pytest.raises(ValueError, match=f"plain or causal kernels; got {feature}"):
        tile_amounts(tuned_spec(64, 64, **{feature: True}))
