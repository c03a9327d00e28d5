"""`fa4 machines`: the machines a prediction can be made for, each figure with its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa4.commands import emit

if TYPE_CHECKING:
    from fa4.sim.machine import Machine


def machines(
    name: Annotated[
        str | None, typer.Argument(help="Show every figure of this one (or of a TOML file).")
    ] = None,
    toml: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Print a TOML file to start your own machine from."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """List the machines, or every figure of one with its source.

    Example: fa4 machines --toml b200 > my.toml && fa4 predict --machine my.toml
    """
    from fa4.hardware import GPUS, find_gpu
    from fa4.sim.machine import find_machine

    if toml is not None:
        if name is not None or as_json:
            raise ValueError("--toml NAME prints a TOML file; give neither NAME nor --json with it")
        print("\n".join(write_toml(find_machine(find_gpu(toml).name))))
        return
    if name is not None:
        emit(describe(find_machine(name)), as_json, render_one)
        return
    emit({"machines": [describe(find_machine(key)) for key in GPUS]}, as_json, render)


def describe(machine: Machine) -> dict[str, Any]:
    """A machine as plain data: figures and costs with sources, the bounds of fitted constants."""
    from dataclasses import fields

    from fa4.hardware import numeric_fields
    from fa4.sim.cost_table import FREE_CONSTANTS, free_constants
    from fa4.sim.validation import machine_mape

    gpu, table = machine.gpu, type(machine.costs)
    origins = table.sources()
    figures = {
        name: {
            "value": getattr(gpu, name),
            "source": gpu.sources[name].text,
            "confidence": gpu.sources[name].confidence,
        }
        for name in numeric_fields()
    }
    costs: dict[str, dict[str, Any]] = {}
    for item in fields(table):
        value = getattr(machine.costs, item.name)
        fitted = item.name in free_constants(machine.costs)
        costs[item.name] = {"value": value, "fitted": fitted}
        if fitted:
            least, most, why = FREE_CONSTANTS[item.name]
            costs[item.name] |= {"least": least, "most": most, "source": f"fitted; {why}"}
        else:
            changed = value != item.default
            source = "differs from the family's" if changed else origins[item.name]
            costs[item.name]["source"] = source
            if not changed and item.name in table.intervals():
                costs[item.name] |= dict(
                    zip(("least", "most"), table.intervals()[item.name], strict=True)
                )
    return {
        "name": gpu.name,
        "arch": gpu.arch,
        "peak_tflops": gpu.peak_bf16_flops / 1e12,
        "ridge_flops_per_byte": gpu.ridge_flops_per_byte,
        "mape": machine_mape(gpu.name.lower()),
        "figures": figures,
        "costs": costs,
        "power": describe_power(machine),
    }


def describe_power(machine: Machine) -> dict[str, dict[str, Any]] | None:
    """What operations take of the power, with sources; None if nobody has measured it."""
    from dataclasses import asdict

    figures = machine.power
    if figures is None:
        return None
    sources, intervals = figures.sources(), figures.intervals()
    described: dict[str, dict[str, Any]] = {}
    for name, value in asdict(figures).items():
        described[name] = {"value": value, "source": sources[name]}
        if name in intervals:
            described[name] |= dict(zip(("least", "most"), intervals[name], strict=True))
    return described


def render(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """All machines: one line each."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        "machine", "arch", "SMs", "GHz", "TFLOP/s", "HBM TB/s", "exp/clk", "TMEM", "model error",
        box=SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    for row in report["machines"]:
        value = {name: figure["value"] for name, figure in row["figures"].items()}
        table.add_row(
            row["name"].lower(),
            row["arch"],
            str(value["sm_count"]),
            f"{value['clock_hz'] / 1e9:.3f}",
            f"{row['peak_tflops']:.0f}",
            f"{value['hbm_bytes_per_s'] / 1e12:.2f}",
            str(value["exp_per_clk"]),
            str(value["tmem_cols"] or "none"),
            "unknown" if row["mape"] is None else f"{row['mape']:.1%} mean",
        )
    legend = "TFLOP/s: dense bf16; exp/clk: exponentials of an SM; TMEM: tensor memory columns"
    return (
        table,
        legend,
        "Every figure with its source: fa4 machines b200. Your own: fa4 machines --toml.",
    )


def render_one(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """One machine: figures and costs with their sources."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    figures, costs = (Table(box=SIMPLE_HEAD, pad_edge=False) for _ in range(2))
    for table, first in ((figures, "figure"), (costs, "cost")):
        table.add_column(first, no_wrap=True)
        table.add_column("value", no_wrap=True, justify="right")
        table.add_column("source")
    for name, row in report["figures"].items():
        trust = "" if row["confidence"] == "high" else f" ({row['confidence']} confidence)"
        figures.add_row(name, _number(row["value"]), row["source"] + trust)
    for name, row in (report["costs"] | (report["power"] or {})).items():
        source = row["source"]
        if "least" in row:
            source += f"; {_number(row['least'])} to {_number(row['most'])}"
        costs.add_row(name, _number(row["value"]), source)
    title = f"{report['name']} ({report['arch']}), peak {report['peak_tflops']:.0f} TFLOP/s"
    return title, figures, costs


def write_toml(machine: Machine) -> Iterator[str]:
    """Lines of a TOML file based on `machine`: every figure as a comment with its source."""
    report = describe(machine)
    yield f"# A machine like {report['name']}: remove the # of what differs, and change it."
    yield "# Use it with: fa4 predict --machine my.toml"
    yield f'base = "{report["name"].lower()}"'
    for table in ("gpu", "costs"):
        yield f"\n[{table}]"
        if table == "gpu":
            yield f'# name = "my {report["name"]}"'
        for name, row in report["figures" if table == "gpu" else "costs"].items():
            yield f"# {name} = {_number(row['value'])}  # {row['source']}"
    yield "\n[sources]  # where the [gpu] figures above come from"
    yield '# clock_hz = "measured with nvidia-smi under load"'


def _number(value: float) -> str:
    """A number as TOML and people read it."""
    if isinstance(value, int):
        return str(value)
    return f"{value:.6g}" if abs(value) >= 1e6 else str(value)
