"""Every method of `fa4.distributed` beside one GPU, on all GPUs of a host: right, and how fast.

    NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 \
        torchrun --nproc_per_node 2 -m lab.hardware.distributed.measure RESULT.json [--seconds 240]

Results are right if O is within twice the error of one GPU's O against float64 (LSE within 1e-3).
Efficiency is one GPU's time over the number of GPUs times theirs, both measured in this run. What
takes longer than the limit is left out and said so. Exit code 1 if anything is wrong. Needs torch
and CuTe-DSL.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fa4.distributed.peers import reaches_all_peers
from lab.hardware.distributed.checks import (
    check_exact,
    check_gradients,
    check_methods,
    check_random,
)
from lab.hardware.distributed.session import SAME, Run
from lab.hardware.distributed.timings import (
    time_blocks,
    time_forward,
    time_links,
    time_torch,
    time_training,
)


def main() -> None:
    """Run everything that the time is enough for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--without", default="", help="words of parts to leave out: 'a;b'")
    parser.add_argument("--seed", type=int, default=1, help="of the random calls")
    given = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    run = Run(given.result, given.seconds)
    for name, part in find_parts(run, given.seed).items():
        if not any(word and word in name for word in given.without.split(";")):
            run.part(name, part)
    sys.exit(run.end())


def find_parts(run: Run, seed: int) -> dict[str, Callable[[], Any]]:
    """What there is to do, by name: what may be wrong before what takes time."""
    ways = ("group", "peers") if reaches_all_peers(dist.group.WORLD) else ("group",)
    parts: dict[str, Callable[[], Any]] = {}
    for way in ways:
        parts[f"methods, {way}"] = partial(check_methods, run, 4, way)
        parts[f"gradients, {way}"] = partial(check_gradients, run, way)
        parts[f"exact, {way}"] = partial(check_exact, run, way)
        parts[f"random calls, {way}"] = partial(check_random, run, way, 40, seed)
    for way in ways:
        parts[f"links, {way}"] = partial(time_links, run, way)
    for seqlen in (32768, 65536, 131072):
        for causal, mask in ((True, "causal"), (False, "no mask")):
            parts[f"{seqlen}, {mask}"] = partial(time_forward, run, seqlen, SAME, causal, ways)
    parts["training"] = partial(time_training, run, 65536, ways)
    parts["grouped heads"] = partial(time_forward, run, 131072, (32, 8), True, ways)
    for seqlen in (32768, 65536, 131072):
        parts[f"torch, {seqlen}"] = partial(time_torch, run, seqlen)
    for rows in (16384, 32768):
        parts[f"blocks, {rows}"] = partial(time_blocks, run, rows)
    return parts


if __name__ == "__main__":
    main()
