"""The table of the Hopper tiles' rates is what was measured."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from fa4.hardware import H200
from fa4.plan.warpgroup_lengths import busiest, keys_of_blocks
from fa4.plan.warpgroup_rates import RATES_FILE
from fa4.plan.warpgroup_tuned import QUEUE_SECONDS
from lab.hardware.warpgroup_forward.tile_rates import (
    CALL_SECONDS,
    Rate,
    fit,
    kept,
    rates_of,
    table,
)

Row = dict[str, str]
ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "lab" / "hardware" / "results" / "hopper_tiles.csv"


def rows(rate: float, start: float, causal: int, noise: float = 0.0, **changes: str) -> list[Row]:
    """What a tile of 128 rows and 80 keys would take, if the model were exact."""
    found = []
    for n, (length, batch, heads) in enumerate(((500, 9, 16), (2000, 3, 16), (9000, 1, 16))):
        window = (None, 0) if causal else (None, None)
        lengths = keys_of_blocks(length, 128, 80, length, length, window)
        keys = busiest(lengths + start, batch * heads, H200.sm_count)
        seconds = 4 * 96 * 128 * keys * H200.sm_count / rate / 1e12 * (1 + noise * (-1) ** n)
        seconds += QUEUE_SECONDS * causal + CALL_SECONDS
        found.append(
            {"head_dim": "96", "head_dim_v": "96", "causal": str(causal), "consumers": "2",
             "tile_n": "80", "kv_stages": "2", "ping_pong": "0", "ahead": "1", "columns": "96 96",
             "direct": "1", "scheduler": "queue" if causal else "static", "rows": str(length),
             "keys": str(length), "batch": str(batch), "heads": str(heads),
             "microseconds": str(seconds * 1e6), **changes}
        )  # fmt: skip
    return found


def calls_of_one_wave(times: list[float], **changes: str) -> list[Row]:
    """Of two warpgroups, each SM a work tile: so many microseconds for 1,000, 4,000, 9,000 keys."""
    made = rows(600.0, 200.0, 0, scheduler="naive", ahead="0", heads="16", batch="1", **changes)
    more = zip(made, (1000, 4000, 9000), times, strict=True)
    return [{**row, "rows": "1000", "keys": str(n), "microseconds": str(us)}
            for row, n, us in more]  # fmt: skip


@pytest.mark.parametrize("causal", [0, 1])
def test_a_fit_finds_rate_and_start(causal: int) -> None:
    """About where times are the model's; the error is seen where they are not."""
    found = fit(rows(600.0, 210.0, causal))
    assert found.tflops == pytest.approx(600, rel=0.01 * causal + 1e-9)
    assert found.start == pytest.approx(210, rel=0.1 * causal + 1e-9)
    assert found.columns == 32 and found.error < 0.01 < 0.02 and not found.one_wave
    assert fit(rows(600.0, 210.0, causal, noise=0.05)).error > 0.02
    assert rates_of(rows(600.0, 210.0, causal)).keys() == {(96, 96, causal == 1)}


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_late_time_says_nothing(which: int) -> None:
    """Of one twice as long as the others say; what is a little longer counts."""
    exact = rows(600.0, 210.0, 0)
    us = float(exact[which]["microseconds"])
    late = [row | {"microseconds": str(us * 2)} if n == which else row
            for n, row in enumerate(exact)]  # fmt: skip
    assert fit(late).tflops == pytest.approx(600, rel=1e-6)
    longer = [row | {"microseconds": str(us * 1.2)} if n == which else row
              for n, row in enumerate(exact)]  # fmt: skip
    assert fit(longer).error > 0.02


def test_calls_of_one_wave_have_turns_where_most_are_faster_so() -> None:
    """One bad order of three decides nothing; without a second way there is no question."""
    plain = calls_of_one_wave([20.0, 70.0, 150.0])
    (alone,) = rates_of(plain)[96, 96, False]
    assert alone.one_wave and alone.alone and not alone.turns
    for times, turns in (([19.0, 69.0, 160.0], True), ([21.0, 71.0, 120.0], False)):
        (found,) = rates_of(plain + calls_of_one_wave(times, ping_pong="1"))[96, 96, False]
        assert found.turns == turns
    many = rows(600.0, 210.0, 0) + rows(610.0, 210.0, 0, ping_pong="1")
    assert [one.turns for one in rates_of(many)[96, 96, False]] == [False, True]


def test_what_is_never_fastest_is_left_out() -> None:
    """A tile that is slower at every length; one that is faster for short sequences stays."""

    def rate(tile_n: int, tflops: float, start: float) -> Rate:
        return Rate(3, tile_n, 2, tflops, start, False, False, 64, False, False, False, 0.0)

    long, short, worse = rate(128, 700, 300), rate(64, 650, 150), rate(64, 600, 300)
    assert list(kept([worse, short, long])) == [long, short]


def test_the_table_is_what_the_command_writes() -> None:
    """If not: python -m lab.hardware.warpgroup_forward.tile_rates (its first lines say how)."""
    with MEASURED.open(newline="", encoding="utf-8") as file:
        found = rates_of(csv.DictReader(file))
    with RATES_FILE.open(newline="", encoding="utf-8") as file:
        kept_ones = list(csv.DictReader(file))
    assert kept_ones == [{name: str(x) for name, x in row.items()} for row in table(found)]
