"""Is the yardstick straight? Plain attention against the oracle, by bounds of the inputs alone.

The error budget is measured from plain attention, so a wrong oracle, or a wrong plain attention,
would widen it until everything passes. The two share no code; here they are held against each other
within a bound that neither has a part in: norms of q, k, v and dout, and unit roundoffs. Plain
attention is held twice, unrounded in float64, where hardly anything is allowed, and as it is used.

    e = |scale| 4 sqrt(d + 1) w max|q| max|k| + 16 w (|scale| max|q| max|k| + |bias| + 1)
    rel = (e^2e - 1 + 8 u + n w + n 2^-24) / (1 - dropout)             FP8: n 2^-10, P's underflow
    with sums that are cut off: e and rel are c |scale| max|q| max|k| and c more for each 32 terms,
                                c = 34 2^-13: of these, of the sum so far, of the new one
    |O|   <= 2 rel max|v|,                        |LSE| <= 2 e + n w + 8 w (|LSE| + 1)
    |dV|  <= 2 rel rows max|dout|
    |dQ|  <= 2 rel |scale| A max|k|,  |dK| <= 2 rel |scale| A max|q| rows
                                                  A = 4 max|dout| max|v| + max|dlse|

max|x| is the largest Euclidean norm of a row. It is far wider than a budget, and far narrower than
any mistake.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from fa4.dtypes import unit_roundoff
from fa4.testing.numerics import LIMITED_BITS, LIMITED_STEP

_MOST_BIAS = 4096.0  # of the mods of `fa4.testing.case`; only their rounding counts
_MOST_EXPONENT = 30.0


class YardstickError(RuntimeError):
    """The oracle and plain attention disagree: the fault is the kit's, not the back end's."""


def _norm(x: np.ndarray) -> float:
    """Largest Euclidean norm of a row, infinities and NaN aside; 0 for none."""
    finite = x.astype(np.float64)
    top = np.abs(finite).max(initial=0.0)
    if not np.isfinite(top):
        finite = np.where(np.isfinite(finite), finite, 0.0)
        top = np.abs(finite).max(initial=0.0)
    if top == 0.0:
        return 0.0
    return float(top * np.sqrt(((finite / top) ** 2).sum(axis=-1).max(initial=0.0)))


def _factor(options: dict[str, Any], *names: str) -> float:
    tables = (options.get(name) for name in names)
    return float(np.prod([1.0 if table is None else np.max(table) for table in tables]))


def _cut_off(terms: int) -> float:
    """What sums of so many terms lose, of the largest that a sum of some of them can be."""
    return -(-terms // LIMITED_STEP) * (LIMITED_STEP + 2) * 2.0 ** (1 - LIMITED_BITS)


class LongestRows:
    """The largest norms of a sequence's rows, whatever type plain attention rounds to."""

    def __init__(self, seq: Any) -> None:
        self.seq = seq

    @cached_property
    def inputs(self) -> tuple[float, float, float]:
        """Of q, k and v."""
        return _norm(self.seq.q), _norm(self.seq.k), _norm(self.seq.v)

    @cached_property
    def dout(self) -> float:
        """Of dO."""
        return _norm(self.seq.dout)


class YardstickBounds:
    """How far plain attention in an element type may be from the oracle, for one sequence.

    longest: of the sequence, if another type has needed them. limited: are sums of products cut
    off (`fa4.testing.numerics`)?
    """

    def __init__(
        self,
        seq: Any,
        options: dict[str, Any],
        dtype: str,
        longest: LongestRows | None = None,
        *,
        limited: bool = False,
    ) -> None:
        rows, _, dim = seq.q.shape
        keys = seq.k.shape[0]
        self.rows = rows * (seq.q.shape[1] // seq.k.shape[1])
        w = unit_roundoff("fp64" if dtype == "fp64" else "fp32")
        u = unit_roundoff(dtype)
        given = options.get("softmax_scale")
        self.scale = abs(dim**-0.5 if given is None else float(given))
        self.scale *= _factor(options, "q_descale", "k_descale")
        self.longest = longest or LongestRows(seq)
        self.q, self.k, self.v = self.longest.inputs
        self.v *= _factor(options, "v_descale")
        size = self.scale * self.q * self.k
        bias = _MOST_BIAS if options.get("score_mod") is not None else 0.0
        error = size * 4 * np.sqrt(dim + 1) * w + 16 * w * (size + bias + 1)
        if limited:
            error += size * _cut_off(dim)
        spread = float(np.expm1(min(2 * error, _MOST_EXPONENT)))
        kept = 1.0 / (1.0 - options.get("dropout_p", 0.0))
        underflow = keys * 2.0**-10 if dtype in ("e4m3", "e5m2") else keys * 2.0**-24
        cut_off = _cut_off(keys) if limited else 0.0
        self.relative = (spread + 8 * u + keys * w + underflow + cut_off) * kept
        self.lse_error, self.w = 2 * error + keys * w, w
        self.least = 2.0**-24 if dtype == "fp16" else 2.0**-126  # a subnormal result's spacing

    def forward(self, oracle: dict[str, np.ndarray]) -> dict[str, Any]:
        """Bounds of "out" and "lse"."""
        size = np.where(np.isfinite(oracle["lse"]), np.abs(oracle["lse"]), 0.0)
        out = 2 * self.relative * self.v + self.least
        return {"out": out, "lse": self.lse_error + 8 * self.w * (size + 1)}

    def gradients(self, seq: Any, with_dlse: bool) -> dict[str, Any]:
        """Bounds of "dq", "dk" and "dv"."""
        dout = self.longest.dout
        upstream = 4 * dout * self.v + (np.abs(seq.dlse).max(initial=0.0) if with_dlse else 0.0)
        per_pair = self.relative * self.scale * upstream
        return {
            "dq": 2 * per_pair * self.k + self.least,
            "dk": 2 * per_pair * self.q * self.rows + self.least,
            "dv": 2 * self.relative * dout * self.rows + self.least,
        }


def hold_against(
    plain: dict[str, np.ndarray], oracle: dict[str, np.ndarray], bounds: dict[str, Any]
) -> None:
    """YardstickError unless each output of plain is within its bound of the oracle's."""
    for name, bound in bounds.items():
        a, b = plain[name].astype(np.float64), oracle[name]
        with np.errstate(invalid="ignore"):
            far = np.abs(a - b) > bound
        if not far.any():
            continue
        # Where plain overflows it is no yardstick, and the budget leaves it out.
        wrong = far & np.isfinite(a) & np.isfinite(b)
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise YardstickError(
                f"the kit's own oracle and plain attention disagree at {name}{list(at)}: "
                f"{b[at]:.9g} and {a[at]:.9g}, but {np.broadcast_to(bound, a.shape)[at]:.3g} is "
                "the most that rounding can do; nothing can be judged"
            )
