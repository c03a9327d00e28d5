"""The tables of docs/throughput.md: every TFLOP/s figure of the pages, and what it is of.

`python -m lab.pages.throughput_tables` writes them between their markers in that page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from fa4.config import Problem
from fa4.designs import design_of
from fa4.figures.ideas import SETTINGS as WATERFALL
from fa4.plan.render import markdown_table
from fa4.sim.options import build, read_choice
from fa4.sim.predict import REAL_RESCALE_RATE
from lab.pages import DOCS
from lab.pages.computed_claims import ONE_CTA, REAL, predicted, waterfall
from lab.pages.marked_tables import MarkedTables
from lab.pages.quotes import Quote, quotes
from lab.pages.recorded_claims import counted, gpu_of, headline

PAGE = DOCS / "throughput.md"
COMMAND = "python -m lab.pages.throughput_tables"
IN_NOTE = re.compile(r"(?<!dim )\b\d{3,4}\b(?! tokens)")  # a figure of a paragraph on TFLOP/s
NAMED = ("machine", "pass", "seqlen", "seqlen_q", "seqlen_k", "batch", "heads", "heads_q",
         "heads_k", "head_dim", "head_dim_v", "causal", "cta_group", "rescale_rate", "kernel",
         "deterministic", "exp2_frequency", "exp2_residue")  # fmt: skip

MEASURED, PREDICTED = "measured", "predicted by the plan"
COUNTED = "predicted by counted instructions"
OURS, PUBLISHED = "this package's Hopper kernel on one H200", "fa4/measured/b200_published.csv"


def bench_kernel() -> str:
    """The same, on the GPU of its record."""
    return OURS.replace("H200", gpu_of("hopper_bench"))


# Tables with TFLOP/s by page and name: what they are of, how they were found, from what.
TABLES_ELSEWHERE = {
    ("docs/forward.md", "prediction"): (
        "forward on B200, 16 heads, d 128: 32k tokens without a mask, 16k causal; CTAs and share "
        "in software as the columns say; no rescales", f"{COUNTED}; one column published",
        "lab/benchmarks/results/forward_prediction.json"),
    ("docs/backward.md", "prediction"): (
        "this package's backward kernels on B200, 16 heads, batch 1; CTAs as the rows say",
        f"{COUNTED}, in parentheses by the plan", "lab/benchmarks/results/codegen.json"),
    ("docs/design.md", "found"): (
        "forward plans on B200 that a search prefers, and today's, 16k tokens without a mask, "
        "16 heads; CTAs as the rows say", f"{PREDICTED}, by all sets of constants",
        "lab/benchmarks/results/design.json"),
    ("docs/design.md", "compiled"): (
        "the kernel with halves and this package's other one on B200, 16k tokens without a mask, "
        "16 heads, d 128; pairs", f"{PREDICTED}, by all sets of constants, and {COUNTED}",
        "lab/benchmarks/results/halves_code.json"),
    ("docs/simulator.md", "published points"): (
        "FlashAttention-4 on B200; CTAs as it chooses; no rescales",
        f"measured by its authors; {PREDICTED}", PUBLISHED),
    ("docs/simulator.md", "aims"): (
        "the kernel with halves on B200, 16k tokens without a mask, 16 heads, d 128; pairs",
        f"{COUNTED}, the least of all sets of constants",
        "lab/benchmarks/results/halves_code.json"),
    ("docs/simulator.md", "calls by all sets"): (
        "forward and backward plans on B200 and GB300", PREDICTED,
        "fa4/measured/b200_constants.csv"),
    ("docs/simulator.md", "choices"): (
        OURS, MEASURED, "fa4/measured/hopper_sweep.csv, lab/benchmarks/results/validation.json"),
    ("docs/simulator.md", "sustained"): (
        f"{OURS}, in bursts and without a pause", f"{MEASURED}; {PREDICTED}",
        "lab/hardware/results/hopper_sustained.json"),
    ("docs/simulator.md", "h100"): (
        "FlashAttention-3 on an H100", f"measured by its authors; {PREDICTED}",
        "fa4/measured/h100_published.csv"),
    ("docs/simulator.md", "power"): (
        "products without attention on one H200: what a power was measured at", MEASURED,
        "lab/hardware/results/hopper_starts.json"),
    ("docs/hopper.md", "calls"): (
        f"{bench_kernel()} and others, whole calls with the host's part", MEASURED,
        "lab/hardware/results/hopper_bench.json"),
    ("docs/hopper.md", "kernel"): (
        f"{OURS} and others, kernels by themselves", MEASURED,
        "lab/hardware/results/warpgroup_forward.json"),
    ("docs/hopper_units.md", "loads"): (
        "products without attention on one H200", MEASURED,
        "lab/hardware/results/hopper_units.json"),
    ("docs/hopper_units.md", "energy"): (
        "the same for half a second", MEASURED, "lab/hardware/results/hopper_starts.json"),
}  # fmt: skip
PICTURES_ELSEWHERE = {
    "measured": ("docs/simulator.md", "the published points of B200 and this package's sweep",
                 f"{MEASURED}; {PREDICTED}", f"{PUBLISHED}, fa4/measured/hopper_sweep.csv"),
    "hopper_sweep": ("docs/simulator.md", "flash-attn-4's Hopper kernel, tiles forced, on one H200",
                     f"{MEASURED}; {PREDICTED}", "tests/sim/data/h200_tile_sweep.csv"),
    "own_hopper_sweep": ("docs/simulator.md", OURS, f"{MEASURED}; {PREDICTED}",
                         "fa4/measured/hopper_sweep.csv"),
    "hopper": ("docs/hopper.md", f"{bench_kernel()} and others, whole calls", MEASURED,
               "lab/hardware/results/hopper_bench.json"),
}  # fmt: skip


def describe(problem: Problem, backward: bool) -> str:
    """A call in words."""
    tokens = f"{problem.seqlen_q} tokens"
    heads = f"{problem.heads_q} heads"
    if problem.heads_k != problem.heads_q:
        heads += f" on {problem.heads_k}"
    dims = f"d {problem.head_dim}"
    mask = "causal" if problem.causal else "no mask"
    kind = "backward" if backward else "forward"
    return f"{kind}, batch {problem.batch}, {tokens}, {heads}, {dims}, {mask}"


def emulates(pipeline: Any) -> bool:
    """Has it a choice of exponentials that are computed in software?"""
    return read_choice(pipeline, "exp2_frequency")[0]


def design(pipeline: Any) -> str:
    """Whose kernel a prediction is of."""
    if emulates(pipeline):
        return "FlashAttention-4's plan"
    return "flash-attn-4's" if pipeline.published else "this package's"


def ctas(pipeline: Any) -> str:
    """How many work together."""
    holds, group = read_choice(pipeline, "cta_group")
    return "pair" if holds and group == 2 else "1"


def emulated(pipeline: Any) -> str:
    """Columns of a KV tile whose exponentials are computed in software."""
    if not emulates(pipeline):
        return "-"
    numerics = pipeline.numerics
    return f"{sum(numerics.exp2.emulated_columns(numerics.tile_n))} of {numerics.tile_n}"


def rescales(quote: Quote) -> str:
    """Share of the steps that rescale O."""
    if design_of(quote.request.pipeline).backward:
        return "-"
    return f"{quote.request.simulation.rescale_rate or 0.0:.0%}"


def besides(quote: Quote) -> str:
    """What was asked for besides shape, CTAs, rescales and exponentials."""
    given = [(name, value) for name, value in quote.settings if name not in NAMED]
    said = [f"{name}={value}" for name, value in given]
    said += ["deterministic"] if dict(quote.settings).get("deterministic") else []
    return ", ".join(said)


def link(page: str) -> str:
    """A page as this one refers to it."""
    if not page.startswith("docs/"):
        return page
    path = page.removeprefix("docs/")
    return f"[{path.removesuffix('.md')}]({path})"


def rows() -> Iterator[tuple[str, ...]]:
    """A row for each call that is quoted, with all pages that do; equal calls are one."""
    found: dict[tuple[Any, ...], tuple[Quote, list[str]]] = {}
    for quote in quotes():
        request = quote.request
        key = (request.problem, request.pipeline, request.machine, request.simulation)
        _, pages = found.setdefault(key, (quote, []))
        if quote.page not in pages:
            pages.append(quote.page)
    for (problem, pipeline, machine, _), (quote, pages) in found.items():
        yield (
            f"{quote.prediction.tflops:.0f}",
            describe(problem, design_of(pipeline).backward),
            f"{machine.name}, {design(pipeline)}",
            ctas(pipeline),
            rescales(quote),
            emulated(pipeline),
            besides(quote),
            ", ".join(map(link, pages)),
        )


def render_quotes() -> str:
    """Every predicted figure of the pages' programs and sentences."""
    heads = ("TFLOP/s", "call", "machine, kernel", "CTAs", "steps that rescale", "in software",
             "besides", "quoted in")  # fmt: skip
    return markdown_table(heads, rows())


def render_headline() -> str:
    """One call in all its figures, and what differs from its first prediction."""
    request = build({})
    base, both, said = predicted().tflops, {**ONE_CTA, **REAL}, f"{REAL_RESCALE_RATE:.0%}"
    share = emulated(request.pipeline)
    columns = int(share.split()[0])
    lines = (
        (headline(), "pair", "-", share, "measured by FlashAttention-4's authors",
         "so much the prediction below is off"),
        (base, "pair", "0%", share, PREDICTED, "what `fa4 predict` says without options"),
        (counted(2, columns), "pair", "0%", share, COUNTED,
         "the compiled kernel's softmax has other instructions than the plan estimates"),
        (predicted(**REAL).tflops, "pair", said, share, PREDICTED,
         "where one of the warps rescales O, the step of both CTAs is longer"),
        (predicted(**ONE_CTA).tflops, "1", "0%", share, PREDICTED,
         "nobody waits for warps of another CTA; what pairs gain on hardware is not modelled"),
        (counted(1, columns), "1", "0%", share, COUNTED, "both"),
        (predicted(**both).tflops, "1", said, share, PREDICTED, "both"),
        (predicted(**ONE_CTA, exp2_frequency=0).tflops, "1", "0%", "0 of 128", PREDICTED,
         "all exponentials wait for one unit"),
    )  # fmt: skip
    table = [
        (f"{tflops:.0f}", pair, rate, columns, how, f"{tflops / base - 1:+.1%}", why)
        for tflops, pair, rate, columns, how, why in lines
    ]
    heads = ("TFLOP/s", "CTAs", "steps that rescale", "in software", "how", "against the second",
             "why")  # fmt: skip
    return markdown_table(heads, table)


def render_others() -> str:
    """Tables and pictures."""
    found = [
        (f'{link(page)}, table "{name}"', what, how, _files(source))
        for (page, name), (what, how, source) in TABLES_ELSEWHERE.items()
    ]
    found += [
        (f'{link(page)}, picture "{name}"', what, how, _files(source))
        for name, (page, what, how, source) in PICTURES_ELSEWHERE.items()
    ]
    steps, asked = waterfall()["rows"], build(WATERFALL)
    found.append((
        f"{link('docs/ladder/index.md')}, picture \"ablation\"",
        f"{describe(asked.problem, False)}, on B200; CTAs: {ctas(asked.pipeline)}; "
        f"{REAL_RESCALE_RATE:.0%} of the steps rescale; from {steps[0][2]:.0f} without any idea to "
        f"{steps[-1][2]:.0f}", PREDICTED, "`fa4 figures ablation`",
    ))  # fmt: skip
    return markdown_table(("where", "what it is of", "how", "source"), found)


def _files(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def render_notes() -> str:
    """Figures of dated notes, which stay as they were."""
    found = []
    for path in sorted((DOCS / "notes").glob("2*.md")):
        about = [part for part in path.read_text("utf-8").split("\n\n") if "TFLOP/s" in part]
        figures = [x for part in about for x in IN_NOTE.findall(" ".join(part.split()))]
        if about:
            found.append((f"[{path.stem}](notes/{path.name})", ", ".join(figures), path.name[:10]))
    return markdown_table(("note", "TFLOP/s", "of the code of"), found)


SECTIONS = {
    "headline": render_headline,
    "quotes": render_quotes,
    "tables": render_others,
    "notes": render_notes,
}
TABLES = MarkedTables(COMMAND, SECTIONS)

if __name__ == "__main__":
    TABLES.write(PAGE)
