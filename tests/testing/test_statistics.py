"""Errors taken together: honest sums stay far from the limits, lost bits and truncation do not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fa4.dtypes import round_to, ulp
from fa4.testing import Case, build_inputs, verify
from fa4.testing.budget import Expected, expect_forward
from fa4.testing.statistics import check_bias, check_rms

CASE = Case(seqlen_q=64, seqlen_k=1025, heads_k=2, head_dim=64, head_dim_v=64)


def attend(q, k, v, *, every: int = 0, truncate: bool = False):
    """Attention whose sums over keys are rounded to the element type every so many keys."""
    name = {2: "fp16" if q.dtype == np.float16 else "bf16", 4: "fp32", 8: "fp64"}[q.dtype.itemsize]
    heads = [np.moveaxis(x.astype(np.float32), 2, 1) for x in (q, k, v)]
    group = heads[0].shape[1] // heads[1].shape[1]
    rows, keys, values = heads[0], *(np.repeat(x, group, axis=1) for x in heads[1:])
    scores = rows @ keys.swapaxes(-1, -2) * np.float32(q.shape[-1] ** -0.5)
    p = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
    weights = round_to(p, name).astype(np.float32)
    out = np.zeros((*rows.shape[:-1], v.shape[-1]), np.float32)
    step = every or max(1, keys.shape[2])
    for start in range(0, keys.shape[2], step):
        part = weights[..., start : start + step] @ values[:, :, start : start + step]
        out = out + part
        if every:
            out = round_to(out, name).astype(np.float32)
    out = out / np.maximum(p.sum(-1, keepdims=True), np.float32(1e-30))
    if truncate:
        spacing = ulp(out, name)
        out = (np.trunc(out / spacing) * spacing).astype(np.float32)
    return round_to(np.moveaxis(out, 1, 2), name)


def every_8(q, k, v):
    return attend(q, k, v, every=8)


def every_64(q, k, v):
    return attend(q, k, v, every=64)


def truncated(q, k, v):
    return attend(q, k, v, truncate=True)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("fault", "name", "message"),
    [
        (every_8, "error_rms", "times that of plain attention"),
        (every_64, "error_rms", "times that of plain attention"),
        (truncated, "rounding_bias", "spacings toward zero: truncated"),
    ],
)
def test_lost_bits_are_found(fault, name: str, message: str, dtype: str) -> None:
    """16-bit partial sums every 8 and every 64 keys, and truncation, in each 16-bit type."""
    (result,) = verify(fault, only=(name,), dtypes=(dtype,)).results
    assert result.status == "failed" and message in result.error
    assert verify(attend_plainly, only=(name,), dtypes=(dtype,)).passed


def attend_plainly(q, k, v):
    return attend(q, k, v)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_honest_attention_is_far_from_the_limits(dtype: str) -> None:
    """Over seeds: the root mean square within 15 % of plain attention's, t below 5."""
    for seed in range(12):
        inputs = build_inputs(Case(**{**vars(CASE), "dtype": dtype, "seed": seed}))
        expected = expect_forward(inputs)["out"]
        parts = inputs.split_rows(attend(inputs.q, inputs.k, inputs.v))
        assert check_rms("out", parts, expected, dtype) < 1.15 / 1.5
        assert check_bias("out", parts, expected, dtype) < 5 / 8


@pytest.mark.parametrize("keys", [257, 1025])
@pytest.mark.parametrize(
    ("dtype", "values"),
    [*((dtype, "normal") for dtype in ("fp32", "bf16", "fp16", "fp64")),
     *(("e4m3", x) for x in ("normal", "common_mean")), ("e5m2", "common_mean")],
)  # fmt: skip
def test_the_median_allowance_is_at_most_three_times_the_error_of_plain_attention(
    dtype: str, values: str, keys: int
) -> None:
    """In the median of nine draws: plain attention's largest error is one number, by luck a third
    smaller or larger, and another one with another order of sums (a BLAS of another CPU)."""
    ratios = []
    for seed in range(9):
        inputs = build_inputs(replace(CASE, dtype=dtype, values=values, seqlen_k=keys, seed=seed))
        expected = expect_forward(inputs)["out"]
        ratios.append(np.median(expected.allowed[0]) / expected.plain_error)
    assert np.median(ratios) <= 3.0, ratios


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_mean_error_of_a_seventh_of_a_spacing_is_found(dtype: str) -> None:
    """And one of a twentieth is not, however many rows show it."""
    rng = np.random.default_rng(7)
    oracle = rng.standard_normal((500, 1, 64))
    expected = Expected([oracle], [oracle], [oracle > 9], [oracle], 0.0)
    spacing, noise = ulp(oracle, dtype), rng.uniform(-0.5, 0.5, oracle.shape)
    honest = oracle + noise * spacing
    assert check_bias("out", [honest + np.sign(oracle) * spacing / 20], expected, dtype) < 1.0
    for sign, word in ((-1, "toward zero: truncated"), (1, "away from zero")):
        with pytest.raises(AssertionError, match=f"spacings {word}"):
            check_bias("out", [honest + sign * np.sign(oracle) * spacing / 7], expected, dtype)


@pytest.mark.parametrize("dtype", ["e4m3", "bf16"])
def test_a_mean_error_of_plain_attention_counts_once_and_a_half(dtype: str) -> None:
    """With P in FP8; half a spacing of it allows 0.1 and 0.75, in other types nothing more."""
    rng = np.random.default_rng(8)
    oracle = rng.standard_normal((500, 1, 64))
    spacing = np.sign(oracle) * ulp(oracle, "bf16")
    noise = rng.uniform(-0.5, 0.5, oracle.shape) * spacing
    expected = Expected([oracle], [oracle], [oracle > 9], [oracle + 0.5 * spacing], 0.0)
    least = 0.85 if dtype == "e4m3" else 0.1
    assert check_bias("out", [oracle + noise + 0.97 * least * spacing], expected, dtype) < 1.0
    with pytest.raises(AssertionError, match="spacings away from zero"):
        check_bias("out", [oracle + noise + 1.03 * least * spacing], expected, dtype)
