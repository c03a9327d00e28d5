"""The tables of docs/hopper.md: measured speed of the Hopper kernel beside others.

`python -m lab.pages.hopper_speed` writes them between their markers in that page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from fa4.commands.bench_random import summarize
from fa4.plan.render import markdown_table
from lab.hardware.warpgroup_backward.predicted import (
    predicted_gradients,
    random_gradients,
    summarised,
)
from lab.hardware.warpgroup_forward import predicted
from lab.pages import DOCS
from lab.pages.marked_tables import MarkedTables
from lab.records import read_record

PAGE = DOCS / "hopper.md"
PEERS = {"flash-attn-4": "flash-attn-4", "cudnn": "cuDNN", "flash": "FlashAttention-2"}
# By the names of PEERS, those of the record of gradients.
NARROW_PEER, NARROW_TOKENS, NARROW_TILE_N = "flash-attn-3", 32768, 96
H100_GRADIENTS = "warpgroup_backward_h100"
GRADIENT_KINDS = (
    ("head dims to 128", "warpgroup_backward", False),
    ("the same, in a fixed order", "warpgroup_backward", True),
    ("head dims above 128", "warpgroup_backward_wide", False),
)
LONG_S = 1e-3  # of random calls
GRADIENT_PEERS = {"flash-attn-4": "flash-attn-4", "cudnn": "cudnn", "flash": "flash-attn-2"}


@dataclass(frozen=True, kw_only=True)
class SpeedPoint:
    """TFLOP/s of one call: of ours, and of peers by the names of PEERS."""

    dims: str
    causal: bool
    seqlen: int
    ours: float
    peers: dict[str, float]


def bench_points() -> Iterator[SpeedPoint]:
    """Of whole calls, as `fa4 bench` timed them."""
    for row in read_record("hopper_bench")["rows"]:
        problem, rates = row["problem"], row["tflops"]
        yield SpeedPoint(
            dims=_dims(problem),
            causal=problem["causal"],
            seqlen=problem["seqlen_q"],
            ours=rates["fa4"],
            peers={name: rates[name] for name in PEERS if name in rates},
        )


def kernel_points() -> Iterator[SpeedPoint]:
    """Of the kernel by itself: the best of the variants that were timed."""
    for call in read_record("warpgroup_forward")["calls"]:
        rates = call["tflops"]
        yield SpeedPoint(
            dims=_dims(call),
            causal=call["causal"],
            seqlen=call["seqlen"],
            ours=max(rate for name, rate in rates.items() if name not in PEERS),
            peers={name: rates[name] for name in PEERS if name in rates},
        )


def gradient_points(record: str = "warpgroup_backward", variant: str = "") -> Iterator[SpeedPoint]:
    """The backward pass whole, as `lab.hardware.warpgroup_backward.measure` timed it.

    variant: how the names of the kernels end that are those of today.
    """
    for row in read_record(record)["rows"]:
        problem, rates = row["problem"], row["tflops"]
        others = (*GRADIENT_PEERS.values(), "deterministic")
        own = [
            rate for name, rate in rates.items()
            if not name.endswith(others) and name.endswith(variant)
        ]  # fmt: skip
        yield SpeedPoint(
            dims=_dims(problem),
            causal=problem["causal"],
            seqlen=problem["seqlen"],
            ours=max(own),
            peers={key: rates[name] for key, name in GRADIENT_PEERS.items() if name in rates},
        )


def wide_points() -> Iterator[SpeedPoint]:
    """The same of head dims above 128."""
    return gradient_points("warpgroup_backward_wide")


def _dims(problem: dict) -> str:
    d, dv = problem["head_dim"], problem.get("head_dim_v")
    return f"{d}" if dv in (d, None) else f"({d}, {dv})"


def render_means(points: Callable[[], Iterator[SpeedPoint]] = bench_points) -> str:
    """How many times as fast as each peer, in the geometric mean; where it was slower."""
    found, rows = list(points()), []
    for name, title in PEERS.items():
        ratios = [point.ours / point.peers[name] for point in found if name in point.peers]
        if not ratios:
            continue
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        slower = sum(ratio < 1 for ratio in ratios)
        rows.append((title, f"{mean:.3f}", str(len(ratios)), str(slower), f"{min(ratios):.2f}"))
    return markdown_table(("against", "times as fast", "calls", "slower in", "worst"), rows)


def render_calls(points: Callable[[], Iterator[SpeedPoint]]) -> str:
    """A row for each head dim and mask, a column for each length: ours / flash-attn-4 / cuDNN."""
    cells: dict[tuple[str, bool], dict[int, str]] = {}
    for point in points():
        others = [point.peers.get(name) for name in ("flash-attn-4", "cudnn")]
        beaten = any(rate is not None and point.ours < rate for rate in others)
        texts = ["-" if rate is None else f"{rate:.0f}" for rate in (point.ours, *others)]
        text = " / ".join(texts) + (" (!)" if beaten else "")
        cells.setdefault((point.dims, point.causal), {})[point.seqlen] = text
    lengths = sorted({length for row in cells.values() for length in row})
    heads = [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths]
    rows = [
        (dims, "causal" if causal else "none", *(row.get(length, "") for length in lengths))
        for (dims, causal), row in cells.items()
    ]
    return markdown_table(("head dim", "mask", *heads), rows)


def render_narrow() -> str:
    """A row for each mask and way to sum, a column for each length of the FP8 kernel."""
    cells: dict[tuple[str, str, str], dict[int, list[float]]] = {}
    record = read_record("warpgroup_fp8")
    fields = {name: variant["fields"] for name, variant in record["variants"].items()}
    for call in record["calls"]:
        if call["batch"] * call["seqlen"] != NARROW_TOKENS:
            continue
        for name, rate in call["tflops"].items():
            if name == NARROW_PEER:
                sums = name
            else:
                sums = "promoted" if fields[name].get("promote") else "tensor core's"
            mask = "causal" if call["causal"] else "none"
            row = cells.setdefault((_dims(call), mask, sums), {})
            row.setdefault(call["seqlen"], []).append(rate)
    lengths = sorted({length for row in cells.values() for length in row})
    rows = [
        (*key, *(f"{max(row[n]):.0f}" if n in row else "" for n in lengths))
        for key, row in sorted(cells.items(), key=lambda item: (int(item[0][0]), item[0][1:]))
    ]
    heads = [f"{n // 1024}k" for n in lengths]
    return markdown_table(("head dim", "mask", "sums", *heads), rows)


def render_narrow_means() -> str:
    """Calls beside FlashAttention-3 by head dim and mask: how many times as fast."""
    record = read_record("warpgroup_fp8")
    ratios: dict[tuple[str, str, str], list[float]] = {}
    for call in record["calls"]:
        peer = call["tflops"].get(NARROW_PEER)
        if peer is None:
            continue
        best: dict[str, float] = {}
        for name, rate in call["tflops"].items():
            if name != NARROW_PEER:
                promoted = record["variants"][name]["fields"].get("promote")
                sums = "promoted" if promoted else "tensor core's"
                best[sums] = max(rate, best.get(sums, 0.0))
        for sums, rate in best.items():
            key = (_dims(call), "causal" if call["causal"] else "none", sums)
            ratios.setdefault(key, []).append(rate / peer)
    rows = []
    for key, found in sorted(ratios.items(), key=lambda item: (int(item[0][0]), item[0][1:])):
        mean = math.exp(math.fsum(map(math.log, found)) / len(found))
        slower = sum(one < 1.0 for one in found)
        rows.append((*key, f"{mean:.3f}", str(len(found)), str(slower), f"{min(found):.2f}"))
    heads = ("head dim", "mask", "sums", "times as fast", "calls", "slower in", "worst")
    return markdown_table(heads, rows)


def render_narrow_errors() -> str:
    """Errors of O over many keys, of variants that differ in how they sum and in P's offset."""
    rows = []
    for variant in read_record("warpgroup_fp8")["variants"].values():
        fields, found = variant["fields"], variant.get("long")
        if not found or fields.get("exp2") or fields["tile_n"] != NARROW_TILE_N:
            continue
        every = fields.get("promote", 0)
        sums = f"promoted, every {every * fields['tile_n']} keys" if every else "tensor core's"
        offset = f"2^{fields.get('offset', 8):g}"
        for mean in (0.0, 1.0):
            values = [f"{one['rms']:.2%}" for one in found if one["mean"] == mean]
            rows.append((sums, offset, f"{mean:g}", *values))
    rows.sort()
    peer = read_record("warpgroup_fp8")["flash-attn-3"]
    for mean in (0.0, 1.0) if peer else ():
        values = [f"{one['rms']:.2%}" for one in peer if one["mean"] == mean]
        rows.append((NARROW_PEER, "", f"{mean:g}", *values))
    return markdown_table(("sums", "P times", "mean of V", "1k keys", "16k", "128k"), rows)


def render_random(*names: str) -> str:
    """Groups of random calls against the fastest peer of each: how many times as fast.

    names: records, one beside the other, each with its GPU if there are several.
    """
    heads, rows = ["calls of"], {}
    for name in names:
        record = read_record(name)
        gpu = f"{record['device'].split()[1]}: " if len(names) > 1 else ""
        heads += [f"{gpu}calls", "times as fast", "slower in", "worst"]
        for one in summarize(record["rows"]):
            row = rows.setdefault(one["group"], [one["group"], *["-"] * 4 * len(names)])
            at = len(heads) - 4
            row[at : at + 4] = (
                str(one["calls"]), f"{one['mean']:.3f}", str(one["slower"]), f"{one['worst']:.2f}"
            )  # fmt: skip
    return markdown_table(tuple(heads), list(rows.values()))


def render_random_peers(record: str = "hopper_random") -> str:
    """The same calls against each peer by itself."""
    rows = []
    for name, title in (*PEERS.items(), ("flash-attn-3", "FlashAttention-3")):
        found = [row["ratio"] for row in read_record(record)["rows"]]
        ratios = [one[name] for one in found if name in one]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            slower = sum(ratio < 1 for ratio in ratios)
            rows.append((title, f"{mean:.3f}", str(len(ratios)), str(slower), f"{min(ratios):.2f}"))
    return markdown_table(("against", "times as fast", "calls", "slower in", "worst"), rows)


def render_random_predictions() -> str:
    """The same calls and others: predicted speed over measured, by kind of mask."""
    found, others = (
        list(predicted.predicted_calls(record["rows"], predicted.machine_of(record)))
        for record in map(read_record, ("hopper_random", "hopper_random_anew"))
    )
    kinds = {
        "all": found,
        "up to 1k keys": [one for one in found if one.problem.seqlen_k <= 1024],
        "less than 0.1 ms": [one for one in found if one.seconds < 1e-4],
        "at least 1 ms": [one for one in found if one.seconds >= 1e-3],
        "no mask": [one for one in found if one.problem.window_size == (None, None)],
        "causal": [one for one in found if one.problem.window_size == (None, 0)],
        "others, drawn when the model was finished": others,
    }
    rows = []
    for name, calls in kinds.items():
        one = predicted.summarised(calls)
        rows.append((name, f"{len(calls)}", f"{one['times']:.3f}", f"{one['mean error']:.1%}",
                     f"{one['rank']:.3f}"))  # fmt: skip
    return markdown_table(("calls of", "calls", "mean", "mean error", "rank"), rows)


def render_gradient_predictions() -> str:
    """Predicted speed over measured, by kind of kernel."""
    rows = []
    for title, record, deterministic in GRADIENT_KINDS:
        found = summarised(list(predicted_gradients(record, deterministic=deterministic)))
        rows.append(
            (title, f"{found['calls']:.0f}", f"{found['times']:.3f}", f"{found['mean error']:.1%}",
             f"{found['largest error']:.1%}", f"{found['rank']:.3f}")
        )  # fmt: skip
    return markdown_table(("kernels", "calls", "mean", "mean error", "largest", "rank"), rows)


def render_random_gradient_predictions() -> str:
    """Random calls of gradients: predicted speed over measured, by kind of kernel and length."""
    rows = []
    for record in ("hopper_random_gradients_anew", "hopper_random_gradients_h100"):
        found = list(random_gradients(record))
        gpu = read_record(record)["device"].split()[1]
        for title, calls in (
            ("head dims to 128", [x for x in found if not x.wide]),
            ("of these, at least 1 ms", [x for x in found if not x.wide and x.seconds >= LONG_S]),
            ("head dims above 128", [x for x in found if x.wide]),
            ("of these, at least 1 ms", [x for x in found if x.wide and x.seconds >= LONG_S]),
        ):
            one = summarised(calls)
            rows.append((gpu, title, f"{one['calls']:.0f}", f"{one['times']:.3f}",
                         f"{one['mean error']:.1%}", f"{one['rank']:.3f}"))  # fmt: skip
    return markdown_table(("GPU", "calls", "number", "mean", "mean error", "rank"), rows)


def render_orders() -> str:
    """Times by other orders of work tiles and queries, by those of the kernel's, in a model."""
    report = read_record("gradient_order")
    rows = [
        (order, *(f"{one['times'][order]['mean']:.2f} ({one['times'][order]['most']:.2f})"
                  for one in report.values()))
        for order in next(iter(report.values()))["times"]
    ]  # fmt: skip
    heads = (f"{kind}, {one['calls']} calls" for kind, one in report.items())
    return markdown_table(("longest first, walk", *heads), rows)


def render_few() -> str:
    """Calls that do not fill the GPU: microseconds, and in how many parts keys are divided."""
    rows = []
    for row in read_record("hopper_splits")["calls"]:
        p, found = row["problem"], row["microseconds"]
        times = [f"{found[name]:.0f}" if name in found else "-" for name in ("fa4", *PEERS)]
        whole = row["by_parts"]["1"]
        mask = ", causal" if p["causal"] else ""
        sizes = f"{p['batch']} x {p['seqlen_q']:,} on {p['seqlen_k']:,} keys{mask}"
        heads = f"{p['heads_q']} on {p['heads_k']}"
        speed = f"{row['tb_per_s']['fa4']:.2f}" if p["seqlen_q"] == 1 else ""
        rows.append((sizes, heads, str(p["head_dim"]), *times, f"{whole:.0f}", speed))
    return markdown_table(
        ("queries", "heads", "head dim", "this kernel", *PEERS.values(), "not divided", "TB/s"),
        rows,
    )


TABLES = MarkedTables(
    "python -m lab.pages.hopper_speed",
    {
        "means": render_means,
        "calls": lambda: render_calls(bench_points),
        "kernel": lambda: render_calls(kernel_points),
        "random": partial(render_random, "hopper_random"),
        "random peers": render_random_peers,
        "random peers anew": partial(render_random_peers, "hopper_random_anew"),
        "random predictions": render_random_predictions,
        "random gradient predictions": render_random_gradient_predictions,
        "random gradients": partial(
            render_random, "hopper_random_gradients", "hopper_random_gradients_h100"
        ),
        "random gradient peers": partial(render_random_peers, "hopper_random_gradients"),
        "few": render_few,
        "gradient orders": render_orders,
        "gradient means": lambda: render_means(gradient_points),
        "gradient means h100": lambda: render_means(partial(gradient_points, H100_GRADIENTS)),
        "gradients": lambda: render_calls(gradient_points),
        "fp8": render_narrow,
        "fp8 means": render_narrow_means,
        "fp8 errors": render_narrow_errors,
        "wide gradient means": lambda: render_means(wide_points),
        "gradient predictions": render_gradient_predictions,
        "wide gradients": lambda: render_calls(wide_points),
    },
)

if __name__ == "__main__":
    TABLES.write(PAGE)
    print(f"wrote the tables of {PAGE.name}")
