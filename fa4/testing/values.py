"""Value regimes: where attention kernels break is as much a matter of values as of shapes.

Each regime makes q, k, v of one sequence, (S, H, D), from a seeded generator in float64; they are
then rounded to the element type. Rows and keys are numbered inside the sequence.

    normal        N(0, 1)
    grid          multiples of 1/4 in [-2, 2]: sums of two are exact in every element type
    scale_100     q 100 times larger: one key takes nearly all of the probability
    equal         every logit of a head the same
    peaks         one-hot queries and keys: a few keys of each row stand out by far
    ramp_up/down  logits that rise with the key index / fall with it: for one of the two directions
                  of traversal, every tile raises the maximum
    jumps_under   logits rise by just under 8 log2 units from a block of 128 keys to the one before
    jumps_over    it, or by just over: the rescaling threshold tau of FlashAttention-4
    tail          one logit 8.5 above all others, which have half of the probability in 5,000 keys:
                  P of each is 2^-12, below what e4m3 keeps without a factor
    low           every logit far below zero (-5e4 to -2e5)
    denormals     subnormal q, k, v
    largest       q up to 2^-28 of the largest finite value with k small in proportion, so that its
                  low bits, which float32 products on matrix units split off, are not subnormal
                  (fp16, FP8: q up to a quarter, and k subnormal);
                  the scores stay finite and of order 1; v at 2^-20 of the largest (fp16, FP8: a
                  quarter), so that sums of 2^8 times as many unnormalised terms stay finite in
                  float32; not for gradients, as those of k overflow by right
    common_mean   k and v vary by 1 around a mean of 4 in each channel of a head: what of dP all
                  keys of a row share cancels in dP - D, and D is as wrong as O was rounded
    near_overflow v, and with it the gradients of q and k, so large that a product with another
                  factor of 2^12 (2^40 in the wider types) would overflow
    activations   outlier channels and an offset, as in the activations of trained models
    masked_nan    normal, with NaN, +inf and -inf in the keys and values that no row sees, and NaN
                  in rows and pages that no sequence uses
    latent        v is the first channels of k
    shared_rope   the channels of k beyond those of v are the same in all heads; rope_part: the
                  others are 0; latent_part: these are 0
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fa4.dtypes import largest_finite, round_to, ulp, unit_roundoff
from fa4.testing.case import Case

TAU_LOG2 = 8.0  # FlashAttention-4's rescaling threshold for 16-bit types
TILE_KEYS = 128  # and its KV tile
TAIL = 8.5
COMMON_MEAN = 4.0  # in standard deviations

Triple = tuple[np.ndarray, np.ndarray, np.ndarray]


class Shapes(NamedTuple):
    """Shapes (S, H, D) of q, k and v of one sequence."""

    q: tuple[int, int, int]
    k: tuple[int, int, int]
    v: tuple[int, int, int]


def _normal(rng: np.random.Generator, shapes: Shapes, case: Case) -> Triple:
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    return q, k, v


def _grid(rng: np.random.Generator, shapes: Shapes, case: Case) -> Triple:
    q, k, v = (rng.integers(-8, 9, shape) / 4.0 for shape in shapes)
    return q, k, v


def _scale_100(rng: np.random.Generator, shapes: Shapes, case: Case) -> Triple:
    q, k, v = _normal(rng, shapes, case)
    return 100.0 * q, k, v


def _equal(rng: np.random.Generator, shapes: Shapes, case: Case) -> Triple:
    q, k, v = _normal(rng, shapes, case)
    return np.full_like(q, 1.5), np.full_like(k, -0.75), v


def _peaks(rng: np.random.Generator, shapes: Shapes, case: Case) -> Triple:
    height = 4.0 * shapes.q[-1] ** 0.25  # the winner's logit is near 16 with the default scale
    arrays = []
    for shape in (shapes.q, shapes.k):
        hot = rng.integers(0, shape[-1], shape[:-1])
        arrays.append(height * (np.arange(shape[-1]) == hot[..., None]))
    return arrays[0], arrays[1], rng.standard_normal(shapes.v)


def _with_logits(
    rng: np.random.Generator, shapes: Shapes, case: Case, logits: np.ndarray
) -> Triple:
    """The scaled logit of key j is logits[j] for every row, up to small noise.

    It is the product of channel 0 of q and k; both get half of it on a logarithmic scale.
    """
    q, k, v = _normal(rng, shapes, case)
    q[..., 1:] *= 0.0625
    k[..., 1:] *= 0.0625
    scale = abs(case.scale) or 1.0
    share = max(1.0, math.sqrt(np.abs(logits).max(initial=1.0) / scale))
    q[..., 0] = share
    k[..., 0] = (logits / (scale * share))[:, None]
    return q, k, v


def _ramp(direction: float) -> Callable[[np.random.Generator, Shapes, Case], Triple]:
    def make(rng: np.random.Generator, shapes: Shapes, case: Case) -> Triple:
        keys = np.arange(shapes.k[0])
        return _with_logits(rng, shapes, case, direction * 0.125 * (keys - keys.size / 2))

    return make


def _jumps(side: float) -> Callable[[np.random.Generator, Shapes, Case], Triple]:
    def make(rng: np.random.Generator, shapes: Shapes, case: Case) -> Triple:
        # As close to tau as rounding the logits to the element type allows.
        step = TAU_LOG2 + side * max(2.0**-6, 32 * unit_roundoff(case.dtype))
        blocks = np.arange(shapes.k[0]) // TILE_KEYS
        top = blocks.max(initial=0)
        return _with_logits(rng, shapes, case, math.log(2.0) * step * (top - blocks))

    return make


def _tail(rng: np.random.Generator, shapes: Shapes, case: Case) -> Triple:
    logits = np.full(shapes.k[0], -TAIL)
    middle = shapes.k[0] // 2
    logits[middle : middle + 1] = 0.0  # none without keys
    return _with_logits(rng, shapes, case, logits)


def _low(rng: np.random.Generator, shapes: Shapes, case: Case) -> Triple:
    logits = -(10.0 ** rng.uniform(4.7, 5.3, shapes.k[0]))
    return _with_logits(rng, shapes, case, logits)


def _denormals(rng: np.random.Generator, shapes: Shapes, case: Case) -> Triple:
    smallest = float(ulp(0.0, case.dtype))
    steps = min(round(0.5 / unit_roundoff(case.dtype)), 2**40)  # below the smallest normal number
    q, k, v = (rng.integers(-steps, steps, shape) * smallest for shape in shapes)
    return q, k, v


def _largest(rng: np.random.Generator, shapes: Shapes, case: Case) -> Triple:
    q, k, v = (rng.uniform(-1.0, 1.0, shape) for shape in shapes)
    # The smallest |k| is 2^-4 of the largest: far from subnormal.
    q, k = (np.copysign(np.maximum(np.abs(x), 0.0625), x) for x in (q, k))
    top, narrow = largest_finite(case.dtype), case.dtype in ("fp16", "e4m3", "e5m2")
    high = top * (0.25 if narrow else 2.0**-28)
    return q * high, k / high, v * (top * (0.25 if narrow else 2.0**-20))


def _common_mean(rng: np.random.Generator, shapes: Shapes, case: Case) -> Triple:
    q, k, v = _normal(rng, shapes, case)
    offsets = (COMMON_MEAN * rng.choice((-1.0, 1.0), shape[1:]) for shape in (shapes.k, shapes.v))
    return q, *(x + offset for x, offset in zip((k, v), offsets, strict=True))  # type: ignore[return-value]


def _near_overflow(rng: np.random.Generator, shapes: Shapes, case: Case) -> Triple:
    q, k, v = _normal(rng, shapes, case)
    narrow = case.dtype in ("fp16", "e4m3", "e5m2")
    return q, k, v * (largest_finite(case.dtype) * 2.0 ** (-12 if narrow else -40))


def _activations(rng: np.random.Generator, shapes: Shapes, case: Case) -> Triple:
    q, k, v = _normal(rng, shapes, case)
    channels = np.exp(rng.standard_normal(shapes.q[-1]))
    channels[:: max(1, shapes.q[-1] // 3)] *= 6.0
    offset = rng.standard_normal(shapes.v[-1])
    return q * channels, k * channels**0.5 + 0.5, 0.25 * v + 4.0 * offset


def _latent(rng: np.random.Generator, shapes: Shapes, case: Case) -> Triple:
    q, k, _ = _normal(rng, shapes, case)
    return q, k, k[..., : shapes.v[-1]].copy()


def _rope(*, position: bool, latent: bool) -> Callable[..., Triple]:
    """k whose channels beyond v's are one head's for all; parts of it 0."""

    def make(rng: np.random.Generator, shapes: Shapes, case: Case) -> Triple:
        q, k, v = _normal(rng, shapes, case)
        first = shapes.v[-1]
        k[..., first:] = k[:, :1, first:] * position
        k[..., :first] *= latent
        return q, k, v

    return make


REGIMES: dict[str, Callable[[np.random.Generator, Shapes, Case], Triple]] = {
    "normal": _normal,
    "grid": _grid,
    "scale_100": _scale_100,
    "equal": _equal,
    "peaks": _peaks,
    "ramp_up": _ramp(1.0),
    "ramp_down": _ramp(-1.0),
    "jumps_under": _jumps(-1.0),
    "jumps_over": _jumps(1.0),
    "tail": _tail,
    "low": _low,
    "denormals": _denormals,
    "largest": _largest,
    "common_mean": _common_mean,
    "near_overflow": _near_overflow,
    "activations": _activations,
    "masked_nan": _normal,
    "latent": _latent,
    "shared_rope": _rope(position=True, latent=True),
    "rope_part": _rope(position=True, latent=False),
    "latent_part": _rope(position=False, latent=True),
}


def draw_values(case: Case, batch: int) -> Triple:
    """q (Sq, Hq, d), k (Sk, Hk, d), v (Sk, Hk, dv) of one batch entry, in the element type.

    ValueError for an unknown regime. Entry `batch` has the same values whatever the other ones are.
    """
    if case.values not in REGIMES:
        raise ValueError(f"values must be one of {list(REGIMES)}; got {case.values!r}")
    rows, keys = case.sequences[batch]
    shapes = Shapes(
        (rows, case.heads_q, case.head_dim),
        (keys, case.heads_k, case.head_dim),
        (keys, case.heads_k, case.head_dim_v),
    )
    rng = np.random.default_rng([case.seed, batch])
    q, k, v = (
        round_to(x, case.dtype, saturate=True) for x in REGIMES[case.values](rng, shapes, case)
    )
    if case.strides == "expanded_kv":
        k, v = (np.repeat(x[:, :1], case.heads_k, axis=1) for x in (k, v))
    if case.strides == "latent":
        v = k[..., : case.head_dim_v].copy()
    return q, k, v


def draw_upstream(case: Case, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """dout (Sq, Hq, dv) in the element type and dlse (Hq, Sq) float32, N(0, 1); or dout 1."""
    rows, _ = case.sequences[batch]
    rng = np.random.default_rng([case.seed, batch, 1])
    dout = round_to(rng.standard_normal((rows, case.heads_q, case.head_dim_v)), case.dtype)
    if case.strides == "expanded_dout":
        dout = np.ones_like(dout)
    return dout, rng.standard_normal((case.heads_q, rows)).astype(np.float32)


def poison(k: np.ndarray, v: np.ndarray, unseen: np.ndarray) -> None:
    """Overwrite keys that no row sees, in place: NaN, +inf, -inf in turn; unseen is (Sk, Hk)."""
    for array in (k, v):
        bad = np.array([np.nan, np.inf, -np.inf]).astype(array.dtype)  # e4m3: NaN for all three
        by_key = bad[np.arange(len(array)) % 3][:, None, None]  # of all heads, which may be one
        array[...] = np.where(unseen[..., None], by_key, array)
