"""`fa4 distributed`: plans of attention across GPUs: shown, timed, checked; and carried out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa4.commands import distributed_run, emit
from fa4.commands.gpus import ACROSS, predict_gpus, read_call, with_options
from fa4.commands.predict import with_settings
from fa4.config import require, require_int

if TYPE_CHECKING:
    from fa4.distributed.plan import CommunicationPlan, Shard, Step

DEFAULT_GPUS = 8
MOST_CHECKED = 1 << 24  # rows x heads, of which each has a number
MOST_PLANNED = 64  # ranks whose programs are made together
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
CALL: Mapping[str, Any] = {
    "gpus": ("N", int, "Ranks.", str(DEFAULT_GPUS)),
    "method": ("NAME", str, ACROSS["method"][2].partition("; auto")[0] + ".", "ring"),
    "degree": ("N", int, "Ranks that share heads, of ring+ulysses.", "1"),
    "seqlen": ("N", str, "Rows of the whole sequence (32k works).", "32k"),
    "heads": ("N", str, "Query heads.", "16"),
    "heads_k": ("N", str, "KV heads.", "heads"),
    "head_dim": ("N", str, "Elements of a query and a key.", "128"),
    "causal": ("", bool, "Hide later keys.", "no"),
    "window": ("L,R", str, "Sliding window, none for an open side.", "none,none"),
    "pass": ("NAME", str, "fwd or bwd.", "fwd"),
}

distributed = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="""Attention across GPUs: show, time and check a plan; run it on a group, and time that.

Under torchrun, run and bench take the ranks that it starts: torchrun --nproc_per_node 8 -m fa4 ...

Example: fa4 distributed plan --gpus 4 --causal
""",
)


@distributed.command()
@with_options("call", CALL)
def plan(
    call: Mapping[str, Any],
    rank: Annotated[int, typer.Option(help="Whose program to show.")] = 0,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            metavar="FILE",
            help="Draw who computes which square of the mask when, and who sends what: .svg, .png.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a rank sends, waits for, computes and merges, step by step.

    Example: fa4 distributed plan --gpus 4 --causal --picture out/ring.svg
    """
    made = make(call)
    require_int("--rank", rank, 0, made.ranks - 1)
    report = describe(made) | {
        "rank": rank,
        "steps": [say_step(made, step) for step in made.programs[rank].steps],
        "results": [f"{name}: {say_piece(piece)}" for name, piece in made.programs[rank].results],
        "picture": None if picture is None else str(picture),
    }
    if picture is not None:
        draw(made, picture)
    emit(report, as_json, render_plan)


@distributed.command()
@with_settings
@with_options("across", ACROSS)
def predict(across: Mapping[str, Any], as_json: Json = False, **settings: Any) -> None:
    """Predict time, efficiency and memory of each method: `fa4 predict --gpus`.

    Example: fa4 distributed predict --gpus 64 --nodes 8 --seqlen 1m --heads 32 --heads-k 8 --causal
    """
    predict_gpus(settings, {**across, "gpus": across["gpus"] or DEFAULT_GPUS}, as_json)


@distributed.command()
@with_options("call", CALL)
def check(
    call: Mapping[str, Any],
    most_imbalance: Annotated[
        float, typer.Option(metavar="X", help="Most work of a rank over the mean.")
    ] = float("inf"),
    as_json: Json = False,
) -> None:
    """Check a plan: every pair of row and key once, no deadlock, no buffer overwritten too early.

    Exit code 1 if something is wrong with it.

    Example: fa4 distributed check --gpus 8 --method ring+ulysses --degree 2 --causal
    """
    from dataclasses import asdict

    from fa4.distributed.check import check_plan

    made = make(call)
    numbers = made.spec.rows.seqlen * made.spec.sizes.heads_q
    require(numbers <= MOST_CHECKED, f"seqlen x heads must be at most {MOST_CHECKED}", numbers)
    found = check_plan(made, most_imbalance)
    emit({**describe(made), **asdict(found)}, as_json, render_check)
    if found.findings:
        raise typer.Exit(1)


distributed.command()(distributed_run.run)
distributed.command()(distributed_run.bench)


def make(call: Mapping[str, Any]) -> CommunicationPlan:
    """The plan of the options."""
    from dataclasses import replace

    from fa4.distributed.forecast import make_call_spec
    from fa4.distributed.methods import make_plan

    given = {name: value for name, value in call.items() if value is not None}
    gpus, method = given.pop("gpus", DEFAULT_GPUS), given.pop("method", "ring")
    degree = given.pop("degree", 1)
    require_int("gpus", gpus, 1, MOST_PLANNED)
    shape, _, backward = read_call(given)
    return make_plan(replace(make_call_spec(shape, method, gpus, degree), backward=backward))


def describe(made: CommunicationPlan) -> dict[str, Any]:
    """What a plan is for."""
    spec = made.spec
    return {
        "method": spec.method, "layout": spec.rows.name, "gpus": made.ranks,
        "seqlen": spec.rows.seqlen, "degree": spec.degree, "digest": spec.digest,
        "pass": "bwd" if spec.backward else "fwd",
    }  # fmt: skip


def headline(report: Mapping[str, Any]) -> str:
    """Method, layout and size in one line."""
    what = "backward" if report["pass"] == "bwd" else "forward"
    return (
        f"{what}, {report['method']}, layout {report['layout']}, {report['seqlen']} rows over "
        f"{report['gpus']} ranks, plan {report['digest']}"
    )


def say_piece(piece: Shard) -> str:
    """Kind, rows and heads."""
    rows = ", ".join(
        f"{run.start}:{run.stop}" + (f":{run.step}" if run.step > 1 else "")
        for run in piece.rows[:4]
    )
    more = ", ..." if len(piece.rows) > 4 else ""
    return f"{piece.kind} {rows}{more} heads {piece.heads.start}:{piece.heads.stop}"


def say_step(made: CommunicationPlan, step: Step) -> str:
    """A step in words."""
    from fa4.distributed.plan import Add, Await, Compute, Free, Pack, Post

    if isinstance(step, Post):
        said = [f"{x.buffer} to rank {x.peer} ({say_piece(x.piece)})" for x in step.sends]
        said += [f"from rank {x.peer} into {x.buffer}" for x in step.receives]
        return f"start {step.name}: {'; '.join(said) or 'nothing'}"
    if isinstance(step, Await):
        return f"wait for {step.name}"
    if isinstance(step, Compute):
        blocks = [f"{x.shape[0]} rows x {x.shape[1]} keys" + ("" if x.is_whole else ", masked")
                  for x in step.blocks]  # fmt: skip
        out = ", ".join(name for name in step.out if name)
        return f"compute {'; '.join(blocks) or 'nothing'} of {', '.join(step.keys)} into {out}"
    if isinstance(step, Pack):
        return f"put {', '.join(step.sources)} into {step.into}"
    if isinstance(step, Add):
        return f"add {step.source} to {step.into}"
    assert isinstance(step, Free)
    return f"free {step.buffer}"


def draw(made: CommunicationPlan, path: Path) -> None:
    """Write the picture of a plan, timed on B200s linked by NVLink."""
    from fa4.base.drawing import FORMATS
    from fa4.base.files import check_folder, require_replaceable, write_whole
    from fa4.distributed.forecast import make_model
    from fa4.distributed.picture import render_plan as render_picture
    from fa4.distributed.simulate import time_plan
    from fa4.sim.links import make_fabric

    kind = path.suffix.lstrip(".").lower()
    if kind not in FORMATS:
        raise ValueError(f"--picture must end in .svg or .png; got {path.name!r}")
    check_folder(path.parent)
    require_replaceable(path)
    model = make_model(made.spec.sizes, "b200", make_fabric(made.ranks, "nvlink5"))
    title = f"{headline(describe(made)).partition(', plan')[0]}; times of a B200, predicted"
    write_whole(path, render_picture(made, time_plan(made, model), title, kind))


def render_plan(report: Mapping[str, Any]) -> str:
    """The steps of a rank, a line each."""
    lines = [headline(report), f"rank {report['rank']}:"]
    lines += [f"  {number:3d} {said}" for number, said in enumerate(report["steps"])]
    lines += [f"  result {said}" for said in report["results"]]
    if report["picture"]:
        lines.append(f"wrote {report['picture']}")
    return "\n".join(lines)


def render_check(report: Mapping[str, Any]) -> str:
    """Findings, or that there are none."""
    found = report["findings"]
    said = [f"wrong: {line}" for line in found] or [
        "right: every pair once, no deadlock in any order, no buffer in use twice"
    ]
    return "\n".join(
        [
            headline(report),
            *said,
            f"most work of a rank over the mean {report['balance']:.2f}; a rank sends at most "
            f"{report['sent_bytes'] / 2**20:.1f} MiB and holds {report['peak_bytes'] / 2**20:.1f}",
        ]
    )
