"""Errors taken together: their root mean square, and their mean.

An error budget bounds the worst element; a kernel that sums in 16 bits, or cuts off instead of
rounding, stays within it and is worse everywhere. Two statistics of whole outputs, in bf16 and
fp16, on independent normal inputs, where the errors of different rows are independent:

- the root mean square error, against that of plain attention on the same inputs: at most
  1.5 (1 + 8 sqrt(16 / n))^(1/2) times for n elements. Honest kernels differ from plain attention in
  the order of sums, and in where P and dS are rounded: 0.7 to 1.5 times. Taking 8 elements of a
  row as one, the ratio's relative deviation is sqrt(16 / n), and 8 deviations are left for luck;
- the mean of the error away from zero, in spacings of the result: 0 for rounding to nearest, -1/2
  for truncation. The means of rows are independent; t is their mean over its standard error, and
  t > 8 with a mean above 0.1 fails.

Eight deviations of a normal variable are exceeded with probability 1.2e-15; with 63 degrees of
freedom, the fewest that are tested, t is with 4e-11. A run computes below 300 of these statistics:
less than 1.2e-8 false alarms a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from fa4.dtypes import ulp
from fa4.testing.backends import Backend
from fa4.testing.budget import Expected, Outputs, expect_forward, expect_gradients, split_outputs
from fa4.testing.case import Case
from fa4.testing.inputs import Inputs
from fa4.testing.layouts import build_inputs
from fa4.testing.levels import needs_of
from fa4.testing.property import Plan, Property

RMS_FACTOR = 1.5
DEVIATIONS = 8.0
LEAST_MEAN = 0.1  # spacings; truncation is 0.5
LEAST_ROWS = 64
LEAST_ELEMENTS = 2048

Statistic = Callable[[str, list[np.ndarray], Expected, str], float]


def rows_of(parts: list[np.ndarray]) -> np.ndarray:
    """(rows, channels) float64 of all rows and heads of an output."""
    return np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts]).astype(np.float64)


def check_rms(name: str, parts: list[np.ndarray], expected: Expected, dtype: str) -> float:
    """The root mean square error as a fraction of its limit; AssertionError above 1."""
    oracle = rows_of(expected.oracle)
    # Rows of different size count alike.
    size = ulp(np.abs(oracle).max(axis=1, keepdims=True), dtype)
    error, usual = ((rows_of(x) - oracle) / size for x in (parts, expected.plain))
    ratio = float(np.sqrt((error**2).mean() / (usual**2).mean()))
    limit = RMS_FACTOR * float(np.sqrt(1.0 + DEVIATIONS * np.sqrt(16.0 / oracle.size)))
    if not ratio <= limit:
        raise AssertionError(
            f"{name}: the root mean square error is {ratio:.3g} times that of plain attention, "
            f"at most {limit:.3g} is allowed: sums or probabilities of too few bits"
        )
    return ratio / limit


def check_bias(name: str, parts: list[np.ndarray], expected: Expected, dtype: str) -> float:
    """t of the mean error away from zero, as a fraction of its limit; AssertionError above 1."""
    oracle = rows_of(expected.oracle)
    away = np.sign(oracle) * (rows_of(parts) - oracle)
    # Both summed over the row: small elements have spacings far below the error that P's rounding
    # leaves in them.
    means = away.sum(axis=1) / ulp(oracle, dtype).sum(axis=1)
    mean, deviation = float(means.mean()), float(means.std(ddof=1))
    t = abs(mean) / (deviation / np.sqrt(len(means)) + 1e-30)
    if t > DEVIATIONS and abs(mean) > LEAST_MEAN:
        toward = "toward zero: truncated, not rounded" if mean < 0 else "away from zero"
        raise AssertionError(
            f"{name}: the mean error is {abs(mean):.3g} spacings {toward} "
            f"({t:.3g} standard errors, at most {DEVIATIONS:g} are allowed)"
        )
    return min(t / DEVIATIONS, abs(mean) / LEAST_MEAN)


def _judge(
    inputs: Inputs, outputs: Outputs, expected: dict[str, Expected], test: Statistic
) -> float:
    share = 0.0
    for name, parts in split_outputs(inputs, outputs).items():
        enough = sum(part[..., 0].size for part in parts) >= LEAST_ROWS
        if name in ("lse", "dsink") or name not in expected or not enough:
            continue
        if sum(part.size for part in parts) >= LEAST_ELEMENTS:
            share = max(share, test(name, parts, expected[name], inputs.dtype))
    return share


def _forward(test: Statistic) -> Callable[[Backend, Case], float]:
    def check(backend: Backend, case: Case) -> float:
        inputs = build_inputs(case)
        return _judge(inputs, backend.forward(inputs), expect_forward(inputs), test)

    return check


def _backward(test: Statistic) -> Callable[[Backend, Case], float]:
    def check(backend: Backend, case: Case) -> float:
        inputs = build_inputs(case)
        saved = backend.forward(inputs)
        grads = replace(backend.gradients(inputs, saved), out=saved.out, lse=None)
        return _judge(inputs, grads, expect_gradients(inputs), test)

    return check


_FEATURES: dict[str, dict[str, Any]] = {
    "gqa": {"group": 2, "heads_k": 1},
    "causal": {"causal": True},
    "splits": {"num_splits": 3},
    "varlen": {"layout": "packed", "lengths": ((40, 1100), (3, 7), (40, 1025))},
}


def _list_cases(plan: Plan, shapes: tuple[tuple[int, int], ...]) -> list[Case]:
    """Normal inputs, long sums; with what the back end offers, once each."""
    features: list[dict[str, Any]] = [{}]
    features += [
        fields for name, fields in _FEATURES.items() if set(needs_of(name)) <= plan.offered
    ]
    if len(shapes) > 1:  # gradients: the sums are the same with every feature
        features = features[:1]
    sizes: dict[str, Any] = {"heads_k": 2, "head_dim": 64, "head_dim_v": 64}
    return [
        Case(**(sizes | {"seqlen_q": rows, "seqlen_k": keys, "dtype": dtype,
                         "seed": plan.seed + 17 * n} | fields))
        for n, fields in enumerate(features)
        for rows, keys in shapes
        for dtype in plan.dtypes
    ]  # fmt: skip


def _statistic(name: str, description: str, test: Statistic, *, gradients: bool) -> Property:
    # Sums over keys are long in O and dQ, over rows in dK and dV. What dQ loses after each tile
    # takes 32 of them to stand out.
    shapes = ((32, 4097), (1025, 64)) if gradients else ((64, 1025),)
    return Property(
        f"gradients_{name}" if gradients else name,
        description,
        _backward(test) if gradients else _forward(test),
        listed=lambda plan: _list_cases(plan, shapes),
        needs=frozenset({"gradients"} if gradients else ()),
        dtypes=("bf16", "fp16"),
        levels=("gradients",) if gradients else (),
        shrinks=frozenset(),
    )


_TESTS = (
    ("error_rms", "no lost bits in sums: the root mean square error", check_rms),
    ("rounding_bias", "results are rounded, not truncated: the mean error", check_bias),
)
STATISTICS = tuple(_statistic(*test, gradients=False) for test in _TESTS)
GRADIENT_STATISTICS = tuple(
    _statistic(name, f"{text} of gradients", test, gradients=True) for name, text, test in _TESTS
)
