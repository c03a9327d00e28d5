"""What the pages print is certain: the same by the sums of another CPU, with one thread or two."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.other_cpu import other_settings

ROOT = Path(__file__).resolve().parents[2]
CPU = Path("/proc/cpuinfo")
# Core type of OpenBLAS -> what the CPU must have, as /proc/cpuinfo names it.
CORE_TYPES = {"Haswell": "avx2", "Sandybridge": "avx", "Zen": "avx2", "SkylakeX": "avx512vl"}
BY_SUMS = "numerics"  # the page that prints errors of sums


def run_examples(
    settings: Mapping[str, str], pages: str = "md"
) -> subprocess.CompletedProcess[str]:
    """The test of the pages' examples in a process of its own, as on another CPU."""
    chosen = f"test_an_example_runs and ({pages})"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
               "tests/docs/test_examples.py", "-k", chosen]  # fmt: skip
    environment = os.environ | settings
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def settings_of(core_type: str, threads: int) -> dict[str, str]:
    """Environment of a core type; skips where this CPU, or NumPy's BLAS, cannot do it."""
    if not other_settings():
        pytest.skip("NumPy has another BLAS than OpenBLAS")
    if not CPU.exists() or CORE_TYPES[core_type] not in CPU.read_text().split():
        pytest.skip(f"this CPU has no {CORE_TYPES[core_type]}")
    return {"OPENBLAS_CORETYPE": core_type, "OPENBLAS_NUM_THREADS": str(threads)}


@pytest.mark.parametrize("core_type", ["", "SkylakeX"])
def test_errors_of_sums_are_printed_as_far_as_they_are_certain(core_type: str) -> None:
    """Two orders of sums that differ in the second digit of an error."""
    settings = settings_of(core_type, 2) if core_type else other_settings()
    done = run_examples(settings, BY_SUMS)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("core_type", CORE_TYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_every_page_prints_the_same(core_type: str, threads: int) -> None:
    done = run_examples(settings_of(core_type, threads))
    assert done.returncode == 0, done.stdout
