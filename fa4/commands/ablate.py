"""`fa4 ablate`: each of FlashAttention-4's ideas switched off in turn, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa4.commands import emit
from fa4.commands.predict import with_changes, with_settings
from fa4.commands.why import limit_of

if TYPE_CHECKING:
    from fa4.sim.ablate import Ablation
    from fa4.sim.predict import Prediction


@with_settings
def ablate(
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting, or gpu.X or costs.X of the machine (repeatable).",
        ),
    ] = None,
    off_rescale_rate: Annotated[
        float,
        typer.Option(
            help="Share of steps that rescale O without a threshold (`fa4 demo` measures it)."
        ),
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    **settings: Any,
) -> None:
    """Predict a call with each of FlashAttention-4's ideas switched off in turn.

    Without options: what `fa4 predict` predicts without options.

    Example: fa4 ablate --seqlen 8k --causal
    """
    from fa4.sim.ablate import ablate as run

    done = run(with_changes(settings, change), off_rescale_rate=off_rescale_rate,
               intervals=True)  # fmt: skip
    emit(build_report(done, limit_of(done.request.given)), as_json, render)


def build_report(done: Ablation, limit: str | None = None) -> dict[str, Any]:
    """The report as plain data; the keys are what `--json` prints. limit: of the call, in words."""
    problem = done.request.problem
    return {
        "problem": {name: getattr(problem, name) for name in problem.__dataclass_fields__},
        "machine": done.base.machine,
        "with_all": numbers(done.base),
        "limit": limit,
        "ideas": [
            {
                "idea": outcome.idea.name,
                "without": outcome.idea.without,
                "settings": dict(outcome.idea.settings),
                "speedup": outcome.speedup,
                "speedup_interval": outcome.interval
                and [outcome.interval.least, outcome.interval.most],
                "undecided": outcome.interval and outcome.interval.undecided,
                "note": outcome.note,
                "result": outcome.prediction and numbers(outcome.prediction),
            }
            for outcome in done.outcomes
        ],
    }


def numbers(prediction: Prediction) -> dict[str, Any]:
    """What is reported of a prediction."""
    return {
        "plan": prediction.plan,
        "microseconds": prediction.seconds * 1e6,
        "tflops": prediction.tflops,
        "peak_share": prediction.peak_share,
        "bottleneck": prediction.bottleneck,
    }


def render(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """The report for people: one row per idea."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    base = report["with_all"]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("idea", no_wrap=True)
    table.add_column("without it", overflow="fold")
    for heading in ("us", "TFLOP/s", "speedup", "by all constants"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row("(all)", "", f"{base['microseconds']:.1f}", f"{base['tflops']:.0f}", "", "")
    notes = []
    for row in report["ideas"]:
        found = row["result"]
        cells = ("-", "-", "-", "-")
        if found is not None:
            speedup = f"{row['speedup']:.3f}x"
            cells = (f"{found['microseconds']:.1f}", f"{found['tflops']:.0f}", speedup,
                     say_all(row))  # fmt: skip
        table.add_row(row["idea"], row["without"], *cells)
        if row["note"]:
            notes.append(f"{row['idea']}: {row['note']}")
    return (
        f"{base['plan']} on {report['machine']}: {base['bottleneck']}",
        *((f"limited by {report['limit']}",) if report["limit"] else ()),
        table,
        *notes,
        "speedup: time without the idea alone, over the time with all",
        "by all constants: the speedup by all sets that fit what was published as well; undecided "
        "where they do not agree whether the idea gains",
    )


def say_all(row: Mapping[str, Any]) -> str:
    """The interval of an idea's speedup, or that its sign is not known."""
    if row["speedup_interval"] is None:
        return "-"
    least, most = row["speedup_interval"]
    return f"undecided {least:.2f}-{most:.2f}" if row["undecided"] else f"{least:.2f}-{most:.2f}"
