"""The table of the Hopper tiles' rates is what was measured."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from fa4.hardware import H200
from fa4.plan.warpgroup_lengths import busiest, keys_of_blocks
from fa4.plan.warpgroup_rates import RATES_FILE
from fa4.plan.warpgroup_tuned import QUEUE_SECONDS
from lab.hardware.warpgroup_forward.tile_rates import Rate, fit, kept, rates_of, table

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "lab" / "hardware" / "results" / "hopper_tiles.csv"


def rows(rate: float, start: float, causal: int, noise: float = 0.0) -> list[dict[str, str]]:
    """What a tile of 128 rows and 80 keys would take, if the model were exact."""
    found = []
    for n, (length, batch, heads) in enumerate(((500, 9, 16), (2000, 3, 16), (9000, 1, 16))):
        window = (None, 0) if causal else (None, None)
        lengths = keys_of_blocks(length, 128, 80, length, length, window)
        keys = busiest(lengths + start, batch * heads, H200.sm_count)
        seconds = 4 * 96 * 128 * keys * H200.sm_count / rate / 1e12 * (1 + noise * (-1) ** n)
        seconds += QUEUE_SECONDS * causal
        found.append(
            {"head_dim": "96", "head_dim_v": "96", "causal": str(causal), "consumers": "2",
             "tile_n": "80", "kv_stages": "2", "ping_pong": "0", "ahead": "1", "columns": "96 96",
             "direct": "1",
             "scheduler": "queue" if causal else "static", "seqlen": str(length),
             "batch": str(batch), "heads": str(heads), "microseconds": str(seconds * 1e6)}
        )  # fmt: skip
    return found


@pytest.mark.parametrize("causal", [0, 1])
def test_a_fit_finds_rate_and_start(causal: int) -> None:
    """About where times are the model's; the error is seen where they are not."""
    found = fit(rows(600.0, 210.0, causal))
    assert found.tflops == pytest.approx(600, rel=0.01 * causal + 1e-9)
    assert found.start == pytest.approx(210, rel=0.1 * causal + 1e-9)
    assert found.columns == 32 and found.error < 0.01 < 0.02
    assert fit(rows(600.0, 210.0, causal, noise=0.05)).error > 0.02
    assert rates_of(rows(600.0, 210.0, causal)).keys() == {(96, 96, causal == 1)}


def test_what_is_never_fastest_is_left_out() -> None:
    """A tile that is slower at every length; one that is faster for short sequences stays."""

    def rate(tile_n: int, tflops: float, start: float) -> Rate:
        return Rate(3, tile_n, 2, tflops, start, False, False, 64, False, False, 0.0)

    long, short, worse = rate(128, 700, 300), rate(64, 650, 150), rate(64, 600, 300)
    assert list(kept([worse, short, long])) == [long, short]


def test_the_table_is_what_the_command_writes() -> None:
    """If not: python -m lab.hardware.warpgroup_forward.tile_rates (its first lines say how)."""
    with MEASURED.open(newline="", encoding="utf-8") as file:
        found = rates_of(csv.DictReader(file))
    with RATES_FILE.open(newline="", encoding="utf-8") as file:
        kept_ones = list(csv.DictReader(file))
    assert kept_ones == [{name: str(x) for name, x in row.items()} for row in table(found)]
