"""`fa4 predict`: time of an attention call on a machine, what bounds it, and what if."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from fa4.commands import emit
from fa4.commands.gpus import ACROSS, predict_gpus, refuse_without_gpus, with_options
from fa4.commands.gradients import (
    find_request,
    gradient_report,
    refuse_options,
    render_gradients,
)
from fa4.commands.why import render_why, why_progress, why_report
from fa4.config import require
from fa4.sim.fields import FIELDS

if TYPE_CHECKING:
    from rich.table import Table

    from fa4.sim.predict import Prediction

BAR_COLUMNS = 30
TOP_STALLS = 3


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes **settings one option per field of `FIELDS`, named alike.

    Options are text (yes-or-no settings are flags) with None for "not given", so that what the
    command receives can go to `fa4.sim.options.build` as it is.
    """
    signature = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    added = []
    for field in FIELDS.values():
        name = field.name + "_" if keyword.iskeyword(field.name) else field.name
        flag = "--" + field.name.replace("_", "-")
        allowed = f" [{'|'.join(field.choices)}]" if field.choices else ""
        help_text = f"{field.help}{allowed} Default: {field.default}."
        kind: Any = bool | None if field.is_flag else str | None
        if field.is_flag:
            declared = flag if field.default == "no" else f"{flag}/--no-{flag[2:]}"
            option = typer.Option(declared, help=field.help, show_default=False)
        else:
            option = typer.Option(flag, help=help_text, metavar=field.metavar, show_default=False)
        added.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None,
                              annotation=Annotated[kind, option])
        )  # fmt: skip

    def run(**given: Any) -> None:
        settings = {name.rstrip("_"): given.pop(name) for name in [p.name for p in added]}
        command(**given, **{name: value for name, value in settings.items() if value is not None})

    run.__doc__, run.__name__ = command.__doc__, command.__name__
    parameters = [*added, *own]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    return run


@with_settings
@with_options("across", ACROSS)
def predict(
    across: Mapping[str, Any],
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting, or gpu.X or costs.X of the machine (repeatable).",
        ),
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            "--compare",
            metavar="'NAME=VALUE ...'",
            help="What if: also predict with this changed, side by side; each one is a variant.",
        ),
    ] = None,
    why: Annotated[
        bool | None,
        typer.Option(
            "--why/--no-why",
            help="What the time depends on, by about 100 more simulations.",
            show_default="yes, up to 16k work tiles, without --compare",
        ),
    ] = None,
    interval: Annotated[
        bool | None,
        typer.Option(
            "--interval/--no-interval",
            help="What all sets of constants say that fit the published figures as well.",
            show_default="yes, up to 16k work tiles",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    **settings: Any,
) -> None:
    """Predict time and throughput of an attention call, and what limits it; no GPU needed.

    Without options: the forward pass of 32k tokens, 16 heads, head dim 128, bf16, on a B200.

    With --gpus the sequence is divided over so many, and the chain says what the last waits for.

    Example: fa4 predict --pass bwd --seqlen 8k --causal --compare cta_group=1
    """  # fmt: skip
    settings = with_changes(settings, change)
    if across["gpus"] is not None:
        require(not compare and why is None, "--gpus has no --compare and no --why", compare or why)
        predict_gpus(settings, across, as_json)
        return
    refuse_without_gpus(across)
    gradients = find_request(settings)
    if gradients is not None:
        refuse_options({"--compare": compare, "--why": why, "--interval": interval})
        emit(gradient_report(gradients), as_json, render_gradients)
        return
    variants = [split_changes("--compare", [text]) for text in compare or ()]
    first = describe(settings)
    spread = interval or (interval is None and worth_asking(first))
    times = all_times(settings) if spread else ()
    first["interval"] = interval_report(first, times)
    if why or (why is None and not variants and worth_asking(first)):
        first["why"] = ask_why(settings, times)
        first["bottleneck"] = first["why"]["limit"]
    if not variants:
        emit(first, as_json, render)
        return
    compared = [compare_with(first, settings, changes, times) for changes in variants]
    # The first variant has the keys that a comparison of two has always had.
    emit({"a": first, **compared[0], "further": compared[1:]}, as_json, render_comparisons)


def worth_asking(report: Mapping[str, Any]) -> bool:
    """Is there work, and little enough of it to be simulated again and again?"""
    from fa4.sim.why import MOST_WORK_TILES

    return bool(0 < report["work_tiles"] <= MOST_WORK_TILES)


def all_times(settings: Mapping[str, object]) -> tuple[float, ...]:
    """Seconds of the call by the machine's constants and by all others that fit as well."""
    from fa4.sim.ensemble import seconds_of
    from fa4.sim.options import build

    return seconds_of(build(settings))


def interval_report(
    report: Mapping[str, Any], times: Sequence[float]
) -> dict[str, float | int] | None:
    """The throughput that these times are, from the least to the most; None without other sets."""
    from fa4.sim.ensemble import interval_of

    found = interval_of([report["tflops"] * report["seconds"] / seconds for seconds in times])
    if found is None:
        return None
    return {"least_tflops": found.least, "most_tflops": found.most, "sets": found.sets}


def ask_why(settings: Mapping[str, object], times: Sequence[float] = ()) -> dict[str, Any]:
    """Why the call takes as long as it does, as plain data; shows progress. times: `all_times`."""
    from fa4.sim.options import build
    from fa4.sim.why import explain_why

    with why_progress() as progress:
        return why_report(explain_why(build(settings), progress, times))


def compare_with(
    first: Mapping[str, Any],
    settings: Mapping[str, object],
    changes: Mapping[str, str],
    times: Sequence[float] = (),
) -> dict[str, Any]:
    """The report of a variant, and how many times as fast it is. times: of the first, as
    `all_times` has them; of none, no interval is given."""
    from fa4.sim.ensemble import speedup_interval

    second = describe({**settings, **changes})
    others = all_times({**settings, **changes}) if len(times) > 1 else ()
    found = speedup_interval(times, others) if others else None
    second["interval"] = interval_report(second, others)
    return {
        "b": second,
        "changes": dict(changes),
        "speedup": first["seconds"] / second["seconds"],
        "speedup_interval": None if found is None else [found.least, found.most],
        "undecided": None if found is None else found.undecided,
    }


def with_changes(settings: Mapping[str, Any], texts: Sequence[str] | None) -> dict[str, Any]:
    """Settings given as options and those of --set. ValueError for one that is given twice."""
    changes = split_changes("--set", texts or ())
    for name in changes:
        if name in settings:
            raise ValueError(
                f"{name} is set twice: by its option to {settings[name]} and by --set to "
                f"{changes[name]}"
            )
    return {**settings, **changes}


def split_changes(option: str, texts: Sequence[str]) -> dict[str, str]:
    """{"tau": "0"} from ["tau=0"]; a text may hold several, separated by spaces.

    Raises ValueError for a text that is no change, or changes that name a setting twice.
    """
    changes: dict[str, str] = {}
    for text in " ".join(texts).split() or texts:
        name, equals, value = text.partition("=")
        name = name.replace("-", "_")
        if not (name and equals and value):
            raise ValueError(f"{option}: expected NAME=VALUE, such as tau=0; got {text!r}")
        if name in changes:
            raise ValueError(f"{option} sets {name} twice: to {changes[name]} and {value}")
        changes[name] = value
    return changes


def describe(settings: Mapping[str, object]) -> dict[str, Any]:
    """The report as plain data: the request, its prediction and how far to trust it."""
    from fa4.sim.options import build
    from fa4.sim.validation import known_accuracy

    request = build(settings)
    prediction = request.predict()
    gpu = request.machine.gpu
    return {
        "settings": {name: str(value) for name, value in settings.items()},
        "pass": "bwd" if request.given.get("pass") == "bwd" else "fwd",
        "problem": asdict(request.problem),
        "sequences": [tuple(pair) for pair in request.simulation.lengths or ()],
        "machine": {
            "name": gpu.name,
            "sm_count": gpu.sm_count,
            "clock_hz": request.machine.clock_hz,
            "peak_clock_hz": gpu.clock_hz,
            "peak_tflops": gpu.peak_bf16_flops / 1e12,
        },
        "pipeline": asdict(request.pipeline),
        "rescale_rate": request.simulation.rescale_rate,
        "exact": request.simulation.exact,
        **measure(prediction),
        "accuracy": known_accuracy(request),
    }


def measure(prediction: Prediction) -> dict[str, Any]:
    """The figures of a prediction as plain data."""
    return {
        "plan": prediction.plan,
        "seconds": prediction.seconds,
        "tflops": prediction.tflops,
        "peak_share": prediction.peak_share,
        "sustained": None if prediction.sustained is None else asdict(prediction.sustained),
        "cycles": prediction.cycles,
        "busiest": prediction.bottleneck,
        "bottleneck": None,  # what the time depends on, which `ask_why` finds
        "bound": {
            "seconds": prediction.bound_seconds,
            "by": prediction.bound_by,
            "share": prediction.bound_seconds / prediction.seconds,
        },
        "unit_busy": dict(prediction.unit_busy),
        "hbm_busy": prediction.hbm_busy,
        "role_stalls": {role: dict(row) for role, row in prediction.role_stalls.items()},
        "imbalance": prediction.imbalance,
        "kernels": [asdict(kernel) for kernel in prediction.kernels],
        "work_tiles": prediction.work_tiles,
        "events": prediction.events,
    }


def headline(report: Mapping[str, Any]) -> str:
    """Pass, shape, type and mask in one line."""
    problem = report["problem"]
    left, right = problem["window_size"]
    mask = "no mask" if (left, right) == (None, None) else f"window {left}, {right}"
    if problem["causal"] and left is None:
        mask = "causal"
    heads = f"{problem['heads_q']} heads"
    if problem["heads_k"] != problem["heads_q"]:
        heads += f" on {problem['heads_k']} KV heads"
    dims = f"head dim {problem['head_dim']}"
    if problem["head_dim_v"] != problem["head_dim"]:
        dims += f" (values {problem['head_dim_v']})"
    at_most = "up to " if report["sequences"] else ""
    return (
        f"{'backward' if report['pass'] == 'bwd' else 'forward'}, batch {problem['batch']}, "
        f"{at_most}{problem['seqlen_q']} queries x {problem['seqlen_k']} keys, {heads}, {dims}, "
        f"{problem['dtype']}, {mask}"
    )


def render(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """One screen: figures, busy units, stalls, kernels and the model's error."""
    machine, bound = report["machine"], report["bound"]
    figures = _grid()
    for name, value in (
        ("time", f"{report['seconds'] * 1e6:.1f} us, {report['cycles']:.0f} cycles of the kernel"),
        ("throughput", f"{report['tflops']:.0f} TFLOP/s, {report['peak_share']:.1%} of peak"),
        *((("interval", say_interval(report["interval"])),) if report.get("interval") else ()),
        *((("sustained", say_sustained(report["sustained"])),) if report["sustained"] else ()),
        (
            "bound",
            f"{bound['seconds'] * 1e6:.1f} us by {bound['by']}; the prediction reaches "
            f"{bound['share']:.0%} of it",
        ),
        *((("limited by", report["bottleneck"]),) if report["bottleneck"] else ()),
        ("busiest", report["busiest"]),
        (
            "kernels",
            ", ".join(f"{k['name']} {k['seconds'] * 1e6:.1f} us" for k in report["kernels"]),
        ),
        ("model error", report["accuracy"]["text"]),
    ):
        figures.add_row(name, value)
    return (
        headline(report),
        f"{machine['name']}, {machine['sm_count']} SMs at {machine['clock_hz'] / 1e9:.3f} GHz, "
        f"peak {machine['peak_tflops']:.0f} TFLOP/s at {machine['peak_clock_hz'] / 1e9:.3f} GHz; "
        f"{report['plan']}, "
        f"{report['pipeline'].get('scheduler', 'static')} scheduler",
        "",
        figures,
        "\nbusy share of each unit, mean over the SMs",
        _bars({**report["unit_busy"], "hbm": report["hbm_busy"]}),
        "\nwhat each warp role waits for, share of the time",
        _stalls(report["role_stalls"]),
        *(render_why(report["why"]) if "why" in report else ()),
    )


def say_interval(interval: Mapping[str, Any]) -> str:
    """What all sets of constants say."""
    return (
        f"{interval['least_tflops']:.0f} to {interval['most_tflops']:.0f} TFLOP/s by "
        f"{interval['sets']} sets of constants that fit what was published as well"
    )


def say_sustained(sustained: Mapping[str, Any]) -> str:
    """Throughput of calls without a pause, and what power makes of the clock."""
    rate, limit_w = f"{sustained['tflops']:.0f} TFLOP/s", sustained["limit_w"]
    share, demand_w = sustained["clock_share"], sustained["demand_w"]
    if share == 1.0:
        return f"{rate} too: about {demand_w:.0f} of {limit_w:.0f} W"
    return (
        f"{rate} when repeated for 0.1 s and more: {limit_w:.0f} W leave {share:.0%} of the clock "
        f"(which would take {demand_w:.0f} W)"
    )


def say_speedups(report: Mapping[str, Any]) -> str:
    """Between what the sets of constants put a speedup, and whether they agree which is faster."""
    if report.get("speedup_interval") is None:
        return ""
    least, most = report["speedup_interval"]
    verdict = "undecided, " if report["undecided"] else ""
    return f" ({verdict}{least:.3f} to {most:.3f} by other constants that fit as well)"


def _grid() -> Table:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    return grid


def _bars(busy: Mapping[str, float]) -> Table:
    """One bar per unit, the busiest first."""
    grid = _grid()
    for unit, share in sorted(busy.items(), key=lambda item: -item[1]):
        filled = min(BAR_COLUMNS, round(share * BAR_COLUMNS))
        bar = "#" * filled + "." * (BAR_COLUMNS - filled)
        grid.add_row(unit, f"{bar} {share:4.0%}")
    return grid


def _stalls(stalls: Mapping[str, Mapping[str, float]]) -> Table:
    """Per role the signals it waits on most."""
    grid = _grid()
    for role, row in stalls.items():
        top = sorted(row.items(), key=lambda item: -item[1])[:TOP_STALLS]
        shown = [f"{signal} {share:.0%}" for signal, share in top if share >= 0.005]
        grid.add_row(role, ", ".join(shown) or "hardly ever")
    return grid


def render_comparisons(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """A beside each variant."""
    parts: list[Any] = []
    for variant in (report, *report["further"]):
        parts += ["", *render_comparison({**variant, "a": report["a"]})]
    return tuple(parts[1:])


def render_comparison(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """A and B side by side, and how much faster B is."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    a, b = report["a"], report["b"]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("A", justify="right")
    table.add_column("B", justify="right")
    table.add_column("B / A", justify="right")
    rows: list[tuple[str, Callable[[Mapping[str, Any]], float], str]] = [
        ("time us", lambda x: x["seconds"] * 1e6, ".1f"),
        ("TFLOP/s", lambda x: x["tflops"], ".0f"),
        ("share of peak", lambda x: x["peak_share"], ".1%"),
        ("bound us", lambda x: x["bound"]["seconds"] * 1e6, ".1f"),
        ("kernel cycles", lambda x: x["cycles"], ".0f"),
        ("idle at the end", lambda x: x["imbalance"], ".1%"),
    ]
    for name, figure, form in rows:
        one, two = figure(a), figure(b)
        table.add_row(name, f"{one:{form}}", f"{two:{form}}", f"{two / one:.3f}" if one else "")
    for unit in dict.fromkeys([*a["unit_busy"], *b["unit_busy"]]):
        one, two = (x["unit_busy"].get(unit, 0.0) for x in (a, b))
        table.add_row(f"{unit} busy", f"{one:.0%}", f"{two:.0%}", "")
    changes = ", ".join(f"{name}={value}" for name, value in report["changes"].items())
    error = a["accuracy"]["text"]
    fresh = [what for what in b["accuracy"]["outside"] if what not in a["accuracy"]["outside"]]
    if fresh:
        error += f"; of B not measured: {', '.join(fresh)}"
    limit = f"\n   limited by {a['bottleneck']}" if a["bottleneck"] else ""
    return (
        f"A: {headline(a)}, {a['machine']['name']}, {a['plan']}\n   {a['busiest']}{limit}",
        f"B: A with {changes}; {b['plan']}\n   {b['busiest']}",
        table,
        f"B is {report['speedup']:.3f} times as fast as A{say_speedups(report)}; "
        f"model error: {error}",
    )
