"""The Hopper kernels again and again: are O, the LSE and every gradient the same bits each time?

    python3 -m lab.hardware.repeated_launches OUT.json [--launches 50]     # GPU

Gradients in a fixed order of sums: one launch behind the other; from several streams at a time,
each with inputs of its own; from a CUDA graph of both passes, whose inputs are then changed. Beside
them gradients in any order, which may differ: that they do shows that the comparison would see it.
Exit code 1 if bits differ that may not.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.hardware.there import describe_machine
from lab.hardware.warpgroup_forward.measure import Watchdog

STREAMS, REPLAYS = 4, 5


@dataclass(frozen=True)
class RepeatedGradient:
    """A call. heads: of queries and of keys. packed: sequences of half the length and of all."""

    head_dim: int
    head_dim_v: int
    batch: int
    seqlen: int
    heads: tuple[int, int]
    causal: bool
    packed: bool = False


CALLS = (
    RepeatedGradient(64, 64, 2, 2048, (8, 8), causal=True),
    RepeatedGradient(64, 64, 1, 1111, (6, 2), causal=False),
    RepeatedGradient(96, 96, 3, 1500, (4, 4), causal=False),
    RepeatedGradient(128, 128, 2, 4096, (8, 8), causal=True),
    RepeatedGradient(128, 128, 1, 4096, (16, 4), causal=False),
    RepeatedGradient(128, 128, 2, 1000, (8, 2), causal=True, packed=True),
    RepeatedGradient(192, 128, 1, 2048, (8, 8), causal=True),
    RepeatedGradient(256, 256, 1, 2000, (8, 2), causal=False),
    RepeatedGradient(256, 256, 2, 1024, (4, 4), causal=True, packed=True),
    RepeatedGradient(200, 200, 1, 1272, (2, 1), causal=False),
)


def make_inputs(call: RepeatedGradient, seed: int, device: str = "cuda") -> list[Any]:
    """Q, K, V and dO, random normal values in bf16."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    rows = (call.seqlen // 2 + call.seqlen,) if call.packed else (call.batch, call.seqlen)
    sizes = zip(
        (call.heads[0], call.heads[1], call.heads[1], call.heads[0]),
        (call.head_dim, call.head_dim, call.head_dim_v, call.head_dim_v), strict=True,
    )  # fmt: skip
    return [
        torch.randn((*rows, *size), device=device, generator=generator).bfloat16() for size in sizes
    ]


def compute(
    call: RepeatedGradient, inputs: list[Any], *, fixed: bool = True, impl: str = "sm90"
) -> list[Any]:
    """O, the LSE, dQ, dK and dV."""
    import torch

    import fa4

    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    options: dict[str, Any] = {"causal": call.causal, "deterministic": fixed, "impl": impl}
    function = fa4.flash_attn_func
    if call.packed:
        function = fa4.flash_attn_varlen_func  # type: ignore[assignment]
        ends = [0, call.seqlen // 2, call.seqlen // 2 + call.seqlen]
        key = (*ends, q.device)
        if key not in ENDS:
            ENDS[key] = torch.tensor(ends, device=q.device).int()
        lengths = ENDS[key]
        options |= {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "max_seqlen_q": call.seqlen}
    out, lse = function(q, k, v, return_lse=True, **options)
    grads = torch.autograd.grad(out, (q, k, v), inputs[3])
    return [out.detach(), lse.detach(), *grads]


ENDS: dict[tuple[Any, ...], Any] = {}  # of sequences; made before a graph is captured


def differ(found: list[Any], wanted: list[Any]) -> bool:
    """Has any element other bits? NaN differs from everything."""
    return not all((x == y).all().item() for x, y in zip(found, wanted, strict=True))


def one_behind_the_other(call: RepeatedGradient, launches: int, **how: Any) -> int:
    """How many launches gave other bits than the first."""
    inputs = make_inputs(call, 0)
    first = compute(call, inputs, **how)
    return sum(differ(compute(call, inputs, **how), first) for _ in range(launches - 1))


def on_streams(call: RepeatedGradient) -> int:
    """How many results of streams that work at a time differ from those of one alone."""
    import torch

    inputs = [make_inputs(call, seed) for seed in range(STREAMS)]
    wanted = [compute(call, one) for one in inputs]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in inputs], []
    for _ in range(REPLAYS):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found.append((number, compute(call, inputs[number])))
    torch.cuda.synchronize()
    return sum(differ(one, wanted[number]) for number, one in found)


def from_graph(call: RepeatedGradient) -> int:
    """How many replays of a graph of both passes differ from calls with the same inputs."""
    import torch

    inputs = [make_inputs(call, seed) for seed in range(REPLAYS)]
    wanted = [compute(call, one) for one in inputs]
    held = [x.clone() for x in inputs[0]]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = compute(call, held)
    wrong = 0
    for given, result in zip(inputs, wanted, strict=True):
        for mine, theirs in zip(held, given, strict=True):
            mine.copy_(theirs)
        graph.replay()
        torch.cuda.synchronize()
        wrong += differ(found, result)
    return wrong


def main() -> int:
    """Counts results with other bits; writes them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--launches", type=int, default=50)
    arguments = parser.parse_args()
    watchdog, rows = Watchdog(), []
    for call in CALLS:
        watchdog.alive(str(call))
        differing = {
            "launches": one_behind_the_other(call, arguments.launches),
            "streams": on_streams(call),
            "graph": from_graph(call),
        }
        row = asdict(call) | {"differing": differing}
        row["any order"] = one_behind_the_other(call, arguments.launches, fixed=False)
        rows.append(row)
        print(row, flush=True)
        report = describe_machine() | {"launches": arguments.launches, "calls": rows}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(sum(row["differing"].values()) for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
