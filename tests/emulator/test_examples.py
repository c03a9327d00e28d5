"""The examples: hand-written CuTe-DSL tcgen05 kernels on the emulator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(name: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        capture_output=True, text=True, timeout=200, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "culprit"),
    [("hello_tcgen05.py", "st.shared.b16"), ("emulate_gemm.py", "cp.async.bulk.tensor.2d")],
)
def test_example(name: str, culprit: str) -> None:
    """The right kernel is right; without the barrier, every MMA is reported to race."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    text = run(name)
    first, _, report = text.partition("\n")
    if name == "hello_tcgen05.py":  # as the page shows it, which no CPU's sums may change
        assert first == "error below 1e-4: True"
    else:
        assert first.startswith("largest error: ") and float(first.split(":")[1]) < 1e-4
    assert report.count("race: the tensor pipe of CTA 0") == 4
    assert report.count(culprit) == 4


def test_the_page_shows_the_example() -> None:
    """Every CuTe-DSL block of the how-to stands in the example, word for word."""
    example = (ROOT / "examples" / "hello_tcgen05.py").read_text(encoding="utf-8")
    blocks = (
        (ROOT / "docs" / "how-to" / "debug.md").read_text(encoding="utf-8").split("```py\n")[1:]
    )
    assert len(blocks) == 2
    for block in blocks:
        assert block.split("```")[0] in example
