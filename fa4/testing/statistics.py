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
  t > 8 with a mean above 0.1 fails. In FP8, where P has a mean error, 1.5 times that of plain
  attention more is allowed; values around a common mean leave it, and what sums of few bits cut
  off, as nearly all of the error.

Eight deviations of a normal variable are exceeded with probability 1.2e-15; with 63 degrees of
freedom, the fewest that are tested, t is with 4e-11. A run computes below 300 of these statistics:
less than 1.2e-8 false alarms a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from fa4.dtypes import ulp
from fa4.testing.backends import Backend
from fa4.testing.budget import Expected, Outputs, expect_forward, expect_gradients, split_outputs
from fa4.testing.case import Case
from fa4.testing.checks import differentiate
from fa4.testing.inputs import Inputs
from fa4.testing.layouts import build_inputs
from fa4.testing.levels import needs_of
from fa4.testing.numerics import FP8_TYPES, Numerics
from fa4.testing.plain import output_type
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
    size = ulp(np.abs(oracle).max(axis=1, keepdims=True), output_type(dtype))
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
    means = _away_from_zero(parts, expected, dtype)
    mean, deviation = float(means.mean()), float(means.std(ddof=1))
    t = abs(mean) / (deviation / np.sqrt(len(means)) + 1e-30)
    # P in FP8 has a mean error of its own: more numbers lie below the middle of two than above.
    usual = _away_from_zero(expected.plain, expected, dtype).mean() if dtype in FP8_TYPES else 0.0
    least = LEAST_MEAN + 1.5 * abs(float(usual))
    if t > DEVIATIONS and abs(mean) > least:
        toward = "toward zero: truncated, not rounded" if mean < 0 else "away from zero"
        raise AssertionError(
            f"{name}: the mean error is {abs(mean):.3g} spacings {toward} "
            f"({t:.3g} standard errors, at most {DEVIATIONS:g} are allowed)"
        )
    return min(t / DEVIATIONS, abs(mean) / least)


def _away_from_zero(parts: list[np.ndarray], expected: Expected, dtype: str) -> np.ndarray:
    """(rows,) mean error away from zero, in spacings of the result's type.

    Both summed over the row: small elements have spacings far below the error that P's rounding
    leaves in them.
    """
    oracle = rows_of(expected.oracle)
    away = np.sign(oracle) * (rows_of(parts) - oracle)
    return away.sum(axis=1) / ulp(oracle, output_type(dtype)).sum(axis=1)


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
        expected = expect_forward(inputs, numerics=backend.numerics)
        return _judge(inputs, backend.forward(inputs), expected, test)

    return check


@lru_cache(maxsize=16)
def _expected_gradients(case: Case, numerics: Numerics) -> dict[str, Expected]:
    """Oracle and plain attention, kept for the other statistic of the same case."""
    expected = expect_gradients(build_inputs(case), numerics=numerics)
    return {name: x._replace(allowed=[], exact=[]) for name, x in expected.items()}


def _backward(test: Statistic) -> Callable[[Backend, Case], float]:
    def check(backend: Backend, case: Case) -> float:
        inputs = build_inputs(case)
        grads = replace(differentiate(backend, case, inputs), lse=None)
        return _judge(inputs, grads, _expected_gradients(case, backend.numerics), test)

    return check


_FEATURES: dict[str, dict[str, Any]] = {
    "gqa": {"group": 2, "heads_k": 1},
    "causal": {"causal": True},
    "splits": {"num_splits": 3},
    "varlen": {"layout": "packed", "lengths": ((40, 1100), (3, 7), (40, 1025))},
}


_SIZES: dict[str, Any] = {"heads_k": 2, "head_dim": 64, "head_dim_v": 64}
# Sums over keys are long in O and dQ, over rows in dK and dV. What dQ loses after each tile takes
# 32 of them to stand out.
_GRADIENT_SHAPES: tuple[dict[str, Any], ...] = (
    {"seqlen_q": 32, "seqlen_k": 4097},
    {"seqlen_q": 1025, "seqlen_k": 64},
)
# Sums over the heads of a group: dK and dV of many elements, so that the limit is sharp.
_GROUPS: tuple[dict[str, Any], ...] = tuple(
    {"seqlen_q": 32, "seqlen_k": 128, "head_dim": 128, "head_dim_v": 128, "group": group,
     "heads_k": 1 if group == 16 else 2}
    for group in (2, 4, 8, 16)
)  # fmt: skip
_GROUPED_LAYOUTS: tuple[dict[str, Any], ...] = (
    _GROUPS[2] | {"causal": True},
    _GROUPS[2] | {"layout": "packed", "lengths": ((32, 110), (0, 3), (30, 40))},
)


def _cases(plan: Plan, shapes: Iterable[dict[str, Any]]) -> list[Case]:
    """Normal inputs of these shapes in each element type."""
    return [
        Case(**(_SIZES | {"dtype": dtype, "seed": plan.seed + 17 * n} | fields))
        for n, fields in enumerate(shapes)
        for dtype in plan.dtypes
    ]


def _list_forward(plan: Plan) -> list[Case]:
    """Long sums, and with what the back end offers."""
    offered = [fields for name, fields in _FEATURES.items() if set(needs_of(name)) <= plan.offered]
    shape = {"seqlen_q": 64, "seqlen_k": 1025}
    return _cases(plan, [shape | fields for fields in ({}, *offered)])


def _list_groups(plan: Plan) -> list[Case]:
    """Sums over every group, and over 8 heads in layouts that the back end offers."""
    masked, packed = _GROUPED_LAYOUTS
    more = [masked] * ("causal" in plan.offered) + [packed] * ("varlen" in plan.offered)
    return _cases(plan, (*reversed(_GROUPS), *more))


def _statistic(
    name: str, description: str, test: Statistic, listed: Callable[[Plan], list[Case]], prefix: str
) -> Property:
    return Property(
        f"{prefix}{name}",
        description,
        _backward(test) if prefix else _forward(test),
        listed=listed,
        needs=frozenset({"gradients"} if prefix else ()),
        dtypes=("bf16", "fp16"),
        levels=("gradients",) if prefix else (),
        shrinks=frozenset(),
    )


_TESTS = (
    ("error_rms", "no lost bits in sums: the root mean square error", check_rms),
    ("rounding_bias", "results are rounded, not truncated: the mean error", check_bias),
)


def _list_fp8(plan: Plan) -> list[Case]:
    """Long sums of independent values, and of values around a common mean."""
    shape = {"seqlen_q": 32, "seqlen_k": 2049, "heads_k": 2}
    return _cases(plan, [shape | {"values": values} for values in ("common_mean", "normal")])


def fp8_statistics() -> tuple[Property, ...]:
    """The same of FP8 inputs, in the arithmetic that is declared."""
    return tuple(
        replace(_statistic(name, f"{text}, FP8", test, _list_fp8, ""), name=f"fp8_{name}",
                dtypes=FP8_TYPES, first_look=4)
        for name, text, test in _TESTS
    )  # fmt: skip


STATISTICS = tuple(_statistic(*test, _list_forward, "") for test in _TESTS)
GRADIENT_STATISTICS = (
    *(
        _statistic(name, f"{text} of gradients", test,
                   lambda plan: _cases(plan, _GRADIENT_SHAPES), "gradients_")
        for name, text, test in _TESTS
    ),
    *(
        _statistic(name, f"{text} of dQ, dK and dV of grouped heads, in the precision declared",
                   test, _list_groups, "gradients_gqa_")
        for name, text, test in _TESTS
    ),
)  # fmt: skip
