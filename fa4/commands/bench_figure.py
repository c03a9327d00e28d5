"""The figure of `fa4 bench`: TFLOP/s by length, a panel for each head dim and mask."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

# Okabe and Ito's colours, which people with any kind of colour blindness can tell apart.
LINES = {
    "fa4": ("#0072B2", "o", "-"),
    "flash-attn-4": ("#D55E00", "s", "-"),
    "cudnn": ("#009E73", "^", "-"),
    "flash": ("#E69F00", "v", "-"),
    "predicted": ("#666666", "", ":"),
}
LABELS = {"fa4": "fa4", "cudnn": "SDPA, cuDNN", "flash": "SDPA, FlashAttention-2"}
STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "svg.hashsalt": "fa4",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
PANEL_INCHES = 3.2, 2.7


def require_matplotlib() -> None:
    """Raises ImportError if it is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"the figure needs matplotlib ({error}): pip install matplotlib"
        ) from None


def draw_bench(report: Mapping[str, Any], kind: str) -> bytes:
    """The figure of a report as "png" or "svg". ImportError if matplotlib is missing."""
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = report["rows"]
    dims = list(dict.fromkeys(_dims(row["problem"]) for row in rows))
    masks = list(dict.fromkeys(row["problem"]["causal"] for row in rows))
    width, height = PANEL_INCHES
    with matplotlib.rc_context(STYLE):
        size = max(2, len(dims)) * width, len(masks) * height + 0.8
        figure = Figure(figsize=size, dpi=130, layout="constrained")
        FigureCanvasAgg(figure)  # no display, whatever the user's settings say
        panels = figure.subplots(len(masks), len(dims), squeeze=False, sharex=True)
        for causal, line in zip(masks, panels, strict=True):
            for dim, axes in zip(dims, line, strict=True):
                key = (dim, causal)
                chosen = [r for r in rows if (_dims(r["problem"]), r["problem"]["causal"]) == key]
                draw_panel(axes, chosen)
                axes.set_title(f"d {dim}, {'causal' if causal else 'no mask'}", loc="left")
        figure.supylabel(f"TFLOP/s, {report['pass']}, {report['dtype']}")
        figure.supxlabel(f"sequence length; 32k tokens; {report['device']}")
        handles = {
            label: handle
            for axes in panels.flat
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            handles.values(), handles, loc="outside upper left", ncols=len(handles), frameon=False
        )
        image = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(image, format=kind, metadata=metadata)
    return image.getvalue()


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
