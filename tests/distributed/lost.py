"""One of two ranks over gloo, of which one goes: `python -m tests.distributed.lost RANK FILE WHEN`.

WHEN: "killed" before a call, "silent" before it, or "between" the agreement and the messages.
Prints what rank 0 is told, and whether what it had is as before.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from fa4 import distributed
from fa4.distributed import group

TIMEOUT_S = 4.0


def main() -> None:
    """The second rank goes; the first one calls."""
    rank, when = int(sys.argv[1]), sys.argv[3]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2,
        timeout=timedelta(seconds=TIMEOUT_S),
    )  # fmt: skip
    q = torch.ones((1, 64, 2, 8))
    distributed.attention(q, q, q, causal=True, impl="reference")
    if rank and when == "between":
        group.GroupChannel.post = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
        distributed.attention(q, q, q, causal=True, impl="reference")
    if rank and when == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank:
        time.sleep(60)
    try:
        distributed.attention(q, q, q, causal=True, impl="reference")
    except ConnectionError as error:
        print(error)
    print("unchanged" if bool((q == 1).all()) else "changed", flush=True)
    os._exit(0)  # the group would wait for the other rank


if __name__ == "__main__":
    main()
