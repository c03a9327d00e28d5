"""The forward kernel against the oracle on code-generation specs that are drawn, not listed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import seed as set_seed
from hypothesis import strategies as st

from fa4.config import ForwardConfig
from fa4.sm100.forward.spec import ForwardSpec
from fa4.testing import assert_within_budget
from tests.sm100 import forward_cases
from tests.sm100.forward_kernel import biased, build, identity, listed, make_inputs
from tests.sm100.test_forward_features import CHEAP

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(7200)]

KERNELS, CASES, PARTS = 24, 6, 4
FLAGS = ("window_left", "window_right", "causal", "packed_q", "packed_k", "used_q", "used_k",
         "sink", "lse")  # fmt: skip
MODS: tuple[dict[str, Any], ...] = (
    {}, {}, {"softcap": True}, {"score_mod": identity},
    {"score_mod": biased, "aux": (("fp32", 2),)},
    {"mask_mod": listed, "aux": (("int32", 1),)},
)  # fmt: skip


@st.composite
def specs(draw: Any) -> ForwardSpec:
    """Any head dimensions, features and numerics that do not exclude one another."""
    fields = {name: draw(st.booleans()) for name in FLAGS} | draw(st.sampled_from(MODS))
    if "mask_mod" in fields:
        fields |= {"causal": False, "window_left": False, "window_right": False}
    if fields["causal"]:
        fields["window_right"] = False
    dims = st.sampled_from(range(8, 129, 8))
    numerics = ForwardConfig.tuned("bf16", 128, fields["causal"] or fields["window_right"])
    if draw(st.booleans()):
        numerics = ForwardConfig(q_tiles=1, exp2=numerics.exp2)
    return ForwardSpec(
        head_dim=draw(dims),
        head_dim_v=draw(dims),
        dtype=draw(st.sampled_from(("bf16", "fp16"))),
        group=draw(st.sampled_from((1, 2, 4, 8))),
        numerics=numerics,
        **fields,
    )


@pytest.mark.parametrize("part", range(PARTS))
def test_drawn_kernels(part: int) -> None:
    """Each kernel on several problems, under any schedule."""

    @set_seed(part)
    @settings(CHEAP, derandomize=False, max_examples=KERNELS // PARTS)
    @given(specs(), st.data())
    def search(spec: ForwardSpec, data: st.DataObject) -> None:
        run = build(spec)
        for _ in range(CASES):
            case = data.draw(forward_cases.cases(spec))
            inputs = make_inputs(spec, case)
            outputs, _ = run(inputs, **data.draw(forward_cases.runs()))
            assert_within_budget(inputs, outputs)

    search()
