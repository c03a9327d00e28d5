"""The error budget: how wrong an attention output may be, derived and never a bare tolerance.

    |x - oracle|  <=  2 max|plain - oracle|  +  band

for every element of O, LSE, dQ, dK, dV and dsink. `plain` is attention in the element type
throughout (`fa4.testing.plain`), its maximum taken over the whole output; `band` is the a priori
rounding error of that element (`fa4.testing.bounds`), which carries the fp32 and fp64 checks, where
plain may be exact by luck. Besides, and whatever the budget:

- NaN is never accepted, and infinities only where the oracle has them;
- a row without a visible key has O and dQ exactly 0, and LSE exactly -inf unless there is a sink;
- a key that no row sees has dK and dV exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fa4.testing.bounds import Bounds, GradientBounds
from fa4.testing.inputs import Inputs
from fa4.testing.oracle import oracle_forward, oracle_gradients
from fa4.testing.plain import GradientTerms, Terms, plain_attention, plain_gradients

PLAIN_FACTOR = 2.0  # FlashAttention's own tests allow twice the error of plain attention


@dataclass(frozen=True)
class Outputs:
    """Results of a call in the layouts of its inputs; None for what was not computed.

    out like q with dv columns; lse (B, Hq, Sq) or (Hq, total); dsink (Hq,).
    """

    out: np.ndarray
    lse: np.ndarray | None = None
    dq: np.ndarray | None = None
    dk: np.ndarray | None = None
    dv: np.ndarray | None = None
    dsink: np.ndarray | None = None


class Expected(NamedTuple):
    """One output, sequence by sequence: oracle, allowed error, and where it must be exact."""

    oracle: list[np.ndarray]
    allowed: list[np.ndarray]
    exact: list[np.ndarray]
    plain_error: float


@dataclass(frozen=True)
class Check:
    """The worst element of one output. share: its error as a fraction of what is allowed.

    index is (batch, row, head, channel) for out and gradients, (batch, head, row) for lse.
    """

    output: str
    share: float
    index: tuple[int, ...]
    value: float
    oracle: float
    error: float
    allowed: float
    rule: str

    def __str__(self) -> str:
        """One line: output, index, value, oracle, error, budget."""
        where = ", ".join(str(i) for i in self.index)
        text = f"{self.output}[{where}] = {self.value:.9g}, oracle {self.oracle:.9g}: "
        if self.rule:
            return text + self.rule
        return text + (
            f"error {self.error:.3g} is {self.share:.3g} times its budget {self.allowed:.3g}"
        )


@dataclass(frozen=True)
class BudgetReport:
    """One `Check` per output; `share` is the worst, and at most 1 if everything is right."""

    checks: tuple[Check, ...]

    @property
    def share(self) -> float:
        """The largest share of the budget that any output used."""
        return max((check.share for check in self.checks), default=0.0)

    @property
    def passed(self) -> bool:
        """Is every output within its budget?"""
        return self.share <= 1.0


def expect_forward(inputs: Inputs) -> dict[str, Expected]:
    """Oracle and budget of "out" and "lse"."""
    oracle, plain = oracle_forward(inputs), plain_attention(inputs)
    bands: dict[str, list[np.ndarray]] = {"out": [], "lse": []}
    exact: dict[str, list[np.ndarray]] = {"out": [], "lse": []}
    with np.errstate(all="ignore"):
        for b, seq in enumerate(inputs.sequences):
            bounds = Bounds(Terms(seq, b, inputs.options, None), inputs.dtype)
            bands["out"].append(bounds.out().transpose(1, 0, 2))
            bands["lse"].append(bounds.lse())
            no_key = np.isneginf(oracle[b]["lse"]) | ~seq.visible.any(axis=-1)
            exact["out"].append(np.broadcast_to(no_key.T[..., None], oracle[b]["out"].shape))
            exact["lse"].append(np.isneginf(oracle[b]["lse"]))
    return {
        name: _expected(
            [o[name] for o in oracle], [getattr(p, name) for p in plain], bands[name], exact[name]
        )
        for name in ("out", "lse")
    }


def expect_gradients(inputs: Inputs, *, with_dlse: bool = False) -> dict[str, Expected]:
    """Oracle and budget of "dq", "dk", "dv" and, with a sink, "dsink"."""
    oracle, dsink = oracle_gradients(inputs, with_dlse=with_dlse)
    plain = plain_gradients(inputs, with_dlse=with_dlse)
    bands, exact = [], []
    with np.errstate(all="ignore"):
        for b, seq in enumerate(inputs.sequences):
            terms = GradientTerms(seq, b, inputs.options, None, with_dlse)
            bands.append(GradientBounds(terms, inputs.dtype).gradients())
            exact.append(_exact_gradients(seq))
    expected = {
        name: _expected(
            [o[name] for o in oracle],
            [getattr(p, name) for p in plain],
            [band[name] for band in bands],
            [spots[name] for spots in exact],
        )
        for name in ("dq", "dk", "dv")
    }
    if dsink is not None:
        total = np.sum([p.dsink for p in plain if p.dsink is not None], axis=0)
        band = np.sum([band["dsink"] for band in bands], axis=0)
        expected["dsink"] = _expected([dsink], [total], [band], [np.zeros(dsink.shape, bool)])
    return expected


def _exact_gradients(seq: Any) -> dict[str, np.ndarray]:
    """Where gradients must be exactly 0: rows without keys, keys without rows."""
    no_key = ~seq.visible.any(axis=-1).T[..., None]
    keys, heads_k, _ = seq.k.shape
    group = seq.q.shape[1] // heads_k
    seen = seq.visible.any(axis=1).reshape(heads_k, group, keys).any(axis=1)
    no_row = ~seen.T[..., None]
    return {
        "dq": np.broadcast_to(no_key, seq.q.shape),
        "dk": np.broadcast_to(no_row, seq.k.shape),
        "dv": np.broadcast_to(no_row, seq.v.shape),
    }


def _expected(
    oracle: list[np.ndarray],
    plain: list[np.ndarray],
    bands: list[np.ndarray],
    exact: list[np.ndarray],
) -> Expected:
    with np.errstate(invalid="ignore"):
        errors = [np.abs(p.astype(np.float64) - o) for p, o in zip(plain, oracle, strict=True)]
    # Where plain overflows, it is no yardstick.
    worst = max((float(e.max(initial=0.0, where=np.isfinite(e))) for e in errors), default=0.0)
    allowed = [PLAIN_FACTOR * worst + band for band in bands]
    return Expected(oracle, allowed, exact, worst)


def check_output(name: str, parts: list[np.ndarray], expected: Expected) -> Check:
    """The worst element of one output; `parts` are its sequences."""
    worst = Check(name, 0.0, (), 0.0, 0.0, 0.0, 0.0, "")
    for b, part in enumerate(parts):
        oracle, allowed, exact = (x[b] for x in expected[:3])
        if part.shape != oracle.shape:
            return Check(
                name, np.inf, (b,), np.nan, np.nan, np.inf, 0.0,
                f"shape {part.shape} must be {oracle.shape}",
            )  # fmt: skip
        if part.size == 0:
            continue
        value = part.astype(np.float64)
        with np.errstate(invalid="ignore"):
            error = np.where(value == oracle, 0.0, np.abs(value - oracle))
            share = np.where(error == 0, 0.0, error / allowed)
        share = np.where(exact & (value != oracle), np.inf, share)
        share = np.where(np.isnan(share) | np.isinf(error), np.inf, share)
        at = tuple(int(i) for i in np.unravel_index(int(np.argmax(share)), share.shape))
        if share[at] > worst.share or not worst.index:
            rule = _broken_rule(float(value[at]), float(oracle[at]), bool(exact[at]))
            numbers = (float(x[at]) for x in (share, value, oracle, error, allowed))
            found = dict(
                zip(("share", "value", "oracle", "error", "allowed"), numbers, strict=True)
            )
            worst = Check(name, index=(b, *at), rule=rule, **found)
    return worst


def _broken_rule(value: float, oracle: float, exact: bool) -> str:
    """Why an element is wrong whatever its budget; empty if the budget decides."""
    if np.isnan(value):
        return "NaN is never right"
    if value == oracle or not (exact or np.isinf(value) or np.isinf(oracle)):
        return ""
    return "must be exact" if exact else "only one of them is infinite"


def check_budget(inputs: Inputs, outputs: Outputs, *, with_dlse: bool = False) -> BudgetReport:
    """Measure every output that is not None against its budget.

    `with_dlse`: the gradients were computed with the incoming gradient of the LSE, `inputs.dlse`.
    """
    expected = expect_forward(inputs)
    if outputs.dq is not None:
        expected |= expect_gradients(inputs, with_dlse=with_dlse)
    split = {"out": inputs.split_rows, "dq": inputs.split_rows, "lse": inputs.split_lse,
             "dk": inputs.split_keys, "dv": inputs.split_keys, "dsink": lambda x: [x]}  # fmt: skip
    checks = []
    for name, wanted in expected.items():
        array = getattr(outputs, name)
        if array is not None:
            checks.append(check_output(name, split[name](array), wanted))
    return BudgetReport(tuple(checks))


def assert_within_budget(inputs: Inputs, outputs: Outputs, *, with_dlse: bool = False) -> float:
    """The share of the budget that was used; AssertionError naming the worst element if above 1."""
    report = check_budget(inputs, outputs, with_dlse=with_dlse)
    if not report.passed:
        raise AssertionError("; ".join(str(c) for c in report.checks if c.share > 1.0))
    return report.share
