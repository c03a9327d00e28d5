"""Small launches of every family of Hopper kernels under compute-sanitizer: no errors, no hazards?

    python3 -m lab.hardware.sanitized OUT.json [--tools memcheck,racecheck,synccheck]     # GPU

Each family in a process of its own for each tool, several at a time; kernels are compiled before.
With `--planted` the warpgroups of the backward kernel do not wait for each other before dQ: what a
tool says then shows whether it sees such a fault. Exit code 1 if a tool found anything.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from lab.hardware.there import describe_machine
from lab.hardware.warpgroup_forward.random_launches import element_type

TOOLS = ("memcheck", "racecheck", "synccheck")
PLACES = (
    "/usr/local/cuda/bin/compute-sanitizer",
    "/usr/local/cuda/compute-sanitizer/compute-sanitizer",
)
LIMIT_S, TOGETHER, LINES = 150.0, 5, 40
PLANTED = "d128 gradients, in order"
NAMES = re.compile(r"kernel_cutlass_\w+")  # of hundreds of letters
SUMMARY = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+) (?:errors?|hazards?)")


def make(rows: int, keys: int, heads: tuple[int, int], dims: tuple[int, int], dtype: str) -> Any:
    """Q, K and V on the GPU, drawn on the CPU: no kernel of torch is looked at."""
    import torch

    torch.manual_seed(0)
    sizes = ((rows, heads[0], dims[0]), (keys, heads[1], dims[0]), (keys, heads[1], dims[1]))
    return tuple(torch.randn(1, *size).to(element_type(dtype)).cuda() for size in sizes)


def forward(*sizes: Any, dtype: str = "bf16", **options: Any) -> None:
    """One call."""
    import fa4

    fa4.flash_attn_func(*make(*sizes, dtype), impl="sm90", return_lse=True, **options)


def gradients(*sizes: Any, **options: Any) -> None:
    """One call of both passes."""
    import torch

    import fa4

    q, k, v = (x.requires_grad_() for x in make(*sizes, "bf16"))
    out = fa4.flash_attn_func(q, k, v, impl="sm90", **options)
    torch.autograd.grad(out, (q, k, v), torch.randn(out.shape).to(out.dtype).cuda())


FAMILIES: dict[str, Callable[[], None]] = {
    "d64": partial(forward, 300, 417, (2, 2), (64, 64)),
    "d128 causal, grouped": partial(forward, 300, 417, (6, 2), (128, 128), causal=True),
    "d256 window": partial(forward, 300, 700, (1, 1), (256, 256), window_size=(100, 30)),
    "d128 in parts": partial(forward, 3, 1500, (8, 2), (128, 128), num_splits=4),
    "d128 e4m3": partial(forward, 300, 417, (2, 2), (128, 128), dtype="e4m3"),
    "d256 e5m2 causal": partial(
        forward, 200, 417, (2, 1), (256, 256), dtype="e5m2", causal=True
    ),
    "d64 gradients": partial(gradients, 300, 417, (2, 2), (64, 64), deterministic=False),
    PLANTED: partial(gradients, 300, 417, (4, 2), (128, 128), causal=True),
    "d64 gradients of several work tiles": partial(gradients, 70, 300, (70, 70), (64, 64)),
    "d128 gradients": partial(gradients, 300, 417, (2, 2), (128, 128), deterministic=False),
    "(192, 128) gradients": partial(gradients, 200, 300, (2, 2), (192, 128), causal=True),
    "d256 gradients": partial(gradients, 200, 300, (2, 1), (256, 256)),
    "d200 gradients in parts": partial(gradients, 200, 3000, (4, 1), (200, 200), causal=True),
}  # fmt: skip


def plant() -> None:
    """The kernels that this process compiles do not wait for the other warpgroup's dS."""
    from fa4.sm90.backward import consumer

    consumer.start_queries = lambda signals, work, ring: work.products.queries(1 - ring.slot)


def launch(family: str, *, planted: bool) -> None:
    """A family's launches, in this process."""
    import torch

    if planted:
        plant()
    FAMILIES[family]()
    torch.cuda.synchronize()
    print("launched", flush=True)


def find_sanitizer() -> str:
    """The program. Raises FileNotFoundError."""
    found = shutil.which("compute-sanitizer") or next((p for p in PLACES if Path(p).exists()), "")
    if not found:
        raise FileNotFoundError(f"compute-sanitizer is neither on PATH nor one of {PLACES}")
    return found


def command_of(family: str, planted: bool) -> list[str]:
    """A process that launches a family."""
    found = [sys.executable, "-m", "lab.hardware.sanitized", "-", "--launch", family]
    return found + ["--planted"] * planted


def run(tool: str, family: str, planted: bool) -> dict[str, Any]:
    """What a tool said of a family; tool "": nothing but the launches, which compile."""
    begun = time.monotonic()
    environment = os.environ | ({"FA4_CACHE": "0"} if planted else {})
    command = command_of(family, planted)
    if tool:
        command = [find_sanitizer(), "--tool", tool, *command]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S,
                              check=False, env=environment)  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"tool": tool, "family": family, "ok": False, "lines": [f"not done in {LIMIT_S} s"]}
    return read_report(tool, family, done.stdout + done.stderr) | {
        "seconds": round(time.monotonic() - begun, 1)
    }


def read_report(tool: str, family: str, text: str) -> dict[str, Any]:
    """ok: launched, and the tool's own summary counts nothing."""
    counts = [int(count) for count in SUMMARY.findall(text)]
    launched = "launched" in text.splitlines()
    ok = launched and (counts == [0] or not tool)
    text = NAMES.sub("kernel", text)
    lines = [line[:200] for line in text.splitlines() if line.startswith("=") or not launched]
    return {
        "tool": tool, "family": family, "ok": ok, "launched": launched,
        "found": counts[0] if counts else None, "lines": [] if ok else lines[-LINES:],
    }  # fmt: skip


def main() -> int:
    """Compiles, looks, writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--families", help="some of them, with semicolons")
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--launch", help="only launch this family")
    arguments = parser.parse_args()
    if arguments.launch:
        launch(arguments.launch, planted=arguments.planted)
        return 0
    families = arguments.families.split(";") if arguments.families else list(FAMILIES)
    if arguments.planted:
        families = [PLANTED]
    rows: list[dict[str, Any]] = []
    writing = threading.Lock()

    def look(item: tuple[str, str]) -> bool:
        found = run(*item, arguments.planted)
        with writing:
            rows.append(found)
            write(found)
        return bool(found["ok"])

    def write(found: dict[str, Any]) -> None:
        print({k: v for k, v in found.items() if k != "lines"}, *found["lines"], sep="\n  ",
              flush=True)  # fmt: skip
        report = describe_machine() | {"planted": arguments.planted, "runs": rows}
        Path(arguments.out).write_text(json.dumps(report, indent=1) + "\n")

    with ThreadPoolExecutor(TOGETHER) as pool:
        list(pool.map(look, [("", family) for family in families]))
        tools = [(t, family) for t in arguments.tools.split(",") for family in families]
        return int(not all(list(pool.map(look, tools))))


if __name__ == "__main__":
    raise SystemExit(main())
