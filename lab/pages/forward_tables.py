"""The tables of docs/forward.md, made of the plan, the tuned variants, the support table and the
measured predictions.

`python -m lab.pages.forward_tables` writes them between their markers in that file.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fa4.compiled.support import describe_support
from fa4.compiled.variants import tuned_spec
from fa4.plan.render import markdown_table, render_graph, render_memory, render_roles
from fa4.plan.render import render_signals as signals_table
from fa4.plan.schema import Arrive, PipelinePlan, Wait, unroll
from fa4.sm100.forward.spec import ForwardSpec
from lab.pages import DOCS
from lab.pages.marked_tables import MarkedTables
from lab.records import read_record

PAGE = DOCS / "forward.md"
COMMAND = "python -m lab.pages.forward_tables"
SHOWN = tuned_spec(128, 128)  # the kernel whose plan the page shows
TRIPS = {"kv_tiles": 2, "masked_tiles": 1, "plain_tiles": 1}  # of the work tile that is unrolled
WIDTH = 98

VARIANTS = {
    "d 64": tuned_spec(64, 64),
    "d 128": SHOWN,
    "d 128, causal": tuned_spec(128, 128, causal=True, scheduler="lpt"),
    "d 128, pair": tuned_spec(128, 128, cta_group=2),
    "d 128, work stealing": tuned_spec(128, 128, causal=True, scheduler="clc"),
    "d 192, dv 128": tuned_spec(192, 128),
    "d 192, dv 128, pair": tuned_spec(192, 128, cta_group=2),
}
VARIANT_TITLES = ("kernel", "warps", "registers: softmax, correction, others", "K/V stages",
                  "shared memory", "tensor memory", "emulated of 128")  # fmt: skip


def render_order(plan: PipelinePlan, trips: Mapping[str, int] = TRIPS, only: str = "") -> str:
    """What every role does in one work tile of two tiles, waits and arrivals included.

    only: the name of the one role that is shown; "" for all.
    """
    parts = []
    for role in plan.roles:
        if only not in ("", role.name):
            continue
        steps = []
        for step in unroll(role.program, trips):
            if isinstance(step, Wait):
                steps.append(f"<{step.signal}")
            elif isinstance(step, Arrive):
                steps.append(f">{step.signal}")
            else:
                steps.append(step.what.replace(" ", "_"))
        lines = textwrap.wrap(" ".join(steps), WIDTH - 2, break_on_hyphens=False)
        parts.append("\n".join([role.name, *(f"  {line}" for line in lines)]))
    return "```text\n" + "\n".join(parts) + "\n```"


def render_variants() -> str:
    """What differs between the kernels that people ask for."""
    return markdown_table(VARIANT_TITLES, (_variant_row(*item) for item in VARIANTS.items()))


def _variant_row(name: str, spec: ForwardSpec) -> tuple[object, ...]:
    plan, tile_n = spec.plan, spec.numerics.tile_n
    registers = (plan.role(role).registers for role in ("softmax0", "correction", "mma"))
    return (
        name,
        plan.warps,
        ", ".join(map(str, registers)),
        plan.buffer("kv").stages,
        f"{plan.bytes_used('smem')} of {spec.gpu.smem_bytes_per_cta} B",
        f"{plan.bytes_used('tmem')} of {spec.gpu.tmem_cols} columns",
        sum(spec.numerics.exp2.emulated_columns(tile_n)),
    )


def render_features() -> str:
    """The support table of `fa4 doctor --matrix`."""
    words = {True: "yes", False: "no", None: "-"}
    columns = ("forward", "backward", "sm90", "sm90 backward")
    rows = (
        (row["feature"], *(words[row[column]] for column in columns), row["detail"])
        for row in describe_support()
    )
    return markdown_table(("feature", *columns, "limits, or why not"), rows)


def render_prediction(results: Path | None = None) -> str:
    """Predicted TFLOP/s against the aims; by CTA group and emulated columns; instructions counted.

    The kernel that a call gets is in bold.
    """
    report = read_record("forward_prediction", results)
    aims = markdown_table(
        ("call", "predicted TFLOP/s", "aim", "reached", "FlashAttention-4, measured"),
        (
            (found["call"], f"{found['tflops']:.0f}", f"{found['target_tflops']:.0f}",
             "yes" if found["reached"] else "no",
             f"{found['published_tflops_of_flash_attention_4']:.0f}")
            for found in report["verdicts"]
        ),
    )  # fmt: skip
    rows = report["predictions"]
    emulated = sorted({row["emulated_columns"] for row in rows})
    table: dict[tuple[str, int], dict[int, str]] = {}
    for row in rows:
        mark = "**" if row["shipped"] else ""
        cells = table.setdefault((row["call"], row["cta_group"]), {})
        cells[row["emulated_columns"]] = f"{mark}{row['tflops']:.0f}{mark}"
    titles = ("call", "CTAs", *(f"{columns} emulated" for columns in emulated))
    lines = ((*key, *(cells.get(c, "-") for c in emulated)) for key, cells in table.items())
    return "\n\n".join((aims, markdown_table(titles, lines), _instructions(rows)))


def _instructions(rows: Iterable[dict[str, Any]]) -> str:
    """What the softmax warps of the shipped kernels execute per row of a KV tile."""
    pipes = ("mufu", "fma", "alu", "other", "instructions")
    table = [
        (row["call"], *(f"{counts['counted'][p]:g} ({counts['planned'][p]:g})" for p in pipes))
        for row in rows
        if row["shipped"]
        for counts in [row["instructions_per_tile"]["softmax0"]]
    ]
    titles = ("softmax, per 128 scores", "MUFU", "FMA (packed: 2)", "ALU", "other", "instructions")
    return markdown_table(titles, table) + "\n\nCounted, and in parentheses the plan's estimate."


SECTIONS: dict[str, Callable[[], str]] = {
    "roles": lambda: render_roles(SHOWN.plan),
    "graph": lambda: f"```mermaid\n{render_graph(SHOWN.plan)}\n```",
    "signals": lambda: signals_table(SHOWN.plan),
    "memory": lambda: render_memory(SHOWN.plan),
    "order": lambda: render_order(SHOWN.plan),
    "variants": render_variants,
    "features": render_features,
    "prediction": render_prediction,
}


TABLES = MarkedTables(COMMAND, SECTIONS)
stale, fill = TABLES.stale, TABLES.fill


def main() -> None:
    """Writes the present tables into the page."""
    TABLES.write(PAGE)


if __name__ == "__main__":
    main()
