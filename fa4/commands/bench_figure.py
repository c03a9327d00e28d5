"""The figure of `fa4 bench`: TFLOP/s by length, a panel for each head dim and mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fa4.base import drawing
from fa4.base.drawing import require_matplotlib

__all__ = ["draw_bench", "require_matplotlib"]

LINES = {
    "fa4": (drawing.BLUE, "o", "-"),
    "flash-attn-4": (drawing.VERMILION, "s", "-"),
    "cudnn": (drawing.GREEN, "^", "-"),
    "flash": (drawing.ORANGE, "v", "-"),
    "predicted": (drawing.GREY, "", ":"),
}
LABELS = {"fa4": "fa4", "cudnn": "SDPA, cuDNN", "flash": "SDPA, FlashAttention-2"}
PANEL_INCHES = 3.2, 2.7


def draw_bench(report: Mapping[str, Any], kind: str) -> bytes:
    """The figure of a report as "png" or "svg". ImportError if matplotlib is missing."""
    rows = report["rows"]
    dims = list(dict.fromkeys(_dims(row["problem"]) for row in rows))
    masks = list(dict.fromkeys(row["problem"]["causal"] for row in rows))
    width, height = PANEL_INCHES
    with drawing.styled():
        size = max(2, len(dims)) * width, len(masks) * height + 0.8
        figure = drawing.new_figure(size, layout="constrained")
        panels = figure.subplots(len(masks), len(dims), squeeze=False, sharex=True)
        for causal, line in zip(masks, panels, strict=True):
            for dim, axes in zip(dims, line, strict=True):
                key = (dim, causal)
                chosen = [r for r in rows if (_dims(r["problem"]), r["problem"]["causal"]) == key]
                draw_panel(axes, chosen)
                axes.set_title(f"d {dim}, {'causal' if causal else 'no mask'}", loc="left")
        figure.supylabel(f"TFLOP/s, {report['pass']}, {report['dtype']}")
        figure.supxlabel(f"sequence length; 32k tokens; {report['device']}")
        figure.text(0.995, 0.005, "Made by: fa4 bench --figure FILE", fontsize=7,
                    color=drawing.GREY, ha="right")  # fmt: skip
        handles = {
            label: handle
            for axes in panels.flat
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            handles.values(), handles, loc="outside upper left", ncols=len(handles), frameon=False
        )
        return drawing.save(figure, kind)


def draw_panel(axes: Any, rows: list[Mapping[str, Any]]) -> None:
    """A line for each back end, and one for the prediction."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        found = row["tflops"] | {"predicted": row["predicted_tflops"]}
        for name, tflops in found.items():
            if tflops is not None:
                lines.setdefault(name, []).append((row["problem"]["seqlen_q"], tflops))
    for name, (colour, marker, style) in LINES.items():
        if name in lines:
            axes.plot(*zip(*sorted(lines[name]), strict=True), style, color=colour, marker=marker,
                      ms=4, label=LABELS.get(name, name))  # fmt: skip
    axes.set_xscale("log", base=2)
    lengths = sorted({row["problem"]["seqlen_q"] for row in rows})
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)


def _dims(problem: Mapping[str, Any]) -> str:
    d, dv = problem["head_dim"], problem["head_dim_v"]
    return f"{d}" if d == dv else f"{d}, {dv}"
