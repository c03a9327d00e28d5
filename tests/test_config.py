"""Configuration objects validate themselves and name the rule and the number."""

import re

import pytest

from fa4.config import (
    DTYPE_MAX_LOG2,
    BackwardConfig,
    Exp2Split,
    ForwardConfig,
    Problem,
    normalize_window,
)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: ForwardConfig(tile_m=0), ValueError, "tile_m must be at least 1; got 0"),
        (lambda: ForwardConfig(tile_n=1.5), TypeError, "tile_n must be an integer; got 1.5"),
        (lambda: ForwardConfig(q_tiles=3), ValueError, "q_tiles must be between 1 and 2; got 3"),
        (lambda: ForwardConfig(rescale_rows=8), ValueError, "must be 1 (per row) or 32"),
        (
            lambda: ForwardConfig(rescale_threshold_log2=float("inf")),
            ValueError,
            "rescale_threshold_log2 must be finite; got inf",
        ),
        (lambda: BackwardConfig(dq_order="any"), ValueError, "dq_order must be one of"),
        (lambda: BackwardConfig(tile_m=9, cta_group=2), ValueError, "tile_m must be even"),
        (lambda: Exp2Split(degree=6), ValueError, "degree must be between 1 and 5; got 6"),
        (
            lambda: Problem(seqlen_q=1, seqlen_k=1, heads_q=3, heads_k=2, head_dim=8),
            ValueError,
            "heads_q must be a multiple of heads_k; got 3 and 2",
        ),
        (
            lambda: Problem(seqlen_q=1, seqlen_k=1, heads_q=2, heads_k=2, head_dim=8, dtype="int8"),
            ValueError,
            "dtype must be one of",
        ),
    ],
)
def test_each_rule_is_stated(build, error, message) -> None:
    with pytest.raises(error, match=re.escape(message)):
        build()


def test_flops_are_those_of_the_paper() -> None:
    sizes = {"seqlen_q": 4096, "seqlen_k": 4096, "heads_q": 16, "heads_k": 16, "head_dim": 128}
    full, causal = Problem(batch=8, **sizes), Problem(batch=8, causal=True, **sizes)
    assert full.forward_flops == 4 * 8 * 16 * 4096**2 * 128 == 2 * causal.forward_flops
    assert full.backward_flops == 2.5 * full.forward_flops
    unequal = Problem(head_dim_v=64, **sizes)
    assert unequal.forward_flops == 2 * 16 * 4096**2 * (128 + 64)


@pytest.mark.parametrize(
    ("dtype", "limit"), [("fp16", 15.999), ("e4m3", 8.807), ("e5m2", 15.807), ("bf16", 127.99)]
)
def test_offset_and_threshold_stay_within_the_type(dtype, limit) -> None:
    assert DTYPE_MAX_LOG2[dtype] == pytest.approx(limit, abs=1e-2)
    ForwardConfig(rescale_threshold_log2=limit - 0.1).check_dtype(dtype)
    with pytest.raises(ValueError, match=f"largest {dtype}"):
        ForwardConfig(rescale_threshold_log2=limit - 4, p_offset_log2=8.0).check_dtype(dtype)


def test_windows() -> None:
    assert normalize_window((-1, 5)) == (None, 5)
    assert normalize_window((3, 9), causal=True) == (3, 0)
    assert normalize_window((3, -2), causal=True) == (3, 0)
    assert normalize_window((0, -5), causal=True) == (0, 0)
    with pytest.raises(ValueError, match="left -2 and right 0"):
        normalize_window((-2, 5), causal=True)
    assert normalize_window([None, None], causal=True) == (None, 0)


def test_tuned_choices() -> None:
    assert ForwardConfig.tuned("bf16", 64, True).exp2.frequency == 16
    assert ForwardConfig.tuned("fp32", 64, True).exp2.frequency == 0
    fp8 = ForwardConfig.tuned("e4m3", 128, False)
    assert (fp8.rescale_threshold_log2, fp8.p_offset_log2) == (0.0, 8.0)
    fp8.check_dtype("e4m3")
