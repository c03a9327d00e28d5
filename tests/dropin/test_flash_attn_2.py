"""`fa4.flash_attn`: flash_attn 2's signatures, and what each function gives."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy as np
import pytest
import torch

import fa4
from fa4 import flash_attn
from tests.dropin.support import differences, signature

TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
# flash_attn 2.8, which cannot be installed without its CUDA build. Source: the README of
# flash-attention, "How to use FlashAttention", and its release notes (2.6 softcap, 2.5 block_table,
# 2.7 cache_leftpad and the fifth result of unpad_input).
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {TAIL}",
    "flash_attn_kvpacked_func": f"q, kv, {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, {TAIL}",
    "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {TAIL}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {TAIL}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TAIL}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
    ),
}
PADDING = {
    "unpad_input": "hidden_states, attention_mask, unused_mask=None",
    "unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
    "pad_input": "hidden_states, indices, batch, seqlen",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    """Names, order and defaults; what we add is by keyword."""
    assert differences(getattr(flash_attn, name), signature(SIGNATURES[name])) == []


@pytest.mark.parametrize("name", PADDING)
def test_signature_of_padding(name: str) -> None:
    """The same for bert_padding."""
    module = importlib.import_module("fa4.flash_attn.bert_padding")
    assert differences(getattr(module, name), signature(PADDING[name])) == []


def test_signatures_of_the_installed_package() -> None:
    """The real one, where it is installed: this package's names have the same parameters."""
    try:
        real = importlib.import_module("flash_attn")
        functions = {name: getattr(real, name) for name in SIGNATURES}
    except (ImportError, AttributeError):
        pytest.skip("flash_attn 2 is not installed")
    for name, function in functions.items():
        assert differences(getattr(flash_attn, name), inspect.signature(function)) == []


def test_the_comparison_sees_differences() -> None:
    """Another order, default or name, one too few and one without a default."""
    whole = SIGNATURES["flash_attn_func"]
    for wrong in (
        whole.replace("q, k,", "k, q,"),
        whole.replace("causal=False", "causal=True"),
        whole.replace("softcap", "soft_cap"),
        whole.removesuffix(", return_attn_probs=False"),
    ):
        assert wrong != whole and differences(flash_attn.flash_attn_func, signature(wrong))
    assert differences(lambda q, *, impl: None, signature("q"))


def test_names() -> None:
    """The package, and the module where flash_attn 2 has them."""
    module = importlib.import_module("fa4.flash_attn.flash_attn_interface")
    assert sorted(SIGNATURES) == sorted(flash_attn.__all__) == sorted(module.__all__)
    assert fa4.flash_attn is flash_attn


def tensors(*lead: int, heads: tuple[int, int] = (4, 2), rows: Any = 5, keys: Any = 7) -> Any:
    """q, k, v in float64 that want gradients; rows and keys as the last of `lead`."""
    torch.manual_seed(0)
    shapes = [(*lead, n, h, 8) for n, h in ((rows, heads[0]), (keys, heads[1]), (keys, heads[1]))]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({"causal": True, "softmax_scale": 0.7}, {"causal": True, "softmax_scale": 0.7}),
    "window": ({"window_size": (2, 1)}, {"window_size": (2, 1)}),
    "left": ({"window_size": (2, -1)}, {"window_size": (2, None)}),
    "any side below 0": ({"window_size": (-3, -7)}, {}),
    "softcap": ({"softcap": 3.0}, {"softcap": 3.0}),
}


@pytest.mark.parametrize("label", OPTIONS)
def test_dense_and_packed_forms(label: str) -> None:
    """Each form gives what `fa4.flash_attn_func` gives, and its gradients."""
    theirs, ours = OPTIONS[label]
    q, k, v = tensors(2, heads=(2, 2), rows=7)
    expected = fa4.flash_attn_func(q, k, v, **ours)
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    for function, given in (
        (flash_attn.flash_attn_func, (q, k, v)),
        (flash_attn.flash_attn_kvpacked_func, (q, torch.stack((k, v), 2))),
        (flash_attn.flash_attn_qkvpacked_func, (torch.stack((q, k, v), 2),)),
    ):
        out = function(*given, **theirs)
        assert out.equal(expected)
        found = torch.autograd.grad(out.square().sum(), (q, k, v), retain_graph=True)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("label", OPTIONS)
def test_varlen_forms(label: str) -> None:
    """Packed sequences, one by one; pages too."""
    theirs, ours = OPTIONS[label]
    q, k, v = tensors(heads=(2, 2), rows=12, keys=12)
    offsets = torch.tensor([0, 3, 3, 12], dtype=torch.int32)
    parts = [slice(0, 3), slice(3, 12)]
    expected = torch.cat([fa4.flash_attn_func(*(x[None, p] for x in (q, k, v)), **ours)[0]
                          for p in parts])  # fmt: skip
    whole = (offsets, offsets, 9, 9)
    pages = torch.arange(12).reshape(6, 2)
    table = torch.tensor([[0, 1, -1, -1, -1], [-1] * 5, [1, 2, 3, 4, 5]], dtype=torch.int32)
    paged = [x[pages] for x in (k, v)]
    # The second sequence begins in the middle of page 1: move it to a page of its own.
    paged = [torch.cat([x[:2], torch.cat([y[3:], y[:1]]).unflatten(0, (5, 2))])
             for x, y in zip(paged, (k, v), strict=True)]  # fmt: skip
    table = torch.tensor([[0, 1, -1, -1, -1], [-1] * 5, [2, 3, 4, 5, 6]], dtype=torch.int32)
    results = [
        flash_attn.flash_attn_varlen_func(q, k, v, *whole, **theirs),
        flash_attn.flash_attn_varlen_kvpacked_func(q, torch.stack((k, v), 1), *whole, **theirs),
        flash_attn.flash_attn_varlen_qkvpacked_func(
            torch.stack((q, k, v), 1), offsets, 9, **theirs
        ),
        flash_attn.flash_attn_varlen_func(q, *paged, *whole, **theirs, block_table=table),
    ]
    for out in results:
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
        (gradient,) = torch.autograd.grad(out.square().sum(), k, retain_graph=True)
        (wanted,) = torch.autograd.grad(expected.square().sum(), k, retain_graph=True)
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-13)


def test_three_results() -> None:
    """(out, lse, S_dmask), the last one empty without dropout; one result by default."""
    q, k, v = tensors(2)
    out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    assert (out.shape, lse.shape, probabilities.shape) == ((2, 5, 4, 8), (2, 4, 5), (0,))
    assert flash_attn.flash_attn_func(q, k, v).equal(out)
    offsets = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 7])
    packed = [x[0] for x in (q, k, v)]
    out, lse, _ = flash_attn.flash_attn_varlen_func(*packed, *offsets, 3, 4, return_attn_probs=True)
    assert (out.shape, lse.shape) == ((5, 4, 8), (4, 5))


def test_probabilities_with_dropout() -> None:
    """S_dmask times V over the kept ones is the output; a minus marks the dropped ones."""
    q, k, v = tensors(2)
    out, lse, signed = flash_attn.flash_attn_func(q, k, v, 0.4, causal=True, return_attn_probs=True)
    kept = signed.clamp(min=0) / 0.6
    wide = v.repeat_interleave(2, 2).transpose(1, 2)
    torch.testing.assert_close((kept @ wide).transpose(1, 2), out, rtol=1e-12, atol=1e-12)
    scores = q.transpose(1, 2) @ k.repeat_interleave(2, 2).permute(0, 2, 3, 1) * 8**-0.5
    seen = torch.ones(5, 7, dtype=torch.bool).tril(2)
    expected = torch.where(seen, (scores - lse[..., None]).exp(), 0.0)
    torch.testing.assert_close(signed.abs(), expected, rtol=1e-12, atol=1e-12)
    assert 0 < (signed < 0).sum() < seen.sum() * 8
    offsets = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 7])
    packed = [x[0] for x in (q, k, v)]
    out, _, signed = flash_attn.flash_attn_varlen_func(
        *packed, *offsets, 3, 4, 0.4, return_attn_probs=True
    )
    assert signed.shape == (2, 4, 3, 4) and not signed[0, :, 2:].any()
    last = signed[1, :, :, :3].clamp(min=0) / 0.6 @ wide[0, :, 4:]
    torch.testing.assert_close(last.transpose(0, 1), out[2:], rtol=1e-12, atol=1e-12)


def test_dropout_draws_anew() -> None:
    """Another mask in each call, the same one after the same seed; NumPy's generator for arrays."""
    q, k, v = (x.detach() for x in tensors(2))
    arrays = [x.numpy() for x in (q, k, v)]

    def draws() -> list[Any]:
        torch.manual_seed(5)
        np.random.seed(5)  # noqa: NPY002
        return [
            *(flash_attn.flash_attn_func(q, k, v, 0.5) for _ in range(2)),
            *(torch.from_numpy(flash_attn.flash_attn_func(*arrays, 0.5)) for _ in range(2)),
        ]

    first = draws()
    assert all(a.equal(b) for a, b in zip(first, draws(), strict=True))
    assert not first[0].equal(first[1]) and not first[2].equal(first[3])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda q, k, v: flash_attn.flash_attn_qkvpacked_func(q), "qkv must be"),
        (lambda q, k, v: flash_attn.flash_attn_kvpacked_func(q, q[:, :, None]), "kv must be"),
        (lambda q, k, v: flash_attn.flash_attn_func(q, k, v, 1.0), "dropout_p must be below 1"),
        (
            lambda q, k, v: flash_attn.flash_attn_func(q, k, v, alibi_slopes=torch.ones(2)),
            r"alibi_slopes must be \(4,\) or \(2, 4\); got \(2,\)",
        ),
    ],
)
def test_refusals(call: Any, text: str) -> None:
    """One line each."""
    with pytest.raises(ValueError, match=text) as raised:
        call(*tensors(2))
    assert "\n" not in str(raised.value)
