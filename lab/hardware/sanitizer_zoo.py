"""Classes of bugs beside compute-sanitizer: which of its tools finds which, on a Hopper GPU.

    python3 -m lab.hardware.sanitizer_zoo OUT.json [--seconds 100]     # GPU

Each broken kernel of lab/bug_zoo.py that Hopper can run, in a process of its own under
each tool and without one; the mended ones of each tool together in one process. Kernels that hang
are ended after a few seconds. Needs NumPy and the CUDA driver.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
BLACKWELL = "Tensor memory (Blackwell)"  # the group that Hopper cannot run
HANGS = ("deadlock", "livelock", "step-limit")
LAUNCH_LIMIT_S, PROCESS_LIMIT_S = 3.0, 25.0
TOGETHER, HUNG_TOGETHER = 12, 6
# Of the launching program, not of the kernel.
MEMCPY, REFUSED = "Host API memory access", "INVALID_PTX"
SUMMARY = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+) ")
# What a tool says first of a finding, without addresses.
FIRST = re.compile(r"=========\s+(?:Error: |Warning: |)(.*)")
WORDS = 256
# %rd63: a word of an array that the kernel does not use, for each thread of a grid of up to 256.
PLACE = """mov.u32 %r126, %ctaid.x; mov.u32 %r127, %ntid.x; mul.lo.u32 %r126, %r126, %r127;
mov.u32 %r127, %tid.x; add.u32 %r127, %r127, %r126; and.b32 %r127, %r127, 255;
mul.wide.u32 %rd63, %r127, 4; add.u64 %rd63, %rd63, %rd2;
"""


def kernels(target: str = "sm_90a") -> list[dict[str, Any]]:
    """The classes as plain data, both texts."""
    from lab.bug_zoo import GROUPS, SMEM_BYTES

    return [
        {
            "name": bug.name,
            "group": group,
            "kind": bug.kind,
            "severity": bug.severity,
            "grid": bug.grid,
            "threads": bug.threads,
            "cluster": bug.cluster,
            "fresh": bug.fresh,
            "smem_bytes": SMEM_BYTES,
            "broken": used(bug.module(bug.broken)).replace("sm_100a", target),
            "mended": used(bug.module(bug.mended)).replace("sm_100a", target),
        }
        for group, bugs in GROUPS.items()
        if group != BLACKWELL
        for bug in bugs
    ]


def used(text: str) -> str:
    """PTX in which what a load brings is stored: ptxas would leave the load out otherwise."""
    loaded = dict.fromkeys(re.findall(r"\bld\.[\w.:]+\s+(%r\d+),", text))
    dropped = [name for name in loaded if len(re.findall(rf"{name}\b", text)) == 1]
    stores = "".join(f"st.global.b32 [%rd63], {name};\n" for name in dropped)
    head, _, tail = text.rpartition("  ret;")
    place = PLACE.replace("%rd2", "%rd1") if "[%rd2]" in text else PLACE
    return f"{head}{place if dropped else ''}{stores}  ret;{tail}"


def verdict(row: dict[str, Any]) -> str:
    """Of a tool on a broken kernel: "found", "-", or what the kernel did."""
    says = " ".join(row["says"])
    if REFUSED in says or REFUSED in row["outcome"]:
        return "ptxas refuses it"
    if row["found"] and MEMCPY not in says:
        return "found"
    if row["outcome"] == "hangs":
        return "hangs"
    if not row["tool"] and row["outcome"] != "ended":
        return "ends with an error"
    return "-" if row["tool"] else "ends"


class ZooGpu:
    """Launches kernels with the driver, and waits for them."""

    def __init__(self) -> None:
        from lab.hardware.driver import Gpu

        self.gpu = Gpu()

    def launch(self, kernel: dict[str, Any], variant: str) -> str:
        """ "ended", "hangs", or the driver's error."""
        import numpy as np

        from lab.hardware.driver import CudaError
        from lab.hardware.emulator_hopper.programs import Program, run_program

        words = tuple(np.zeros(WORDS, np.uint32) for _ in range(2))
        program = Program(
            kernel["name"], "zoo", kernel[variant], words, (), (kernel["grid"], 1, 1),
            (kernel["threads"], 1, 1), (kernel["cluster"], 1, 1), kernel["smem_bytes"],
        )  # fmt: skip
        try:
            image = kernel[variant].encode() + b"\0"
            fresh = (0,) if kernel["fresh"] else ()
            run_program(self.gpu, program, image, LAUNCH_LIMIT_S, fresh)
        except TimeoutError:
            return "hangs"
        except CudaError as error:
            return str(error)
        return "ended"


def launch(file: Path, names: Sequence[str], variant: str) -> None:
    """In this process: launches kernels of a file of `kernels`, telling which is on."""
    gpu = ZooGpu()
    for kernel in json.loads(file.read_text()):
        if kernel["name"] in names or not names:
            print(f"@ {kernel['name']}", flush=True)
            outcome = gpu.launch(kernel, variant)
            print(f"@@ {outcome}", flush=True)
            if outcome == "hangs":
                os._exit(3)


def look(file: Path, tool: str, name: str, variant: str) -> dict[str, Any]:
    """One kernel (or "" for all) under a tool, or without one (tool "")."""
    from lab.hardware.sanitized import find_sanitizer

    begun = time.monotonic()
    command = [sys.executable, "-m", "lab.hardware.sanitizer_zoo", "-", "--file", str(file),
               "--variant", variant, "--launch", name]  # fmt: skip
    if tool:
        command = [find_sanitizer(), "--tool", tool, *command]
    limit = PROCESS_LIMIT_S if name else 4 * PROCESS_LIMIT_S
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        text, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        text += "\n@@ hangs"
    seconds = round(time.monotonic() - begun, 1)
    return {"tool": tool, "bug": name, "variant": variant, "seconds": seconds} | read(text)


def read(text: str) -> dict[str, Any]:
    """found: what the summary counts (None without one). outcome: of the launch. says: the first
    lines of the tool. by_kernel: of a process that launches several, lines for each."""
    counts = [int(count) for count in SUMMARY.findall(text)]
    outcomes = re.findall(r"^@@ (.*)$", text, re.MULTILINE)
    says = [
        found[1].strip()
        for line in text.splitlines()
        if (found := FIRST.match(line)) and found[1].strip()
    ]
    said = [line for line in says if "SUMMARY" not in line and "COMPUTE-SANITIZER" not in line]
    by_kernel: dict[str, list[str]] = {}
    current = ""
    for line in text.splitlines():
        if line.startswith("@ "):
            current = line[2:]
        elif (found := FIRST.match(line)) and current and "SUMMARY" not in line:
            by_kernel.setdefault(current, []).append(found[1].strip()[:160])
    return {
        "found": counts[-1] if counts else None,
        "outcome": outcomes[-1] if outcomes else "no launch",
        "says": [line[:160] for line in said[:3]] if outcomes else text.splitlines()[-6:],
        "by_kernel": {name: lines[:2] for name, lines in by_kernel.items() if any(lines)},
        "launched": len(outcomes),
    }


def main() -> int:
    """Looks at all, writing after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--seconds", type=float, default=100.0, help="start nothing after these")
    parser.add_argument("--file", type=Path)
    parser.add_argument(
        "--resume", type=Path, help="a file whose runs are kept, and not made again"
    )
    parser.add_argument("--launch", help="only launch this kernel of the file, or '' for all")
    parser.add_argument("--variant", default="broken", choices=("broken", "mended"))
    arguments = parser.parse_args()
    if arguments.launch is not None:
        launch(arguments.file, [arguments.launch] if arguments.launch else [], arguments.variant)
        return 0
    from lab.hardware.there import describe_machine

    begun, writing, rows = time.monotonic(), threading.Lock(), []
    if arguments.resume is not None:
        rows += json.loads(arguments.resume.read_text())["runs"]
    known = {(row["tool"], row["bug"], row["variant"]) for row in rows}
    listed = kernels()
    report = describe_machine() | {
        "bugs": [{k: v for k, v in one.items() if k not in ("broken", "mended")} for one in listed]
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.json"
        file.write_text(json.dumps(listed))

        def one(item: tuple[str, str, str]) -> None:
            if item in known or time.monotonic() - begun > arguments.seconds:
                return
            found = look(file, *item)
            with writing:
                rows.append(found)
                Path(arguments.out).write_text(json.dumps(report | {"runs": rows}, indent=1) + "\n")
                print({k: v for k, v in found.items() if k != "by_kernel"}, flush=True)

        ending = [b["name"] for b in listed if b["kind"] not in HANGS]
        hanging = [b["name"] for b in listed if b["kind"] in HANGS]
        for names, together in ((ending, TOGETHER), (hanging, HUNG_TOGETHER)):
            work = [(tool, name, "broken") for name in names for tool in ("", *TOOLS)]
            if names is ending:
                work = [(tool, "", "mended") for tool in ("", *TOOLS)] + work
            with ThreadPoolExecutor(together) as pool:
                list(pool.map(one, work))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
