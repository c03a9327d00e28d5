"""Is what GPUs compute together right? Beside one GPU, and float64."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist

import fa4
from fa4 import distributed
from fa4.distributed.layout import make_layout
from lab.hardware.distributed.session import HEAD_DIM, HEADS, Run, gradient_kernel, tensors

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


def check_exact(run: Run, transport: str = "group") -> None:
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
            out = distributed.attention(*mine, layout=layout, transport=transport, **options)
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
