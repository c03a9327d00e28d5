"""The demo's one figure: error per layer against its budget, and rescales per KV tile by tau."""

from __future__ import annotations

import math
from typing import Any

from fa4.base import drawing
from fa4.base.drawing import BLUE, GREY, ORANGE, VERMILION

FEATURED_TAU = 8.0  # the one FlashAttention-4 uses for bf16


def draw_figure(report: dict[str, Any]) -> bytes:
    """The figure of a report (`build_report`) as PNG. ImportError if matplotlib is missing."""
    with drawing.styled():
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        spacing = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08, wspace=0.04)
        figure = drawing.new_figure((12.5, 5.4), layout=spacing)
        errors, rescales = figure.subplots(1, 2, width_ratios=(1, 1.15))
        draw_errors(errors, report)
        draw_rescales(rescales, report)
        figure.supxlabel(describe_input(report), fontsize=9, color=GREY)
        return drawing.save(figure, "png")


def describe_input(report: dict[str, Any]) -> str:
    """One line on what was measured."""
    about = report["input"]
    causal = ", causal mask" if report["causal"] else ""
    if about["kind"] == "text":
        lengths = about["chunk_lengths"]
        what = f"{about['model']} reading {about['tokens_used']} tokens in {len(lengths)} chunks"
    else:
        what = f"q, k, v from {about['path'].replace('$', ' ')}"
    kinds = {f"{layer['heads']} heads of {layer['head_dim']}" for layer in report["layers"]}
    return f"{what}; {' and '.join(sorted(kinds))}, {report['dtype']}{causal}"


def draw_errors(axes: Any, report: dict[str, Any]) -> None:
    """Left panel: budget, FA4's error and plain attention's error of O for each layer."""
    checks = [layer["out"] for layer in report["layers"]]
    within = [check["within_budget"] for check in checks]
    positions = range(len(checks))
    budgets, plain, errors = (
        [check[key] for check in checks] for key in ("budget", "plain_max_error", "error")
    )
    top = max([x for x in [*budgets, *plain, *errors] if math.isfinite(x) and x > 0], default=1.0)
    # Matplotlib would write the power of ten into the space of the legend.
    power = 3 * math.floor(math.log10(top) / 3)
    budgets, plain, errors = (
        [min(x, 1.1 * top) / 10.0**power for x in values] for values in (budgets, plain, errors)
    )  # an infinite error sits on top
    handles = [axes.bar(positions, budgets, width=0.62, color="#DDDDDD", label="error budget")]
    handles += axes.plot(positions, plain, "s", color=ORANGE, ms=8, mfc="white", mew=1.8,
                         label="plain bf16 attention")  # fmt: skip
    for marker, colour, wanted, label in (
        ("o", BLUE, True, "FA4 mode"),
        ("X", VERMILION, False, "FA4 mode, OVER budget"),
    ):
        points = [(x, errors[x]) for x in positions if within[x] is wanted]
        if points:
            handles += axes.plot(*zip(*points, strict=True), marker, color=colour, ms=9,
                                 label=label)  # fmt: skip
    axes.set_title(error_title(report["layers"]), pad=30)
    axes.set_xlabel("layer (the first is 0)")
    unit = "units of O" if power == 0 else f"10$^{{{power}}}$ units of O"
    axes.set_ylabel(f"|O \u2212 float64 oracle|, worst element  ({unit})")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if len(checks) <= 16:
        axes.set_xticks(list(positions))
    axes.set_ylim(0, 1.16 * top / 10.0**power)
    place_legend(axes, handles)


def error_title(layers: list[dict[str, Any]]) -> str:
    """What the left panel shows, in numbers."""
    over = {part: sum(not layer[part]["within_budget"] for layer in layers)
            for part in ("out", "lse")}  # fmt: skip
    for part, name in (("out", "O"), ("lse", "LSE")):
        if over[part]:
            return f"{name} is OVER its error budget in {over[part]} of {len(layers)} layers"
    kept = f"All {len(layers)} layers stay" if len(layers) > 1 else "The layer stays"
    return f"{kept} within the error budget"


def place_legend(axes: Any, handles: list[Any]) -> None:
    """One row between the title and the panel, where no data can be."""
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=len(handles),
        frameon=False, fontsize=9, borderpad=0, handlelength=1.5, handletextpad=0.4,
        columnspacing=1.2,
    )  # fmt: skip


def draw_rescales(axes: Any, report: dict[str, Any]) -> None:
    """Right panel: share of warps that rescale at each KV tile, one line for each tau."""
    from matplotlib import colormaps

    sweep = report["rescale_rate"]
    visited, taus = sweep["tile_visited"], sweep["taus"]
    axes.set_xlabel(f"KV tile in the order visited (tiles of {sweep['tile_n']} keys)")
    axes.set_ylabel("warps of 32 rows that rescale O (%)")
    if not visited:
        axes.set_title("One KV tile: nothing to rescale", pad=30)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    handles = []
    for number, (tau, rates) in enumerate(zip(taus, sweep["rate"], strict=True)):
        featured = tau == FEATURED_TAU
        shade = colormaps["viridis"](0.8 * number / max(len(taus) - 1, 1))
        handles += axes.plot(
            visited, [100 * rate for rate in rates], marker="osD^vP"[number % 6],
            color=VERMILION if featured else shade, lw=2.8 if featured else 1.5,
            ms=6 if featured else 4.5, zorder=3 if featured else 2,
            label=f"τ = {tau:g}" + (" (FA4)" if featured else ""),
        )  # fmt: skip
    axes.set_title(rescale_title(sweep), pad=30)
    axes.set_ylim(-2, 104)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if len(visited) <= 24:
        axes.set_xticks(visited)
    axes.grid(axis="y", color="#E6E6E6")
    axes.set_axisbelow(True)
    place_legend(axes, handles)
    annotate_edge(axes, report)


def rescale_title(sweep: dict[str, Any]) -> str:
    """What the right panel shows, in numbers."""
    rates = dict(zip(sweep["taus"], sweep["total_rate"], strict=True))
    eager, lazy = rates.get(0.0, 0.0), rates.get(FEATURED_TAU, 0.0)
    if not eager:
        return "The maximum never moves after the first tile"
    skipped = 100 * (1 - lazy / eager)
    return f"τ = {FEATURED_TAU:g} skips {skipped:.0f}% of the rescales that τ = 0 makes"


def annotate_edge(axes: Any, report: dict[str, Any]) -> None:
    """Say why the curves bend where they do, if the reason is known."""
    sweep = report["rescale_rate"]
    first, last = sweep["tile_visited"][0], sweep["tile_visited"][-1]
    note: dict[str, Any] = {
        "xytext": (last - 0.30 * (last - first), 95), "ha": "center", "va": "center",
        "fontsize": 9, "color": GREY,
    }  # fmt: skip
    if report["causal"]:
        text = "causal: the first tile that a row sees\nat all counts as a rise, for every τ"
        axes.annotate(text, xy=note["xytext"], **note)
    elif last * sweep["tile_n"] in report["input"].get("chunk_lengths", []):
        text = "the last tile holds the\nchunk's first token, [CLS]"
        arrow = {"arrowstyle": "->", "color": GREY}
        axes.annotate(text, xy=(last - 0.12, 100 * sweep["rate"][0][-1]), arrowprops=arrow, **note)
