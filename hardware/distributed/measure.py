"""Every method of `fa4.distributed` beside one GPU, on all GPUs of a host: right, and how fast.

    NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 \
        torchrun --nproc_per_node 2 -m hardware.distributed.measure RESULT.json [--seconds 240]

Results are right if O is within twice the error of one GPU's O against float64 (LSE within 1e-3).
Efficiency is one GPU's time over the number of GPUs times theirs, both measured in this run. What
takes longer than the limit is left out and said so. Needs torch and CuTe-DSL; flash-attn-4 for
gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fa4
from fa4 import distributed
from fa4.distributed.layout import make_layout
from fa4.distributed.peers import reaches_all_peers
from fa4.distributed.public import PublicKernel

HEADS, HEAD_DIM = 16, 128
SAME = (HEADS, HEADS)
ROUNDS, BURST_S, PAUSE_S = 5, 0.05, 0.05
TRANSPORTS = ("group", "peers")
SMALL = 4096
METHODS: dict[str, dict[str, Any]] = {
    "ring": {"layout": "zigzag", "causal": True},
    "ring, no mask": {"method": "ring", "layout": "zigzag"},
    "ring, contiguous": {"method": "ring", "layout": "contiguous", "causal": True},
    "all_gather": {"layout": "zigzag", "causal": True},
    "halo": {"layout": "contiguous", "window_size": (300, 0)},
    "ulysses": {"layout": "contiguous", "causal": True},
    "pass_q": {"layout": "zigzag", "causal": True},
    "exact": {"method": "all_gather", "layout": "zigzag", "causal": True, "order": "exact"},
}


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


def exact(q: Any, k: Any, v: Any, window: tuple[int | None, int | None]) -> torch.Tensor:
    """O in float64, by definition."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    out = torch.empty_like(q)
    row = torch.arange(q.shape[2], device="cuda")
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head].transpose(1, 2) / HEAD_DIM**0.5
        apart = row[None, :] - row[:, None]
        if window[1] is not None:
            scores.masked_fill_(apart > window[1], -float("inf"))
        if window[0] is not None:
            scores.masked_fill_(apart < -window[0], -float("inf"))
        out[:, head] = scores.softmax(-1) @ v[:, head]
    return out.transpose(1, 2)


def check_methods(run: Run, heads_k: int, transport: str) -> None:
    """Each method beside one GPU and float64."""
    q, k, v, _ = tensors(SMALL, HEADS, heads_k)
    for name, options in METHODS.items():
        options = {"method": name, "transport": transport, **options}
        window = options.get("window_size", (None, 0 if options.get("causal") else None))
        layout = make_layout(options["layout"], SMALL, run.ranks, tile=256)
        mine = [layout.shard(x, run.rank).contiguous() for x in (q, k, v)]
        one = fa4.flash_attn_func(q, k, v, window_size=window, return_lse=True)
        truth = layout.shard(exact(q, k, v, window), run.rank)
        given = {**options, "layout": layout}
        out, lse = distributed.attention(*mine, **given, impl="sm90", return_lse=True)
        alone = layout.shard(one.out, run.rank)
        error = float((out.double() - truth).abs().max())
        budget = 2 * float((alone.double() - truth).abs().max())
        apart = float((lse - layout.shard(one.lse, run.rank, 2)).abs().max())
        run.note(
            "right",
            method=name,
            heads_k=heads_k,
            transport=transport,
            error=run.slowest(error),
            budget=run.slowest(budget),
            lse=run.slowest(apart),
            same_bits=not run.slowest(float(not torch.equal(out, alone))),
            right=not run.slowest(float(error > budget or apart > 1e-3)),
        )


def check_exact(run: Run) -> None:
    """order="exact": the bits of all GPUs together are those of each alone."""
    alone = [dist.new_group([rank]) for rank in range(run.ranks)][run.rank]
    for heads_k, causal in ((16, True), (4, True), (4, False)):
        q, k, v, _ = tensors(SMALL, HEADS, heads_k)
        options = {"causal": causal, "order": "exact", "impl": "sm90"}
        whole = make_layout("zigzag", SMALL, 1)
        wanted = distributed.attention(q, k, v, group=alone, layout=whole, **options)
        for name in ("zigzag", "contiguous"):
            layout = make_layout(name, SMALL, run.ranks, tile=256)
            mine = [layout.shard(x, run.rank) for x in (q, k, v)]
            out = distributed.attention(*mine, layout=layout, **options)
            same = torch.equal(out, layout.shard(wanted, run.rank))
            run.note(
                "right",
                order="exact",
                layout=name,
                heads_k=heads_k,
                causal=causal,
                same_bits_as_one_gpu=not run.slowest(float(not same)),
            )


def check_random(run: Run, transport: str, calls: int, seed: int) -> None:
    """Random calls beside one GPU: uneven lengths, documents, windows, grouped heads, sinks."""
    draw = random.Random(seed)
    worst, wrong = 0.0, []
    for number in range(calls):
        seqlen, heads_k = draw.randint(64, 3000), draw.choice((1, 4, 16))
        method = draw.choice(("ring", "all_gather", "halo", "ulysses", "pass_q"))
        heads_k = max(heads_k, run.ranks) if method == "ulysses" else heads_k
        layout_name = draw.choice(("contiguous", "zigzag", "documents"))
        cuts = sorted(draw.randint(0, seqlen) for _ in range(draw.randint(0, 3)))
        offsets = (0, *cuts, seqlen) if layout_name == "documents" else (0, seqlen)
        left = draw.choice((None, None, draw.randint(0, 700)))
        window = (left, draw.choice((None, 0, 0)))
        q, k, v, _ = tensors(seqlen, HEADS, heads_k, seed=number)
        sink = torch.linspace(-2, 12, HEADS, device="cuda") if draw.random() < 0.3 else None
        at = torch.tensor(offsets, dtype=torch.int32, device="cuda")
        lengths = {"cu_seqlens_q": at, "cu_seqlens_k": at, "max_seqlen_q": seqlen}
        one = fa4.flash_attn_varlen_func(
            q[0], k[0], v[0], **lengths, window_size=window, return_lse=True, impl="sm90"
        )
        alone, lse = one.out.float(), one.lse
        if sink is not None:
            total = torch.logaddexp(lse, sink[:, None])
            alone, lse = alone * torch.exp(lse - total).T[..., None], total
        layout = make_layout(layout_name, seqlen, run.ranks, cu_seqlens=offsets)
        mine = [layout.shard(x[0], run.rank, 0) for x in (q, k, v)]
        out, found = distributed.attention(
            *mine, layout=layout, method=method, window_size=window, cu_seqlens=offsets,
            learnable_sink=sink, transport=transport, impl="sm90", return_lse=True,
        )  # fmt: skip
        apart = (out.float() - layout.shard(alone, run.rank, 0)).abs().max()
        wanted = layout.shard(lse, run.rank, 1)
        same = torch.where(found == wanted, 0.0, (found - wanted).abs()).nan_to_num(1e9).max()
        error = run.slowest(max(float(apart) / 0.03, float(same) / 1e-3))  # of two roundings
        worst = max(worst, error)
        if error > 1:
            wrong.append((number, method, layout_name, seqlen, heads_k, window, error))
    run.note("right", random_calls=calls, transport=transport, wrong=wrong, of_budget=worst)


def check_gradients(run: Run, transport: str) -> None:
    """Gradients of the zigzag ring beside those of one GPU, by the same kernels."""
    q, k, v, dout = tensors(SMALL, HEADS, 4)
    kernel = gradient_kernel()
    options = {"softmax_scale": HEAD_DIM**-0.5, "window_size": (None, 0), "softcap": 0.0}
    saved = kernel.forward(q, k, v, options)
    wanted = kernel.backward(dout, q, k, v, saved, options)
    layout = make_layout("zigzag", SMALL, run.ranks)
    mine = [layout.shard(x, run.rank).contiguous().requires_grad_() for x in (q, k, v)]
    out = distributed.attention(*mine, causal=True, method="ring", impl=kernel, transport=transport)
    out.backward(layout.shard(dout, run.rank))
    for name, x, y in zip(("dq", "dk", "dv"), mine, wanted, strict=True):
        alone = layout.shard(y, run.rank).float()
        assert x.grad is not None
        apart = float((x.grad.float() - alone).norm() / alone.norm())
        run.note("right", gradient=name, transport=transport, relative_rms=run.slowest(apart))


def time_links(run: Run, transport: str) -> None:
    """Both ranks send to each other: bytes per second, one way."""
    from fa4.distributed.blocks import SequenceMask
    from fa4.distributed.methods import check_spec
    from fa4.distributed.plan import Post, Sizes, Spec
    from fa4.distributed.recorded import ShardedCall, program_of

    for kib in (64, 1024, 4096, 16384, 65536, 262144):
        rows = kib * 1024 // (2 * HEAD_DIM * 2)
        layout = make_layout("contiguous", rows * run.ranks, run.ranks)
        mask = SequenceMask(None, None, (0, rows * run.ranks))
        spec = check_spec(Spec("ring", layout, layout, mask, Sizes(1, 1)))
        job = ShardedCall(
            spec, run.rank, dist.group.WORLD, PublicKernel("sm90"), 1.0, 0.0, transport
        )
        post = next(x for x in program_of(spec, run.rank).steps if isinstance(x, Post))
        given = tuple(torch.zeros((1, rows, 1, HEAD_DIM), device="cuda").bfloat16() for _ in "kv")
        empty = tuple(torch.empty_like(x) for x in given)

        def swap(
            job: Any = job,
            spec: Any = spec,
            post: Any = post,
            given: Any = given,
            into: Any = empty,
        ) -> None:
            channel = job.channel(spec)
            channel.post(post, [given], [into])
            channel.done(post.name)

        seconds = run.time(swap)
        rate = kib * 1024 / seconds / 1e9
        run.note("links", transport=transport, bytes=kib * 1024, us=seconds * 1e6, gb_s=rate)


def time_forward(run: Run, seqlen: int, heads: tuple[int, int], causal: bool) -> None:
    """One GPU, and the zigzag ring by both transports; all_gather and Ulysses at the longest."""
    q, k, v, _ = tensors(seqlen, *heads)
    flops = 4.0 * heads[0] * HEAD_DIM * seqlen**2 / (2 if causal else 1)
    window = (None, 0 if causal else None)
    one = run.time(lambda: fa4.flash_attn_func(q, k, v, window_size=window))
    note = {"seqlen": seqlen, "heads": heads[0], "heads_k": heads[1], "causal": causal}
    run.note("times", **note, method="one GPU", ms=one * 1e3, tflops=flops / one / 1e12)
    layout = make_layout("zigzag", seqlen, run.ranks)
    mine = [layout.shard(x, run.rank).contiguous() for x in (q, k, v)]
    methods = [("ring", transport) for transport in TRANSPORTS]
    if seqlen == 65536:
        methods += [(name, "peers") for name in ("all_gather", "ulysses")]
    for method, transport in methods:
        options = {"method": method, "layout": layout, "causal": causal, "transport": transport}

        def call(options: Any = options) -> None:
            distributed.attention(*mine, **options, impl="sm90")

        seconds = run.time(call)
        run.note(
            "times",
            **note,
            method=method,
            transport=transport,
            ms=seconds * 1e3,
            efficiency=one / run.ranks / seconds,
        )


def time_blocks(run: Run, seqlen: int) -> None:
    """What one rank computes at a step: the calls alone, and the merge."""
    from fa4.distributed.public import find_merger

    q, k, v, _ = tensors(seqlen, HEADS, HEADS)
    half = seqlen // 2
    shapes = {
        "diagonal": (q, k, v, (None, 0)),
        "half the queries": (q[:, half:], k, v, (None, None)),
        "half the keys": (q, k[:, :half], v[:, :half], (None, None)),
        "whole": (q, k, v, (None, None)),
    }
    for name, (a, b, c, window) in shapes.items():

        def call(a: Any = a, b: Any = b, c: Any = c, window: Any = window) -> None:
            fa4.flash_attn_func(a, b, c, window_size=window, return_lse=True)

        run.note("times", rows=seqlen, block=name, ms=run.time(call) * 1e3)
    lse = torch.zeros((1, seqlen, HEADS, 1), device="cuda")
    parts = (q.clone(), lse, k, lse.clone())
    seconds = run.time(lambda: find_merger(q, k)(*parts))
    run.note("times", rows=seqlen, block="merge", ms=seconds * 1e3)


def time_training(run: Run, seqlen: int) -> None:
    """Forward and backward of one GPU and of the zigzag ring, causal."""
    q, k, v, dout = tensors(seqlen, HEADS, HEADS)
    kernel = gradient_kernel()
    options = {"softmax_scale": HEAD_DIM**-0.5, "window_size": (None, 0), "softcap": 0.0}

    def alone() -> None:
        kernel.backward(dout, q, k, v, kernel.forward(q, k, v, options), options)

    one = run.time(alone)
    layout = make_layout("zigzag", seqlen, run.ranks)
    mine = [layout.shard(x, run.rank).contiguous().requires_grad_() for x in (q, k, v)]
    upstream = layout.shard(dout, run.rank)
    for transport in TRANSPORTS:
        given = {"causal": True, "method": "ring", "impl": kernel, "transport": transport}

        def call(given: Any = given) -> None:
            out = distributed.attention(*mine, **given)
            torch.autograd.grad(out, mine, upstream)

        seconds = run.time(call)
        run.note(
            "times",
            seqlen=seqlen,
            passes="forward and backward",
            transport=transport,
            one_gpu_ms=one * 1e3,
            ms=seconds * 1e3,
            efficiency=one / run.ranks / seconds,
        )


def time_torch(run: Run, seqlen: int) -> None:
    """torch's own context_parallel, causal, by its rotations and cuDNN."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (run.ranks,))
    for rotation in ("allgather", "alltoall"):
        set_rotate_method(rotation)
        q, k, v, _ = (x.transpose(1, 2).contiguous() for x in tensors(seqlen, HEADS, HEADS))
        with (
            context_parallel(mesh, buffers=(q, k, v), buffer_seq_dims=(2, 2, 2)),
            sdpa_kernel([SDPBackend.CUDNN_ATTENTION]),
        ):
            attend = torch.nn.functional.scaled_dot_product_attention

            def call(q: Any = q, k: Any = k, v: Any = v, attend: Any = attend) -> None:
                attend(q, k, v, is_causal=True)

            seconds = run.time(call)
        name = f"torch context_parallel, {rotation}, cuDNN"
        run.note("times", seqlen=seqlen, causal=True, method=name, ms=seconds * 1e3)


def main() -> None:
    """Run everything that the time is enough for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--without", default="", help="words of parts to leave out: 'a;b'")
    given = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    run = Run(given.result, given.seconds)
    global TRANSPORTS
    if not reaches_all_peers(dist.group.WORLD):
        TRANSPORTS = ("group",)
    parts: dict[str, Callable[[], Any]] = {}
    for way in TRANSPORTS:
        parts[f"links, {way}"] = lambda t=way: time_links(run, t)
        parts[f"methods, {way}"] = lambda t=way: check_methods(run, 4, t)
    for seqlen in (32768, 65536, 131072):
        for causal, mask in ((True, "causal"), (False, "no mask")):
            parts[f"{seqlen}, {mask}"] = lambda n=seqlen, c=causal: time_forward(run, n, SAME, c)
    parts["blocks"] = lambda: [time_blocks(run, n) for n in (16384, 32768)]
    parts["exact"] = lambda: check_exact(run)
    for way in TRANSPORTS:
        parts[f"gradients, {way}"] = lambda t=way: check_gradients(run, t)
    parts["training"] = lambda: time_training(run, 65536)
    parts["random calls"] = lambda: [check_random(run, t, 100, 1) for t in TRANSPORTS]
    parts["grouped heads"] = lambda: time_forward(run, 131072, (32, 8), True)
    for seqlen in (32768, 65536, 131072):
        parts[f"torch, {seqlen}"] = lambda n=seqlen: time_torch(run, n)
    for name, part in parts.items():
        if not any(word and word in name for word in given.without.split(";")):
            run.part(name, part)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
