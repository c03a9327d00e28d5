"""The scripts of docs/findings on this machine: what each prints, or how it ends, as one JSON file.

    python3 -m lab.hardware.run_findings FILE.json     # GPU, with torch and flash-attn-4

Each script needs only torch and the library that it is about, and runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lab import ROOT
from lab.hardware.verify_gpu import describe_gpu

SCRIPTS = ROOT / "docs/findings"
LIMIT_S, PROCESSES, LINES = 120, 5, 4


def run_script(path: Path) -> dict[str, Any]:
    """Exit code and last lines of a script; None as code where it did not end."""
    command = [sys.executable, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"code": None, "lines": [f"did not end in {LIMIT_S} s"]}
    text = done.stdout if done.returncode == 0 else done.stderr
    lines = [line[:300] for line in text.strip().splitlines() if line.strip()]
    return {"code": done.returncode, "lines": lines[-LINES:]}


def main() -> int:
    """Runs all of them and writes the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    paths = sorted(SCRIPTS.glob("*.py"))
    with ThreadPoolExecutor(PROCESSES) as pool:
        results = dict(zip((p.stem for p in paths), pool.map(run_script, paths), strict=True))
    for name, found in results.items():
        print(name, found["code"], *found["lines"], sep="\n  ")
    out.write_text(json.dumps(describe_gpu() | {"results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
