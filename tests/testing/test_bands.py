"""The budget's formulas once more: row by row from the arrays, and the numbers written out.

`fa4.testing.bounds` and `yardstick` state them; here a small case is computed along those lines by
another program, so that a changed factor or term shows as a different band.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fa4.dtypes import ulp
from fa4.testing import Case, build_inputs, check_property, load_backend
from fa4.testing.bounds import Bounds, GradientBounds, equal_terms, two_norm
from fa4.testing.inputs import Inputs
from fa4.testing.numerics import Numerics
from fa4.testing.plain import GradientTerms, Terms, truncated
from fa4.testing.yardstick import YardstickBounds, _norm
from tests.testing.planted.fault import Fault
from tests.testing.planted.styles import tiles_of

BASE = Case(seqlen_q=3, seqlen_k=5, group=2, head_dim=8, head_dim_v=16, dtype="fp32", seed=11)
CASES = {
    "fp32": BASE,
    "fp64": replace(BASE, dtype="fp64"),
    "bf16": replace(BASE, dtype="bf16"),
    "fp16": replace(BASE, dtype="fp16", values="scale_100"),
    "vanishing": replace(BASE, values="scale_100", seqlen_k=9),
    "many keys": replace(BASE, seqlen_k=70, heads_k=2, dtype="bf16"),
    "one key": replace(BASE, seqlen_k=1),
    "rows without keys": replace(BASE, causal=True, seqlen_q=7, dtype="bf16"),
    "softcap": replace(BASE, softcap=1.5, dtype="fp16"),
    "sink": replace(BASE, sink=1.5, causal=True, seqlen_q=7),
    "large sink": replace(BASE, sink=-40.0, dtype="bf16", values="scale_100"),
    "no sink": replace(BASE, sink=float("-inf"), dtype="fp16"),
    "no sink and no keys": replace(BASE, sink=float("-inf"), causal=True, seqlen_q=7),
    "scale": replace(BASE, softmax_scale=-0.2, dtype="bf16"),
    "dropout": replace(BASE, dropout_p=0.5, seqlen_k=40),
    "denormals": replace(BASE, values="denormals", dtype="fp16"),
    "equal": replace(BASE, values="equal", seqlen_q=6, seqlen_k=40, dtype="fp64"),
    "equal rows": replace(BASE, values="equal", seqlen_q=36, strides="expanded_dout"),
}
FP8 = {
    "e4m3": replace(BASE, dtype="e4m3", descale=True, heads_k=2),
    "e5m2": replace(BASE, dtype="e5m2"),
}
U = {"fp64": 2.0**-53, "fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11, "e4m3": 2.0**-4,
     "e5m2": 2.0**-3}  # fmt: skip
LEAST = {"fp64": 2.0**-1074, "fp32": 2.0**-149, "bf16": 2.0**-133, "fp16": 2.0**-24,
         "e4m3": 2.0**-9, "e5m2": 2.0**-16}  # fmt: skip


def norm(x: Any) -> Any:
    """Root of the sum of squares over the first axis."""
    return np.sqrt((np.asarray(x) ** 2).sum(axis=0))


def alike(terms: Any, w: float) -> Any:
    """(N, D) terms of D sums: n / 2 w |sum| where the n that are not 0 all are equal."""
    found = []
    for column in np.asarray(terms).T:
        column = column[column != 0.0]
        deviation = np.sqrt(np.var(column)) if len(column) > 1 else math.inf
        same = deviation <= 2.0**-20 * norm(column) / math.sqrt(max(len(column), 1))
        found.append(0.5 * len(column) * w * abs(column.sum()) if same else 0.0)
    return np.array(found)


class Head:
    """One query head of the first sequence, row by row; rows whose scores are all hidden have no
    probabilities. `keep` is dropout's factor of each pair."""

    def __init__(self, inputs: Inputs, head: int, keep: np.ndarray, stored: str | None) -> None:
        seq, options, self.dtype = inputs.sequences[0], inputs.options, inputs.dtype
        kv = head // (seq.q.shape[1] // seq.k.shape[1])
        self.q, self.dout = (x[:, head].astype(np.float64) for x in (seq.q, seq.dout))
        self.k, self.v = (x[:, kv].astype(np.float64) for x in (seq.k, seq.v))
        self.dlse = seq.dlse[head].astype(np.float64)
        self.visible, self.keep = seq.visible[head], keep
        self.k[~self.visible.any(axis=0)] = self.v[~self.visible.any(axis=0)] = 0.0
        factors = (options.get(f"{x}_descale") for x in "qkv")
        q_factor, k_factor, self.v_factor = (1.0 if x is None else x[0, kv] for x in factors)
        scale = options.get("softmax_scale")
        self.scale = float(self.q.shape[1] ** -0.5 if scale is None else scale)
        self.scale *= float(q_factor) * float(k_factor)
        self.cap = options.get("softcap", 0.0)
        sink = options.get("learnable_sink")
        self.sink, self.has_sink = (-math.inf, False) if sink is None else (float(sink[head]), True)
        narrow = self.dtype in ("e4m3", "e5m2")
        self.u_p, self.u = U[self.dtype], U["bf16"] if narrow else U[self.dtype]
        self.work = "fp64" if self.dtype == "fp64" else "fp32"
        self.w = U[self.work]
        self.normal = 2.0**-1022 if self.work == "fp64" else 2.0**-126
        self.cubic = 0.0 if self.dtype in ("fp32", "fp64") else 1e-4
        self.underflow = LEAST[self.dtype] / (2**8 if narrow else 1) + 4 * self.normal
        self.stored = 0.0 if stored is None else U[stored]
        self.rows = [self._row(i) for i in range(len(self.q))]

    def g(self, terms: int) -> float:
        return 2.0 * math.sqrt(terms + 1.0) * self.w

    def _row(self, i: int) -> SimpleNamespace:
        products = self.k * self.q[i]
        scaled = self.scale * products.sum(axis=1)
        seen, keys = self.visible[i], len(self.k)
        tanh = np.tanh(scaled / self.cap) if self.cap else 0 * scaled
        s = self.cap * tanh if self.cap else scaled
        top = max([*s[seen], self.sink])
        top = 0.0 if top == -math.inf else top
        e = np.where(seen, np.exp(np.where(seen, s, top) - top), 0.0)
        total = e.sum() + math.exp(self.sink - top)
        lse = top + math.log(total) if total else -math.inf
        p = e / total if total else e
        delta = self.g(self.q.shape[1]) * np.hypot(abs(self.scale) * norm(products.T), scaled)
        delta = np.minimum(delta + 3 * self.w * (abs(s) + abs(s - top) + 2), 30.0)
        rho = np.sqrt(np.expm1(delta) ** 2 + (2 * self.u_p) ** 2 + self.cubic**2)
        row_sum = alike(p[:, None], self.w)[0]
        eps = norm(p * np.expm1(delta)) + self.g(keys) * norm(p) + 4 * self.w + self.cubic
        eps += row_sum
        share = math.exp(self.sink - lse) if total else 0.0
        if share:
            eps += 3 * self.w * share * (abs(self.sink) + abs(top))
        size = (abs(lse) if total else 0.0) + 1.0
        row = SimpleNamespace(**{k: v for k, v in locals().items() if k not in ("self", "row")})
        row.slope = 1 - tanh**2
        row.weights = p * self.keep[i]
        row.o = row.weights @ self.v
        return row

    def spacing(self, x: Any, dtype: str) -> Any:
        return ulp(np.asarray(x), dtype) + self.normal

    def lse(self, stored: str) -> list[float]:
        return [
            math.log1p((r.p * np.expm1(r.delta)).sum()) + self.g(len(self.k)) + 4 * self.w
            + r.row_sum + self.cubic + 4 * max(self.w, U[stored]) * r.size
            for r in self.rows
        ]  # fmt: skip

    def out(self) -> list[np.ndarray]:
        narrow = self.dtype in ("e4m3", "e5m2")
        bands, g = [], self.g(len(self.k))
        for r, keep in zip(self.rows, self.keep, strict=True):
            weighted, exact = r.weights[:, None] * self.v, abs(r.o)
            band = norm(weighted * r.rho[:, None]) + g * (norm(weighted) + exact)
            band = band + (r.eps + (0.0 if narrow else self.u)) * exact
            band = np.minimum(band, (r.weights * (r.rho + r.eps + g)) @ abs(self.v))
            band = band + alike(weighted, self.w)
            lost = self.underflow * norm((r.seen * keep)[:, None] * self.v)
            band = band + lost / (r.total if narrow else 1.0)
            result = self.spacing(self.v_factor * r.o, "bf16" if narrow else self.dtype)
            bands.append(self.v_factor * band + result)
        return bands

    def sums(self, error: np.ndarray, weights: np.ndarray, rows: np.ndarray, g: float) -> Any:
        """For one result: error, weights (N,), rows (N, D)."""
        exact = abs(weights @ rows)
        squares = np.hypot(norm(error[:, None] * rows), abs(error @ rows)) + self.u * exact
        squares = squares + g * (norm(weights[:, None] * rows) + exact)
        most = (error + (g + self.u) * abs(weights)) @ abs(rows)
        return np.minimum(squares, most) + alike(weights[:, None] * rows, self.w)

    def gradients(self) -> dict[str, np.ndarray]:
        """Bands without the rounding of the results, and the results ("exact dq")."""
        dv, keys, scale = self.v.shape[1], len(self.k), abs(self.scale)
        for r in self.rows:
            r.eps += 2 * self.stored * r.size
        for i, (r, band) in enumerate(zip(self.rows, self.out(), strict=True)):
            dout = self.dout[i]
            r.dot = dout @ r.o - self.dlse[i]
            r.dot_band = norm(dout * band) + self.g(dv) * norm(dout * r.o)
            r.dot_band += 4 * self.w * (abs(self.dlse[i]) + abs(r.dot))
            dp = self.keep[i] * (self.v @ dout)
            dp_band = self.keep[i] * self.g(dv) * norm((self.v * dout).T)
            gap = abs(dp - r.dot)
            r.ds = r.p * (dp - r.dot) * r.slope
            bent = r.p * gap * (2 * r.delta / self.cap + 4 * self.w) if self.cap else 0.0
            r.ds_band = r.p * (gap * r.rho + dp_band + 2 * self.u * abs(dp)) * r.slope
            r.ds_band = r.ds_band + bent + 2 * self.u * abs(r.ds)
            small = self.underflow * max(1.0, 1 / max(scale, 2.0**-10))
            r.ds_band = r.ds_band + r.seen * small * (1 + gap)
            r.common = r.p * r.dot_band * r.slope
            r.spread = r.weights * (r.rho + r.eps) + self.underflow * r.seen * self.keep[i]
        rows, g_rows = self.rows, self.g(len(self.rows))
        found = {
            "dq": [
                scale * (self.sums(r.ds_band, r.ds, self.k, self.g(keys)) + abs(r.common @ self.k)
                         + r.eps * abs(r.ds @ self.k))
                for r in rows
            ],
            "exact dq": [self.scale * r.ds @ self.k for r in rows],
        }  # fmt: skip
        columns = {
            name: np.array([getattr(r, name) for r in rows]).T
            for name in ("ds", "ds_band", "spread", "weights", "common")
        }
        by_key = columns["ds_band"] + columns["common"]
        by_key = by_key + abs(columns["ds"]) * np.array([r.eps for r in rows])
        found["dk"] = [scale * self.sums(by_key[j], columns["ds"][j], self.q, g_rows)
                       for j in range(keys)]  # fmt: skip
        found["exact dk"] = [self.scale * columns["ds"][j] @ self.q for j in range(keys)]
        found["dv"] = [self.sums(columns["spread"][j], columns["weights"][j], self.dout, g_rows)
                       for j in range(keys)]  # fmt: skip
        found["exact dv"] = [columns["weights"][j] @ self.dout for j in range(keys)]
        found["dsink"] = [sum(self._sink_row(r, g_rows) for r in rows)]
        found["exact dsink"] = [-sum(self._sink_weight(r) * r.dot for r in rows)]
        return {name: np.array(parts) for name, parts in found.items()}

    def _sink_weight(self, r: SimpleNamespace) -> float:
        return math.exp(self.sink - r.lse) if r.lse != -math.inf else 1.0

    def _sink_row(self, r: SimpleNamespace, g_rows: float) -> float:
        weight = self._sink_weight(r)
        finite = math.isfinite(r.lse) and math.isfinite(self.sink) and weight > 0
        size = abs(self.sink) + abs(r.lse) + 1.0 if finite else 1.0
        error = math.expm1(min(r.eps + 8 * self.w * size, 30.0)) + g_rows
        return weight * (abs(r.dot) * error + r.dot_band)


def heads_of(case: Case, terms: Terms, stored: str | None = None) -> list[Head]:
    inputs = build_inputs(case)
    keep = np.broadcast_to(terms.keep, terms.visible.shape)
    return [Head(inputs, head, keep[head], stored) for head in range(case.heads_q)]


@pytest.mark.parametrize("stored", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [*CASES, *FP8])
def test_forward_bands(name: str, stored: str) -> None:
    """O and LSE, for both types that an LSE may come in."""
    case = (CASES | FP8)[name]
    inputs = build_inputs(case)
    with np.errstate(all="ignore"):
        terms = Terms(inputs.sequences[0], 0, inputs.options, None)
        bounds = Bounds(terms, case.dtype)
        out, lse = bounds.out(), bounds.lse(stored)
    heads = heads_of(case, terms)
    np.testing.assert_allclose(out, [head.out() for head in heads], rtol=1e-9)
    np.testing.assert_allclose(lse, [head.lse(stored) for head in heads], rtol=1e-9)


@pytest.mark.parametrize(("dim", "steps"), [(8, 1), (96, 3), (104, 4)])
def test_scores_that_are_cut_off_may_be_further_away(dim: int, steps: int) -> None:
    """By 2^-14 of their norm for every 32 columns, whatever the number of rows."""
    case = replace(FP8["e4m3"], head_dim=dim, seqlen_q=40)
    inputs = build_inputs(case)
    deltas = []
    for sums in ("fp32", "limited"):
        terms = Terms(inputs.sequences[0], 0, inputs.options, None, Numerics(fp8_sums=sums))
        deltas.append(Bounds(terms, case.dtype).delta)
    norms = abs(terms.scale) * two_norm(terms.q, terms.k.transpose(0, 2, 1))
    more = steps * 2.0**-14 * (norms + np.abs(terms.scaled))
    np.testing.assert_allclose(deltas[1] - deltas[0], more, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "work"), [("fp64", np.float64), ("fp32", np.float32),
                                             ("bf16", np.float32)])  # fmt: skip
def test_what_is_subnormal_may_be_flushed(dtype: str, work: type) -> None:
    """A result of 0 may be off by the least normal number of the work type, and by hardly more;
    P, of V with a length of 1, by four of them."""
    case = replace(BASE, dtype=dtype, head_dim_v=1)
    inputs = build_inputs(case)
    ones = replace(inputs, sequences=(inputs.sequences[0]._replace(v=np.ones((5, 1, 1))),))
    tiny, least = float(np.finfo(work).tiny), LEAST[dtype]
    bounds = Bounds(Terms(ones.sequences[0], 0, {}, None), dtype)
    assert bounds.spacing(np.zeros(1), dtype)[0] == pytest.approx(tiny + least, rel=1e-9, abs=0)
    assert bounds.underflow == pytest.approx(4 * tiny + least, rel=1e-9, abs=0)


def test_what_is_cut_off_has_fourteen_bits() -> None:
    """Toward zero, by less than one of them; what has no more stays."""
    x = np.random.default_rng(3).standard_normal(1000).astype(np.float32)
    kept = truncated(x)
    fractions = np.frexp(kept)[0] * 2.0**14
    assert (fractions == np.round(fractions)).all() and (fractions % 2 != 0).any()
    assert (np.abs(kept) <= np.abs(x)).all()
    assert (np.abs(x - kept) < 2.0**-13 * np.abs(x)).all() and (x != kept).any()
    np.testing.assert_array_equal(truncated(kept), kept)


@pytest.mark.parametrize("stored", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_gradient_bands(name: str, stored: str) -> None:
    """dQ, dK, dV and dsink with a gradient of the LSE; heads that share keys add up."""
    case = CASES[name]
    inputs = build_inputs(case)
    with np.errstate(all="ignore"):
        terms = GradientTerms(inputs.sequences[0], 0, inputs.options, None, with_dlse=True)
        bands = GradientBounds(terms, case.dtype, stored).gradients()
        heads = heads_of(case, terms, stored)
        found = [head.gradients() for head in heads]
    parts = {name: np.stack([part[name] for part in found]) for name in found[0]}

    def rows_first(name: str) -> np.ndarray:
        return parts[name].transpose(1, 0, 2)

    def folded(name: str) -> np.ndarray:
        part = parts[name]
        return part.reshape(-1, case.group, *part.shape[1:]).sum(axis=1).transpose(1, 0, 2)

    work = heads[0]
    for name, collect in (("dq", rows_first), ("dk", folded), ("dv", folded)):
        expected = collect(name) + work.spacing(collect(f"exact {name}"), case.dtype)
        np.testing.assert_allclose(bands[name], expected, rtol=1e-8, err_msg=name)
    assert ("dsink" in bands) == work.has_sink
    if work.has_sink:
        spacing = work.spacing(parts["exact dsink"], work.work)
        np.testing.assert_allclose(bands["dsink"], (parts["dsink"] + spacing)[:, 0], rtol=1e-8)


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("name", [*CASES, *FP8, "score_mod"])
def test_how_far_plain_attention_may_be(name: str, with_dlse: bool) -> None:
    """From the norms of the longest rows alone."""
    case = (CASES | FP8 | {"score_mod": replace(BASE, score_mod="alibi", dtype="bf16")})[name]
    inputs = build_inputs(case)
    seq, options, dtype = inputs.sequences[0], inputs.options, case.dtype
    q, k, v, dout = (
        max(math.hypot(*row) for row in x.astype(np.float64).reshape(-1, x.shape[-1]))
        for x in (seq.q, seq.k, seq.v, seq.dout)
    )
    most = {x: float(np.max(options.get(f"{x}_descale", 1.0))) for x in "qkv"}
    v *= most["v"]
    w, u, n = U["fp64" if dtype == "fp64" else "fp32"], U[dtype], case.seqlen_k
    scale = abs(case.scale) * most["q"] * most["k"]
    size, bias = scale * q * k, 4096.0 if case.score_mod else 0.0
    e = 4 * math.sqrt(case.head_dim + 1) * w * size + 16 * w * (size + bias + 1)
    rel = math.expm1(min(2 * e, 30)) + 8 * u + n * w
    rel += n * 2.0 ** (-10 if dtype in FP8 else -24)
    rel /= 1 - case.dropout_p
    least = 2.0**-24 if dtype == "fp16" else 2.0**-126
    bounds = YardstickBounds(seq, options, dtype)
    given = np.array([-3.0, 0.5, -np.inf])
    found = bounds.forward({"lse": given})
    lse = 2 * e + n * w + 8 * w * (np.array([3.0, 0.5, 0.0]) + 1)
    assert found["out"] == pytest.approx(2 * rel * v + least, rel=1e-6)
    np.testing.assert_allclose(found["lse"], lse, rtol=1e-6)
    upstream = 4 * dout * v + (abs(seq.dlse).max() if with_dlse else 0.0)
    rows = case.seqlen_q * case.group
    assert bounds.gradients(seq, with_dlse) == {
        "dq": pytest.approx(2 * rel * scale * upstream * k + least, rel=1e-6),
        "dk": pytest.approx(2 * rel * scale * upstream * q * rows + least, rel=1e-6),
        "dv": pytest.approx(2 * rel * dout * rows + least, rel=1e-6),
    }


@pytest.mark.parametrize(
    ("rows", "longest"),
    [
        ([[3.0, 4.0], [1.0, 2.0]], 5.0),
        ([[0.3, -0.4], [0.0, 0.0]], 0.5),
        ([[0.3, 0.4], [math.nan, math.inf]], 0.5),
        ([[0.3, 0.4], [-math.inf, 1.2]], 1.2),
        ([[3e200, 4e200]], 5e200),
        ([[0.0, 0.0]], 0.0),
        ([], 0.0),
    ],
)
def test_the_longest_row(rows: list[list[float]], longest: float) -> None:
    """Squares may overflow; what is not finite counts as 0."""
    assert _norm(np.array(rows).reshape(-1, 2)) == pytest.approx(longest, rel=1e-12)


@pytest.mark.parametrize("keys", [1, 128])
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_equal_rows_err_alike(dtype: str, keys: int) -> None:
    """With equal logits and dO of ones, all rows have one error, and a sum's roundings one sign.

    With independent errors assumed, dV in float64 was at 2.8 times its budget through tiles of one
    key, and dK at 1.6 times it through any.
    """
    backend = load_backend(Fault("tiles", "", "", (), kernel=tiles_of(keys)).attention())
    case = Case(seqlen_q=1025, seqlen_k=33, head_dim=8, head_dim_v=8, dtype=dtype, values="equal",
                seed=1, strides="expanded_dout")  # fmt: skip
    assert check_property("gradients_strides_expanded_dout", backend, case) <= 0.5


def test_equal_terms_are_all_equal() -> None:
    """Zeros do not count, one other term is enough; signs are part of a term."""
    rows = np.array([[[1.0, 1.0], [1.0, 2.0], [1.0, 1.0], [7.0, -1.0]]])
    weights = np.array([[[0.25, 0.25, 0.25, 0.0], [0.0, 0.0, 0.0, 1.0]]])
    exact, length = np.abs(weights @ rows), two_norm(weights, rows)
    assert equal_terms(weights, exact, length).tolist() == [[[1.5, 0.0], [0.0, 0.0]]]
