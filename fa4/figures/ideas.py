"""What FlashAttention-4's ideas are worth, and what the machines' units can do."""

from __future__ import annotations

from typing import Any

from fa4.base import drawing
from fa4.figures.entry import Data, FigureEntry

SETTINGS = {"seqlen": "8k", "causal": "yes"}
MACHINES = ("h200", "b200", "b300")
UNITS = {"tensor": "tensor core (products)", "smem": "shared memory (operands)",
         "mufu": "exponential unit (2^x)"}  # fmt: skip
TILE_ROWS, TILE_KEYS = 128, 128


def collect_ablation() -> Data:
    """The kernel built up again, one idea after the other, from one that has none of them.

    Ideas are taken away from the complete kernel in the reverse order of the figure, and stay away.
    """
    from fa4.designs.ideas import FORWARD_IDEAS
    from fa4.sim.ablate import OFF_RESCALE_RATE
    from fa4.sim.options import build
    from fa4.sim.predict import REAL_RESCALE_RATE

    settings: dict[str, object] = {**SETTINGS, "rescale_rate": REAL_RESCALE_RATE}
    request = build(settings)
    tflops = request.predict().tflops
    steps, left_out = [], []
    for idea in reversed(FORWARD_IDEAS):
        if not idea.used(request.pipeline):
            continue
        fewer = settings | dict(idea.settings)
        if "tau" in idea.settings:
            fewer["rescale_rate"] = OFF_RESCALE_RATE
        try:
            without = build(fewer).predict().tflops
        except ValueError:  # does not fit: P and O of two Q tiles in shared memory
            left_out.append(idea.name)
            continue
        steps.append((idea.name, without, tflops))
        settings, tflops = fewer, without
    steps.reverse()
    note = f"Always there, as without it nothing fits: {', '.join(left_out)}." * bool(left_out)
    return {
        "title": f"From {tflops:,.0f} to {steps[-1][2]:,.0f} TFLOP/s: what each idea adds",
        "note": f"{REAL_RESCALE_RATE:.0%} of the steps rescale O, as in a real model. {note} "
        "Ideas interact: in another order the steps are different.",
        "columns": ["idea added", "TFLOP/s before", "TFLOP/s after"],
        "rows": [["none of them", 0.0, tflops], *(list(step) for step in steps)],
    }


def draw_ablation(figure: Any, data: Data) -> None:
    """A waterfall from top to bottom."""
    axes = figure.subplots()
    rows = data["rows"]
    most = max(after for _, _, after in rows)
    for number, (_, before, after) in enumerate(rows):
        gain = after - before
        colour, hatch = (drawing.BLUE, "") if gain >= 0 else (drawing.VERMILION, "xx")
        if number == 0:
            colour, hatch = drawing.SILVER, "//"
        axes.barh(number, gain, left=before, height=0.7, color=colour, hatch=hatch,
                  edgecolor="white")  # fmt: skip
        label = f"{after:,.0f}" if number == 0 else f"{gain:+,.0f}"
        axes.text(max(before, after) + 0.008 * most, number, label, va="center")
        if number + 1 < len(rows):
            axes.plot([after, after], [number, number + 1], color=drawing.GREY, linewidth=0.8)
    last = len(rows)
    axes.barh(last, rows[-1][2], height=0.7, color=drawing.GREEN, hatch="..", edgecolor="white")
    axes.text(rows[-1][2] + 0.008 * most, last, f"{rows[-1][2]:,.0f}", va="center", weight="bold")
    names = [rows[0][0], *(f"+ {row[0]}" for row in rows[1:]), "all of them"]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * most)
    axes.set_xlabel("predicted TFLOP/s on B200, causal, 8k tokens, head dim 128, bf16")
    axes.set_title(data["title"])


def collect_roofline() -> Data:
    """Microseconds that one SM of each machine needs for a tile of 128 x 128 x 128, by unit."""
    from fa4.designs import plan_of
    from fa4.sim.options import build
    from fa4.sim.roofline import roofline_terms

    rows = []
    for name in MACHINES:
        request = build({"machine": name, "exp2_frequency": 0} if name != "h200" else
                        {"machine": name})  # fmt: skip
        machine = request.machine
        pipeline: Any = request.pipeline
        plan = plan_of(pipeline, machine.gpu)
        tiles = plan_rows(pipeline) / TILE_ROWS * pipeline.tile_n / TILE_KEYS
        terms = roofline_terms(plan, machine, paper=True)
        for unit in UNITS:
            cycles = terms.totals[unit] / tiles
            rows.append([machine.name, unit, cycles, 1e9 * cycles / machine.clock_hz])
    return {
        "title": "Tensor cores doubled, exponentials did not: what a tile of attention needs",
        "note": "One tile: 128 queries x 128 keys, head dim 128, forward, without software 2^x; "
        "the longest bar of a machine bounds its speed.",
        "columns": ["machine", "unit", "cycles of an SM", "nanoseconds"],
        "rows": rows,
    }


def plan_rows(pipeline: Any) -> int:
    """Queries of a CTA's work tile."""
    numerics = getattr(pipeline, "numerics", None)
    rows: int = numerics.tile_m * numerics.q_tiles if numerics else pipeline.block_rows
    return rows


def draw_roofline(figure: Any, data: Data) -> None:
    """A group of bars for each machine."""
    axes = figure.subplots()
    colours = (drawing.BLUE, drawing.PINK, drawing.ORANGE)
    machines = list(dict.fromkeys(row[0] for row in data["rows"]))
    for place, (unit, label) in enumerate(UNITS.items()):
        chosen = {row[0]: row for row in data["rows"] if row[1] == unit}
        for number, machine in enumerate(machines):
            _, _, cycles, ns = chosen[machine]
            y = number + 0.27 * (place - 1)
            axes.barh(y, ns, height=0.25, color=colours[place], edgecolor="white",
                      hatch=drawing.HATCHES[place],
                      label=label if number == 0 else None)  # fmt: skip
            axes.text(ns + 4, y, f"{ns:,.0f} ns = {cycles:,.0f} cycles", va="center", fontsize=8.5)
    axes.set_yticks(range(len(machines)), machines)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(row[3] for row in data["rows"]))
    axes.set_xlabel("nanoseconds of one SM for one tile, at the clock of the data sheet's peak")
    axes.legend(frameon=False, loc="lower right")
    axes.set_title(data["title"])


ABLATION = FigureEntry(
    name="ablation",
    about="waterfall: what each of FlashAttention-4's ideas adds (predicted)",
    sources="fa4's simulator; the figure measured shows its error",
    size_inches=(9.0, 4.6),
    collect=collect_ablation,
    draw=draw_ablation,
)
ROOFLINE = FigureEntry(
    name="roofline",
    about="what one tile needs of each unit on H200, B200 and B300",
    sources="rates of the units in fa4/hardware.py, each with its own (fa4 machines NAME)",
    size_inches=(9.0, 4.2),
    collect=collect_roofline,
    draw=draw_roofline,
)
