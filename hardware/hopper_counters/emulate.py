"""Counts of the emulator for the kernels whose counters ncu reads, where the problem is small.

    python -m hardware.hopper_counters.emulate CONFIGURATIONS.json COUNTS.json

A configuration with a `seed` is run, on the numbers that `launch` draws from it; the others are
null. Counts are the counters': instructions of warps, bytes of the whole launch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fa4.compiled.artifact import CompiledKernel, compile_artifact
from fa4.compiled.forward import compile_warpgroup
from fa4.emulator import Options, launch
from fa4.emulator.machine.launch_work import LOADED, LaunchWork
from fa4.emulator.masks import LANES
from fa4.hardware import H200
from hardware.hopper_counters.expected import WARPS_PER_GROUP
from hardware.hopper_counters.launch import numbers
from hardware.warpgroup_forward.measure import make_spec


def as_counters(work: LaunchWork) -> dict[str, int]:
    """A launch's work in the units of ncu: a product of a warpgroup is one of each of its warps."""
    products = sum(n for name, n in work.products.items() if name.startswith("wgmma."))
    return {
        "wgmma": products * WARPS_PER_GROUP,
        "exponentials": work.exponentials // LANES,
        "copied_bytes": work.copied_bytes[LOADED],
    }


def emulate(given: Mapping[str, Any], kernel: CompiledKernel) -> LaunchWork:
    """What a configuration's launch does. EmulationFailed if the kernel has a fault."""
    import torch

    spec = kernel.spec
    q, k, v = (torch.from_numpy(x).to(torch.bfloat16) for x in numbers(given))
    o, lse = (
        torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=q.dtype),
        torch.zeros((q.shape[0], q.shape[2], q.shape[1])),
    )
    nones = (None,) * 3
    (report,) = launch(
        kernel, q, k, v, o, lse, spec.head_dim**-0.5, *nones, q.shape[1], *nones, *nones, H200.sms,
        **vars(Options()),
    )  # fmt: skip
    (work,) = report.work
    return work


def main() -> int:
    """Runs them; writes the list."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("configurations", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    found: list[dict[str, int] | None] = []
    for given in json.loads(arguments.configurations.read_text(encoding="utf-8")):
        if "seed" not in given:
            found.append(None)
            continue
        kernel = compile_artifact(make_spec(dict(given["spec"])), "sm_90a", compile_warpgroup)
        found.append(as_counters(emulate(given, kernel)))
        print(given["spec"], found[-1], flush=True)
    arguments.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
