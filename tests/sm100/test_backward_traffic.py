"""Shared-memory bytes of the backward kernels: as planned, as counted, within their limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("cutlass")

from fa4.plan.schema import Copy, Loop, Role
from fa4.plan.traffic import tile_traffic
from lab.records import read_record
from tests.sm100.backward_traffic import (
    LIMIT_CYCLES,
    PORT_BYTES,
    STATISTICS,
    counted,
    port_bytes,
    reduced_bytes,
    report,
    spec_of,
)

PAIR = "d 128, pair"
NAMES = [
    "d 128",
    PAIR,
    pytest.param("d 64", marks=pytest.mark.slow),
    pytest.param("d 192, dv 128, pair", marks=pytest.mark.slow),
]
STATISTICS_BYTES = 8 * 2 * 64 * 4  # each compute warp reads -LSE and -D of its 64 queries


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_moves_what_the_plan_says(name: str) -> None:
    """To the byte, in each CTA; statistics of rows are read besides."""
    planned = tile_traffic(spec_of(name).plan)
    for rows in counted(name):
        assert rows == planned | {STATISTICS: STATISTICS_BYTES}


@pytest.mark.parametrize("name", LIMIT_CYCLES)
def test_limits(name: str) -> None:
    assert all(port_bytes(rows) <= LIMIT_CYCLES[name] * PORT_BYTES for rows in counted(name))


def test_a_pair_halves_what_each_cta_reduces() -> None:
    (alone,) = reduced_bytes("d 128")
    assert reduced_bytes(PAIR) == [alone // 2, alone // 2]


def test_planted_traffic_is_seen() -> None:
    """Planted: a plan that stages dQ of all columns twice; another kernel's plan."""
    plan = spec_of(PAIR).plan
    doubled = replace(plan, roles=tuple(_twice(role) for role in plan.roles))
    found = tile_traffic(doubled)
    assert found["bulk reductions"] == 2 * tile_traffic(plan)["bulk reductions"]
    assert port_bytes(tile_traffic(spec_of("d 128").plan)) > LIMIT_CYCLES[PAIR] * PORT_BYTES


def _twice(role: Role) -> Role:
    def copied(step: Any) -> Any:
        if isinstance(step, Loop):
            return replace(step, body=tuple(map(copied, step.body)))
        amount = getattr(step, "amount", None)
        if isinstance(amount, Copy) and amount.kind == "reduce":
            return replace(step, amount=replace(amount, num_bytes=2 * amount.num_bytes))
        return step

    return replace(role, program=tuple(map(copied, role.program)))


@pytest.mark.slow
def test_the_result_file_is_the_present_one() -> None:
    """If not: python -m tests.sm100.backward_traffic."""
    assert read_record("backward_traffic") == report()
