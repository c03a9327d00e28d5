"""Real processes over gloo: the oracle's numbers, refusals on every rank, exact bits, a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has printed."""
    meeting = tmp_path_factory.mktemp("group") / "meeting"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.distributed.worker"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS), str(meeting)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    results = [rank.communicate(timeout=240) for rank in ranks]
    assert [x.returncode for x in ranks] == [0] * RANKS, [err[-2000:] for _, err in results]
    return [json.loads(out) for out, _ in results]


def test_float64_equals_the_oracle(found: list[dict[str, Any]]) -> None:
    """O, LSE, dQ, dK, dV and dsink of every method, of a large sink as well."""
    assert len(found[0]["fp64"]) == 8
    assert all(error < 1e-11 for rank in found for error in rank["fp64"].values()), found


def test_bf16_is_within_its_rounding(found: list[dict[str, Any]]) -> None:
    """fp32 merges of 16-bit parts."""
    assert all(error < 0.05 for rank in found for error in rank["bf16"].values()), found


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("causal", "causal must be the same on every rank; rank 0 has True, rank 1 has False"),
        ("type", "type must be the same"),
        ("heads", "heads must be the same"),
        ("method", "method must be the same"),
        ("rows", "rows must be those of layout zigzag of 13: [7, 6]; got [8, 5]"),
        ("name", "method must be one of ring, "),
        ("cu_seqlens", "cu_seqlens must ascend from 0 to the 16 rows; got (0, 5)"),
        ("ulysses", "ulysses needs a number of ranks that divides 1 query heads"),
    ],
)
def test_refusals_are_one_line_on_every_rank(
    found: list[dict[str, Any]], name: str, words: str
) -> None:
    """Nobody waits for somebody who has given up."""
    said = {rank["refusals"].get(name) for rank in found}
    assert len(said) == 1 and None not in said, said
    assert words in said.pop()


def test_exact_bits_over_a_group(found: list[dict[str, Any]]) -> None:
    """Of two ranks as of one."""
    assert all(rank["exact"] for rank in found)


def test_models_run_sharded(found: list[dict[str, Any]]) -> None:
    """Unmodified, under `context_parallel`."""
    assert all(error < 1e-11 for rank in found for error in rank["replaced"].values()), found
