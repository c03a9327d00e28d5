"""Small random problems and exact comparisons for the reference's own tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

import fa4

# A float64 result of the tiled algorithm and the oracle differ by summation order only. With
# |scores| <= s the exponent's rounding error is s * 2^-53, and sums of n <= 512 terms add
# n * 2^-53; 4e-12 covers s = 1e3 with a factor 30 to spare, and any missing key or wrong factor
# exceeds it by far.
EXACT = 4e-12


@dataclass
class Drawn:
    """Arrays of one problem, heads second to last, and the call's keywords."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    options: dict[str, Any] = field(default_factory=dict)


def arrays(
    shape: tuple[int, int, int, int, int, int, int],
    seed: int = 0,
    dtype: Any = np.float64,
    scale: float = 1.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Normal q, k, v for (B, Sq, Sk, Hq, Hk, d, dv); q is multiplied by `scale`."""
    batch, seqlen_q, seqlen_k, heads_q, heads_k, dim, dim_v = shape
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, seqlen_q, heads_q, dim)) * scale
    k = rng.standard_normal((batch, seqlen_k, heads_k, dim))
    v = rng.standard_normal((batch, seqlen_k, heads_k, dim_v))
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def worst(a: Any, b: Any) -> float:
    """Largest |a - b|; equal infinities are 0 apart, NaN anywhere is infinite."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    with np.errstate(invalid="ignore"):
        gap = np.where(a == b, 0.0, np.abs(a - b))
    return float(np.where(np.isnan(gap), np.inf, gap).max(initial=0.0))


def small_tiles(**fields: Any) -> fa4.ForwardConfig:
    """Tiles that even a 20-row problem crosses."""
    return fa4.ForwardConfig(**{"tile_m": 8, "tile_n": 16, **fields})


def assert_exact(drawn: Drawn, *configs: Any, varlen: bool = False) -> None:
    """Tiled forward and backward equal the oracle in float64, with and without an LSE gradient."""
    forward = fa4.flash_attn_varlen_func if varlen else fa4.flash_attn_func
    backward = fa4.flash_attn_varlen_backward if varlen else fa4.flash_attn_backward
    config = configs or (small_tiles(), fa4.BackwardConfig(tile_m=8, tile_n=16))
    inputs = (drawn.q, drawn.k, drawn.v)
    out, lse = forward(*inputs, config=config, return_lse=True, **drawn.options)
    true_out, true_lse = forward(*inputs, impl="oracle", return_lse=True, **drawn.options)
    assert worst(out, true_out) <= EXACT
    assert worst(lse, true_lse) <= EXACT * max(1.0, finite_max(true_lse))
    rng = np.random.default_rng(1)
    dout, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    saved = (dout, *inputs, out, lse)
    grads = backward(*saved, dlse=dlse, config=config, **drawn.options)
    truth = backward(*saved, dlse=dlse, impl="oracle", **drawn.options)
    for got, expected in zip(grads, truth, strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            assert worst(got, expected) <= EXACT * max(1.0, finite_max(expected))


def finite_max(x: np.ndarray) -> float:
    """Largest finite magnitude, 0 if there is none."""
    return float(np.abs(np.where(np.isfinite(x), x, 0.0)).max(initial=0.0))


@st.composite
def problems(draw: Any) -> Drawn:
    """Any small dense problem with any combination of features that may be combined."""
    seqlens = st.sampled_from([0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 50])
    group, heads_k = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 2))
    dims = st.sampled_from([1, 3, 8, 16])
    shape = (draw(st.integers(1, 2)), draw(seqlens), draw(seqlens), group * heads_k, heads_k,
             draw(dims), draw(dims))  # fmt: skip
    seed = draw(st.integers(0, 2**16))
    q, k, v = arrays(shape, seed, scale=draw(st.sampled_from([0.1, 1.0, 10.0])))
    options: dict[str, Any] = {}
    mask = draw(st.sampled_from(["none", "causal", "window", "mask_mod"]))
    if mask == "causal":
        options["causal"] = True
    elif mask == "window":
        left = draw(st.one_of(st.none(), st.integers(-5, 40)))
        right = draw(st.one_of(st.none(), st.integers(-5, 40)))
        if left is None or right is None or left + right >= 0 or -1 in (left, right):
            options["window_size"] = (left, right)
    elif mask == "mask_mod":
        options["mask_mod"] = keep_two_of_three
    mod = draw(st.sampled_from(["none", "softcap", "score_mod"]))
    if mod == "softcap":
        options["softcap"] = 3.0
    elif mod == "score_mod":
        options |= {"score_mod": tilt, "score_mod_bwd": tilt_backward}
    if draw(st.booleans()):
        options["learnable_sink"] = np.random.default_rng(seed).standard_normal(shape[3]) * 3
    if draw(st.booleans()):
        options |= {"dropout_p": 0.25, "dropout_seed": seed}
    options["softmax_scale"] = draw(st.sampled_from([None, 1.0, 0.0, -0.5]))
    options["num_splits"] = draw(st.integers(1, 4))
    return Drawn(q, k, v, options)


def keep_two_of_three(batch: Any, head: Any, q_idx: Any, kv_idx: Any, *_: Any) -> Any:
    """A mask without structure that tiles could exploit."""
    return (q_idx + 2 * kv_idx + head + batch) % 3 != 0


def tilt(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any, *_: Any) -> Any:
    """A score_mod that depends on every index."""
    return score + 0.5 * np.sin(score) - 0.1 * (q_idx - kv_idx) + 0.2 * head + 0.3 * batch


def tilt_backward(grad: Any, score: Any, *_: Any) -> Any:
    """Its derivative."""
    return grad * (1.0 + 0.5 * np.cos(score))
