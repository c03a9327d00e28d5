"""What a pull request's ratio says of CTAs that stay: by itself, and applied to other points."""

from __future__ import annotations

import math

import pytest

from fa4.figures.accuracy import KEPT_OUT_FILE
from fa4.sim.machine import find_machine
from fa4.sim.measurements import Row, read_measurements, select_rows
from fa4.sim.validation import Point
from lab.benchmarks.baselines import flops_of
from lab.benchmarks.ratios import LENGTHS, RATIOS, STAYS, in_a_row, staying_us, with_more


def test_what_staying_takes_gives_the_ratio() -> None:
    """Added to each work tile of the call whose CTAs stay."""
    asked, logs = RATIOS[STAYS], []
    more_us = staying_us(asked)
    for length in LENGTHS:
        first, second = asked.calls(length)
        tiles = in_a_row(first.problem, first.pipeline, first.machine)
        assert tiles == math.ceil(first.predict().work_tiles / first.machine.gpu.sm_count)
        seconds = first.predict().seconds + 1e-6 * more_us * tiles
        logs.append(math.log(seconds / second.predict().seconds))
    assert math.exp(sum(logs) / len(logs)) == pytest.approx(asked.published, rel=1e-3)


def test_more_is_for_those_that_stay() -> None:
    """Forward without a mask; a causal call starts a CTA for each work tile, as a backward does."""
    rows, _ = select_rows(read_measurements(KEPT_OUT_FILE), find_machine("b200"))

    def slower(row: Row) -> float:
        """Seconds that 1 us of each work tile makes."""
        point = Point(row=row, predicted_tflops=1000.0, bottleneck="")
        return flops_of(row) / with_more(point, 1.0) / 1e12 - flops_of(row) / 1e15

    for row in rows:
        stays = row.direction == "fwd" and not row.problem.causal
        assert (slower(row) > 1e-6) == stays
    pair = next(row for row in rows if "2-CTA" in row.software and row.problem.seqlen_q == 4096
                and row.problem.batch == 8 and row.direction == "fwd")  # fmt: skip
    tiles = 8 * pair.problem.heads_q * (4096 // 512)
    assert slower(pair) == pytest.approx(1e-6 * math.ceil(tiles / 74), rel=1e-6)
