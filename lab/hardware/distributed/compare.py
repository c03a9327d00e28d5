"""The simulator of links beside what was measured: two H200s, and published rows of others.

    python -m lab.hardware.distributed.compare

Two H200s (`two_gpus.json`; `h200x2_ring.csv` of an earlier program, whose merges are eager): the
pair's time, kernels at the rate of one GPU that was measured beside it. ring-flash-attention
(`ring_flash_attn.csv`): efficiency on eight GPUs, kernels at its published rate of one, merges
eager; that full blocks are faster than causal ones of 8k tokens is taken from FlashAttention-2 on
an H200 (`FULL_OVER_CAUSAL`).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from fa4.distributed.forecast import CallShape, make_call_spec
from fa4.distributed.kernel_times import (
    FLOPS_PER_PAIR,
    MEMORY_SHARE,
    MemoryTimes,
    RatedBlocks,
    memory_of,
)
from fa4.distributed.methods import check_spec
from fa4.distributed.plan import Sizes, Spec
from fa4.distributed.simulate import TimingModel, time_spec
from fa4.sim.links import make_fabric
from lab.hardware import RESULTS
from lab.records import read_record

# torch 2.11's FlashAttention-2 on an H200, head dim 128, 2 x 8,192 tokens: 331.5 and 279.3 TFLOP/s
# forward, 307.6 and 289.9 backward.
FULL_OVER_CAUSAL = {"forward": 331.5 / 279.3, "backward": 307.6 / 289.9}
# GPU -> link, HBM bytes/s (data sheets), SMs
PUBLISHED = {
    "8 H800": ("nvlink4-h800", 3.35e12, 132),
    "8 A100": ("nvlink3", 2.039e12, 108),
}


class ComparedRow(NamedTuple):
    """value, predicted: ms of the pair, or efficiency."""

    name: str
    value: float
    predicted: float


def read(name: str) -> list[dict[str, str]]:
    """A record's rows."""
    with (RESULTS / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def predict_ring(
    shape: CallShape, one_gpu_ms: float, transport: str = "group", merge: str = "fused"
) -> float:
    """Milliseconds of a zigzag ring of two H200s, kernels at the rate of one GPU's whole call."""
    spec = make_call_spec(shape, "zigzag", 2)
    pairs = spec.mask.pairs((range(shape.seqlen),))
    rate = FLOPS_PER_PAIR[False] * 256 * pairs * shape.sizes.heads_q / (one_gpu_ms / 1e3)
    blocks = RatedBlocks(shape.sizes, {"whole": rate, "banded": rate})
    fabric = make_fabric(2, "nvlink4", transport=transport)
    model = TimingModel(blocks, memory_of("h200", merge), fabric, 132)
    return 1e3 * max(x.seconds for x in time_spec(spec, model))


def name_call(seqlen: int, heads: int, heads_k: int, causal: bool) -> str:
    """A call, in a table."""
    mask = "causal" if causal else "no mask"
    return f"{seqlen // 1024}k tokens, {heads}/{heads_k} heads, {mask}"


def earlier_rings() -> Iterator[ComparedRow]:
    """Milliseconds of the zigzag ring of a program from before `fa4.distributed`."""
    for row in read("h200x2_ring.csv"):
        seqlen, heads, heads_k = (int(row[x]) for x in ("seqlen", "heads", "heads_k"))
        causal = row["causal"] == "1"
        shape = CallShape(seqlen, Sizes(heads, heads_k), causal=causal)
        found = predict_ring(shape, float(row["one_gpu_ms"]), merge="eager")
        yield ComparedRow(name_call(seqlen, heads, heads_k, causal), float(row["ms"]), found)


class MeasuredRing(NamedTuple):
    """A call of `fa4.distributed` on two GPUs in ms, each transport beside what is predicted."""

    name: str
    one_gpu_ms: float
    by_transport: dict[str, ComparedRow]


def measured_rings() -> Iterator[MeasuredRing]:
    """Of the record two_gpus, forward passes; each beside one GPU of the same run."""
    calls: dict[tuple[int, int, int, bool], dict[str, float]] = {}
    for row in read_record("two_gpus")["times"]:
        if row.get("method") in ("one GPU", "ring"):
            key = (row["seqlen"], row["heads"], row["heads_k"], row["causal"])
            calls.setdefault(key, {})[row.get("transport", "one GPU")] = row["ms"]
    for (seqlen, heads, heads_k, causal), ms in calls.items():
        shape = CallShape(seqlen, Sizes(heads, heads_k), causal=causal)
        one, name = ms["one GPU"], name_call(seqlen, heads, heads_k, causal)
        yield MeasuredRing(name, one, {
            way: ComparedRow(name, ms[way], predict_ring(shape, one, way))
            for way in ("group", "peers")
        })  # fmt: skip


def eight_gpus(gpus: str = "8 H800") -> Iterator[ComparedRow]:
    """Efficiency of ring-flash-attention's rings, 32/8 heads, 8k tokens a GPU."""
    link, hbm_bytes_per_s, sm_count = PUBLISHED[gpus]
    sizes, local = Sizes(32, 8), 8192
    rows = [row for row in read("ring_flash_attn.csv") if row["gpus"] == gpus]
    forward_s = next(1 / float(x["one_gpu_per_s"]) for x in rows if x["pass"] == "fwd")
    work = 256.0 * 32 * local * (local + 1) / 2
    for row in rows:
        alone = 1 / float(row["one_gpu_per_s"])
        seconds = {"forward": forward_s, "backward": alone - forward_s}
        rates = {
            name: {
                "banded": FLOPS_PER_PAIR[name == "backward"] * work / x,
                "whole": FLOPS_PER_PAIR[name == "backward"] * work / x * FULL_OVER_CAUSAL[name],
            }
            for name, x in seconds.items()
            if x > 0
        }
        blocks = RatedBlocks(sizes, rates["forward"], rates.get("backward", {}))
        memory = MemoryTimes(hbm_bytes_per_s * MEMORY_SHARE, "eager")
        model = TimingModel(blocks, memory, make_fabric(8, link), sm_count)
        spec = make_call_spec(CallShape(8 * local, sizes, causal=True), row["method"], 8)
        specs = [spec] if row["pass"] == "fwd" else [spec, _backward(spec)]
        found = sum(max(x.seconds for x in time_spec(one, model)) for one in specs)
        published = float(row["per_s"]) / (float(row["one_gpu_per_s"]) / 8)
        yield ComparedRow(f"{gpus} {row['pass']} {row['method']}", published, 8 * alone / found)


def _backward(spec: Spec) -> Spec:
    return check_spec(replace(spec, backward=True))


def main() -> None:
    """Print both."""
    for row in earlier_rings():
        print(f"{row.name}: {row.value:.2f} ms, predicted {row.predicted:.2f}, "
              f"{row.predicted / row.value - 1:+.1%}")  # fmt: skip
    for ring in measured_rings():
        for way, row in ring.by_transport.items():
            print(f"{row.name}, {way}: {row.value:.2f} ms, predicted {row.predicted:.2f}, "
                  f"{row.predicted / row.value - 1:+.1%}")  # fmt: skip
    for gpus in PUBLISHED:
        for row in eight_gpus(gpus):
            print(f"{row.name}: {row.value:.1%}, predicted {row.predicted:.1%}")


if __name__ == "__main__":
    main()
