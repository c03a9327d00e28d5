"""`fa4 predict --pass bwd` of Hopper's kernels: a time for each of them, one behind the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fa4.config import require

if TYPE_CHECKING:
    from fa4.sim.options import GradientRequest

MODEL_ERROR = (
    "not fitted to any backward kernel; beside the records of an H200: docs/hopper.md, Gradients"
)


def find_request(settings: Mapping[str, object]) -> GradientRequest | None:
    """What is asked of Hopper's backward kernels; None where another kernel is meant.

    Raises ValueError for a setting that they have not.
    """
    from fa4.sim.options import build_hopper_backward

    return build_hopper_backward(settings)


def gradient_report(request: GradientRequest) -> dict[str, Any]:
    """As plain data."""
    from fa4.sim.hopper_backward import predict_hopper_backward

    found = predict_hopper_backward(
        request.problem, request.machine, deterministic=request.deterministic,
        lengths=request.lengths,
    )  # fmt: skip
    return {
        "problem": asdict(found.problem),
        "machine": found.machine,
        "deterministic": request.deterministic,
        "seconds": found.seconds,
        "tflops": found.tflops,
        "clock_hz": found.clock_hz,
        "kernels": [asdict(kernel) for kernel in found.kernels],
        "accuracy": {"text": MODEL_ERROR},
    }


def render_gradients(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """A line for the call, one for each kernel."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    problem = report["problem"]
    table = Table("kernel", "time", "cycles", "busiest unit", box=SIMPLE_HEAD, pad_edge=False)
    for kernel in report["kernels"]:
        busy = sorted(kernel["unit_busy"].items(), key=lambda item: -item[1])
        shown = f"{busy[0][0]} {busy[0][1]:.0%}" if busy else "HBM"
        table.add_row(kernel["name"], f"{kernel['seconds'] * 1e6:.1f} us",
                      f"{kernel['cycles']:.0f}" if busy else "-", shown)  # fmt: skip
    order = ", sums in a fixed order" if report["deterministic"] else ""
    return (
        f"backward pass on {report['machine']}: batch {problem['batch']}, {problem['seqlen_q']} "
        f"queries x {problem['seqlen_k']} keys, {problem['heads_q']} heads on "
        f"{problem['heads_k']}, d {problem['head_dim']}, dv {problem['head_dim_v']}{order}",
        f"{report['seconds'] * 1e6:.1f} us, {report['tflops']:.0f} TFLOP/s at "
        f"{report['clock_hz'] / 1e9:.2f} GHz",
        table,
        f"model error: {report['accuracy']['text']}",
    )


def refuse_options(options: Mapping[str, object]) -> None:
    """Raises ValueError for what only one kernel's prediction has."""
    for name, value in options.items():
        require(not value, f"{name} is not of the backward pass of Hopper", value)
