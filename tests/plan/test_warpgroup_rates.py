"""The table of the Hopper tiles' rates is what was measured."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from fa4.hardware import H200
from fa4.plan.warpgroup_rates import RATES
from lab.hardware.warpgroup_forward.tile_rates import Rate, fit, kept, rates_of, render

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "lab" / "hardware" / "results" / "hopper_tiles.csv"


def rows(rate: float, start: float, causal: int, noise: float = 0.0) -> list[dict[str, str]]:
    """What a tile of 128 rows and 80 keys would take, if the model were exact."""
    found = []
    for n, (length, batch, heads) in enumerate(((500, 9, 16), (2000, 3, 16), (9000, 1, 16))):
        count = -(-length // 128) * batch * heads
        waves = count / H200.sm_count if causal else -(-count // H200.sm_count)
        keys = (length + 128 + 80) / 2 if causal else -(-length // 80) * 80
        flops = 4 * 96 * 128 * (keys + start) * waves * H200.sm_count
        found.append(
            {"head_dim": "96", "head_dim_v": "96", "causal": str(causal), "consumers": "2",
             "tile_n": "80", "kv_stages": "2", "ping_pong": "0", "ahead": "1",
             "seqlen": str(length), "batch": str(batch), "heads": str(heads),
             "microseconds": str(flops / rate / 1e6 * (1 + noise * (-1) ** n))}
        )  # fmt: skip
    return found


@pytest.mark.parametrize("causal", [0, 1])
def test_a_fit_finds_rate_and_start(causal: int) -> None:
    """Exactly where times are exact; the error is seen where they are not."""
    found = fit(rows(600.0, 210.0, causal))
    assert (found.tflops, found.start) == (pytest.approx(600), pytest.approx(210))
    assert found.error < 1e-9 < 0.02 < fit(rows(600.0, 210.0, causal, noise=0.05)).error
    assert rates_of(rows(600.0, 210.0, causal)).keys() == {(96, 96, causal == 1)}


def test_what_is_never_fastest_is_left_out() -> None:
    """A tile that is slower at every length; one that is faster for short sequences stays."""

    def rate(tile_n: int, tflops: float, start: float) -> Rate:
        return Rate(3, tile_n, 2, tflops, start, False, False, 0.0)

    long, short, worse = rate(128, 700, 300), rate(64, 650, 150), rate(64, 600, 300)
    assert list(kept([worse, short, long])) == [long, short]


def test_the_table_is_what_the_command_writes() -> None:
    """If not: python -m lab.hardware.warpgroup_forward.tile_rates (its first lines say how)."""
    with MEASURED.open(newline="", encoding="utf-8") as file:
        found = rates_of(csv.DictReader(file))
    text = render(found)
    assert eval(text.partition("] = ")[2]) == RATES
