"""`fa4 bench`: our kernels beside torch's and FlashAttention-4's, on a GPU that they run on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa4.base.files import check_folder, write_whole
from fa4.commands import emit
from fa4.commands.bench_report import DTYPES, read_report
from fa4.commands.bench_timing import (
    FORWARD_PASS,
    OURS,
    TIMINGS,
    Pass,
    Timer,
    measure_one,
    time_calls,
)
from fa4.compiled.support import NARROW

if TYPE_CHECKING:
    from fa4.config import Problem

# The grid of the FlashAttention-4 paper: 32k tokens, hidden size 2048, bf16.
TOTAL_TOKENS, HIDDEN = 32 * 1024, 2048
SEQLENS = "1k,2k,4k,8k,16k,32k"
# Head dims and lengths by implementation: the paper's, and what Hopper's kernel has beside them.
GRIDS = {"sm100": ("64,128,192:128", SEQLENS), "sm90": ("64,96,128,192:128,256", f"512,{SEQLENS}")}

ORDER_HELP = "With --backward: sums in a fixed order, of those that can."
FROM_HELP = "Show what --json wrote; measure nothing."
FIGURE_HELP = "Draw it: .png or .svg."
DTYPE_HELP = "bf16, fp16 or, on Hopper and without factors, e4m3 or e5m2."
TIMING_HELP = "burst (calls one by one) or graph (a CUDA graph, without the host's part)."
RANDOM_HELP = "Time N random calls instead of the grid."
SECONDS_HELP = "With --random: begin no call later."
ROWS_HELP = "With --random: add each row to this file as it comes, as a line of JSON."
BACKENDS = (OURS, "cudnn", "flash", "flash-attn-4", "flash-attn-3")
FIGURES = (".png", ".svg")

OF_A_REPORT = ("earlier", "figure", "as_json")  # options that --from leaves a meaning


def bench(
    context: typer.Context,
    head_dims: Annotated[str, typer.Option(help="d, or d:dv; default: the GPU's.")] = "",
    seqlens: Annotated[str, typer.Option(help="Lengths; default: the GPU's.")] = "",
    masks: Annotated[str, typer.Option(help="full, causal or both.")] = "full,causal",
    backends: Annotated[str, typer.Option(help="Of these.")] = ",".join(BACKENDS),
    dtype: Annotated[str, typer.Option(help=DTYPE_HELP)] = "bf16",
    backward: Annotated[bool, typer.Option("--backward", help="Time gradients instead.")] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic", help=ORDER_HELP)] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Bursts of calls per point.")] = 20,
    timing: Annotated[str, typer.Option(help=TIMING_HELP)] = "burst",
    random: Annotated[int, typer.Option("--random", metavar="N", min=0, help=RANDOM_HELP)] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of --random.")] = 0,
    seconds: Annotated[float, typer.Option(min=1.0, help=SECONDS_HELP)] = 600.0,
    rows: Annotated[Path | None, typer.Option(metavar="FILE", help=ROWS_HELP)] = None,
    figure: Annotated[
        Path | None, typer.Option("--figure", metavar="FILE", help=FIGURE_HELP)
    ] = None,
    earlier: Annotated[Path | None, typer.Option("--from", metavar="FILE", help=FROM_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Time the kernels on a GPU against torch SDPA and flash-attn-4: H100, H200, B200, B300.

    The paper's grid: 32k tokens in sequences of up to 32k, 2048 / d heads. The back ends take turns
    in short bursts, so that all of them meet the same clock. Prints the median TFLOP/s, beside the
    simulator's prediction, and how many times as fast as each other one ours is. Exit code 2, and
    nothing measured, where there is no such GPU.

    Example: fa4 bench --head-dims 128 --seqlens 8k,32k --masks causal --figure bench.png
    """
    from fa4.call.choose import find_gpu
    from fa4.commands.bench_random import Limits, draw, measure_random, without_missing
    from fa4.commands.progress import progress_bar

    if deterministic and not backward:
        raise ValueError("--deterministic is an option of --backward; got it without")
    if timing not in TIMINGS:
        raise ValueError(f"--timing must be one of {', '.join(TIMINGS)}; got {timing!r}")
    if random and figure:
        raise ValueError("a figure is of the grid; got --figure with --random")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    if backward and dtype in NARROW:
        raise ValueError(f"--backward needs --dtype bf16 or fp16; got {dtype!r}")
    check_figure(figure)
    if earlier is not None:
        refuse_beside(context)
        report = read_report(earlier, BACKENDS)
    else:
        timed = Pass(backward, deterministic, timing)
        found = find_gpu()
        names = read_names("backends", backends, BACKENDS)
        problems: Sequence[Problem]
        if random:
            problems = draw(
                random, seed, dtype, [read_dims(text) for text in head_dims.split(",") if text]
            )
        else:
            grid = GRIDS[found.impl or "sm100"]
            problems = list(make_grid(head_dims or grid[0], seqlens or grid[1], masks, dtype))
        if not found.device:
            raise ValueError(f"fa4 bench needs an H100, H200, B200 or B300: {found.why}")
        names = without_missing(names, asked=backends != ",".join(BACKENDS))
        timer = functools.partial(time_calls, found, repeats, timed)
        report = {"device": device_name(found.device), "impl": found.impl, "dtype": dtype,
                  "pass": timed.label, "timing": timing}  # fmt: skip
        with progress_bar() as update:
            if random:
                report["random"] = {"calls": random, "seed": seed}
                limits = Limits(seconds, rows)
                report["rows"] = measure_random(
                    problems, names, timer, update, found, limits, timed
                )
            else:
                report["rows"] = measure(problems, names, timer, update, timed, found.impl)
    report["figure"] = None if figure is None else str(figure)
    if figure is not None:
        from fa4.commands.bench_figure import draw_bench

        write_whole(figure, draw_bench(report, figure.suffix.removeprefix(".")))
    emit(report, as_json, render)


def refuse_beside(context: typer.Context) -> None:
    """Raises ValueError for an option of what would be measured: --from measures nothing."""
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is None or source.name != "COMMANDLINE" or parameter.name in OF_A_REPORT:
            continue
        raise ValueError(
            f"{parameter.opts[0]} says what to measure, and --from measures nothing; "
            f"got {context.params[str(parameter.name)]!r} beside it"
        )


def check_figure(figure: Path | None) -> None:
    """Raises now what drawing would raise after everything is measured."""
    if figure is None:
        return
    from fa4.base.files import require_replaceable
    from fa4.commands.bench_figure import require_matplotlib

    if figure.suffix not in FIGURES:
        raise ValueError(f"--figure must end in {' or '.join(FIGURES)}; got {str(figure)!r}")
    require_replaceable(figure)
    check_folder(figure.parent)
    require_matplotlib()


def read_names(option: str, text: str, allowed: Sequence[str]) -> list[str]:
    """The words of a list with commas. Raises ValueError for one that is not allowed."""
    names = [word.strip() for word in text.split(",") if word.strip()]
    for name in names:
        if name not in allowed:
            raise ValueError(f"--{option} must be of {', '.join(allowed)}; got {name!r}")
    if not names:
        raise ValueError(f"--{option} must name at least one of {', '.join(allowed)}; got {text!r}")
    return names


def read_count(option: str, text: str) -> int:
    """A whole number. Raises ValueError that names the option."""
    from fa4.sim.fields import parse_count

    try:
        return parse_count(text)
    except ValueError as error:
        raise ValueError(f"{option} {error}; got {text!r}") from None


def read_dims(text: str) -> tuple[int, int]:
    """Head dims d and dv of "d" or "d:dv"."""
    from fa4.config import require

    dims = [read_count("--head-dims", part) for part in text.split(":")]
    require(len(dims) <= 2, "--head-dims must be d or d:dv, with commas", text)
    return dims[0], dims[-1]


def make_grid(head_dims: str, seqlens: str, masks: str, dtype: str) -> Iterator[Problem]:
    """A problem for every combination; heads are as many as make the hidden size."""
    from fa4.config import Problem, require

    kinds = read_names("masks", masks, ("full", "causal"))
    for dims in map(read_dims, head_dims.split(",")):
        for kind in kinds:
            for length in (read_count("--seqlens", part) for part in seqlens.split(",")):
                require(1 <= length <= TOTAL_TOKENS, "--seqlens must be 1 to 32k", length)
                heads = max(1, HIDDEN // dims[-1])
                yield Problem(
                    batch=TOTAL_TOKENS // length, seqlen_q=length, seqlen_k=length,
                    heads_q=heads, heads_k=heads, head_dim=dims[0], head_dim_v=dims[-1],
                    dtype=dtype, causal=kind == "causal",
                )  # fmt: skip


def measure(
    problems: Sequence[Problem],
    backends: Sequence[str],
    timer: Timer,
    update: Callable[[int, int, str], None] = lambda done, total, name: None,
    timed: Pass = FORWARD_PASS,
    impl: str = "sm100",
) -> list[dict[str, Any]]:
    """A row per problem: TFLOP/s by back end, the prediction, and why something is missing.

    timer: (back ends, problem) -> seconds of each, or why it cannot. impl: what "fa4" is.
    """
    from fa4.commands.run import predict

    rows: list[dict[str, Any]] = []
    for problem in problems:
        update(len(rows), len(problems), f"d {problem.head_dim}, {problem.seqlen_q} keys")
        found = predict(problem, backward=timed.backward, impl=impl)
        row = measure_one(problem, backends, timer, timed)
        rows.append(row | {"predicted_tflops": None if found is None else found["tflops"]})
    return rows


def device_name(device: str) -> str:
    """As torch calls it."""
    import torch

    return str(torch.cuda.get_device_name(device))


def render(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """A table with a row per problem, then why something is missing."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rows = report["rows"]
    if "random" in report:
        from fa4.commands.bench_random import render_random

        return render_random(report)
    names = list(dict.fromkeys(n for row in rows for n in (*row["tflops"], *row["missing"])))
    others = [name for name in names if any(name in row["ratio"] for row in rows)]
    table = Table("d", "mask", "length", box=SIMPLE_HEAD, pad_edge=False)
    for name in (*names, "predicted", *(f"{OURS} / {name}" for name in others)):
        table.add_column(name, justify="right")
    for row in rows:
        p = row["problem"]
        dims = f"{p['head_dim']}" + (
            f", {p['head_dim_v']}" if p["head_dim_v"] != p["head_dim"] else ""
        )
        cells = [_number(row["tflops"].get(name), ".0f") for name in names]
        cells.append(_number(row["predicted_tflops"], ".0f"))
        cells += [_number(row["ratio"].get(name), ".2f") for name in others]
        mask = "causal" if p["causal"] else "full"
        table.add_row(dims, mask, str(p["seqlen_q"]), *cells)
    gaps = dict.fromkeys((name, why) for row in rows for name, why in row["missing"].items())
    return (
        f"{report['device']}: {report['pass']}, {report['dtype']}, TFLOP/s",
        table,
        *(f"{OURS} / {name}: {geometric_mean(rows, name):.3f} in the geometric mean"
          for name in others),
        *(f"{name}: {why}" for name, why in gaps),
        *([f"wrote {report['figure']}"] if report["figure"] else []),
    )  # fmt: skip


def geometric_mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Of how many times as fast ours is, over all rows that have both."""
    from statistics import geometric_mean as mean

    return mean(row["ratio"][name] for row in rows if name in row["ratio"])


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
