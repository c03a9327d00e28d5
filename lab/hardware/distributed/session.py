"""One process of a measurement across GPUs: its tensors, kernels and clock, what it has found."""

from __future__ import annotations

import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fa4.distributed.public import PublicKernel

HEADS, HEAD_DIM = 16, 128
SAME = (HEADS, HEADS)
ROUNDS, BURST_S, PAUSE_S = 5, 0.05, 0.05
GRADIENT_RMS = 2**-8  # bf16 gradients summed in another order: one rounding


def wrong_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of the findings "right" that say that something is not, by whatever they say it."""
    return [
        row
        for row in found["right"]
        if not row.get("right", True)
        or not row.get("same_bits_as_one_gpu", True)
        or not row.get("relative_rms", 0.0) < GRADIENT_RMS  # a NaN is wrong, too
        or not row.get("of_budget", 0.0) <= 1
        or row.get("wrong")
    ]


class WithForeignGradient(PublicKernel):
    """This package's forward kernel with flash-attn-4's backward kernel."""

    def backward(
        self, dout: Any, q: Any, k: Any, v: Any, saved: tuple[Any, Any], options: dict[str, Any]
    ) -> tuple[Any, Any, Any]:
        """(dQ, dK, dV) of a block without a mask, or causal."""
        from flash_attn.cute.interface import _flash_attn_bwd

        left, right = options["window_size"]
        assert left is None and right in (None, 0), "blocks of zigzag rings only"
        tensors = [x.contiguous() for x in (q, k, v)]
        scale = options["softmax_scale"]
        found = _flash_attn_bwd(
            *tensors, saved[0], dout, saved[1], softmax_scale=scale, causal=right == 0
        )
        return found[0], found[1], found[2]


def gradient_kernel() -> PublicKernel:
    """This package's Hopper kernels; where its backward kernel refuses, flash-attn-4's."""
    kernel = PublicKernel("sm90")
    q, k, v, dout = tensors(256, 2, 2)
    options = {"softmax_scale": 0.1, "window_size": (None, 0), "softcap": 0.0}
    try:
        kernel.backward(dout, q, k, v, kernel.forward(q, k, v, options), options)
    except NotImplementedError:
        return WithForeignGradient("sm90")
    return kernel


class Run:
    """One process of the run; rank 0 collects what is found and writes it after each part."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.path, self.ends = path, time.monotonic() + seconds
        properties = torch.cuda.get_device_properties(0)
        self.found: dict[str, Any] = {
            "gpu": properties.name,
            "gpus": self.ranks,
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "right": [],
            "links": [],
            "times": [],
            "left_out": [],
        }

    def end(self) -> int:
        """Says what is wrong or was left out; the program's exit code: 1 if anything is wrong."""
        wrong = wrong_rows(self.found)
        if self.rank == 0:
            for row in wrong:
                print(f"WRONG: {row}", flush=True)
            print(f"{len(self.found['right'])} rows, {len(wrong)} wrong, "
                  f"{len(self.found['left_out'])} parts left out", flush=True)  # fmt: skip
        dist.destroy_process_group()
        return int(bool(wrong))

    def part(self, name: str, function: Callable[[], Any]) -> None:
        """One part; what fails is said, and the others go on."""
        over = torch.tensor([float(time.monotonic() > self.ends)], device="cuda")
        dist.all_reduce(over)
        error = "no time left" if over.item() else ""
        if not error:
            try:
                function()
            except Exception:
                error = traceback.format_exc()[-900:]
        said: list[Any] = [None] * self.ranks
        dist.all_gather_object(said, error)
        if any(said) and self.rank == 0:
            self.found["left_out"].append({"part": name, "errors": said})
            print(f"{name}: {max(said, key=len).strip().splitlines()[-1]}", flush=True)
        if self.rank == 0:
            self.path.write_text(json.dumps(self.found, indent=1))

    def note(self, kind: str, **values: Any) -> None:
        """One finding, printed and kept by rank 0."""
        if self.rank == 0:
            self.found[kind].append(values)
            print(kind, *(f"{name}={_short(x)}" for name, x in values.items()), flush=True)

    def time(self, function: Callable[[], Any]) -> float:
        """Seconds of a call, the slowest rank's median over rounds with pauses."""
        for _ in range(2):
            function()
        once = self.slowest(_events(function, 1))
        calls = max(2, min(200, int(BURST_S / once)))
        rounds = []
        for _ in range(ROUNDS):
            time.sleep(PAUSE_S)
            dist.barrier()
            rounds.append(self.slowest(_events(function, calls)))
        return statistics.median(rounds)

    def slowest(self, seconds: float) -> float:
        """The most that a rank took."""
        found = torch.tensor([seconds], device="cuda", dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found.item())


def _short(x: Any) -> str:
    return f"{x:.4g}" if isinstance(x, float) else str(x)


def _events(function: Callable[[], Any], calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def tensors(seqlen: int, heads: int, heads_k: int, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v, dout of (1, seqlen, heads, 128), the same on every rank."""
    made = torch.Generator(device="cuda").manual_seed(seed)
    shapes = ((1, seqlen, n, HEAD_DIM) for n in (heads, heads_k, heads_k, heads))
    return [
        torch.randn(x, generator=made, device="cuda", dtype=torch.float32).bfloat16()
        for x in shapes
    ]
