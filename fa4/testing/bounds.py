"""The rounding band: how far two honest evaluations of the same attention may lie apart.

First-order forward errors, element by element, of an implementation that multiplies exactly, sums
in w (float32; float64 for fp64), rounds P once to the element type before P V (dS before its
products) and each result once. u and w are the unit roundoffs of the element and the work type.

Rounding errors of different terms are independent, so they add as squares do; what all terms of a
row share (its maximum, its sum) multiplies the result. Both are bounded by the sum of magnitudes,
which is all that holds where few terms count (Higham and Mary, "A New Approach to Probabilistic
Rounding Error Analysis", 2019). With |x y|_2 for the root of the sum over j of (x_j y_j)^2:

    score     delta = c sqrt(d + 1) w sqrt(|scale q k|_2^2 + s^2) + 3 w (|s| + |s - m| + 2)
    P         rho = sqrt(delta^2 + (2 u)^2 + E^2)           a maximal error, so a few deviations
    row       eps = |p delta|_2 + c sqrt(n + 1) w |p|_2 + 4 w + E
    O         |p rho v|_2 + (eps + u) |O| + c sqrt(n + 1) w (|p v|_2 + |O|) + underflow of P |v|_2
    LSE       log(1 + sum p (e^delta - 1)) + c sqrt(n + 1) w + 4 w (|LSE| + 1) + E
    D         |dO band(O)|_2 + c sqrt(dv + 1) w |dO O|_2     O with more bits: 2 u of its rounding
    dS        P rho |dP - D| + P (c sqrt(dv + 1) w |dO v|_2 + 2 u |dP|) + 2 u |dS|
    dQ        as O, from dS and K; and |scale| band(D) |P K|, which a row shares
    dK, dV    as O, from dS and Q, P and dO: errors of different rows are independent

In dQ, dK and dV an error e of each weight comes to hypot(|e x|_2, |e x|): rows (or keys) that are
equal have the same P, LSE and D, and so the same error, which n of them add up to n times, not to
sqrt(n) times; |e x| is what errors of one sign add up to. In random inputs both terms are alike.

The roundings of a sum are no longer independent either where all of its n terms are equal: adding t
to k t leaves the same rest for as long as the spacing of the sum is the same. What holds there is
the sum over all k of half a spacing, (n / 2) w |sum|, which every sum above is then given.

c is 2: the standard deviation of a sum one term after another is 0.28 sqrt(n) w times its norm. E
is what the exponential itself may err: nothing more for fp32 and fp64, 10^-4 for the narrower
types, whose kernels compute a part of the exponentials as a cubic polynomial (8.8e-5 in
FlashAttention-4).

In FP8, u of P is that of the type which P is rounded to, and O, in bf16, has no u: its spacing, two
roundings, is enough (with values around a common mean, u was a sixth of what was allowed, which was
3.4 times plain attention's error); sums that are cut off to t bits after each s terms lose
n / s 2^-t of |p v|_2 + |O| more (`fa4.testing.numerics`).

Each with one spacing of its own type added, half of it for the final rounding, and the smallest
normal number of the work type, so that flushing subnormal results to zero is allowed.
"""

from __future__ import annotations

import numpy as np

from fa4.dtypes import ulp, unit_roundoff
from fa4.testing.numerics import FP8_TYPES, LIMITED_BITS, LIMITED_STEP
from fa4.testing.plain import GradientTerms, Terms, output_type, work_type

_DEVIATIONS = 2.0  # c above
_MOST_EXPONENT = 30.0  # beyond e^30 a bound says nothing; keeps it finite
_CUBIC_EXP2 = 1e-4
_ALIKE = 2.0**-40  # terms whose squares differ by less, relative to their mean, count as equal
_SMALLEST_NORMAL = {"fp32": 2.0**-126, "fp64": 2.0**-1022}


def root(x: np.ndarray) -> np.ndarray:
    """Square root of a sum of squares, which rounding may have left just below 0."""
    return np.sqrt(np.maximum(x, 0.0))


def joined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """sqrt(a^2 + b^2) of magnitudes whose squares may over- or underflow; of subnormal ones not
    less than the larger. `np.hypot` takes four times as long."""
    most = np.maximum(a, b)
    with np.errstate(invalid="ignore"):
        ratio = np.minimum(a, b) / np.maximum(most, _SMALLEST_NORMAL["fp64"])
    return np.where(np.isinf(most), most, most * np.sqrt(1.0 + ratio**2))


def two_norm(weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """|w x|_2 over the inner axis of weights (..., M, N) and rows (..., N, D): (..., M, D)."""
    return two_norms(rows, weights)[0]


def two_norms(rows: np.ndarray, *weights: np.ndarray) -> list[np.ndarray]:
    """`two_norm` of several weights with the same rows.

    Scaled by the largest of each, so that squares neither over- nor underflow.
    """
    top = np.maximum(np.abs(rows).max(initial=0.0), 1e-300)
    squares = (rows / top) ** 2
    norms = []
    for weight in weights:
        scaled, own = _by_largest(weight)
        norms.append(own * top * root(scaled @ squares))
    return norms


def row_norm(x: np.ndarray) -> np.ndarray:
    """|x|_2 over the last axis."""
    squares, top = _by_largest(x)
    return top[..., 0] * np.sqrt(squares.sum(axis=-1))


def _by_largest(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Squares of x over the largest |x| of each row, which is the second result (1 for 0)."""
    top = np.abs(x).max(axis=-1, keepdims=True, initial=0.0)
    top = np.where(top > 0.0, top, 1.0)
    return (x / top) ** 2, top


def equal_terms(weights: np.ndarray, exact: np.ndarray, norm: np.ndarray) -> np.ndarray:
    """Half the number of terms of each sum whose terms are all equal, zeros apart; 0 of others.

    weights (..., M, N); of their sums with rows, |sum| and the terms' 2-norm, both (..., M, D).
    """
    count = (weights != 0.0).sum(axis=-1)[..., None]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        alike = (exact / norm) ** 2 >= count * (1.0 - _ALIKE)
    return np.where(alike & (count > 1), 0.5 * count, 0.0)


class Bounds:
    """Bands of one sequence from its float64 terms; shapes as in Terms (heads first)."""

    def __init__(self, terms: Terms, dtype: str) -> None:
        self.terms, self.dtype = terms, dtype
        self.work_name = work_type(dtype)
        self.u, self.w = unit_roundoff(output_type(dtype)), unit_roundoff(self.work_name)
        self.u_p = unit_roundoff(terms.numerics.p_type(dtype))
        self.cubic = 0.0 if dtype in ("fp32", "fp64") else _CUBIC_EXP2
        self.g_keys = self.g(terms.visible.shape[-1])
        scores = np.where(np.isfinite(terms.scores), terms.scores, 0.0)
        norms = np.abs(terms.scale) * two_norm(terms.q, terms.k.transpose(0, 2, 1))
        scaled = np.where(np.isfinite(terms.scaled), terms.scaled, 0.0)
        # Partial sums of terms of one sign grow with their number, not with its root.
        self.delta = self.g(terms.q.shape[-1]) * joined(norms, np.abs(scaled))
        self.delta += self.cut_off(terms.q.shape[-1]) * (norms + np.abs(scaled))
        size = np.abs(scores) + np.abs(scores - terms.top[..., None]) + 2.0
        self.delta = np.minimum(self.delta + 3 * self.w * size, _MOST_EXPONENT)
        self.growth = np.expm1(self.delta)
        self.rho = np.sqrt(self.growth**2 + (2 * self.u_p) ** 2 + self.cubic**2)
        # What rounding or flushing a subnormal P, and then a subnormal dS, may cost; each twice.
        p_type, offset = terms.numerics.p_type(dtype), terms.numerics.p_offset_log2(dtype)
        self.underflow = float(ulp(0.0, p_type)) * 2.0**-offset
        self.underflow += 4 * _SMALLEST_NORMAL[self.work_name]
        self.weights = terms.p * terms.keep  # P as V sees it
        shared, norm = row_norm(terms.p * self.growth), row_norm(terms.p)[..., None]
        total = terms.p.sum(axis=-1, keepdims=True)
        self.row_sum = (self.w * equal_terms(terms.p, total, norm) * total)[..., 0]
        self.eps = shared + self.g_keys * norm[..., 0] + self.row_sum + 4 * self.w + self.cubic
        if terms.options.get("learnable_sink") is not None:  # its exponent is no key's
            share = np.exp(np.where(np.isfinite(terms.lse), terms.sink - terms.lse, -np.inf))
            size = np.where(share > 0.0, np.abs(terms.sink) + np.abs(terms.top), 0.0)
            self.eps = self.eps + 3 * self.w * share * size

    def g(self, terms: int) -> float:
        """Relative error of a sum of that many terms, of its norm."""
        return float(_DEVIATIONS * np.sqrt(terms + 1.0) * self.w)

    def cut_off(self, terms: int) -> float:
        """What sums of so many terms that are cut off after a few lose, of their norm."""
        if not self.terms.limits(self.dtype):
            return 0.0
        return float(-(-terms // LIMITED_STEP) * 2.0**-LIMITED_BITS)

    def spacing(self, x: np.ndarray, name: str) -> np.ndarray:
        """What rounding the result itself, or flushing it to zero, may cost."""
        finite = np.where(np.isfinite(x), x, 0.0)
        return ulp(finite, name) + _SMALLEST_NORMAL[self.work_name]

    def lse(self, stored: str) -> np.ndarray:
        """(Hq, Sq); `stored` is the type that the LSE comes in. The sink is rounded to it too."""
        terms = self.terms
        size = np.where(np.isfinite(terms.lse), np.abs(terms.lse), 0.0) + 1.0
        spread = (terms.p * self.growth).sum(axis=-1)
        coarsest = max(self.w, unit_roundoff(stored))
        sums = self.g_keys + self.row_sum
        return np.log1p(spread) + sums + 4 * self.w + self.cubic + 4 * coarsest * size

    def out(self, last: float = 1.0) -> np.ndarray:
        """(Hq, Sq, dv); `last`: the part of the final rounding that counts."""
        terms = self.terms
        exact = np.abs(self.weights @ terms.v)
        norm, off, kept = two_norms(
            terms.v, self.weights, self.weights * self.rho, terms.visible * terms.keep
        )
        alike = self.w * equal_terms(self.weights, exact, norm) * exact
        sums = self.g_keys + self.cut_off(terms.visible.shape[-1])
        band = off + sums * (norm + exact)
        again = 0.0 if self.dtype in FP8_TYPES else last * self.u
        band = band + (self.eps + again)[..., None] * exact
        most = self.weights * (self.rho + self.eps[..., None] + sums)
        band = np.minimum(band, most @ np.abs(terms.v)) + alike
        lost = self.underflow * kept
        if self.dtype in FP8_TYPES:  # rounded before it is normalised
            lost = lost / np.where(terms.total > 0.0, terms.total, 1.0)[..., None]
        band = band + lost
        band = band * terms.factor("v_descale")
        return band + last * self.spacing(terms.out, output_type(self.dtype))


class GradientBounds(Bounds):
    """Bands of the gradients; `terms` are GradientTerms, `stored` the type of the saved LSE."""

    def __init__(self, terms: GradientTerms, dtype: str, stored: str) -> None:
        super().__init__(terms, dtype)
        self.back = terms
        size = np.where(np.isfinite(terms.lse), np.abs(terms.lse), 0.0) + 1.0
        self.eps = self.eps + 2 * unit_roundoff(stored) * size
        dout, g_dim = terms.dout, self.g(terms.v.shape[-1])
        # Of an O with more bits, what rounding took is rounded itself.
        exact = terms.numerics.saved_out == "exact"
        o_band = self.out(max(2 * self.u, self.w) if exact else 1.0)
        self.row_dot = row_norm(dout * o_band) + g_dim * row_norm(dout * terms.out)
        self.row_dot += 4 * self.w * (np.abs(terms.dlse) + np.abs(terms.row_dot))
        dp = g_dim * two_norm(dout, terms.v.transpose(0, 2, 1)) * terms.keep
        gap = np.abs(terms.dp - terms.row_dot[..., None])
        cap = terms.options.get("softcap", 0.0)
        slope = 2 * self.delta / cap + 4 * self.w if cap else 0.0
        # p and the upstream gradient at different precision: independent from pair to pair.
        raw = terms.p * (gap * self.rho + dp + 2 * self.u * np.abs(terms.dp))
        bent = terms.p * gap * slope  # the derivative of tanh at a slightly wrong score
        self.ds = np.abs(terms.chain(raw)) + np.where(terms.visible, bent, 0.0)
        self.ds = self.ds + (2 * self.u) * np.abs(terms.ds)
        # dS may be rounded with the scale in it, where more of it is subnormal.
        scaled = np.maximum(1.0, 1.0 / np.maximum(np.abs(terms.scale), 2.0**-10))
        self.ds = self.ds + np.where(terms.visible, self.underflow * scaled * (1.0 + gap), 0.0)
        # What all pairs of a row share: its D and its LSE.
        self.shared_ds = np.abs(terms.chain(terms.p * self.row_dot[..., None]))
        self.shared_ds += self.eps[..., None] * np.abs(terms.ds)

    def gradients(self) -> dict[str, np.ndarray]:
        """dq (Sq, Hq, d), dk (Sk, Hk, d), dv (Sk, Hk, dv) and, with a sink, dsink (Hq,)."""
        terms, exact = self.back, self.back.backward()
        scale = np.abs(terms.scale)
        rows = terms.q.shape[1]
        dq = scale * self.sums(self.ds, terms.ds, terms.k, self.g_keys)
        # A row's error has one sign for all of its keys, up to the derivative of the score.
        common = terms.chain(terms.p * self.row_dot[..., None])
        dq += scale * np.abs(common @ terms.k)
        dq += self.eps[..., None] * np.abs(scale * (terms.ds @ terms.k))
        by_key = (self.ds + self.shared_ds).transpose(0, 2, 1)
        dk = scale * self.sums(by_key, terms.ds.transpose(0, 2, 1), terms.q, self.g(rows))
        spread = self.weights * (self.rho + self.eps[..., None])
        spread = spread + self.underflow * terms.visible * terms.keep
        dv = self.sums(
            spread.transpose(0, 2, 1), self.weights.transpose(0, 2, 1), terms.dout, self.g(rows)
        )
        bands = {"dq": dq.transpose(1, 0, 2), "dk": terms.fold(dk), "dv": terms.fold(dv)}
        for name in bands:
            bands[name] = bands[name] + self.spacing(getattr(exact, name), self.dtype)
        if exact.dsink is not None:
            bands["dsink"] = self.dsink(exact.dsink, self.g(rows))
        return bands

    def sums(
        self, error: np.ndarray, weights: np.ndarray, rows: np.ndarray, g_terms: float
    ) -> np.ndarray:
        """Error of weights @ rows, each weight off by `error`: as squares add, at most as sums.

        Equal terms err alike: what errors of one sign come to counts as one more term.
        """
        exact, (norm, off) = np.abs(weights @ rows), two_norms(rows, weights, error)
        alike = self.w * equal_terms(weights, exact, norm) * exact
        band = joined(off, np.abs(error @ rows)) + self.u * exact
        band = band + g_terms * (norm + exact)
        most = (error + (g_terms + self.u) * np.abs(weights)) @ np.abs(rows)
        return np.minimum(band, most) + alike

    def dsink(self, exact: np.ndarray, g_rows: float) -> np.ndarray:
        """(Hq,)."""
        terms = self.back
        weight, dots = terms.sink_weight, np.abs(terms.row_dot)
        size = np.where(weight > 0, np.abs(terms.sink) + np.abs(terms.lse), 0.0) + 1.0
        size = np.where(np.isfinite(size), size, 1.0)
        error = np.expm1(np.minimum(self.eps + 8 * self.w * size, _MOST_EXPONENT)) + g_rows
        row = weight * (dots * error + self.row_dot)
        return row.sum(axis=-1) + self.spacing(exact, work_type(self.dtype))
