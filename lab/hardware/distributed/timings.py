"""How long calls, their parts and messages take on the GPUs of a host."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import fa4
from fa4 import distributed
from fa4.distributed.layout import make_layout
from fa4.distributed.public import PublicKernel
from lab.hardware.distributed.session import HEAD_DIM, HEADS, Run, gradient_kernel, tensors


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


def time_forward(
    run: Run, seqlen: int, heads: tuple[int, int], causal: bool, transports: tuple[str, ...]
) -> None:
    """One GPU, and the zigzag ring by both transports; all_gather and Ulysses at the longest."""
    q, k, v, _ = tensors(seqlen, *heads)
    flops = 4.0 * heads[0] * HEAD_DIM * seqlen**2 / (2 if causal else 1)
    window = (None, 0 if causal else None)
    one = run.time(lambda: fa4.flash_attn_func(q, k, v, window_size=window))
    note = {"seqlen": seqlen, "heads": heads[0], "heads_k": heads[1], "causal": causal}
    run.note("times", **note, method="one GPU", ms=one * 1e3, tflops=flops / one / 1e12)
    layout = make_layout("zigzag", seqlen, run.ranks)
    mine = [layout.shard(x, run.rank).contiguous() for x in (q, k, v)]
    methods = [("ring", transport) for transport in transports]
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


def time_training(run: Run, seqlen: int, transports: tuple[str, ...]) -> None:
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
    for transport in transports:
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
