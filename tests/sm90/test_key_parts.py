"""Hopper's gradients of few keys: query heads that share them are divided over CTAs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cutlass")

import fa4
from fa4.backends import kernel_backward
from fa4.compiled import variants
from fa4.compiled.support import BackwardCall
from fa4.hardware import B200, H200
from fa4.plan.warpgroup_key_parts import key_parts

SMS = H200.sm_count
CALL = BackwardCall(
    dtype="bf16", head_dim=96, head_dim_v=96, heads_q=64, heads_k=4, batch=1, rows_q=2654,
    rows_k=2654, window=(None, 0),
)  # fmt: skip


@given(st.integers(1, 2000), st.integers(1, 64), st.floats(0.1, 500))
def test_parts_divide_the_group(ctas: int, group: int, tiles: float) -> None:
    """Never more than there are heads; CTAs that fill whole rounds are left as they are."""
    parts = key_parts(ctas, group, tiles, SMS)
    assert group % parts == 0
    assert key_parts(ctas, 1, tiles, SMS) == 1
    assert key_parts(SMS * (ctas % 8 + 1), group, tiles, SMS) == 1


def test_a_gpu_without_work_gets_some() -> None:
    """84 CTAs of 132 SMs, 16 heads each; none on Blackwell, none where every head has its keys."""
    assert variants.find_key_parts(CALL, H200) == 4
    assert variants.choose_backward_spec(CALL, H200).key_parts
    fields = vars(CALL)
    for other in ({"heads_k": 64}, {"batch": 32}):
        call = BackwardCall(**fields | other)
        assert variants.find_key_parts(call, H200) == 1
        assert not variants.choose_backward_spec(call, H200).key_parts
    packed = BackwardCall(**fields | {"batch": 3, "packed_q": True, "packed_k": True})
    assert variants.find_key_parts(packed, H200) > 1
    assert variants.find_key_parts(CALL, B200) == 1
    none = fields | {"batch": 0, "packed_q": True, "packed_k": True}
    assert variants.find_key_parts(BackwardCall(**none), H200) == 1


def gradients(shape: tuple[int, ...], dims: tuple[int, int], impl: str, **options: Any) -> Any:
    """dQ, dK and dV of a drawn call: six query heads on two; packed in two sequences, one empty."""
    drawn = torch.Generator().manual_seed(3)
    sizes = ((6, dims[0]), (2, dims[0]), (2, dims[1]))
    q, k, v = (
        torch.randn(*shape, *size, generator=drawn).bfloat16().requires_grad_() for size in sizes
    )
    if len(shape) == 1:
        lengths = torch.tensor([0, 40, 40, shape[0] - 7], dtype=torch.int32)
        options |= {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths}
        out = fa4.flash_attn_varlen_func(q, k, v, impl=impl, **options)
    else:
        out = fa4.flash_attn_func(q, k, v, impl=impl, **options)
    dout = torch.randn(out.shape, generator=drawn).bfloat16()
    return torch.autograd.grad(out, (q, k, v), dout)


@pytest.mark.parametrize(
    ("shape", "dims", "options"),
    [
        ((1, 150), (96, 72), {"causal": True}),
        ((150,), (40, 64), {"deterministic": True}),
        ((2, 70), (136, 24), {}),
        ((150,), (24, 136), {"causal": True}),
    ],
)
def test_parts_add_up(
    monkeypatch: Any, shape: tuple[int, ...], dims: tuple[int, int], options: dict[str, Any]
) -> None:
    """As the reference's; rows of no sequence are 0, and what a part lacks is seen."""
    asked: list[int] = []

    def three(call: Any, gpu: Any) -> int:
        asked.append(3)
        return 3

    for module in (variants, kernel_backward):
        monkeypatch.setattr(module, "find_key_parts", three)
    found = gradients(shape, dims, "emulator_sm90", **options)
    assert len(asked) >= 2
    wanted = gradients(shape, dims, "reference", **options)
    for mine, right in zip(found, wanted, strict=True):
        assert mine.dtype == right.dtype and mine.shape == right.shape
        bound = 2**-7 * float(right.abs().max())
        torch.testing.assert_close(mine, right, rtol=0, atol=bound)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(mine * 0.9, right, rtol=0, atol=bound)
    if len(shape) == 1:
        assert all(not x[-7:].any() for x in found)
