"""The tables of docs/simulator.md: what work costs, what was fitted, how wrong predictions are.

`python -m lab.pages.simulator_tables` writes them between their markers in that file, and the
picture beside them. Errors of fits to other points come from `lab/benchmarks/validation.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from fa4.figures.accuracy import B200_FILE, H100_FILE, HOPPER_FILE
from fa4.plan.render import markdown_table
from fa4.sim.cost_table import FREE_CONSTANTS, CostTable, H100Costs, HopperCosts
from fa4.sim.ensemble import constant_sets, interval_of, seconds_of
from fa4.sim.machine import BLACKWELL_COSTS, COSTS, find_machine
from fa4.sim.measurements import pipeline_for, read_measurements, select_rows
from fa4.sim.options import build
from fa4.sim.power import B200_POWER, H200_POWER
from fa4.sim.predict import predict
from fa4.sim.validation import Comparison, compare
from lab import ROOT
from lab.hardware.hopper_counters.simulate import apart, measured, prediction, simulated, traffic
from lab.hardware.warpgroup_forward.repeated import sustained_calls
from lab.pages import DOCS
from lab.pages.aims import render_aims
from lab.pages.marked_tables import MarkedTables
from lab.pages.work_tiles import render_work_tiles
from lab.records import read_record

PAGE = DOCS / "simulator.md"
PICTURE = DOCS / "pictures" / "hopper_sweep.svg"
DATA = ROOT / "tests" / "sim" / "data"
OWN_PICTURE = PICTURE.with_name("own_hopper_sweep.svg")
COMMAND = "python -m lab.pages.simulator_tables"
UNITS = {
    "_cycles": "cycles",
    "bytes_per_clk": "bytes/clk",
    "lanes_per_clk": "lanes/clk",
    "_per_clk": "instructions/clk",
    "_ns": "ns",
    "": "share",
}


def unit(name: str) -> str:
    """What a figure is counted in, by the end of its name."""
    return next(unit for end, unit in UNITS.items() if name.endswith(end))


def columns() -> Mapping[str, CostTable]:
    """Machines with the same figures, by their names: a column each."""
    found: dict[str, CostTable] = {}
    for table in dict.fromkeys(COSTS.values()):
        names = [name.upper() for name, costs in COSTS.items() if costs == table]
        found[", ".join(names)] = table
    return found


def render_costs() -> str:
    """Every figure that was measured or published, with its source."""
    names = [item.name for item in fields(CostTable) if item.name not in FREE_CONSTANTS]
    rows = [
        (f"`{name}`", unit(name), *(_with_interval(x, name) for x in columns().values()),
         CostTable.sources()[name], _hopper_source(name))
        for name in names
    ]  # fmt: skip
    return markdown_table(("cost", "unit", *columns(), "source", "source for Hopper"), rows)


def render_h100() -> str:
    """FlashAttention-3's published figures beside both speeds."""
    machine = find_machine("h100")
    rows, _ = select_rows(read_measurements(H100_FILE), machine, "FA3")
    table = []
    for row in rows:
        found = predict(row.problem, pipeline_for(row, machine), machine)
        assert found.sustained is not None
        table.append((row.label, f"{row.tflops:g}", *(
            f"{value:.0f}, {value / row.tflops - 1:+.1%}"
            for value in (found.tflops, found.sustained.tflops)
        )))  # fmt: skip
    return markdown_table(("call", "published TFLOP/s", "in a burst", "without a pause"), table)


def render_power() -> str:
    """What operations of an H200 take of its power, and what is assumed of a B200."""
    rows = []
    for name, source in H200_POWER.sources().items():
        cells = []
        for figures in (H200_POWER, B200_POWER):
            value, interval = f"{getattr(figures, name):g}", figures.intervals().get(name)
            between = "" if interval is None else f" ({interval[0]:g} to {interval[1]:g})"
            cells.append(value + between)
        rows.append((f"`{name}`", *cells, source, B200_POWER.sources()[name]))
    return markdown_table(("figure", "H200", "B200", "source", "source for B200"), rows)


def render_kept_out() -> str:
    """What nothing was fitted to: mean error and rank correlation of each model."""
    rows = []
    for group, models in read_record("validation")["b200"]["kept out"].items():
        ours = models["simulator"]
        cells = (f"{x['mape_percent']:.1f}%, {x['rank_correlation']:.2f}" for x in models.values())
        rows.append((group, str(ours["points"]), *cells, f"{ours['bias_percent']:+.1f}%",
                     f"{ours['worst_percent']:+.1f}%"))  # fmt: skip
    titles = ("published", "points", "simulator", "formula", "forest", "bias", "worst")
    return markdown_table(titles, rows)


def render_sets() -> str:
    """Between what the figures of the recorded sets lie, and what some calls take by them."""
    sets = constant_sets()
    rows = [
        (f"`{name}`", f"{getattr(BLACKWELL_COSTS, name):g}",
         f"{min(x[name] for x in sets):g} to {max(x[name] for x in sets):g}")
        for name in sets[0]
    ]  # fmt: skip
    return markdown_table(("figure", "shipped", f"in {len(sets)} sets that fit as well"), rows)


# What the page asks all sets of constants: name -> settings.
SET_CALLS: Mapping[str, Mapping[str, object]] = {
    "d128, one CTA": {"cta_group": 1},
    "d128, pair": {"cta_group": 2},
    "d128, flash_attn.cute's pair": {"cta_group": 2, "kernel": "published"},
    "d128 causal": {"causal": "yes"},
    "d64": {"head_dim": 64},
    "(192, 128), pair": {"head_dim": 192, "head_dim_v": 128},
    "d256": {"head_dim": 256},
    "d128 backward, pair": {"pass": "bwd"},
    "d64 on GB300": {"head_dim": 64, "machine": "gb300"},
}


def render_set_calls() -> str:
    """Throughput of calls by the shipped constants, and by all sets."""
    rows = []
    for name, settings in SET_CALLS.items():
        request = build({"seqlen": "16k", "batch": 2, **settings})
        found, times = request.predict(), seconds_of(request)
        interval = interval_of([found.tflops * found.seconds / x for x in times])
        assert interval is not None
        rows.append((name, f"{found.tflops:.0f}", f"{interval.least:.0f} to {interval.most:.0f}"))
    return markdown_table(("2 x 16k tokens, 16 heads", "TFLOP/s", "by all sets"), rows)


def render_sustained() -> str:
    """Calls repeated for long, measured and predicted."""
    rows = []
    for call in sustained_calls():
        problem, found = call.problem, call.prediction.sustained
        assert found is not None
        mask = "causal" if problem.causal else "none"
        rows.append((
            f"{problem.head_dim}, {problem.head_dim_v}", call.tile, mask, str(problem.seqlen_k),
            f"{call.burst:.0f}, {call.prediction.tflops:.0f}",
            f"{call.sustained:.0f}, {found.tflops:.0f}",
            f"{call.sustained / call.burst:.3f}, {found.clock_share:.3f}",
        ))  # fmt: skip
    heads = ("head dims", "tile", "mask", "keys", "TFLOP/s in a burst", "for 0.4 to 0.8 s",
             "ratio")  # fmt: skip
    return markdown_table(heads, rows)


def _with_interval(table: CostTable, name: str) -> str:
    """A figure, and between what it lies where that is known."""
    value, interval = getattr(table, name), table.intervals().get(name)
    if interval is None:
        return f"{value:g}"
    return f"{value:g} ({interval[0]:g} to {interval[1]:g})"


def _hopper_source(name: str) -> str:
    own = HopperCosts.sources()[name]
    said = "as there" if own == CostTable.sources()[name] else own
    if getattr(H100Costs(), name) != getattr(HopperCosts(), name):
        said += f"; H100: {H100Costs.sources()[name]}"
    return said


@cache
def comparison(file: Path, machine: str) -> Comparison:
    """A file of measurements predicted by the machine as it is shipped."""
    rows, _ = select_rows(read_measurements(file), find_machine(machine))
    return compare(rows, find_machine(machine))


def published() -> Comparison:
    """FlashAttention-4's published throughput on B200."""
    return comparison(B200_FILE, "b200")


def swept() -> Comparison:
    """The measured tile sweep of a Hopper kernel on an H200."""
    return comparison(DATA / "h200_tile_sweep.csv", "h200")


def own_swept() -> Comparison:
    """The same of this package's kernel."""
    return comparison(HOPPER_FILE, "h200")


def _totals(found: Comparison) -> tuple[str, str, str]:
    worst = found.worst
    return f"{found.mape:.1%}", f"{worst.error:+.1%}", f"{found.rank_correlation:.3f}"


def render_published() -> str:
    """Every published point, then all."""
    rows = [
        (f"{p.row.label}, {p.row.software}", f"{p.row.tflops:g}", f"{p.predicted_tflops:.0f}",
         f"{p.error:+.1%}")
        for p in published().points
    ]  # fmt: skip
    mean, worst, _ = _totals(published())
    rows.append(("**all**", "", "", f"mean {mean}, worst {worst}"))
    return markdown_table(("call", "measured TFLOP/s", "predicted", "error"), rows)


def render_swept() -> str:
    """Mean signed error by tile, P's source and overlap, then all."""
    groups: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for point in swept().points:
        groups[tuple(point.row.tile[name] for name in TILE)].append(point.error)
    rows = [
        (f"{m} x {n}", source, "yes" if overlap else "no", f"{sum(x) / len(x):+.1%}",
         f"{max(x, key=abs):+.1%}")
        for (m, n, source, overlap), x in groups.items()
    ]  # fmt: skip
    mean, worst, rank = _totals(swept())
    rows.append(("**all**", f"{len(swept().points)} points", f"rank correlation {rank}",
                 f"absolute {mean}", worst))  # fmt: skip
    return markdown_table(("tile", "P from", "overlap", "mean error", "worst"), rows)


def render_own() -> str:
    """Mean and worst error by head dims, rows and whether it spills by the plan, then all."""
    groups: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for point in own_swept().points:
        problem, tile = point.row.problem, point.row.tile
        dims = f"{problem.head_dim}, {problem.head_dim_v}"
        groups[dims, tile["tile_m"], tile["p_source"], tile["overlap"]].append(point.error)
    rows = [
        (dims, str(m), source, "yes" if overlap else "no", str(len(x)), f"{sum(x) / len(x):+.1%}",
         f"{max(x, key=abs):+.1%}")
        for (dims, m, source, overlap), x in groups.items()
    ]  # fmt: skip
    mean, worst, rank = _totals(own_swept())
    rows.append(("**all**", "", f"rank correlation {rank}", "", str(len(own_swept().points)),
                 f"absolute {mean}", worst))  # fmt: skip
    titles = ("head dims", "rows", "P from", "overlap", "points", "mean error", "worst")
    return markdown_table(titles, rows)


def render_choices() -> str:
    """What the simulator would choose of the sweep, and what it loses."""
    report = read_record("validation")["own h200"]["choices"]
    rows = [
        (f"{x['head_dim']}, {x['head_dim_v']}", "causal" if x["causal"] else "none",
         str(x["seqlen"]), str(x["candidates"]), _words(x["chosen"]), f"{x['chosen_tflops']:g}",
         _words(x["best"]), f"{x['best_tflops']:g}", f"{x['lost_percent']:.1f}%")
        for x in report
    ]  # fmt: skip
    titles = ("head dims", "mask", "keys", "candidates", "chosen", "TFLOP/s", "best", "TFLOP/s",
              "lost")  # fmt: skip
    return markdown_table(titles, rows)


def _words(tile: Mapping[str, object]) -> str:
    words = f"{tile['tile_m']} x {tile['tile_n']}, {tile['kv_stages']} stages"
    words += ", P in smem" if tile["p_source"] == "smem" else ""
    words += "" if tile["overlap"] else ", serial"
    words += ", turns" if tile["ping_pong"] else ""
    return words + (f", {tile['emulated_percent']}% emulated" if tile["emulated_percent"] else "")


TILE = ("tile_m", "tile_n", "p_source", "overlap")


def render_left_out() -> str:
    """Errors of what constants were not fitted to, and those of a formula."""
    report = read_record("validation")
    rows = [
        (f"H200, {name}", str(x["points"]), f"{x['mape_percent']:.1f}%",
         f"{x['worst_percent']:+.1f}%", f"rank correlation {x['rank_correlation']:.3f}")
        for name, x in report["h200"].items() if name.startswith("kept out")
    ]  # fmt: skip
    names = {"all": "this package's sweep", "another run": "the same calls, another run"}
    rows += [
        (f"H200, {name}", str(x["points"]), f"{x['mape_percent']:.1f}%",
         f"{x['worst_percent']:+.1f}%", f"rank correlation {x['rank_correlation']:.3f}")
        for name, x in ((names[key], report["own h200"][key]) for key in names)
    ]  # fmt: skip
    rows += [
        (f"B200, all but: {name}", str(x["points"]), f"{x['mape_percent']:.1f}%",
         f"{x['worst_percent']:+.1f}%", f"formula {x['formula_mape_percent']:.1f}%, "
         f"forest {x['forest_mape_percent']:.1f}%")
        for name, x in report["b200"]["left out"].items()
    ]  # fmt: skip
    return markdown_table(("not fitted to", "points", "mean error", "worst", "beside"), rows)


def render_ends() -> str:
    """The groups' errors with measured figures at the ends of their intervals."""
    found = read_record("validation")["b200"]["other starts"]
    groups = next(iter(found.values()))
    rows = [
        (f"all but: {group}", *(f"{errors[group]:.1f}%" for errors in found.values()))
        for group in groups
    ]
    return markdown_table(("not fitted to", *(f"`{name}`" for name in found)), rows)


def counted_kernels() -> Iterator[tuple[tuple[str, str], Mapping[str, Any]]]:
    """(head dims, what was chosen) and the record of each kernel whose counters are on record."""
    for kernel in read_record("hopper_counters")["kernels"]:
        spec = kernel["configuration"]["spec"]
        choices = {x: y for x, y in spec.items() if not x.startswith("head_dim")}
        said = " ".join(f"{name}={value}" for name, value in choices.items())
        dims = f"{spec['head_dim']}, {spec['head_dim_v']}"
        yield (dims, f"`{said}`" if said else "as it comes"), kernel


def render_counters() -> str:
    """Shares of time, measured and simulated."""
    rows = []
    for names, kernel in counted_kernels():
        there, here = measured(kernel), simulated(kernel["configuration"])
        cells = (
            f"{there[name]:.1f}, {here[name]:.1f}{' (!)' if name in apart(there, here) else ''}"
            for name in there
        )
        rows.append((*names, *cells))
    titles = ("head dims", "kernel", "tensor core works", "producer waits", "consumer waits")
    return markdown_table(titles, rows)


def render_traffic() -> str:
    """Wavefronts and bytes, measured and simulated."""
    scales = {"shared_wavefronts": 1e6, "dram_bytes": 1e6, "l2_bytes": 1e9}
    rows = []
    for names, kernel in counted_kernels():
        found = traffic(kernel, prediction(kernel["configuration"]))
        cells = (
            f"{there / scales[name]:.3g}, {here / scales[name]:.3g} ({here / there - 1:+.0%})"
            for name, (there, here) in found.items()
        )
        rows.append((*names, *cells))
    titles = ("head dims", "kernel", "shared memory, million wavefronts", "device memory, MB",
              "L2, GB")  # fmt: skip
    return markdown_table(titles, rows)


def draw_sweep(found: Comparison) -> str:
    """Predicted against measured throughput of the sweep as an SVG, both axes from 0 to 900."""
    side, margin, most = 520, 50, 900.0
    scale = (side - 2 * margin) / most
    colours = {64: "#0072b2", 128: "#e69f00", 192: "#cc3311"}

    def at(measured: float, predicted: float) -> tuple[float, float]:
        return margin + measured * scale, side - margin - predicted * scale

    def text(x: float, y: float, words: str, more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{words}</text>'

    (x0, y0), (x1, y1) = at(0, 0), at(most, most)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {side} {side}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{side}" height="{side}" fill="white"/>',
        f'<path d="M{x0} {y1}V{y0}H{x1}" fill="none" stroke="black"/>',
        f'<path d="M{x0} {y0}L{x1} {y1}" stroke="gray"/>',
    ]
    for tick in range(0, int(most) + 1, 200):
        x, y = at(tick, tick)
        parts += [text(x - 10, y0 + 16, str(tick)), text(x0 - 30, y + 4, str(tick))]
    parts.append(text(x0 + 110, y0 + 36, "measured TFLOP/s, one H200"))
    parts.append(text(x0 - 30, y1 - 12, "predicted TFLOP/s"))
    parts.append(text(x1, y0 + 48, f"Made by: {COMMAND}", 'font-size="9" text-anchor="end"'))
    for number, (tile_m, colour) in enumerate(colours.items()):
        y = y1 + 20 + 18 * number
        parts.append(f'<circle cx="{x0 + 30}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(text(x0 + 40, y, f"{tile_m} rows"))
    for point in found.points:
        x, y = at(point.row.tflops, point.predicted_tflops)
        colour = colours[point.row.tile["tile_m"]]
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" '
                     'fill-opacity="0.6"/>')  # fmt: skip
    return "\n".join([*parts, "</svg>"]) + "\n"


def render_free() -> str:
    """What calibration chose, where it began, and the bounds within which it may choose."""
    start, sources = CostTable(), CostTable.sources()
    rows = [
        (f"`{name}`", unit(name), *(f"{getattr(x, name):g}" for x in columns().values()),
         f"{least:g} to {most:g}", f"{getattr(start, name):g}", sources[name], why)
        for name, (least, most, why) in FREE_CONSTANTS.items()
    ]  # fmt: skip
    titles = ("constant", "unit", *columns(), "allowed", "unfitted", "meaning", "why these bounds")
    return markdown_table(titles, rows)


SECTIONS = {
    "published points": render_published,
    "tile sweep": render_swept,
    "own sweep": render_own,
    "choices": render_choices,
    "left out": render_left_out,
    "kept out": render_kept_out,
    "work tiles": render_work_tiles,
    "aims": render_aims,
    "sets": render_sets,
    "calls by all sets": render_set_calls,
    "ends": render_ends,
    "counters": render_counters,
    "traffic": render_traffic,
    "sustained": render_sustained,
    "h100": render_h100,
    "power": render_power,
    "free constants": render_free,
    "costs": render_costs,
}


TABLES = MarkedTables(COMMAND, SECTIONS)


def main() -> None:
    """Writes the present tables into the page, and the picture."""
    for picture, found in ((PICTURE, swept()), (OWN_PICTURE, own_swept())):
        picture.write_text(draw_sweep(found), encoding="utf-8")
    TABLES.write(PAGE)


if __name__ == "__main__":
    main()
