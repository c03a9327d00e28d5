"""`flash_attn_with_kvcache` against attention over keys that are put together by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.flash_attn import flash_attn_with_kvcache
from tests.dropin.test_alibi import formula

HEADS, HEADS_K, DIM = 4, 2, 16


def turn(x: Any, cos: Any, sin: Any, at: Any, interleaved: bool) -> Any:
    """x (S, H, D): the first 2 * cos.shape[1] dimensions as complex numbers, times e^(i angle)."""
    half = cos.shape[1]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    turned = torch.complex(x[..., first], x[..., second]) * torch.complex(cos, sin)[at][:, None]
    result = x.clone()
    result[..., first], result[..., second] = turned.real, turned.imag
    return result


@st.composite
def problems(draw: Any) -> dict[str, Any]:
    """Keywords of the function, in float64, and what the naive way needs to know."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    batch, rows, new = (draw(st.integers(1, n)) for n in (3, 4, 3))
    kind = draw(st.sampled_from(("plain", "entries", "leftpad", "pages")))
    page, pages = (draw(st.sampled_from((1, 3, 8))), 6) if kind == "pages" else (24, 1)
    entries = batch * pages + draw(st.integers(0, 2)) * (kind != "plain")
    shape = (entries, page, HEADS_K, DIM)
    call = {
        "q": torch.randn(batch, rows, HEADS, DIM, dtype=torch.float64),
        "k_cache": torch.randn(shape, dtype=torch.float64),
        "v_cache": torch.randn(shape, dtype=torch.float64),
        "causal": draw(st.booleans()),
        "softmax_scale": draw(st.sampled_from((None, 0.5))),
        "num_splits": draw(st.sampled_from((0, 1, 2))),
    }
    capacity = page * pages
    least = 2 if kind == "leftpad" else 0
    if capacity - new >= least:
        call["k"], call["v"] = torch.randn(2, batch, new, HEADS_K, DIM, dtype=torch.float64)
        capacity -= new
    lengths = [draw(st.integers(least, capacity)) for _ in range(batch)]
    call["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32)
    order = torch.randperm(entries)
    if kind in ("entries", "leftpad") and entries >= batch:
        call["cache_batch_idx"] = order[:batch].int()
    if kind == "leftpad":
        call["cache_leftpad"] = torch.tensor([draw(st.integers(0, n)) for n in lengths])
    if kind == "pages":
        call["block_table"] = order[: batch * pages].reshape(batch, pages).int()
    if "k" in call and draw(st.booleans()):
        angles = torch.randn(60, draw(st.sampled_from((2, 8))), dtype=torch.float64)
        call["rotary_cos"], call["rotary_sin"] = angles.cos(), angles.sin()
        call["rotary_interleaved"] = draw(st.booleans())
    if draw(st.booleans()):
        call["alibi_slopes"] = torch.rand(batch, HEADS)
    return call


def naive(call: dict[str, Any]) -> tuple[Any, Any, Any]:
    """(out, k_cache, v_cache) with each key moved by itself."""
    caches = [call["k_cache"].clone(), call["v_cache"].clone()]
    page = caches[0].shape[1]
    outs = []
    for b, rows in enumerate(call["q"]):
        stop = int(call["cache_seqlens"][b])
        begin = int(call["cache_leftpad"][b]) if "cache_leftpad" in call else 0
        entry = int(call["cache_batch_idx"][b]) if "cache_batch_idx" in call else b
        news = [call[x][b] for x in "kv"] if "k" in call else [rows[:0], rows[:0]]
        if "rotary_cos" in call:
            tables = call["rotary_cos"], call["rotary_sin"]
            at = stop + torch.arange(len(rows)) * call["causal"]
            rows = turn(rows, *tables, at, call["rotary_interleaved"])
            at = stop + torch.arange(len(news[0]))
            news[0] = turn(news[0], *tables, at, call["rotary_interleaved"])
        places = []
        for position in range(stop + len(news[0])):
            whole = entry
            if "block_table" in call:
                whole = int(call["block_table"][b, position // page])
            places.append((whole, position % page))
        for cache, new in zip(caches, news, strict=True):
            for place, row in zip(places[stop:], new, strict=True):
                cache[place] = row
        seen = [
            torch.stack([c[p] for p in places[begin:]])
            if places[begin:]
            else c.new_zeros(0, *c.shape[2:])
            for c in caches
        ]
        slopes = call["alibi_slopes"][b] if "alibi_slopes" in call else torch.zeros(HEADS)
        scale = call["softmax_scale"] or DIM**-0.5
        scaled = rows * (scale * DIM**0.5)
        outs.append(formula(scaled[None], *(x[None] for x in seen), slopes, call["causal"])[0])
    return torch.stack(outs), *caches


@settings(max_examples=150)
@given(problems())
def test_like_keys_put_together_by_hand(call: dict[str, Any]) -> None:
    """The output, and both caches afterwards, to the last bit where nothing was turned."""
    out, k_cache, v_cache = naive(call)
    found = flash_attn_with_kvcache(**call)
    torch.testing.assert_close(found, out, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(call["k_cache"], k_cache, rtol=1e-13, atol=1e-13)
    assert call["v_cache"].equal(v_cache)


def test_decoding_is_prefilling() -> None:
    """One token at a time gives the rows of all tokens at once; in the kernel, too."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 6, n, 64).bfloat16() for n in (2, 1, 1))
    cache = [torch.zeros(2, 8, 1, 64, dtype=torch.bfloat16) for _ in range(2)]
    for impl in ("reference", "emulator"):
        for step in range(6):
            part = [x[:, step : step + 1] for x in (q, k, v)]
            out, lse = flash_attn_with_kvcache(
                part[0], *cache, *part[1:], cache_seqlens=step, causal=True,
                return_softmax_lse=True, impl=impl,
            )  # fmt: skip
            exact = formula(part[0], k[:, : step + 1], v[:, : step + 1], torch.zeros(2), True)
            torch.testing.assert_close(out, exact, rtol=0.02, atol=0.02)
            assert lse.shape == (2, 2, 1)
    assert cache[0][:, :6].equal(k) and not cache[0][:, 6:].any()


def test_gradients_reach_what_was_given() -> None:
    """q, k, v and the old cache; the cache itself stays out of the graph, step after step."""
    torch.manual_seed(0)
    leaves = [torch.randn(1, n, h, 8, dtype=torch.float64, requires_grad=True)
              for n, h in ((2, 4), (2, 2), (2, 2), (5, 2), (5, 2))]  # fmt: skip
    q, k, v, *old = leaves
    cache = [x.detach().clone() for x in old]
    # What the function is given: copies that are not leaves, so that they may be written.
    given_cache = [x.clone() for x in old]
    out = flash_attn_with_kvcache(q, *given_cache, k, v, cache_seqlens=3, causal=True)
    whole = [torch.cat([x[:, :3], new], 1) for x, new in zip(old, (k, v), strict=True)]
    wanted = torch.autograd.grad(
        formula(q, *whole, torch.zeros(4), True).square().sum(), leaves, retain_graph=True
    )
    found = torch.autograd.grad(out.square().sum(), leaves, retain_graph=True)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)
    for _ in range(2):
        out = flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=3)
        assert out.requires_grad and not cache[0].requires_grad


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"v": None}, "k and v go together"),
        ({"rotary_sin": None}, "rotary_cos and rotary_sin go together"),
        ({"k": None, "v": None}, "rotary_cos and rotary_sin need k and v"),
        ({"cache_seqlens": None}, "k and v need cache_seqlens"),
        ({"cache_seqlens": 7}, "room for 8 keys; got position 8"),
        (
            {"rotary_cos": torch.ones(4, 4), "rotary_sin": torch.ones(4, 4)},
            "rotary_cos has rows for 4 positions; got position 4",
        ),
        ({"cache_seqlens": torch.tensor([1, 2])}, r"cache_seqlens must be an int or \(1,\)"),
        (
            {"block_table": torch.zeros(1, 1).int(), "cache_leftpad": torch.zeros(1).int()},
            "block_table and cache_leftpad exclude each other",
        ),
    ],
)
def test_refusals(change: dict[str, Any], text: str) -> None:
    """One line each, and the cache untouched."""
    table = torch.ones(20, 4)
    good = {
        "q": torch.ones(1, 2, 4, 16), "k_cache": torch.zeros(1, 8, 2, 16),
        "v_cache": torch.zeros(1, 8, 2, 16), "k": torch.ones(1, 2, 2, 16),
        "v": torch.ones(1, 2, 2, 16), "rotary_cos": table, "rotary_sin": table,
        "cache_seqlens": 3,
    }  # fmt: skip
    with pytest.raises(ValueError, match=text) as raised:
        flash_attn_with_kvcache(**good | change)
    assert "\n" not in str(raised.value) and not good["k_cache"].any()
