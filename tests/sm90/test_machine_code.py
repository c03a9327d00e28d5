"""Whatever the call: ptxas leaves products, and what is beside them, where its kernel has them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass")

from fa4.compiled.build import compile_kernel
from fa4.compiled.support import BackwardCall, ForwardCall
from fa4.compiled.variants import choose_backward_spec, choose_sm90_spec
from fa4.hardware import H200
from fa4.inspect.products import KernelProducts, read_products
from fa4.kit.units import MMA_DEPTH
from fa4.plan.warpgroup_wide import WideBackwardPipeline
from fa4.plan.warpgroup_wide_queries import sums_first
from fa4.sm90.forward.products import MOST_AHEAD
from tests.sm90.test_chosen_plans import NARROW, calls
from tests.sm90.test_wide_plan_trace import computed_by_threads

FACTORS = 4  # two rows of a thread, in two steps
COMPILED = settings(max_examples=15)


def products_of(spec: Any) -> list[KernelProducts]:
    """Of those kernels that have any."""
    artifacts = compile_kernel(spec, "sm_90a").artifacts
    found = read_products(artifacts.CUBIN, artifacts.PTX).values()
    return [one for one in found if one.instructions]


@pytest.mark.slow
@COMPILED
@given(calls(("bf16", "fp16", *NARROW)))
def test_forward_kernels(fields: dict[str, Any]) -> None:
    """Where loops are many, the factors by which O is rescaled may come late in one of them; of 10
    steps, with packed heads and a mask, threads may compute descriptors."""
    (found,) = products_of(choose_sm90_spec(ForwardCall(**fields)))
    assert not found.wait, found
    if fields["dtype"] in NARROW or -(-fields["head_dim"] // MMA_DEPTH) != MOST_AHEAD:
        assert not found.by_threads, found
    assert found.late <= FACTORS, found


@pytest.mark.slow
@COMPILED
@given(calls(("bf16", "fp16")), st.booleans(), st.booleans())
def test_kernels_of_gradients(fields: dict[str, Any], fixed: bool, lse: bool) -> None:
    """Up to head dim 192 half of a step's exponentials may be behind its wait; of 11 or 12 steps
    threads may compute descriptors in dQ's kernel."""
    call = BackwardCall(**fields | {"num_splits": 1}, deterministic=fixed, lse_gradient=lse)
    spec = choose_backward_spec(call, H200)
    held, moved, pipeline = False, 0, spec.pipeline
    if isinstance(pipeline, WideBackwardPipeline):
        held, moved = sums_first(pipeline), computed_by_threads(pipeline)
    kernels = products_of(spec)
    assert sum(found.by_threads for found in kernels) <= moved, kernels
    for found in kernels:
        assert not found.wait, found
        assert found.late <= (0 if held else found.ptx_exponentials / 2), found
