"""Programs of other front ends as users run them, by `fa4 emulate SCRIPT.py`, unchanged.

The scripts of docs/findings/kernels give what their page says.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab import ROOT
from lab.foreign import SITE, missing

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

# TileLang needs an older TVM-FFI than CuTe-DSL: its packages lie in a folder of their own.
TILELANG = Path(os.environ.get("FA4_TILELANG", ROOT / ".venv" / "tilelang"))
KERNELS = ROOT / "docs/findings/kernels"
PAGE = (ROOT / "docs/findings/kernels.md").read_text(encoding="utf-8")


def emulate(script: Path, site: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, what the script printed, and the report."""
    command = [sys.executable, "-m", "fa4.cli", "emulate", str(script), "--json", *options]
    cuda = TILELANG / "nvidia/cu13"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "CUDA_HOME": str(cuda),
        "PATH": os.pathsep.join([str(cuda / "bin"), os.environ["PATH"]]),
    }
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    text, start, report = done.stdout.partition("{\n")
    assert start, done.stderr[-2000:]
    return done.returncode, text, json.loads(start + report)


def test_helion() -> None:
    """A GEMM whose sizes are no multiples of its blocks; the script itself compares."""
    code, text, report = emulate(ROOT / "tests/conformance/scripts/helion_matmul.py", SITE)
    assert code == 0 and "largest error" in text
    assert list(report["launches"]) == ["_helion_matmul"] and not report["findings"]


def test_flashinfer_without_c() -> None:
    """Through FlashInfer's own entry point: the read is found, and NaN comes of it."""
    script = KERNELS / "flashinfer_gemm_without_c.py"
    code, text, report = emulate(script, SITE, "--fail-on", "error")
    assert code == 0 and "4096 NaN of 4096" in text and text.strip() in PAGE
    kinds = {finding["kind"] for finding in report["findings"]}
    assert "uninitialised" in kinds and all("c_ptr" in f["message"] for f in report["findings"]
                                            if f["kind"] == "uninitialised")  # fmt: skip


@pytest.mark.skipif(not TILELANG.is_dir(), reason=f"no TileLang in {TILELANG}")
@pytest.mark.skipif(not shutil.which("g++"), reason="nvcc needs a host compiler")
def test_tilelang_and_its_hang(tmp_path: Path) -> None:
    """Right values, and a hang that steering finds without a change of the kernel and replays."""
    script, kept = KERNELS / "tilelang_late_producers.py", tmp_path / "hang.json"
    found = emulate(script, TILELANG, "--arch", "sm_90a", "--fail-on", "error")
    code, text, report = found
    error = re.search(r"largest error ([\d.]+) of (\d+)", text)
    assert code == 0 and error and float(error[1]) <= 2**-10 * float(error[2])
    assert {finding["kind"] for finding in report["findings"]} == {"mbarrier"}
    options = ("--arch", "sm_90a", "--steer", "32", "--witness", str(kept))
    code, _, report = emulate(script, TILELANG, *options)
    steering = report["steering"]
    assert code == 1 and len(steering["shown"]) >= 1 and steering["unshown"] == 0
    assert steering["runs"] <= 32 and all(
        "deadlock" in shown["outcome"] and len(shown["order"]) == 1 for shown in steering["shown"]
    )
    code, _, report = emulate(script, TILELANG, "--arch", "sm_90a", "--replay", str(kept))
    assert code == 1 and "deadlock" in {finding["kind"] for finding in report["findings"]}
