"""The rounding band: how far two honest evaluations of the same attention may lie apart.

First-order forward error bounds, element by element, for an implementation that multiplies exactly,
sums in w (float32; float64 for fp64), rounds P once to the element type before P V (dS before its
products) and each result once. u and w are the unit roundoffs of the element and the work type;
sums of n terms err by g(n) = 4 sqrt(n + 1) w relative to the sum of magnitudes (Higham and Mary,
"A New Approach to Probabilistic Rounding Error Analysis", 2019, with lambda = 4).

    score      delta = g(d) |scale| |Q||K|^T + 8 w (|s| + |m| + 1)     scale, base 2, exponential
    LSE        eps = log(1 + sum_j P (e^delta - 1)) + g(n) + 4 w + E,  and rounding of the LSE
    P          rho = e^(delta + eps) - 1 + 2 u
    O          (P rho)|V| + g(n) P|V|  + least(P) sum_j |v_j|          underflow of P
    D          |dO| band(O) + g(dv)|dO||O|
    dS         P rho |dP - D| + P (g(dv)|dO||V|^T + band(D)), through the derivative of the score
    dV, dK, dQ (P rho + g P)^T|dO|,  |scale|(band(dS) + (g + 2u)|dS|) times |Q|, |K|

E is what the exponential itself may err: nothing more for fp32 and fp64, 10^-4 for the narrower
types, whose kernels compute a part of the exponentials as a cubic polynomial (8.8e-5 in
FlashAttention-4), to be covered by the rounding of P, but not in the sum.

Each with one spacing of its own type added, and the smallest normal number of the work type, so
that flushing subnormal results to zero is allowed. For fp64 the band is doubled: the oracle has it
too.
"""

from __future__ import annotations

import numpy as np

from fa4.dtypes import ulp, unit_roundoff
from fa4.testing.plain import GradientTerms, Terms, output_type, work_type

_CONFIDENCE = 4.0  # Higham and Mary's lambda: a bound fails with probability 2 exp(-lambda^2 / 2)
_MOST_EXPONENT = 30.0  # beyond e^30 a bound says nothing; keeps it finite
_CUBIC_EXP2 = 1e-4
_SMALLEST_NORMAL = {"fp32": 2.0**-126, "fp64": 2.0**-1022}


class Bounds:
    """Bands of one sequence from its float64 terms; shapes as in Terms (heads first)."""

    def __init__(self, terms: Terms, dtype: str) -> None:
        self.terms, self.dtype = terms, dtype
        self.work_name = work_type(dtype)
        self.u, self.w = unit_roundoff(dtype), unit_roundoff(self.work_name)
        self.copies = 2.0 if dtype == "fp64" else 1.0
        keys = terms.visible.shape[-1]
        self.g_keys = self.g(keys)
        self.magnitude = np.where(np.isfinite(terms.scores), np.abs(terms.scores), 0.0)
        dot = np.abs(terms.q) @ np.abs(terms.k).transpose(0, 2, 1)
        size = self.magnitude + np.abs(terms.top)[..., None] + 1.0
        self.delta = np.abs(terms.scale) * self.g(terms.q.shape[-1]) * dot + 8 * self.w * size
        spread = np.expm1(np.minimum(self.delta, _MOST_EXPONENT))
        self.eps = np.log1p((terms.p * spread).sum(axis=-1)) + self.g_keys + 4 * self.w
        if dtype not in ("fp32", "fp64"):
            self.eps = self.eps + _CUBIC_EXP2
        exponent = np.minimum(self.delta + self.eps[..., None], _MOST_EXPONENT)
        self.rho = np.expm1(exponent) + 2 * self.u
        self.weights = terms.p * terms.keep  # P as V sees it

    def g(self, terms: int) -> float:
        """Relative error of a sum of that many terms."""
        return float(_CONFIDENCE * np.sqrt(terms + 1.0) * self.w)

    def spacing(self, x: np.ndarray, name: str) -> np.ndarray:
        """What rounding the result itself, or flushing it to zero, may cost."""
        finite = np.where(np.isfinite(x), x, 0.0)
        return ulp(finite, name) + _SMALLEST_NORMAL[self.work_name]

    def lse(self) -> np.ndarray:
        """(Hq, Sq); the sink's logit is rounded to float32 too."""
        size = np.where(np.isfinite(self.terms.lse), np.abs(self.terms.lse), 0.0) + 1.0
        return self.copies * (self.eps + 4 * unit_roundoff(self.work_name) * size)

    def out(self) -> np.ndarray:
        """(Hq, Sq, dv)."""
        values = np.abs(self.terms.v)
        band = (self.weights * (self.rho + self.g_keys)) @ values
        if self.dtype not in ("e4m3", "e5m2"):  # there P underflows visibly: the plain error counts
            least = 0.5 * float(ulp(0.0, self.dtype))
            band = band + least * ((self.terms.visible * self.terms.keep) @ values)
        band = band * self.terms.factor("v_descale")
        return self.copies * (band + self.spacing(self.terms.out, output_type(self.dtype)))


class GradientBounds(Bounds):
    """Bands of the gradients; `terms` are GradientTerms."""

    def __init__(self, terms: GradientTerms, dtype: str) -> None:
        super().__init__(terms, dtype)
        self.back = terms
        dout, g_dim = np.abs(terms.dout), self.g(terms.v.shape[-1])
        self.row_dot = (dout * (self.out() + g_dim * np.abs(terms.out))).sum(axis=-1)
        self.row_dot += 4 * self.w * (np.abs(terms.dlse) + np.abs(terms.row_dot))
        dp = g_dim * (dout @ np.abs(terms.v).transpose(0, 2, 1)) * terms.keep
        gap = np.abs(terms.dp - terms.row_dot[..., None])
        cap = terms.options.get("softcap", 0.0)
        slope = 2 * self.delta / cap + 4 * self.w if cap else 0.0
        raw = terms.p * (gap * self.rho + dp + self.row_dot[..., None])
        bent = terms.p * gap * slope  # the derivative of tanh at a slightly wrong score
        self.ds = np.abs(terms.chain(raw)) + np.where(terms.visible, bent, 0.0)
        self.ds = self.ds + (2 * self.u) * np.abs(terms.ds)

    def gradients(self) -> dict[str, np.ndarray]:
        """dq (Sq, Hq, d), dk (Sk, Hk, d), dv (Sk, Hk, dv) and, with a sink, dsink (Hq,)."""
        terms, exact = self.back, self.back.backward()
        scale = np.abs(terms.scale)
        g_rows = self.g(terms.q.shape[1])
        size = np.abs(terms.ds)
        dq = scale * ((self.ds + self.g_keys * size) @ np.abs(terms.k))
        dk = scale * ((self.ds + g_rows * size).transpose(0, 2, 1) @ np.abs(terms.q))
        dv = (self.weights * (self.rho + g_rows)).transpose(0, 2, 1) @ np.abs(terms.dout)
        bands = {"dq": dq.transpose(1, 0, 2), "dk": terms.fold(dk), "dv": terms.fold(dv)}
        for name in bands:
            spacing = self.spacing(getattr(exact, name), self.dtype)
            bands[name] = self.copies * (bands[name] + spacing)
        if exact.dsink is not None:
            weight, dots = terms.sink_weight, np.abs(terms.row_dot)
            size = np.where(weight > 0, np.abs(terms.sink) + np.abs(terms.lse), 0.0) + 1.0
            size = np.where(np.isfinite(size), size, 1.0)
            exponent = np.minimum(self.eps + 8 * self.w * size, _MOST_EXPONENT)
            error = np.expm1(exponent) + g_rows
            row = weight * (dots * error + self.row_dot)
            bands["dsink"] = self.copies * (
                row.sum(axis=-1) + self.spacing(exact.dsink, work_type(self.dtype))
            )
        return bands
