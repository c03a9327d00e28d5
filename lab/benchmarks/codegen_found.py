"""A kernel compiled in a process of its own, and figures of it beside those of its peers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import ROOT
from lab.benchmarks.codegen_wanted import OURS, Wanted

SITE = ROOT / ".venv" / "codegen"
sys.path.append(str(SITE))  # its disassembler

from fa4.inspect.codegen import KernelCode, read_kernels  # noqa: E402

WORKER = ("-m", "lab.benchmarks.codegen_kernels")
SECONDS = 600
Figures = Mapping[str, float | None]


@dataclass(frozen=True)
class Found:
    """A compiled kernel, or why there is none. pair: do its products serve two CTAs?"""

    wanted: Wanted
    code: KernelCode | None = None
    seconds: float = 0.0
    wall_seconds: tuple[float, ...] = ()
    versions: dict[str, str] | None = None
    pair: bool = False
    problem: str = ""

    @property
    def name(self) -> str:
        """For the table."""
        parts = [self.wanted.maker]
        if self.wanted.maker == OURS and self.wanted.cta_group == 2:
            parts.append("2 CTA")
        if self.wanted.deterministic:
            parts.append("deterministic")
        if self.wanted.exp2 == "mufu":
            parts.append("no emulation")
        return " ".join(parts)


def environment() -> dict[str, str]:
    """That finds this checkout and its compiler before what is installed."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (SITE, ROOT)))}


def compile_one(wanted: Wanted, compiles: int) -> Found:
    """Compiles in a process of its own and reads what came out."""
    with tempfile.TemporaryDirectory(prefix="fa4-codegen-") as folder:
        command = [sys.executable, "-W", "ignore", *WORKER, wanted.argument()]
        done = subprocess.run(
            [*command, str(compiles), folder], env=environment(),
            cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            return Found(wanted, problem=lines[-1].strip() if lines else "failed without a word")
        out = Path(folder)
        report = json.loads((out / "compile.json").read_text())
        ptx = (out / "kernel.ptx").read_text()
        kernels = read_kernels((out / "kernel.cubin").read_bytes(), ptx)
    # A module may hold helpers beside the kernel.
    code = max(kernels, key=lambda one: one.instructions or 0)
    code = code.with_smem(report["dynamic_smem_bytes"])
    times = report["cpu_seconds"]
    return Found(
        wanted, code, min(times[1:] or times), tuple(report["seconds"]), report["versions"],
        "tcgen05.mma.cta_group::2" in ptx,
    )  # fmt: skip


def ratios(
    ours: Found, peers: Iterable[Found], figures: Callable[[Found], Figures]
) -> dict[str, dict[str, Any]]:
    """Each figure of ours beside the best of the peers in this run; smaller is better in each."""
    result = {}
    theirs = [(figures(peer), peer.name) for peer in peers]
    for name, value in figures(ours).items():
        known = [(x, who) for row, who in theirs for x in [row.get(name)] if x is not None]
        if value is None or not known:
            continue
        best, who = min(known, key=lambda pair: pair[0])
        ratio = round(value / best, 3) if best else None
        result[name] = {"ours": value, "best_peer": best, "peer": who, "ratio": ratio}
    return result


def describe(found: Found, figures: Figures, disagreement: str = "") -> dict[str, Any]:
    """A kernel as plain data; its PTX loops and single instructions are left out."""
    row: dict[str, Any] = {"name": found.name}
    if found.code is None:
        return row | {"problem": found.problem}
    code: dict[str, Any] = found.code.describe()
    code["ptx"] = {name: x for name, x in code["ptx"].items() if name != "loops"}
    for loop in code["loops"]:
        del loop["marks"]
    return row | {
        "versions": found.versions,
        "disagreement": disagreement,
        "seconds": [round(x, 3) for x in found.wall_seconds],
        "figures": dict(figures),
        "code": code,
    }


def number(value: float | None) -> str:
    """For a cell."""
    return "-" if value is None else f"{value:.0f}"
