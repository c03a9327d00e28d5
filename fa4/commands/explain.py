"""`fa4 explain`: a kernel's pipeline before it runs: roles, signals, memory, findings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa4.commands import emit

if TYPE_CHECKING:
    from fa4.hardware import Gpu
    from fa4.plan.schema import PipelinePlan

PASSES = ("forward", "backward")
ONLY = {"forward": ("tile_n", "q_tiles", "kv_stages"),
        "backward": ("deterministic", "scheduler")}  # fmt: skip
CHANGES = ("tile_n", "q_tiles", "cta_group", "kv_stages", "scheduler")
SEQLEN = 8192  # of the problem that FlashAttention-4's choices are looked up for


def explain(
    which: Annotated[str, typer.Option("--pass", help="forward or backward.")] = "forward",
    head_dim: Annotated[int, typer.Option(help="Elements of a query and key.")] = 128,
    head_dim_v: Annotated[int | None, typer.Option(help="Of a value; default: head dim.")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Hide later keys.")] = False,
    machine: Annotated[str, typer.Option(help="A name such as b200, or a TOML file.")] = "b200",
    cta_group: Annotated[int | None, typer.Option(help="1, or 2 for CTA pairs.")] = None,
    tile_n: Annotated[int | None, typer.Option(help="Keys of a KV tile; forward only.")] = None,
    q_tiles: Annotated[int | None, typer.Option(help="Q tiles per CTA; forward only.")] = None,
    kv_stages: Annotated[int | None, typer.Option(help="K/V ring slots; forward only.")] = None,
    kernel: Annotated[
        str | None,
        typer.Option(help="As of fa4 predict.", show_default="this package's on the machine"),
    ] = None,
    deterministic: Annotated[
        bool | None, typer.Option("--deterministic", help="A fixed order of sums; backward only.")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="naive, lpt or spt: order of launches; backward only.")
    ] = None,
    programs: Annotated[bool, typer.Option("--programs", help="Show what roles do.")] = False,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print the graph only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Show the pipeline that FlashAttention-4 would choose, or the one your options describe.

    Warps, registers, signals, memory, and what the static checks find. Exit code 1 if they find
    anything.

    Example: fa4 explain --pass backward --head-dim 64 --programs
    """
    from fa4.config import require
    from fa4.plan.render import render_graph
    from fa4.sim.machine import find_machine

    require(which in PASSES, f"--pass must be one of {', '.join(PASSES)}", which)
    if mermaid and as_json:
        raise ValueError("--mermaid and --json exclude each other; got both")
    choices = {"head_dim": head_dim, "head_dim_v": head_dim_v, "causal": causal,
               "cta_group": cta_group, "tile_n": tile_n, "q_tiles": q_tiles,
               "kv_stages": kv_stages, "deterministic": deterministic,
               "scheduler": scheduler}  # fmt: skip
    gpu = find_machine(machine).gpu
    plan = build(which, choices, gpu, kernel)
    report = describe(plan, gpu)
    if mermaid:
        print(render_graph(plan))
    else:
        if not (programs or as_json):
            report["programs"] = {}
        emit(report, as_json, render)
    if report["findings"]:
        raise typer.Exit(1)


def build(
    which: str, choices: Mapping[str, Any], gpu: Gpu, kernel: str | None = None
) -> PipelinePlan:
    """The plan of a kernel's choices for a long problem, with the given ones instead."""
    from fa4.designs import find_design
    from fa4.sim.options import replaced

    other = "backward" if which == "forward" else "forward"
    for name in ONLY[other]:
        if choices[name] is not None:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is an option of the {other} pass; got {choices[name]}")
    design = find_design(gpu, backward=which == "backward", kernel=kernel)
    assert design.choose is not None  # it is modelled
    pipeline = design.choose(_problem(choices), gpu, bool(choices["deterministic"]))
    for name in CHANGES:
        if choices[name] is not None:
            pipeline = replaced(pipeline, {name: choices[name]}, which)
    plan: PipelinePlan = design.plan(pipeline, gpu)
    return plan


def _problem(choices: Mapping[str, Any]) -> Any:
    from fa4.config import Problem

    names = ("head_dim", "head_dim_v", "causal")
    given = {name: choices[name] for name in names}
    return Problem(seqlen_q=SEQLEN, seqlen_k=SEQLEN, heads_q=1, heads_k=1, **given)


def describe(plan: PipelinePlan, gpu: Gpu) -> dict[str, Any]:
    """The report as plain data; the keys are what `--json` prints."""
    from fa4.plan import check_plan
    from fa4.plan.render import draw_memory, render_program
    from fa4.plan.resident import resident_clusters

    return {
        "plan": plan.name,
        "machine": gpu.name,
        "cta_group": plan.cta_group,
        "warps": plan.warps,
        "resident": resident_clusters(plan, gpu),
        "memory": {
            "smem_bytes": plan.bytes_used("smem"),
            "smem_bytes_limit": gpu.smem_bytes_per_cta,
            "tmem_cols": plan.bytes_used("tmem"),
            "tmem_cols_limit": gpu.tmem_cols,
        },
        "roles": [
            {
                "role": role.name,
                "warps": role.warps,
                "registers": role.registers,
                "waits_on": [s.name for s in plan.signals if role.name in s.waiters],
                "arrives_on": [s.name for s in plan.signals if role.name in s.arrivals],
            }
            for role in plan.roles
        ],
        "signals": [
            {
                "signal": signal.name,
                "kind": signal.kind,
                "stages": signal.stages,
                "arrivals": dict(signal.arrivals),
                "arrive_count": signal.arrive_count,
                "tx_bytes": signal.tx_bytes,
                "first_tx_bytes": signal.first_tx_bytes,
                "waiters": signal.waiters,
                "free": signal.free,
                "remote": signal.remote,
            }
            for signal in plan.signals
        ],
        "buffers": _buffers(plan),
        "maps": [draw_memory(plan, space) for space in ("smem", "tmem")],
        "programs": {role.name: render_program(role) for role in plan.roles},
        "findings": [
            {"rule": found.rule, "subject": found.subject, "message": found.message}
            for found in check_plan(plan, gpu)
        ],
    }


def _buffers(plan: PipelinePlan) -> list[dict[str, Any]]:
    return [
        {
            "buffer": buffer.name,
            "space": buffer.space,
            "start": buffer.start,
            "stop": buffer.stop,
            "size": buffer.size,
            "stages": buffer.stages,
            "overlaps": dict(buffer.overlaps),
        }
        for buffer in plan.buffers
    ]


def render(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """The report for people: roles, signals, memory drawn to scale, programs, findings."""
    memory = report["memory"]
    pair = ", CTA pairs" if report["cta_group"] == 2 else ""
    findings = [f"{row['rule']}: {row['subject']}: {row['message']}" for row in report["findings"]]
    return (
        f"{report['plan']} on {report['machine']}: {report['warps']} warps{pair}, "
        f"{report['resident']} {'pairs' if pair else 'CTAs'} resident, "
        f"{memory['smem_bytes']} of {memory['smem_bytes_limit']} bytes of shared memory, "
        f"{memory['tmem_cols']} of {memory['tmem_cols_limit']} columns of tensor memory",
        *_tables(report),
        *(text + "\n" for text in report["maps"]),
        *(text + "\n" for text in report["programs"].values()),
        *(findings or ["The static checks find nothing."]),
    )


def _tables(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """Roles and signals, for 80 columns."""
    from rich import box
    from rich.table import Table

    from fa4.plan.render import span

    style: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
    roles = Table("role", "warps", "regs", "waits on", "arrives on", **style)
    for row in report["roles"]:
        names = (" ".join(row[key]) for key in ("waits_on", "arrives_on"))
        roles.add_row(row["role"], span(row["warps"]), str(row["registers"]), *names)
    signals = Table("signal", "stages", "arrivals", "bytes", "waiters", "free", **style)
    for row in report["signals"]:
        arrivals = " + ".join(f"{name} {count}" for name, count in row["arrivals"].items())
        extra = f" (+{row['first_tx_bytes']})" if row["first_tx_bytes"] else ""
        num_bytes = f"{row['tx_bytes']}{extra}" if row["tx_bytes"] else ""
        signals.add_row(row["signal"], str(row["stages"]), arrivals, num_bytes,
                        " ".join(row["waiters"]), str(row["free"] or ""))  # fmt: skip
    return roles, signals
