"""The error budget: how wrong an attention output may be, derived and never a bare tolerance.

    |x - oracle|  <=  2 max|plain - oracle|  +  band

for every element of O, LSE, dQ, dK, dV and dsink. `plain` is attention in the element type
throughout (`fa4.testing.plain`), its maximum taken over the channels of the element's row (over the
rows of a head for the LSE); `band` is the a priori rounding error of that element
(`fa4.testing.bounds`), which carries rows where plain is exact by luck. Plain and oracle are held
against each other first (`fa4.testing.yardstick`). Besides, and whatever the budget:

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
from fa4.testing.numerics import USUAL_NUMERICS, Numerics
from fa4.testing.oracle import oracle_forward, oracle_gradients
from fa4.testing.plain import (
    GradientTerms,
    Terms,
    plain_attention,
    plain_gradients,
    work_type,
)
from fa4.testing.yardstick import LongestRows, YardstickBounds, hold_against

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
    """One output, sequence by sequence: oracle, allowed error, where it must be exact, plain.

    plain_error: the largest error of plain attention over all of it.
    """

    oracle: list[np.ndarray]
    allowed: list[np.ndarray]
    exact: list[np.ndarray]
    plain: list[np.ndarray]
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


def expect_forward(
    inputs: Inputs, lse_type: str | None = None, numerics: Numerics = USUAL_NUMERICS
) -> dict[str, Expected]:
    """Oracle and budget of "out" and "lse"; `lse_type`: what the LSE comes in, None for the usual.

    numerics: what the back end declares. YardstickError where oracle and plain attention contradict
    each other.
    """
    oracle, plain = oracle_forward(inputs), plain_attention(inputs, numerics)
    stored = lse_type or work_type(inputs.dtype)
    bands: dict[str, list[np.ndarray]] = {"out": [], "lse": []}
    exact: dict[str, list[np.ndarray]] = {"out": [], "lse": []}
    with np.errstate(all="ignore"):
        for b, seq in enumerate(inputs.sequences):
            terms, longest = Terms(seq, b, inputs.options, None, numerics), LongestRows(seq)
            for dtype, other in ((inputs.dtype, plain[b]), ("fp64", terms.forward())):
                judge = YardstickBounds(
                    seq, inputs.options, dtype, longest, limited=terms.limits(dtype)
                )
                hold_against(other._asdict(), oracle[b], judge.forward(oracle[b]))
            bounds = Bounds(terms, inputs.dtype)
            bands["out"].append(bounds.out().transpose(1, 0, 2))
            bands["lse"].append(bounds.lse(stored))
            no_key = np.isneginf(oracle[b]["lse"]) | ~seq.visible.any(axis=-1)
            exact["out"].append(np.broadcast_to(no_key.T[..., None], oracle[b]["out"].shape))
            exact["lse"].append(np.isneginf(oracle[b]["lse"]))
    return {
        name: _expected(
            [o[name] for o in oracle], [getattr(p, name) for p in plain], bands[name], exact[name]
        )
        for name in ("out", "lse")
    }


def expect_gradients(
    inputs: Inputs,
    *,
    with_dlse: bool = False,
    lse_type: str | None = None,
    numerics: Numerics = USUAL_NUMERICS,
) -> dict[str, Expected]:
    """Oracle and budget of "dq", "dk", "dv" and, with a sink, "dsink"; see `expect_forward`."""
    oracle, dsink = oracle_gradients(inputs, with_dlse=with_dlse)
    plain = plain_gradients(inputs, with_dlse=with_dlse, numerics=numerics)
    stored = lse_type or work_type(inputs.dtype)
    bands, exact = [], []
    with np.errstate(all="ignore"):
        for b, seq in enumerate(inputs.sequences):
            terms = GradientTerms(seq, b, inputs.options, None, with_dlse, numerics)
            longest = LongestRows(seq)
            for dtype, other in ((inputs.dtype, plain[b]), ("fp64", terms.backward())):
                judge = YardstickBounds(seq, inputs.options, dtype, longest)
                hold_against(other._asdict(), oracle[b], judge.gradients(seq, with_dlse))
            bands.append(GradientBounds(terms, inputs.dtype, stored).gradients())
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
    for name in ("dk", "dv"):
        expected[name] = _add_shared(expected[name], *inputs.shared)
    if dsink is not None:
        total = np.sum([p.dsink for p in plain if p.dsink is not None], axis=0)
        band = np.sum([band["dsink"] for band in bands], axis=0)
        expected["dsink"] = _expected([dsink], [total], [band], [np.zeros(dsink.shape, bool)])
    return expected


def _add_shared(expected: Expected, members: tuple[int, ...], count: int) -> Expected:
    """Where sequences share their first keys, dK and dV are the sum over them, and so is what is
    allowed."""
    if not count:
        return expected
    lists = [list(parts) for parts in expected[:4]]
    for name, parts in zip(Expected._fields[:4], lists, strict=True):
        common = (np.all if name == "exact" else np.sum)(
            [parts[b][:count] for b in members], axis=0
        )
        for b in members:
            parts[b] = np.concatenate([common, parts[b][count:]])
    oracle, allowed, exact, plain = lists
    return Expected(oracle, allowed, exact, plain, expected.plain_error)


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
    allowed, worst = [], 0.0
    for p, o, band in zip(plain, oracle, bands, strict=True):
        with np.errstate(invalid="ignore"):
            error = np.abs(p.astype(np.float64) - o)
        error = np.where(np.isfinite(error), error, 0.0)  # where plain overflows: no yardstick
        worst = max(worst, float(error.max(initial=0.0)))
        # The last axis is a row's channels (O, gradients) or a head's rows (LSE).
        allowed.append(PLAIN_FACTOR * error.max(axis=-1, keepdims=True, initial=0.0) + band)
    return Expected(oracle, allowed, exact, plain, worst)


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
        with np.errstate(all="ignore"):  # where nothing is allowed
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


def lse_type_of(lse: np.ndarray) -> str:
    """The type that an LSE is judged as: its own, or fp32 if narrower, which is what it must hold.

    FlashAttention's LSE is float32 whatever the inputs are, so that is enough for fp64 inputs too.
    """
    return "fp64" if lse.dtype == np.float64 else "fp32"


def _broken_rule(value: float, oracle: float, exact: bool) -> str:
    """Why an element is wrong whatever its budget; empty if the budget decides."""
    if np.isnan(value):
        return "NaN is never right"
    if value == oracle or not (exact or np.isinf(value) or np.isinf(oracle)):
        return ""
    return "must be exact" if exact else "only one of them is infinite"


def split_outputs(inputs: Inputs, outputs: Outputs) -> dict[str, list[np.ndarray]]:
    """The sequences of every output that is not None, in the layouts of `Expected`."""
    split = {"out": inputs.split_rows, "dq": inputs.split_rows, "lse": inputs.split_lse,
             "dk": inputs.split_keys, "dv": inputs.split_keys, "dsink": lambda x: [x]}  # fmt: skip
    arrays = {name: getattr(outputs, name) for name in split}
    return {name: split[name](x) for name, x in arrays.items() if x is not None}


def check_budget(
    inputs: Inputs,
    outputs: Outputs,
    *,
    with_dlse: bool = False,
    gradients_alone: bool = False,
    numerics: Numerics = USUAL_NUMERICS,
) -> BudgetReport:
    """Measure every output that is not None against its budget.

    `with_dlse`: the gradients were computed with the incoming gradient of the LSE, `inputs.dlse`.
    `gradients_alone`: out and lse are taken as they are. numerics: what the back end declares.
    """
    lse_type = None if outputs.lse is None else lse_type_of(outputs.lse)
    expected = {} if gradients_alone else expect_forward(inputs, lse_type, numerics)
    if outputs.dq is not None:
        expected |= expect_gradients(
            inputs, with_dlse=with_dlse, lse_type=lse_type, numerics=numerics
        )
    parts = split_outputs(inputs, outputs)
    return BudgetReport(
        tuple(
            check_output(name, parts[name], wanted)
            for name, wanted in expected.items()
            if name in parts
        )
    )


def assert_within_budget(inputs: Inputs, outputs: Outputs, **how: Any) -> float:
    """The share of the budget that was used; AssertionError naming the worst element if above 1.

    Keywords as for `check_budget`.
    """
    report = check_budget(inputs, outputs, **how)
    if not report.passed:
        raise AssertionError("; ".join(str(c) for c in report.checks if c.share > 1.0))
    return report.share
