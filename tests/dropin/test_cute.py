"""`fa4.flash_attn.cute`: flash-attn-4's signatures and returns."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import fa4
from fa4.flash_attn import cute
from tests.dropin.support import differences, signature

# flash-attn-4 4.0.0b36; tests/conformance compares with the package itself.
START = "q, k, v, qv=None, "
COMMON = (
    "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, "
    "num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, "
    "mask_mod=None, "
)
END = "gather_bwd_recompute_p=False, gather_bwd_token_chunk=None"
SIGNATURES = {
    "flash_attn_func": (
        f"{START}gather_kv_indices=None, {COMMON}aux_tensors=None, aux_scalars=None, "
        f"block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False, {END}"
    ),
    "flash_attn_varlen_func": (
        f"{START}cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
        "min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, "
        f"page_table=None, {COMMON}block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, "
        "return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, "
        f"disable_scheduler_metadata=False, {END}"
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    """Names, order and defaults."""
    assert differences(getattr(cute, name), signature(SIGNATURES[name])) == []


def tensors() -> Any:
    """q, k, v: two entries, so that unpacking a tensor would split the batch."""
    torch.manual_seed(0)
    return [torch.randn(2, n, h, 16) for n, h in ((5, 4), (7, 2), (7, 2))]


def test_always_two_results() -> None:
    """(out, lse): lse None unless asked for or a gradient is wanted, and differentiable then."""
    q, k, v = tensors()
    expected = fa4.flash_attn_func(q, k, v, causal=True, return_lse=True)
    out, lse = cute.flash_attn_func(q, k, v, causal=True)
    assert out.equal(expected.out) and lse is None
    out, lse = cute.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert out.equal(expected.out) and lse.equal(expected.lse)
    _, lse = cute.flash_attn_func(q.requires_grad_(), k, v)
    lse.sum().backward()
    assert q.grad.abs().sum() > 0


def test_varlen() -> None:
    """Packed, padded and paged, with every option by its place in the signature."""
    q, k, v = tensors()
    out, lse = cute.flash_attn_varlen_func(
        q, k, v, seqused_q=torch.tensor([5, 2]), seqused_k=torch.tensor([7, 3]), return_lse=True,
        causal=True, softcap=2.0, learnable_sink=torch.ones(4), num_splits=0,
    )  # fmt: skip
    expected = fa4.flash_attn_varlen_func(
        q, k, v, seqused_q=torch.tensor([5, 2]), seqused_k=torch.tensor([7, 3]), return_lse=True,
        causal=True, softcap=2.0, learnable_sink=torch.ones(4),
    )  # fmt: skip
    assert out.equal(expected.out) and lse.equal(expected.lse)
    offsets, pages = torch.tensor([0, 5, 10]), torch.tensor([[1, 0], [0, 1]])
    out, _ = cute.flash_attn_varlen_func(
        q.flatten(0, 1), k, v, None, offsets, None, 5, None, None, None, torch.tensor([9, 7]), None,
        pages, window_size=(3, None),
    )  # fmt: skip
    expected = fa4.flash_attn_varlen_func(
        q.flatten(0, 1), k, v, cu_seqlens_q=offsets, seqused_k=torch.tensor([9, 7]),
        page_table=pages, window_size=(3, None),
    )  # fmt: skip
    assert out.equal(expected)


@pytest.mark.parametrize(
    "option",
    [
        {"qv": torch.ones(1)},
        {"gather_kv_indices": torch.ones(1)},
        {"aux_scalars": (1,)},
        {"gather_bwd_recompute_p": True},
        {"gather_bwd_token_chunk": 128},
        {"seqlen_k_per_split": 64},
    ],
    ids=lambda option: next(iter(option)),
)
def test_what_has_no_counterpart_is_refused(option: dict[str, Any]) -> None:
    """By name, in one line, from each function that has the parameter; empty means unset."""
    (name,) = option
    functions = [f for f in (cute.flash_attn_func, cute.flash_attn_varlen_func)
                 if name in inspect.signature(f).parameters]  # fmt: skip
    assert functions
    for function in functions:
        with pytest.raises(NotImplementedError, match=f"^{name} is not in this version") as raised:
            function(*tensors(), **option)
        assert "\n" not in str(raised.value)
        function(*tensors(), aux_scalars=())
