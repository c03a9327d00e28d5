"""The emulator's counts for the launches whose counters ncu reads.

    python -m lab.hardware.hopper_counters.emulate CONFIGURATIONS.json COUNTS [--kernels FOLDER]

Sequences and heads have the same work, and so have the query tiles of a call without a mask: one
sequence of one head is run, of those tiles one whole and what is left over, and counted as often as
the launch has them. FOLDER: kernels as they were compiled when the counters were read, 0.kernel and
so on (`fa4.compiled.artifact.to_bytes`); without it they are compiled now. Counts are the
counters': instructions of warps, bytes of the whole launch.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fa4.compiled.artifact import CompiledKernel, compile_artifact, from_bytes
from fa4.compiled.forward import compile_warpgroup
from fa4.emulator import launch
from fa4.emulator.machine.launch_work import LOADED, LaunchWork
from fa4.emulator.warp_lanes import LANES
from fa4.hardware import H200
from lab.hardware.hopper_counters.expected import WARPS_PER_GROUP, Work
from lab.hardware.warpgroup_forward.measure import make_spec


def as_counters(work: LaunchWork) -> Counter[str]:
    """A launch's work in the units of ncu: a product of a warpgroup is one of each of its warps."""
    products = sum(n for name, n in work.products.items() if name.startswith("wgmma."))
    return Counter(
        wgmma=products * WARPS_PER_GROUP,
        exponentials=work.exponentials // LANES,
        copied_bytes=work.copied_bytes[LOADED],
    )


def emulate(kernel: CompiledKernel, queries: int, keys: int) -> LaunchWork:
    """What a launch for one sequence of one head does, on random normal numbers."""
    import torch

    spec, rng = kernel.spec, np.random.default_rng(0)

    def draw(length: int, dim: int) -> Any:
        values = rng.standard_normal((1, length, 1, dim), np.float32)
        return torch.from_numpy(values).to(torch.bfloat16)

    q, k, v = draw(queries, spec.head_dim), draw(keys, spec.head_dim), draw(keys, spec.head_dim_v)
    o, lse = torch.empty(1, queries, 1, spec.head_dim_v, dtype=q.dtype), torch.empty(1, 1, queries)
    (report,) = launch(
        kernel, q, k, v, o, lse, spec.head_dim**-0.5, *[None] * 3, queries, *[None] * 6,
        H200.sm_count, checks=False,
    )  # fmt: skip
    (work,) = report.work
    return work


def parts(work: Work) -> Iterator[tuple[int, int]]:
    """(queries, times) of launches that together do a configuration's work."""
    if work.causal:
        yield work.seqlen, work.sequences
        return
    tiles, left = divmod(work.seqlen, work.tile_m)
    yield work.tile_m, tiles * work.sequences
    if left:
        yield left, work.sequences


def counts(given: Mapping[str, Any], kernel: CompiledKernel) -> dict[str, int]:
    """Of the whole launch of a configuration."""
    found: Counter[str] = Counter()
    for queries, times in parts(Work.of(given)):
        part = as_counters(emulate(kernel, queries, given["seqlen"]))
        found.update({name: times * number for name, number in part.items()})
    return dict(found)


def main() -> int:
    """Runs them; writes the list."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("configurations", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--kernels", type=Path)
    arguments = parser.parse_args()
    found: list[dict[str, int]] = []
    for number, given in enumerate(json.loads(arguments.configurations.read_text())):
        spec = make_spec(dict(given["spec"]))
        if arguments.kernels:
            kernel = from_bytes((arguments.kernels / f"{number}.kernel").read_bytes(), spec)
        else:
            kernel = compile_artifact(spec, "sm_90a", compile_warpgroup)
        found.append(counts(given, kernel))
        print(given["spec"], found[-1], flush=True)
    arguments.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
