"""`fa4 emulate`: runs a kernel of a PTX file on the CPU and reports what the checks find."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa4.commands import emit
from fa4.files import check_folder, write_whole

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.table import Table

    from fa4.emulator.machine.launch_record import Allocation, Launch
    from fa4.emulator.tools.seeds import Exploration

TOP_OPCODES, TOP_OF_A_ROLE, LISTED_OPCODES, LISTED_PROBLEMS = 12, 4, 16, 3
MAX_STEPS = 10_000_000  # half a minute
NAME_LENGTH = 60

KernelOption = Annotated[str, typer.Option(help="Its name, if the file has several kernels.")]
GridOption = Annotated[str, typer.Option(metavar="X,Y,Z", help="CTAs; default: one cluster.")]
BlockOption = Annotated[
    str, typer.Option(metavar="X,Y,Z", help="Threads of a CTA; default: .reqntid, or 128.")
]
ClusterOption = Annotated[
    str, typer.Option(metavar="X,Y,Z", help="CTAs of a cluster; default: .reqnctapercluster, or 1.")
]
ArgOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ARGUMENT",
        help="A kernel parameter, in order: an array such as f32[1024]=random or "
        "x:bf16[8,64]=x.npy, or a number such as i32=5 or f32=0.5.",
    ),
]
OutOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=FILE.npy", help="Write this array as the kernel left it."),
]
ScheduleOption = Annotated[
    str, typer.Option(help="fifo, random or adversarial. Default: fifo; with --seeds, random.")
]
SeedsOption = Annotated[
    int, typer.Option(min=1, help="Run this many seeds, up to the first with findings.")
]
StrictOption = Annotated[
    bool,
    typer.Option("--strict-tmem-loads", help="Ask for tcgen05.wait::ld as the manual does."),
]
LanesOption = Annotated[
    bool,
    typer.Option("--strict-tmem-lanes", help="Report tensor memory addresses of another warp."),
]
OrderedOption = Annotated[
    bool, typer.Option("--ordered-sums", help="Report sums of floats in an order left to chance.")
]
MaxStepsOption = Annotated[
    int, typer.Option(min=1, help="End a kernel that is not at its end after so many steps.")
]
TraceOption = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Write a timeline for ui.perfetto.dev.")
]


def emulate(
    file: Annotated[Path | None, typer.Argument(metavar="FILE.ptx", show_default=False)] = None,
    kernel: KernelOption = "",
    grid: GridOption = "",
    block: BlockOption = "",
    cluster: ClusterOption = "",
    smem: Annotated[int, typer.Option(min=0, help="Bytes of dynamic shared memory.")] = 0,
    arg: ArgOption = None,
    out: OutOption = None,
    schedule: ScheduleOption = "",
    seed: Annotated[int, typer.Option(min=0, help="Of the schedule and of random arrays.")] = 0,
    seeds: SeedsOption = 1,
    no_checks: Annotated[bool, typer.Option("--no-checks", help="No race checks.")] = False,
    strict_tmem_loads: StrictOption = False,
    strict_tmem_lanes: LanesOption = False,
    ordered_sums: OrderedOption = False,
    max_findings: Annotated[int, typer.Option(min=1, help="Stop after this many.")] = 20,
    max_steps: MaxStepsOption = MAX_STEPS,
    trace: TraceOption = None,
    list_only: Annotated[bool, typer.Option("--list", help="Describe the kernels.")] = False,
    support: Annotated[bool, typer.Option("--support", help="List the instructions.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Run a PTX kernel on the CPU and find races, deadlocks and stray accesses.

    Exit code 0 if the checks found nothing, 1 if they did, 2 for bad input. docs/emulator.md says
    how to write arguments and read the report.

    Example: fa4 emulate add.ptx --grid 8 --arg x:f32[1024]=random --arg y:f32[1024]=zeros
    """
    if support:
        from fa4.emulator.tools.support import describe_support

        emit(describe_support(), as_json, render_support)
        return
    if file is None:
        raise ValueError("missing argument FILE.ptx")
    with one_line_errors(file):
        ptx = read_ptx(file)
        if list_only:
            from fa4.emulator.tools.describe import describe_kernels

            emit({"file": str(file), **describe_kernels(ptx)}, as_json, render_kernels)
            return
        shapes = {"grid": grid, "block": block, "cluster": cluster}
        job = prepare(ptx, kernel, arg or [], seed, smem, shapes)
        places = check_outputs(job, out or [], trace)
        schedule = choose_schedule(schedule, seeds)
        options = {
            "schedule": schedule,
            "checks": not no_checks,
            "strict_tmem_loads": strict_tmem_loads,
            "strict_tmem_lanes": strict_tmem_lanes,
            "ordered_sums": ordered_sums,
            "max_findings": max_findings,
            "max_steps": max_steps,
        }
        found = run(job, seeds, {**options, "seed": seed}, trace)
    report = describe(job, found) | {"file": str(file), **options, "trace": trace}
    emit(report | {"written": write(job, places)}, as_json, render)
    if report["findings"]:
        raise typer.Exit(1)


@dataclass
class PtxJob:
    """A launch with its memory. arrays: by name. before: their content at the start."""

    launch: Launch
    allocations: list[Allocation]
    arrays: dict[str, NDArray[Any]]
    before: dict[str, NDArray[Any]]


@contextmanager
def one_line_errors(file: Path) -> Iterator[None]:
    """Turns what the emulator raises into a ValueError that fits one line."""
    from fa4.emulator.errors import EmulatorError, UnsupportedInstruction

    try:
        yield
    except UnsupportedInstruction as error:
        problems = error.problems
        listed = "; ".join(
            f"line {line}: {text} ({why})" for line, text, why in problems[:LISTED_PROBLEMS]
        )
        more = "" if len(problems) <= LISTED_PROBLEMS else f"; --list shows all {len(problems)}"
        raise ValueError(
            f"{file}: {error.kernel} has unsupported instructions: {listed}{more}"
        ) from error
    except EmulatorError as error:
        raise ValueError(f"{file}: {error}") from error


def read_ptx(file: Path) -> str:
    """The text of a PTX file. Raises ValueError if it is binary."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not PTX text") from None


def prepare(
    ptx: str,
    kernel: str,
    texts: Sequence[str],
    seed: int,
    dynamic_smem_bytes: int,
    shapes: Mapping[str, str],
) -> PtxJob:
    """The launch that the options describe."""
    from fa4.emulator.errors import ArgumentError
    from fa4.emulator.host.ptx_arguments import arrays_of, parse_arguments
    from fa4.emulator.host.ptx_launch import find_kernel, make_launch

    find_kernel(ptx, kernel)  # before large arrays are made
    triples = {name: parse_shape(name, text) for name, text in shapes.items()}
    values = parse_arguments(texts, seed)
    arrays = arrays_of(values)
    try:
        launch, allocations = make_launch(
            ptx, values, kernel, dynamic_smem_bytes=dynamic_smem_bytes, **triples
        )
    except ArgumentError as error:
        text = texts[list(values).index(error.argument)]
        raise ValueError(f"--arg {text}: {error}") from error
    return PtxJob(launch, allocations, arrays, {name: a.copy() for name, a in arrays.items()})


def parse_shape(name: str, text: str) -> tuple[int, int, int] | None:
    """(x, y, z) of "8", "8,2" or "8,2,1"; None of ""."""
    from fa4.emulator.errors import LaunchError
    from fa4.emulator.execute import check_shape

    if not text:
        return None
    sizes = text.split(",")
    if len(sizes) > 3 or not all(size.strip().isdigit() for size in sizes):
        raise ValueError(f"--{name} {text}: one to three numbers with commas between them")
    x, y, z = [int(size) for size in [*sizes, "1", "1"][:3]]
    try:
        check_shape(name, (x, y, z))
    except LaunchError as error:
        raise ValueError(f"--{name} {text}: {error}") from None
    return x, y, z


def choose_schedule(name: str, seeds: int) -> str:
    """The schedule of --schedule and --seeds. Raises ValueError if there is none, or no use."""
    from fa4.emulator.machine.options import SCHEDULES

    if name and name not in SCHEDULES:
        raise ValueError(f"--schedule {name}: allowed are {', '.join(SCHEDULES)}")
    if seeds > 1 and name == "fifo":
        raise ValueError("--seeds changes nothing with --schedule fifo: take random or adversarial")
    return name or ("fifo" if seeds == 1 else "random")


def check_outputs(job: PtxJob, texts: Sequence[str], trace: Path | None) -> dict[str, Path]:
    """Array -> file, of the --out options. Raises before anything runs if one cannot be written."""
    if not texts and trace is None:
        return {}

    places = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or not path.endswith(".npy"):
            raise ValueError(f"--out {text}: expected NAME=FILE.npy")
        if name in places:
            raise ValueError(f"--out {text}: {name} is written already")
        if name not in job.arrays:
            raise ValueError(f"--out {text}: no such array; there are {', '.join(job.arrays)}")
        places[name] = Path(path)
    options = {f"--out {text}": place for text, place in zip(texts, places.values(), strict=True)}
    options |= {f"--trace {trace}": trace} if trace else {}
    for option, place in options.items():
        check_folder(place.parent)
        if place.is_dir():
            raise ValueError(f"{option}: is a directory, not a file")
        if place.exists() and not place.is_file():
            raise ValueError(f"{option}: is not a regular file")
    return places


def run(job: PtxJob, seeds: int, options: Mapping[str, Any], trace: Path | None) -> Exploration:
    """Runs the job; writes the timeline of the last run."""
    from fa4.emulator.machine.options import Options
    from fa4.emulator.tools.seeds import explore

    found = explore(
        [job.launch], job.allocations, Options(**options), seeds, record=trace is not None
    )
    if trace is not None and found.recorder is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        found.recorder.write(trace)
    return found


def write(job: PtxJob, places: Mapping[str, Path]) -> dict[str, Path]:
    """Writes arrays; types that .npy files do not know (bf16, fp8) as float32."""
    import io

    import numpy as np

    for name, path in places.items():
        array, content = job.arrays[name], io.BytesIO()
        with np.errstate(invalid="ignore"):  # signalling NaNs
            np.save(content, array.astype(np.float32) if array.dtype.kind == "V" else array)
        write_whole(path, content.getvalue())
    return dict(places)


def describe(job: PtxJob, found: Exploration) -> dict[str, Any]:
    """The report as plain data."""
    from fa4.emulator.tools.describe import describe_array, describe_report

    launch = job.launch
    return {
        "grid": launch.grid,
        "block": launch.block,
        "cluster": launch.cluster,
        "dynamic_smem_bytes": launch.dynamic_smem_bytes,
        **describe_report(found.report, launch.ptx),
        "seeds": found.seeds,
        "differing": found.differing,
        "arrays": [describe_array(n, a, job.before[n]) for n, a in job.arrays.items()],
    }


def render(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """The report for people: findings, what ran, what changed."""
    shape = " x ".join(str(tuple(report[name])) for name in ("grid", "block"))
    seeds = report["seeds"]
    order = report["schedule"]
    if order != "fifo":
        order += f", seed {seeds[0]}" if len(seeds) == 1 else f", seeds {seeds[0]} to {seeds[-1]}"
    parts: list[Any] = [
        f"{_shortened(', '.join(report['kernels']))}: {shape} threads; schedule {order}"
        f"{'' if report['checks'] else '; without race checks'}",
        *(f"  {line}" for line in report["output"]),
        *map(render_finding, report["findings"]),
        render_opcodes(report),
        _table(("array", "type", "changed", "least", "most", "inf or NaN"), _array_rows(report)),
    ]
    parts += [
        f"{name} differs between seed {seeds[0]} and seed {seed}"
        for name, seed in report["differing"].items()
    ]
    parts += [f"wrote {path}" for path in report["written"].values()]
    if report["trace"]:
        parts.append(f"wrote {report['trace']}; open it at https://ui.perfetto.dev")
    count = len(report["findings"])
    where = f" with seed {seeds[-1]}" if count and order != "fifo" else ""
    parts.append(f"{count or 'no'} finding{'s' if count != 1 else ''}{where}")
    return tuple(parts)


def render_finding(finding: Mapping[str, Any]) -> str:
    """Kind and message, then where: PTX line with its text, source line, CTA and warp."""
    hint = "\n    if it only takes long, raise --max-steps" * (finding["kind"] == "step-limit")
    where = f"PTX line {finding['line']}: {finding['text']}" if finding["line"] else "no PTX line"
    if finding["source"]:
        where += f"\n    from {finding['source']}"
    who = f"CTA {finding['cta']}" if finding["cta"] >= 0 else ""
    who += f" warp {finding['warp']}" if finding["warp"] >= 0 else ""
    who = f"\n    {who}" * bool(who)
    return f"\n{finding['kind']}: {finding['message']}\n    {where}{who}{hint}"


def render_opcodes(report: Mapping[str, Any]) -> str:
    """How much was executed, how fast, and of what."""
    top = list(report["instructions"].items())
    listed = [f"{opcode} {count}" for opcode, count in top[:TOP_OPCODES]]
    rest = sum(count for _, count in top[TOP_OPCODES:])
    lines = [
        f"\n{report['thread_instructions']} thread-instructions in {report['seconds']:.3f} s, "
        f"{report['thread_instructions_per_s'] / 1e6:.2f} M/s (loading: "
        f"{report['load_seconds']:.3f} s)",
        "  " + ", ".join(listed) + (f", others {rest}" if rest else ""),
    ]
    for role in report["roles"]:
        common = [f"{opcode} {n}" for opcode, n in list(role["top"].items())[:TOP_OF_A_ROLE]]
        warps = ", ".join(map(str, role["warps"]))
        lines.append(f"  warps {warps}: {role['name']}; {', '.join(common)}")
    return "\n".join(lines)


def _array_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for row in report["arrays"]:
        size = 1
        for extent in row["shape"]:
            size *= extent
        limits = ["-" if row[name] is None else f"{row[name]:g}" for name in ("min", "max")]
        shape = f"{row['dtype']}{row['shape']}"
        yield row["name"], shape, f"{row['changed']} of {size}", *limits, str(row["not_finite"])


def render_kernels(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """--list for people: one paragraph per kernel."""
    parts = [f"{report['file']}: PTX {report['version']} for {report['target']}"]
    for kernel in report["kernels"]:
        dynamic = " and dynamic" if kernel["uses_dynamic_smem"] else ""
        mix = [f"{opcode} {n}" for opcode, n in list(kernel["mix"].items())[:LISTED_OPCODES]]
        named = [f".{name} {', '.join(map(str, v))}" for name, v in kernel["directives"].items()]
        parts += [
            f"\n{kernel['name']}: {kernel['instructions']} instructions",
            *(f"  parameter {p['name'].removeprefix(kernel['name'] + '_')}: .{p['type']}, "
              f"{p['bytes']} bytes"
              for p in kernel["parameters"]),
            f"  shared memory: {kernel['static_smem_bytes']} bytes static{dynamic}",
            f"  registers: {', '.join(f'{n} {k}' for k, n in kernel['registers'].items())}",
            f"  directives: {'; '.join(named) or 'none'}",
            f"  {', '.join(mix)}{', ...' if len(kernel['mix']) > LISTED_OPCODES else ''}",
            *(f"  unsupported, line {p['line']}: {p['text']} ({p['reason']})"
              for p in kernel["unsupported"]),
        ]  # fmt: skip
    return tuple(parts)


def render_support(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """--support for people: the table, then how many rows rest on what."""
    rows = [(row["forms"], row["sections"], row["basis"]) for row in report["instructions"]]
    total = ", ".join(f"{count} {what}" for what, count in report["counts"].items())
    return _table(("instruction and forms", "PTX ISA", "confirmed by"), rows), total


def _shortened(name: str) -> str:
    """CuTe-DSL's kernel names hold the types of all arguments."""
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 3]}..."


def _table(headings: Sequence[str], rows: Any) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(*headings, box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table
