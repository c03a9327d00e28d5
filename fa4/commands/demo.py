"""`fa4 demo`: FA4's algorithm on real queries, keys and values, its errors and its rescales."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fa4.base.files import check_folder, write_whole
from fa4.commands import SCHEMA_VERSION, emit, plain

MOST_FINDINGS = 3  # shown to people; the report has all


def demo(
    text: Annotated[
        Path | None, typer.Option("--text", help="UTF-8 text to read instead of the essay.")
    ] = None,
    arrays: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help=".npz or .safetensors file with q, k, v or LAYER.q, LAYER.k, LAYER.v, each "
            "(S, H, D) or (B, S, H, D), instead of a text.",
        ),
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal", help="Hide later keys in the attention that is measured.")
    ] = False,
    chunks: Annotated[
        int, typer.Option("--chunks", min=1, help="Read at most so many chunks of 512 tokens.")
    ] = 16,
    no_kernel: Annotated[
        bool, typer.Option("--no-kernel", help="Leave the compiled kernel and the emulator out.")
    ] = False,
    out: Annotated[
        Path, typer.Option("--out", help="Folder for report.json and figure.png.")
    ] = Path("out/demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Run FA4's algorithm on the attention layers of a real model and check every layer.

    MiniLM-L6-v2 reads a text; each layer's q, k, v, rounded to bf16, go through FA4's forward pass
    and through the float64 oracle. One head also goes through the compiled SM100 kernels, forward
    and backward, executed by the emulator, if the compiler is installed. Exit code 1 if an error
    exceeds its budget or the emulator finds a fault.

    Example: fa4 demo --causal --out out/causal
    """
    from fa4.demo.inputs import file_source, text_source
    from fa4.demo.report import build_report

    if text is not None and arrays is not None:
        raise ValueError(f"--text and --input exclude each other; got {text} and {arrays}")
    check_folder(out)
    source = file_source(arrays) if arrays is not None else text_source(text, chunks)
    left_out = source.about.get("tokens_in_text", 0) - source.about.get("tokens_used", 0)
    if left_out:
        say(f"the last {left_out} tokens are left out; --chunks {chunks} sets the limit")
    report = build_report(source, causal, say, kernel=not no_kernel)
    if report["kernel"] and report["kernel"]["problem"]:
        say(report["kernel"]["problem"])
    image = draw(report)
    report["figure"] = None if image is None else str(out / "figure.png")
    report["report"] = str(out / "report.json")
    document = {"schema_version": SCHEMA_VERSION, **plain(report)}
    content = json.dumps(document, indent=2, allow_nan=False) + "\n"
    write_whole(out / "figure.png", image)
    write_whole(out / "report.json", content.encode())
    emit(report, as_json, render)
    ran = report["kernel"] and not report["kernel"]["problem"]
    if not report["within_budget"] or (ran and not report["kernel"]["ok"]):
        raise typer.Exit(1)


def render_kernel(kernel: Mapping[str, Any] | None) -> tuple[str, ...]:
    """What the compiled kernel did with one head; nothing if it did not run."""
    if kernel is None or kernel["problem"]:
        return ()
    used, head = kernel["resources"], f"head dim {kernel['head_dim']}"
    if kernel["padded_head_dim"] != kernel["head_dim"]:
        head += f" (padded to {kernel['padded_head_dim']})"
    registers = ", ".join(f"{role} {number}" for role, number in used["registers"].items())
    lines = [
        f"Compiled kernel ({kernel['arch']}, {kernel['compiler']}) in the emulator, first head of "
        f"{kernel['layer']}, {kernel['rows']} x {kernel['keys']}, {head}: "
        + ("ok" if kernel["ok"] else "WRONG"),
        *render_checks(kernel, {"out": "O", "lse": "LSE"}),
        f"  registers per thread: {registers}; spills {used['spill_bytes']} B",
        f"  shared memory {used['smem_bytes']} of {used['smem_bytes_limit']} B, tensor memory "
        f"{used['tmem_columns_used']} of {used['tmem_columns_limit']} columns",
    ]
    row = kernel["prediction"]
    if row is not None:
        lines.append(
            f"  predicted on a {row['machine']} by its own instruction counts, one such layer: "
            f"{row['microseconds']:.1f} us"
        )
    return *lines, *render_backward(kernel["backward"])


def render_backward(backward: Mapping[str, Any] | None) -> tuple[str, ...]:
    """What the backward kernels did with the same head; nothing if they did not run."""
    if backward is None or backward["problem"]:
        return ()
    bits = "the same bits" if backward["same_bits"] else "DIFFERENT BITS"
    return (
        "Backward kernels in the emulator, the same head: "
        + ("ok" if backward["ok"] else "WRONG")
        + f"; {bits} under every schedule",
        *render_checks(backward, {"dq": "dQ", "dk": "dK", "dv": "dV"}),
    )


def render_checks(result: Mapping[str, Any], labels: Mapping[str, str]) -> Iterator[str]:
    """Errors beside their budgets; findings by schedule."""
    errors = ", ".join(
        f"{label} error {check['error']:.1e} of {check['budget']:.1e} allowed"
        for name, label in labels.items()
        if (check := result["checks"].get(name))
    )
    yield f"  {errors or 'no result'}"
    counts = ", ".join(f"{row['schedule']} {len(row['findings'])}" for row in result["schedules"])
    yield f"  races and other findings by schedule: {counts}"
    findings = [finding for row in result["schedules"] for finding in row["findings"]]
    yield from (f"    {finding}" for finding in findings[:MOST_FINDINGS])


def render_speed(prediction: Mapping[str, Any]) -> tuple[str, ...]:
    """Simulated B200 times, one line each; the layer's is missing for a shape without a kernel."""
    lines = []
    for name, title in (("layer", "one such layer"), ("headline", "the paper's headline shape")):
        row = prediction[name]
        if row is None:
            continue
        lines.append(
            f"Predicted on a {row['machine']}, {title} (B{row['batch']} H{row['heads']} "
            f"S{row['seqlen']} D{row['head_dim']}): {row['microseconds']:.1f} us, "
            f"{row['tflops']:.0f} TFLOP/s, {row['peak_share']:.0%} of peak"
        )
    return tuple(lines)


def say(line: str) -> None:
    """Progress and remarks go to stderr, so that stdout holds the report alone."""
    print(f"fa4 demo: {line}", file=sys.stderr, flush=True)


def draw(report: dict[str, Any]) -> bytes | None:
    """The figure as PNG; None, and a sentence on stderr, without matplotlib."""
    from fa4.demo.figure import draw_figure

    try:
        return draw_figure(report)
    except ImportError as error:
        say(str(error))
        return None


def render(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """The report for people: one row per layer, then the rescales, the verdict and the files."""
    from rich import box
    from rich.table import Table

    # Fits 80 columns.
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("layer", overflow="fold")
    for title in ("O error", "budget", "LSE error", "budget", "rescaled", "skipped", "emulated"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("")
    for layer in report["layers"]:
        skipped = layer["skipped_share"]
        table.add_row(
            layer["name"],
            *(f"{layer['out'][key]:.1e}" for key in ("error", "budget")),
            *(f"{layer['lse'][key]:.1e}" for key in ("error", "budget")),
            f"{layer['rescales_done']}",
            "-" if skipped is None else f"{skipped:.2%}",
            f"{layer['emulated_share']:.1%}",
            "ok" if layer["within_budget"] else "OVER",
        )
    layers, sweep = report["layers"], report["rescale_rate"]
    kept = sum(layer["within_budget"] for layer in layers)
    shares = ", ".join(
        f"{rate:.1%} at {tau:g}"
        for tau, rate in zip(sweep["taus"], sweep["total_rate"], strict=True)
    )
    verdict = "all" if kept == len(layers) else f"{len(layers) - kept} over budget, {kept}"
    mask = ", causal" if report["causal"] else ""
    return (
        f"FA4 mode ({report['dtype']}{mask}) against the float64 oracle, at the worst element:",
        table,
        f"Warps that rescale, by tau, in KV tiles of {sweep['tile_n']} keys: {shares}",
        f"Layers within budget: {verdict} of {len(layers)}",
        *render_kernel(report["kernel"]),
        *render_speed(report["prediction"]),
        *(f"wrote {report[key]}" for key in ("report", "figure") if report[key]),
    )
