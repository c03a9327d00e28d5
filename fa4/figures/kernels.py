"""Figures of the kernels themselves: two steps as a timeline, bytes through shared memory."""

from __future__ import annotations

from typing import Any

from fa4.base import drawing
from fa4.figures.entry import Data, FigureEntry

STEADY = {"seqlen": "8k", "cta_group": 1}  # 512 keys have no two steady steps
TIMELINE_STEPS, RECORDED_STEPS = 2, 12
MOVERS = {  # colour of what moves bytes, as fa4.plan.traffic names it
    "products": drawing.BLUE,
    "copies": drawing.SKY,
    "stores": drawing.ORANGE,
    "stores from a peer": drawing.PINK,
    "bulk reductions": drawing.VERMILION,
}
MOVER_NAMES = {"products": "operands of products", "copies": "loads of Q, dO, statistics",
               "stores": "stores of P, dS, dQ", "stores from a peer": "dS from the other CTA",
               "bulk reductions": "dQ to global memory"}  # fmt: skip
KIB = 1024


def collect_timeline() -> Data:
    """Busy shares in two steady steps of the forward kernel; the timeline itself is drawn."""
    from fa4.sim.figure import steady_window, title_of, unit_shares
    from fa4.sim.options import build
    from fa4.sim.timeline import record

    request = build(STEADY)
    timeline = record(request.problem, request.pipeline, request.machine, request.simulation,
                      kv_tiles=RECORDED_STEPS)  # fmt: skip
    window = steady_window(timeline, TIMELINE_STEPS)
    shares = unit_shares(timeline, window)
    return {
        "title": title_of(timeline, window),
        "note": "Predicted. Roles above the line, units below it; dashed: a step begins.",
        "columns": ["unit", "busy (share of the time)"],
        "rows": [[unit, share] for unit, share in shares.items()],
        "timeline": timeline,
        "window": window,
    }


def draw_timeline(figure: Any, data: Data) -> None:
    """The picture of `fa4 trace --out x.svg`."""
    from fa4.sim.figure import draw_axes

    draw_axes(figure.subplots(), data["timeline"], data["window"])


def collect_smem() -> Data:
    """KiB through the shared memory of a CTA for each query tile of the backward pass."""
    from fa4.config import BackwardConfig, BackwardPipeline
    from fa4.hardware import B200
    from fa4.plan.backward import backward_plan
    from fa4.plan.traffic import tile_traffic

    rows: list[list[Any]] = []
    for group in (1, 2):
        pipeline = BackwardPipeline(numerics=BackwardConfig(cta_group=group))
        moved = tile_traffic(backward_plan(pipeline, B200))
        rows += [[group, name, moved.get(name, 0) / KIB] for name in MOVERS]
    totals = [sum(row[2] for row in rows if row[0] == group) for group in (1, 2)]
    return {
        "title": f"A CTA pair moves {1 - totals[1] / totals[0]:.0%} fewer bytes of shared memory",
        "note": "Backward, tiles of 128 x 128, head dim 128, bf16; bytes of one CTA.",
        "columns": ["CTAs that work together", "what moves", "KiB for each query tile"],
        "rows": rows,
    }


def draw_smem(figure: Any, data: Data) -> None:
    """One stacked bar for a CTA alone, one for a CTA of a pair."""
    axes = figure.subplots()
    totals = {1: 0.0, 2: 0.0}
    for place, (name, colour) in enumerate(MOVERS.items()):
        for group in totals:
            kib = next(row[2] for row in data["rows"] if row[:2] == [group, name])
            axes.barh(group, kib, left=totals[group], height=0.6, color=colour, edgecolor="white",
                      hatch=drawing.HATCHES[place],
                      label=MOVER_NAMES[name] if group == 1 else None)  # fmt: skip
            if kib > 12:
                axes.text(totals[group] + kib / 2, group, f"{kib:g}", ha="center", va="center",
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})  # fmt: skip
            totals[group] += kib
    for group, total in totals.items():
        axes.text(total + 4, group, f"{total:g} KiB", va="center", weight="bold")
    axes.set_yticks([1, 2], ["one CTA alone", "one CTA of a pair"])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.14 * max(totals.values()))
    axes.set_xlabel("KiB through the shared memory of one CTA, for each query tile")
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.22), fontsize=9)
    axes.set_title(data["title"])


TIMELINE = FigureEntry(
    name="timeline",
    about="two steady steps of the forward kernel, by warp role and unit",
    sources="fa4's simulator on the kernel's plan (fa4 trace)",
    size_inches=(15.0, 8.2),
    collect=collect_timeline,
    draw=draw_timeline,
)
SMEM = FigureEntry(
    name="smem",
    about="bytes through shared memory of the backward pass, one CTA and a pair",
    sources="the kernels' plans; a run in the emulator counts the same (docs/backward.md)",
    size_inches=(9.0, 3.8),
    collect=collect_smem,
    draw=draw_smem,
)
