"""Messages by copy engines between ranks that share one GPU: right or wrong, without times.

    torchrun --nproc_per_node 2 -m lab.hardware.distributed.one_gpu RESULT.json [--seconds 120]

A host of one GPU is enough: each rank is a process with a context of its own, and their inboxes are
shared as they are between GPUs. What this cannot show is what a link does, and how fast.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Read by torch when memory is shared; without it, two ranks of one GPU are refused.
os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"

import torch
import torch.distributed as dist

from lab.hardware.distributed.checks import (
    check_exact,
    check_gradients,
    check_methods,
    check_random,
)
from lab.hardware.distributed.session import Run


def main() -> None:
    """All that is right or wrong of `measure`, by one transport."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--calls", type=int, default=40, help="random ones")
    parser.add_argument("--seed", type=int, default=1, help="of the random calls")
    given = parser.parse_args()
    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    run = Run(given.result, given.seconds)
    run.part("gradients", lambda: check_gradients(run, "peers"))
    run.part("methods", lambda: check_methods(run, 4, "peers"))
    run.part("exact", lambda: check_exact(run, "peers"))
    run.part("random calls", lambda: check_random(run, "peers", given.calls, given.seed))
    sys.exit(run.end())


if __name__ == "__main__":
    main()
