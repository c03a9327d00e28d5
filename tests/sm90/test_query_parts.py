"""Hopper's gradients of few queries with wide heads: their keys are divided over CTAs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cutlass")

from fa4.backends import kernel_backward
from fa4.compiled import variants
from fa4.compiled.support import BackwardCall
from fa4.hardware import B200, H200
from fa4.plan.warpgroup_query_parts import FEWEST_STEPS, QueryCtas, query_parts
from tests.sm90.test_key_parts import gradients

SMS = H200.sm_count
CALL = BackwardCall(
    dtype="bf16", head_dim=152, head_dim_v=152, heads_q=2, heads_k=2, batch=1, rows_q=421,
    rows_k=23088, window=(None, 0),
)  # fmt: skip


@given(st.integers(1, 3000), st.floats(0.1, 2000), st.floats(1, 2))
def test_parts_have_work(ctas: int, steps: float, uneven: float) -> None:
    """A part has some KV tiles; CTAs that fill whole rounds are left as they are."""
    parts = query_parts(QueryCtas(ctas=ctas, steps=steps, longest=uneven * steps), SMS)
    assert parts == 1 or parts <= uneven * steps / FEWEST_STEPS
    whole = QueryCtas(ctas=SMS * (ctas % 8 + 1), steps=steps, longest=steps)
    assert query_parts(whole, SMS) == 1


def test_a_gpu_without_work_gets_some() -> None:
    """8 CTAs of 132 SMs; none on Blackwell, none where the kernel adds up dQ, none of enough."""
    assert variants.find_query_parts(CALL, H200) > 8
    assert variants.choose_backward_spec(CALL, H200).query_parts
    fields = vars(CALL)
    packed = BackwardCall(**fields | {"batch": 3, "packed_q": True, "packed_k": True})
    assert variants.find_query_parts(packed, H200) > 1
    narrow = BackwardCall(**fields | {"head_dim": 128, "head_dim_v": 128})
    many = BackwardCall(**fields | {"heads_q": 64, "heads_k": 64, "batch": 4})
    for call in (narrow, many):
        assert variants.find_query_parts(call, H200) == 1
        assert not getattr(variants.choose_backward_spec(call, H200), "query_parts", False)
    assert variants.find_query_parts(CALL, B200) == 1
    none = fields | {"batch": 0, "packed_q": True, "packed_k": True}
    assert variants.find_query_parts(BackwardCall(**none), H200) == 1


@pytest.mark.parametrize(
    ("shape", "dims", "options"),
    [
        ((2, 170), (136, 24), {"window_size": (90, 20)}),
        ((150,), (24, 136), {"causal": True}),
        ((1, 260), (256, 72), {"causal": True}),
    ],
)
def test_parts_add_up(
    monkeypatch: Any, shape: tuple[int, ...], dims: tuple[int, int], options: dict[str, Any]
) -> None:
    """As the reference's; rows of no sequence are 0, and what a part lacks is seen.

    Both kernels' sums are divided; the first case has parts without a key.
    """
    asked: list[int] = []

    def count(parts: int) -> Any:
        def found(call: Any, gpu: Any) -> int:
            asked.append(parts)
            return parts

        return found

    for module in (variants, kernel_backward):
        monkeypatch.setattr(module, "find_key_parts", count(3))
        monkeypatch.setattr(module, "find_query_parts", count(5))
    found = gradients(shape, dims, "emulator_sm90", **options)
    assert {3, 5} == set(asked)
    wanted = gradients(shape, dims, "reference", **options)
    for mine, right in zip(found, wanted, strict=True):
        assert mine.dtype == right.dtype and mine.shape == right.shape
        bound = 2**-7 * float(right.abs().max())
        torch.testing.assert_close(mine, right, rtol=0, atol=bound)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(mine * 0.9, right, rtol=0, atol=bound)
    if len(shape) == 1:
        assert all(not x[-7:].any() for x in found)
