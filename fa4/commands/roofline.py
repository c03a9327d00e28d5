"""`fa4 roofline`: cycles that a step of a kernel needs on each unit of an SM, and a picture.

The numbers are those of the plan that the simulator runs; without options, the four budgets of the
FlashAttention-4 paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa4.base import drawing
from fa4.base.files import check_folder, write_whole
from fa4.commands import emit

if TYPE_CHECKING:
    from fa4.config import BackwardPipeline, ForwardPipeline

UNIT_NAMES = {"tensor": "tensor core", "smem": "shared memory", "mufu": "exponentials"}

# The four tables of the paper: options of this command.
PAPER_KERNELS: tuple[dict[str, Any], ...] = (
    {"pass": "forward", "q_tiles": 1},
    {"pass": "forward", "q_tiles": 2},
    {"pass": "backward", "cta_group": 1, "kernel": "published"},
    {"pass": "backward", "cta_group": 2, "kernel": "published"},
)
KERNELS = ("blackwell", "published")  # of the backward pass
ONLY = {"forward": ("q_tiles", "emulated_frequency"), "backward": ("kernel",)}

NOTES = (
    "A, B: operands of a product read from shared memory (those in tensor memory are free)",
    "bound by: of a step, as fa4 predict charges it; that counts whole calls",
)
PAPER_NOTE = (
    "the paper's rules: nothing for loads into shared memory and for row statistics; with options "
    "all is counted that fa4 predict charges"
)

KINDS = {
    "products": drawing.SKY,
    "operand reads": drawing.ORANGE,
    "stores, exchange, reduction": drawing.VERMILION,
    "exponentials": drawing.GREEN,
}
PRODUCTS_END: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1}


def roofline(
    direction: Annotated[
        str | None, typer.Option("--pass", help="forward or backward.", show_default="forward")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Elements of a query, key or value.", show_default="128")
    ] = None,
    tile_n: Annotated[
        int | None, typer.Option(help="Keys of a KV tile.", show_default="128")
    ] = None,
    q_tiles: Annotated[
        int | None, typer.Option(help="Q tiles of 128 rows per CTA, 1 or 2.", show_default="2")
    ] = None,
    cta_group: Annotated[
        int | None, typer.Option(help="CTAs that work together, 1 or 2.", show_default="1")
    ] = None,
    emulated_frequency: Annotated[
        int | None,
        typer.Option(
            help="Columns per group of which some exponentials are emulated; 0 for none.",
            show_default="0",
        ),
    ] = None,
    kernel: Annotated[
        str | None,
        typer.Option(
            help="Whose backward kernel, blackwell (this package's) or published.",
            show_default="blackwell",
        ),
    ] = None,
    machine: Annotated[
        str, typer.Option(help="A machine's name, or a TOML file that describes one.")
    ] = "b200",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    figure: Annotated[
        Path | None, typer.Option(help="Also draw it, as .png or .svg.", dir_okay=False)
    ] = None,
) -> None:
    """Add up what a step needs of each unit; without options, the paper's four tables.

    Example: fa4 roofline --pass forward --head-dim 64 --emulated-frequency 10
    """
    from fa4.base.files import require_replaceable

    asked = {
        "pass": direction,
        "head_dim": head_dim,
        "tile_n": tile_n,
        "q_tiles": q_tiles,
        "cta_group": cta_group,
        "emulated_frequency": emulated_frequency,
        "kernel": kernel,
    }
    if figure is not None:
        if figure.suffix.lower() not in (".png", ".svg"):
            raise ValueError(f"--figure must end in .png or .svg; got {figure.name!r}")
        require_replaceable(figure)
        check_folder(figure.parent)
    given = {name: value for name, value in asked.items() if value is not None}
    report = build_report([given] if given else list(PAPER_KERNELS), machine, paper=not given)
    if figure is not None:
        draw_figure(report, figure)
    emit(report, as_json, render)


def build_report(
    kernels: list[dict[str, Any]], machine: str, *, paper: bool = False
) -> dict[str, Any]:
    """The terms of each kernel as plain data; the keys are what `--json` prints."""
    from fa4.sim.machine import find_machine

    found = find_machine(machine)
    described = [describe_kernel(one, found, paper=paper) for one in kernels]
    return {"machine": found.name, "paper_rules": paper, "kernels": described}


def describe_kernel(
    options: Mapping[str, Any], machine: Any, *, paper: bool = False
) -> dict[str, Any]:
    """Tile and terms of one kernel."""
    from fa4.designs import plan_of
    from fa4.sim.roofline import roofline_terms

    pipeline = make_pipeline(options)
    plan, numerics = plan_of(pipeline, machine.gpu), pipeline.numerics
    rows, split = numerics.tile_m * getattr(numerics, "q_tiles", 1), getattr(numerics, "exp2", None)
    emulated = split.share(numerics.tile_n) if split else 0.0
    terms = roofline_terms(plan, machine, paper=paper)
    return {
        "pass": options.get("pass", "forward"),
        "plan": plan.name,
        "kernel": options.get("kernel", KERNELS[0]) if options.get("pass") == "backward" else None,
        "tile": [rows, pipeline.numerics.tile_n, pipeline.head_dim],
        "cta_group": plan.cta_group,
        "emulated_share": emulated,
        "terms": {unit: dict(values) for unit, values in terms.terms.items()},
        "totals": terms.totals,
        "bound_cycles": terms.bound,
        "bound_by": terms.bound_by,
        "tensor_share": terms.tensor_share,
    }


def make_pipeline(options: Mapping[str, Any]) -> ForwardPipeline | BackwardPipeline:
    """The pipeline of some options; ValueError for options that its pass does not have."""
    from dataclasses import replace

    from fa4.config import (
        FRAGMENT_COLS,
        BackwardConfig,
        BackwardPipeline,
        Exp2Split,
        ForwardConfig,
        ForwardPipeline,
        require,
        require_int,
    )

    direction = options.get("pass", "forward")
    require(direction in ("forward", "backward"), "pass must be forward or backward", direction)
    head_dim, tile_n = options.get("head_dim", 128), options.get("tile_n", 128)
    cta_group = options.get("cta_group", 1)
    other = "backward" if direction == "forward" else "forward"
    for name in ONLY[other]:
        require(name not in options, f"{name} is for the {other} pass", options.get(name))
    if direction == "backward":
        tiles = BackwardConfig(tile_n=tile_n, cta_group=cta_group)
        whose = options.get("kernel", KERNELS[0])
        require(whose in KERNELS, f"kernel must be one of {', '.join(KERNELS)}", whose)
        published = whose != KERNELS[0]
        return BackwardPipeline(head_dim=head_dim, numerics=tiles, published=published)
    frequency, split = options.get("emulated_frequency", 0), Exp2Split()
    if frequency:  # which columns of a group, and from which fragment on, as tuned for B200
        tuned = ForwardConfig.tuned("bf16", head_dim, causal=False).exp2
        require_int("emulated_frequency", frequency, tuned.residue, FRAGMENT_COLS)
        split = replace(tuned, frequency=frequency)
    numerics = ForwardConfig(q_tiles=options.get("q_tiles", 2), tile_n=tile_n, exp2=split)
    return ForwardPipeline(head_dim=head_dim, numerics=numerics, cta_group=cta_group)


def title(kernel: Mapping[str, Any]) -> str:
    """Which kernel, and on what tile."""
    rows, keys, dim = kernel["tile"]
    pair = ", CTA pair" if kernel["cta_group"] == 2 else ""
    emulated = kernel["emulated_share"]
    software = f", {emulated:.1%} of the exponentials emulated" if emulated else ""
    whose = f", kernel {kernel['kernel']}" if kernel["kernel"] else ""
    return f"{kernel['pass']} {rows} x {keys} x {dim}{pair}{whose}{software}"


def verdict(kernel: Mapping[str, Any]) -> str:
    """What bounds a kernel, and by how much more than its products."""
    tensor, bound = kernel["totals"]["tensor"], kernel["bound_cycles"]
    level = [UNIT_NAMES[u] for u, cycles in kernel["totals"].items() if cycles == bound]
    over = bound / tensor - 1
    if over > 0:
        return f"bound by {' and '.join(level)}, {over:.0%} over the products"
    return f"bound by {' and '.join(level)}"


def render(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """One table per kernel."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    parts: list[Any] = [f"Cycles of one SM of {report['machine']} per step of one CTA"]
    for kernel in report["kernels"]:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("unit", no_wrap=True)
        table.add_column("cycles", justify="right", no_wrap=True)
        table.add_column("of")
        for unit, terms in kernel["terms"].items():
            items = [f"{name} {cycles:g}" for name, cycles in terms.items()]
            table.add_row(UNIT_NAMES[unit], f"{kernel['totals'][unit]:g}", ", ".join(items))
        parts += [f"{title(kernel)}: {verdict(kernel)}", table]
    return (*parts, *NOTES, *((PAPER_NOTE,) if report["paper_rules"] else ()))


def draw_figure(report: Mapping[str, Any], path: Path) -> None:
    """Stacked terms of each unit against the products' cycles. ImportError without matplotlib."""

    kernels = report["kernels"]
    longest = max(kernel["bound_cycles"] for kernel in kernels)
    with drawing.styled(font_size=9, axes_titlesize=10):
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        height = 1.5 * len(kernels) + 1.0
        figure = drawing.new_figure((11, height), layout="constrained")
        panels = figure.subplots(len(kernels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, kernel in zip(panels, kernels, strict=True):
            draw_kernel(axes, kernel, longest)
        panels[-1].set_xlabel(f"cycles of one SM of {report['machine']} per step of one CTA")
        handles: list[Any] = [Patch(color=colour, label=kind) for kind, colour in KINDS.items()]
        handles.append(Line2D([], [], label="end of the products", **PRODUCTS_END))
        figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False)
        kind = path.suffix.lower().removeprefix(".")
        content = drawing.save(figure, kind)
    write_whole(path, content)


def draw_kernel(axes: Any, kernel: Mapping[str, Any], longest: float) -> None:
    """One bar per unit, cut into terms; a line where the products end."""
    units = list(kernel["terms"])
    for row, unit in enumerate(units):
        start = 0.0
        for name, cycles in kernel["terms"][unit].items():
            axes.barh(row, cycles, left=start, height=0.72, color=KINDS[kind_of(unit, name)],
                      edgecolor="white", linewidth=1.2)  # fmt: skip
            room = cycles / longest
            if room > 0.025:
                text = f"{name}\n{cycles:g}" if room < 0.12 else f"{name} {cycles:g}"
                axes.text(start + cycles / 2, row, text, ha="center", va="center", fontsize=7)
            start += cycles
        axes.text(start + 0.006 * longest, row, f"{start:g}", va="center", weight="bold")
    axes.axvline(kernel["totals"]["tensor"], zorder=0, **PRODUCTS_END)
    axes.set_yticks(range(len(units)), [UNIT_NAMES[unit] for unit in units])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.06 * longest)
    axes.set_title(f"{title(kernel)}: {verdict(kernel)}")


def kind_of(unit: str, term: str) -> str:
    """Which colour a term gets."""
    if unit == "smem":
        return "operand reads" if term.endswith((" A", " B")) else "stores, exchange, reduction"
    return "products" if unit == "tensor" else "exponentials"
