"""One rank of a gloo group: `python -m tests.distributed.worker RANK RANKS FILE`, tests in `JOBS`.

Prints a line of JSON: what each job has found.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fa4 import distributed
from fa4.distributed.layout import RowLayout, make_layout
from fa4.oracle import attend_batch, differentiate_batch

ROWS, DOCUMENTS = 53, (0, 0, 9, 10, 53)
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("ring", "zigzag", {"causal": True}),
    ("ring", "striped", {"causal": True, "softcap": 2.0}),
    ("ring", "contiguous", {}),
    ("all_gather", "zigzag", {"causal": True}),
    ("halo", "contiguous", {"window_size": (7, 3)}),
    ("ulysses", "zigzag", {"causal": True}),
    ("pass_q", "zigzag", {"causal": True}),
    ("auto", "documents", {"causal": True, "cu_seqlens": DOCUMENTS}),
)


def tensors(dtype: torch.dtype, rows: int = ROWS) -> list[torch.Tensor]:
    """q, k, v, dO: the same on every rank."""
    made = torch.Generator().manual_seed(7)
    heads = (4, 2, 2, 4)
    return [
        torch.randn((1, rows, n, 8), generator=made, dtype=torch.float64).to(dtype) for n in heads
    ]


def apart(found: Any, wanted: np.ndarray) -> float:
    """The largest difference."""
    return float(np.abs(found.detach().double().numpy() - wanted).max(initial=0.0))


def errors(rank: int, ranks: int, dtype: torch.dtype) -> dict[str, float]:
    """Of every case: the largest error of O, LSE, dQ, dK, dV and dsink, in sums of all ranks."""
    found = {}
    sink = torch.linspace(-1, 20, 4, dtype=torch.float64).to(dtype).double()
    for method, name, options in CASES:
        q, k, v, dout = tensors(dtype)
        options = dict(options)
        packed = "cu_seqlens" in options
        layout = make_layout(name, ROWS, ranks, cu_seqlens=options.get("cu_seqlens", ()))
        mine = [layout.shard(x, rank).requires_grad_() for x in (q, k, v)]
        own_sink = sink.to(torch.float64 if dtype == torch.float64 else torch.float32).clone()
        own_sink.requires_grad_()
        given = [x[0] for x in mine] if packed else mine
        out, lse = distributed.attention(
            *given, layout=name, method=method, learnable_sink=own_sink, impl="reference",
            return_lse=True, **options,
        )  # fmt: skip
        out = out[None] if packed else out
        out.backward(layout.shard(dout, rank))
        offsets = np.array(options.pop("cu_seqlens", (0, ROWS)))
        options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        options["learnable_sink"] = sink.numpy()
        arrays = [x[0].double().numpy() for x in (q, k, v)]
        wanted, wanted_lse = attend_batch(*arrays, options)
        grads = differentiate_batch(tuple(arrays), dout[0].double().numpy(), None, options)
        assert own_sink.grad is not None and grads.dsink is not None
        dist.all_reduce(own_sink.grad)
        rows = layout.positions(rank)
        lse = lse if packed else lse[0]
        found[f"{method} {name}"] = max(
            apart(out[0], wanted[rows]),
            apart(lse, wanted_lse[:, rows]),
            *(apart(x.grad[0], y[rows]) for x, y in zip(mine, grads[:3], strict=True)),
            apart(own_sink.grad, grads.dsink),
        )
    return found


def refusals(rank: int, ranks: int) -> dict[str, str]:
    """What is said where ranks disagree, or the rows are not the layout's."""
    q, k, v, _ = (x[:, : 8 * ranks] for x in tensors(torch.float32))
    layout = make_layout("zigzag", 8 * ranks, ranks)
    mine = [layout.shard(x, rank) for x in (q, k, v)]
    calls: dict[str, Callable[[], Any]] = {
        "causal": lambda: distributed.attention(*mine, causal=rank == 0),
        "type": lambda: distributed.attention(*(x.double() if rank else x for x in mine)),
        "heads": lambda: distributed.attention(mine[0][:, :, : 2 + 2 * (rank > 0)], *mine[1:]),
        "method": lambda: distributed.attention(*mine, method="ring" if rank else "halo"),
        "rows": lambda: distributed.attention(*(x[:, rank * 3 :] for x in mine)),
        "name": lambda: distributed.attention(*mine, method="rings"),
        "cu_seqlens": lambda: distributed.attention(*mine, cu_seqlens=(0, 5)),
        "ulysses": lambda: distributed.attention(*(x[:, :, :1] for x in mine), method="ulysses"),
    }
    return {name: said(call) for name, call in calls.items()}


def said(call: Callable[[], Any]) -> str:
    """What a call is refused with."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def exact(rank: int, ranks: int) -> bool:
    """Are the bits of O and its gradients those of one rank alone?"""
    rows = 600
    alone = dist.new_group([0]), dist.new_group([1])
    q, k, v, dout = tensors(torch.bfloat16, rows)

    def run(group: Any, layout: RowLayout, mine: int) -> list[torch.Tensor]:
        given = [layout.shard(x, mine).requires_grad_() for x in (q, k, v)]
        out = distributed.attention(
            *given, group=group, layout=layout, causal=True, order="exact", impl="reference"
        )
        out.backward(layout.shard(dout, mine))
        return [out.detach(), *(x.grad for x in given if x.grad is not None)]

    layout = make_layout("zigzag", rows, ranks, tile=256)
    found = run(None, layout, rank)
    wanted = run(alone[rank], make_layout("zigzag", rows, 1), 0)
    return all(torch.equal(x, layout.shard(y, rank)) for x, y in zip(found, wanted, strict=True))


def replaced(rank: int, ranks: int) -> dict[str, float]:
    """An unmodified model under `context_parallel`: its output, gradient, and what comes back."""
    torch.manual_seed(0)
    mixer = torch.nn.Linear(16, 48, dtype=torch.float64)

    def model(x: torch.Tensor) -> torch.Tensor:
        q, k, v = mixer(x).view(2, -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    whole = torch.randn((2, 24, 16), dtype=torch.float64)
    wanted = model(whole)
    wanted.square().sum().backward()
    assert mixer.weight.grad is not None
    gradient, mixer.weight.grad = mixer.weight.grad, None
    buffer = whole.clone()
    with distributed.context_parallel(None, buffers=[buffer], buffer_seq_dims=[1]):
        assert buffer.shape[1] == 24 // ranks
        out = model(buffer)
        out.square().sum().backward()
    dist.all_reduce(mixer.weight.grad)
    layout = make_layout("zigzag", 24, ranks)
    mine = layout.shard(wanted.detach(), rank, 2).numpy()
    return {
        "out": apart(out, mine),
        "gradient": apart(mixer.weight.grad, gradient.numpy()),
        "buffer": apart(buffer, whole.numpy()),
        "unsharded": apart(distributed.unshard(out, layout, dim=2), wanted.detach().numpy()),
    }


def compiled(rank: int, ranks: int) -> bool:
    """Under torch.compile: the same bits, gradients included."""
    layout = make_layout("zigzag", 16 * ranks, ranks)
    mine = [layout.shard(x[:, : 16 * ranks], rank) for x in tensors(torch.float32)[:3]]

    def double(*given: torch.Tensor) -> torch.Tensor:
        given = tuple(2 * x for x in given)
        return 2 * distributed.attention(*given, layout=layout, causal=True, impl="reference")

    found = []
    for function in (double, torch.compile(double, backend="eager")):
        given = [x.clone().requires_grad_() for x in mine]
        out = function(*given)
        out.sum().backward()
        found.append([out, *(x.grad for x in given)])
    return all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def main() -> None:
    """All jobs on this rank."""
    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=ranks
    )
    found = {
        "fp64": errors(rank, ranks, torch.float64),
        "bf16": errors(rank, ranks, torch.bfloat16),
        "refusals": refusals(rank, ranks),
        "exact": exact(rank, ranks),
        "replaced": replaced(rank, ranks),
        "compiled": compiled(rank, ranks),
    }
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
