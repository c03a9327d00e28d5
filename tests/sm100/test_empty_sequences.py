"""Sequences without keys or queries, anywhere, with no memory in front of any tensor.

The maps of packed tensors begin in front of them; TMA translates a map's start for a box that
holds nothing of a sequence, so such boxes must come from another map (`fa4.kit.views`). The
emulator reports the others, as `aligned_copy` leaves nothing registered there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass")

from fa4.config import ForwardConfig
from fa4.sm90.forward.spec import WarpgroupSpec
from fa4.sm100.backward.spec import BackwardSpec
from fa4.sm100.forward.spec import ForwardSpec
from fa4.testing import Case, assert_within_budget
from tests.sm90 import forward_kernel as sm90
from tests.sm100 import backward_kernel, forward_cases, forward_kernel
from tests.sm100.test_forward_features import CHEAP

PACKED: dict[str, Any] = {"head_dim": 64, "head_dim_v": 64, "packed_q": True, "packed_k": True}
FORWARD: dict[str, Callable[[], Any]] = {
    "sm90": lambda: sm90.build(WarpgroupSpec(**PACKED, tile_n=64, consumers=1)),
    "sm90, ahead of its work tiles": lambda: sm90.build(
        WarpgroupSpec(**PACKED, tile_n=64, consumers=3, scheduler="snake", ahead=True)
    ),
    "sm100": lambda: forward_kernel.build(ForwardSpec(**PACKED, numerics=tuned(64))),
    "sm100, a pair": lambda: forward_kernel.build(
        ForwardSpec(**(PACKED | {"head_dim": 128, "head_dim_v": 128}), cta_group=2,
                    numerics=tuned(128))
    ),
}  # fmt: skip
BACKWARD: dict[str, Callable[[], Any]] = {
    "one CTA": lambda: backward_kernel.build(BackwardSpec(**PACKED)),
    "a pair": lambda: backward_kernel.build(
        BackwardSpec(**(PACKED | {"head_dim": 128, "head_dim_v": 128}), cta_group=2)
    ),
    "a serial pair": lambda: backward_kernel.build(
        BackwardSpec(**(PACKED | {"head_dim": 192, "head_dim_v": 128}), cta_group=2)
    ),
}
LENGTHS = st.sampled_from((0, 0, 1, 5, 63, 64, 65, 129))


def tuned(head_dim: int) -> ForwardConfig:
    return ForwardConfig.tuned("bf16", head_dim, False)


@st.composite
def cases(draw: st.DrawFn, spec: Any) -> Case:
    """Two to five short sequences of one head; about a quarter have no keys, or no queries."""
    lengths = draw(st.lists(st.tuples(LENGTHS, LENGTHS), min_size=2, max_size=5))
    rows, keys = map(sum, zip(*lengths, strict=True))
    if not rows or not keys:
        lengths.append((1, 1))
    return Case(
        layout="packed", lengths=tuple(lengths), head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v, dtype=spec.dtype, seed=draw(st.integers(0, 2**16)),
    )  # fmt: skip


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name: str) -> None:
    run = FORWARD[name]()

    @settings(CHEAP, max_examples=4)
    @given(cases(run.spec), forward_cases.runs())
    def check(case: Case, how: dict[str, Any]) -> None:
        inputs = forward_kernel.make_inputs(run.spec, case)
        outputs, _ = run(inputs, **(how | {"num_sms": how["num_sms"] * run.spec.cta_group}))
        assert_within_budget(inputs, outputs)

    check()


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name: str) -> None:
    run = BACKWARD[name]()

    @settings(CHEAP, max_examples=2)
    @given(cases(run.spec), forward_cases.backward_runs())
    def check(case: Case, how: dict[str, Any]) -> None:
        inputs = forward_kernel.make_inputs(run.spec, case)
        outputs, _ = run(inputs, **how)
        assert_within_budget(inputs, outputs, gradients_alone=True)

    check()
