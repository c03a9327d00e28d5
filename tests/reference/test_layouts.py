"""Packed batches of which parts are used, and descales of grouped heads, sequence by sequence."""

from __future__ import annotations

import numpy as np
import pytest

import fa4
from fa4.dtypes import round_to

HEADS, KV_HEADS, D = 4, 2, 16


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("impl", ["reference", "oracle"])
def test_used_rows_of_a_packed_batch(impl: str) -> None:
    """Of each sequence's rows and keys the first are used; O and LSE are those of these alone."""
    rng = np.random.default_rng(0)
    ends, used_q = np.array([0, 12, 33, 50], np.int32), np.array([12, 9, 0], np.int32)
    ends_k, used_k = np.array([0, 20, 45, 60], np.int32), np.array([17, 25, 8], np.int32)
    q, k, v = random(rng, 50, HEADS, D), *(random(rng, 60, KV_HEADS, D) for _ in range(2))
    out, lse = fa4.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends_k, max_seqlen_q=21, max_seqlen_k=25,
        seqused_q=used_q, seqused_k=used_k, causal=True, impl=impl, return_lse=True,
    )  # fmt: skip
    for start, rows, start_k, keys in zip(ends, used_q, ends_k, used_k, strict=False):
        if rows:
            here, there = slice(start, start + rows), slice(start_k, start_k + keys)
            alone = fa4.flash_attn_func(
                q[None, here], k[None, there], v[None, there],
                causal=True, impl="oracle", return_lse=True,
            )  # fmt: skip
            np.testing.assert_allclose(out[here], alone[0][0], atol=2e-6)
            np.testing.assert_allclose(lse[:, here], alone[1][0], atol=2e-6)


@pytest.mark.parametrize("impl", ["reference", "oracle"])
def test_descales_of_grouped_heads(impl: str) -> None:
    """A KV head's factors apply to all query heads of its group: codes times factors, exactly."""
    rng = np.random.default_rng(1)
    q, k, v = (round_to(random(rng, 2, 24, heads, D), "e4m3") for heads in (HEADS, *2 * [KV_HEADS]))
    factors = [rng.uniform(0.5, 2, (2, KV_HEADS)).astype(np.float32) for _ in range(3)]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), factors, strict=True))
    out = fa4.flash_attn_func(q, k, v, impl=impl, **named)
    groups = (HEADS // KV_HEADS, 1, 1)
    scaled = [
        x.astype(np.float64) * np.repeat(factor, group, axis=1)[:, None, :, None]
        for x, factor, group in zip((q, k, v), factors, groups, strict=True)
    ]
    want = fa4.flash_attn_func(*scaled, impl="oracle")
    assert np.abs(out.astype(np.float64) - want).max() < 0.12 * np.abs(want).max()
