"""examples/train_across_gpus.py: two ranks learn what one learns, step by step."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_across_gpus.py"
TOLERANCE = 1e-9  # relative, of losses and of sums of weights, in float64


def train(ranks: int, steps: int, out: Path) -> dict[str, list[float]]:
    """What rank 0 of a group has written."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), "--steps", str(steps), "--out", str(out)],
            env={**environment, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    errors = [process.communicate(timeout=1200)[1] for process in processes]
    assert [x.returncode for x in processes] == [0] * ranks, errors
    found_there: dict[str, list[float]] = json.loads(out.read_text())
    return found_there


@pytest.mark.parametrize("steps", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_two_ranks_train_as_one(steps: int, tmp_path: Path) -> None:
    """Losses of every step and the weights at the end; and it learns."""
    one, two = (train(ranks, steps, tmp_path / f"{ranks}.json") for ranks in (1, 2))
    for name, values in one.items():
        assert two[name] == pytest.approx(values, rel=TOLERANCE), name
    assert two["losses"][-1] < two["losses"][0] * (0.98 if steps < 100 else 0.6)
