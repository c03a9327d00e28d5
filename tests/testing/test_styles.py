"""Correct styles are not rejected, by any property, robustness included."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fa4.testing import verify
from tests.testing.planted import STYLES
from tests.testing.remembered import remembered_budgets

HERE = "tests.testing.planted"


@pytest.fixture(scope="module", autouse=True)
def shared_budgets() -> Iterator[None]:
    """What is expected of a case is the same for every style."""
    with remembered_budgets():
        yield


def rejected(name: str, **how: object) -> list[str]:
    """Names and errors of the properties that fail, robustness included."""
    report = verify(f"{HERE}:{name}", strict=True, **how)
    assert report.with_status("passed")
    return [f"{x.name}: {x.error}" for x in report.with_status("failed")]


def test_there_are_twelve_styles() -> None:
    """Orders, precisions, tiles and sums."""
    assert len(STYLES) >= 12


# Where limits are tight: statistics, values, groups, FP8.
TIGHT = ("gradients", "gradients_values_*", "gradients_gqa_*", "gradients_with_gqa",
         "gradients_common_mean", "error_rms", "rounding_bias", "fp8*", "mla_fp8")  # fmt: skip


@pytest.mark.parametrize("name", STYLES)
def test_styles_pass_where_limits_are_tight(name: str) -> None:
    """At a first look, with one seed; lab/benchmarks/verify.py takes twenty."""
    assert rejected(name, only=TIGHT, quick=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", STYLES)
def test_styles_pass(name: str, seed: int) -> None:
    """The whole suite, with two seeds."""
    assert rejected(name, seed=seed) == []
