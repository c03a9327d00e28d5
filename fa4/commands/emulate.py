"""`fa4 emulate`: runs kernels on the CPU, of PTX or of a script, and reports what checks find."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa4.base.files import check_folder, write_whole
from fa4.commands import emit, emulate_witness
from fa4.commands.emulate_choices import (
    choose_arch,
    choose_schedule,
    choose_severity,
    is_as_severe,
    refuse_given,
)
from fa4.commands.emulate_covered import (
    SecondsOption,
    UntilOption,
    VaryOption,
    covered_options,
    run_covered,
)
from fa4.commands.emulate_covered import render as render_covered
from fa4.commands.emulate_cuda import compile_cuda
from fa4.commands.emulate_findings import (
    BaselineOption,
    CoverageOption,
    FindingFiles,
    IgnoreOption,
    SarifOption,
    SuppressionsOption,
    WriteOption,
)
from fa4.commands.emulate_report import render, render_kernels, render_support
from fa4.commands.emulate_witness import ReplayOption, SteerOption, WitnessOption

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fa4.emulator.accepted import Accepted
    from fa4.emulator.machine.launch_record import Allocation, Launch
    from fa4.emulator.tools.seeds import Exploration

LISTED_PROBLEMS = 3
MAX_STEPS = 10_000_000  # half a minute

FileArgument = Annotated[
    Path | None, typer.Argument(metavar="FILE.ptx|FILE.cu|SCRIPT.py", show_default=False)
]
ScriptArgs = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", help="Of the script; after -- if they begin with a dash."),
]
ArchOption = Annotated[str, typer.Option(help="Of a script or .cu: sm_100a, sm_103a or sm_90a.")]
FailOption = Annotated[
    str, typer.Option(help="Least severity that fails: style, formal, hazard or error.")
]
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
    file: FileArgument = None,
    script_args: ScriptArgs = None,
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
    fail_on: FailOption = "hazard",
    ignore: IgnoreOption = None,
    suppressions: SuppressionsOption = None,
    baseline: BaselineOption = None,
    write_baseline: WriteOption = False,
    sarif: SarifOption = None,
    coverage: CoverageOption = None,
    steer: SteerOption = 0,
    witness: WitnessOption = None,
    replay: ReplayOption = None,
    until_covered: UntilOption = 0,
    vary: VaryOption = None,
    seconds: SecondsOption = 120.0,
    arch: ArchOption = "sm_100a",
    trace: TraceOption = None,
    list_only: Annotated[bool, typer.Option("--list", help="Describe the kernels.")] = False,
    support: Annotated[bool, typer.Option("--support", help="List the instructions.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Run a kernel (PTX, CUDA C++), or a script that launches some, and say what is wrong with it.

    Races, deadlocks, stray accesses, missing fences. A script sees a GPU in torch; its Triton and
    CuTe-DSL kernels are run. Exit code 0 if no finding is as severe as --fail-on, 1 if one is, 2
    for bad input. docs/emulator.md says how to write arguments and read the report.

    Example: fa4 emulate add.ptx --grid 8 --arg x:f32[1024]=random --arg y:f32[1024]=zeros
    """
    if support:
        from fa4.emulator.tools.support import describe_support

        emit(describe_support(), as_json, render_support)
        return
    if file is None:
        raise ValueError("missing argument FILE.ptx, FILE.cu or SCRIPT.py")
    files = FindingFiles(
        ignore=ignore or [],
        suppressions=suppressions or [],
        baseline=baseline,
        write_baseline=write_baseline,
        sarif=sarif,
        coverage=coverage,
    )
    options = {
        "schedule": choose_schedule(schedule, seeds),
        "checks": not no_checks,
        "strict_tmem_loads": strict_tmem_loads,
        "strict_tmem_lanes": strict_tmem_lanes,
        "ordered_sums": ordered_sums,
        "max_findings": max_findings,
        "max_steps": max_steps,
        "fail_on": choose_severity(fail_on),
    }
    of_ptx = {
        "--kernel": kernel, "--grid": grid, "--block": block, "--cluster": cluster, "--smem": smem,
        "--arg": arg, "--out": out, "--seeds": seeds > 1, "--trace": trace, "--list": list_only,
    }  # fmt: skip
    orders = {"--steer": steer, "--witness": witness, "--replay": replay}
    covered = covered_options(until_covered, vary, seconds)
    if file.suffix == ".py":
        refuse_given(file, of_ptx)
        if until_covered:
            given = {**of_ptx, **orders, **covered, "--seed": seed, "--arch": choose_arch(arch)}
            done = run_covered(file, script_args or [], given, options, files)
            emit_covered(done, options, as_json)
            return
        chosen = {**options, "seed": seed, "collect": write_baseline, **script_orders(orders)}
        arguments = script_args or []
        emulate_script(file, arguments, choose_arch(arch), chosen, files, witness, as_json)
        return
    if script_args:
        raise ValueError(f"{script_args[0]}: only a script takes arguments; a kernel's are --arg")
    emulate_ptx(
        file,
        of_ptx | orders | covered | {"--seeds": seeds, "--seed": seed, "--arch": choose_arch(arch)},
        options,
        files,
        as_json,
    )


def emulate_ptx(
    file: Path,
    given: Mapping[str, Any],
    options: Mapping[str, Any],
    files: FindingFiles,
    as_json: bool,
) -> None:
    """Runs a kernel of a PTX file and prints what was found. given: options that only PTX has."""
    from fa4.emulator.tools.finding_files import FindingTexts

    seed, trace, accepted = given["--seed"], given["--trace"], files.accepted
    with one_line_errors(file):
        ptx = compile_cuda(file, given["--arch"]) if file.suffix == ".cu" else read_ptx(file)
        if given["--list"]:
            from fa4.emulator.tools.describe import describe_kernels

            emit({"file": str(file), **describe_kernels(ptx)}, as_json, render_kernels)
            return
        shapes = {name: given[f"--{name}"] for name in ("grid", "block", "cluster")}
        make = partial(
            prepare, ptx, given["--kernel"], seed=seed, dynamic_smem_bytes=given["--smem"],
            shapes=shapes,
        )  # fmt: skip
        if given["--until-covered"]:
            emit_covered(run_covered(file, [], given, options, files, make), options, as_json)
            return
        job = make(given["--arg"] or [])
        places = check_outputs(job, given["--out"] or [], trace)
        chosen = {**options, "seed": seed, "accepted": accepted}
        if given["--replay"]:
            chosen["schedule"] = emulate_witness.read(given["--replay"]).schedule()
        if given["--steer"]:
            found = run_steered(job, given, chosen)
        else:
            found = run(job, given["--seeds"], chosen, trace)
    order = "replay" if given["--replay"] else options["schedule"]
    report = describe(job, found, accepted) | {"file": str(file), **options, "trace": trace}
    ran = found.report
    steering = emulate_witness.describe_steering([ran]) if given["--steer"] else None
    report |= {"schedule": order, "witness": None, "steering": steering}
    made = files.write(
        FindingTexts(
            findings=ran.findings, accepted=ran.accepted, coverage=ran.coverage, ptx_file=file
        )
    )
    if given["--witness"] and given["--steer"]:
        kept = emulate_witness.write_shown(given["--witness"], [ran])
        report["witness"] = kept and emulate_witness.describe(kept, given["--witness"])
    elif given["--witness"] and not ran.ok:
        content = [(array, job.before[name]) for name, array in job.arrays.items()]
        chosen["seed"] = found.seeds[-1]
        kept = emulate_witness.write(
            given["--witness"], job.launch, job.allocations, content, chosen
        )
        report["witness"] = kept and emulate_witness.describe(kept, given["--witness"])
    report |= {"written": write(job, places), "reports": list(map(str, made))}
    emit(report, as_json, render)
    severe = [f for f in report["findings"] if is_as_severe(f, options["fail_on"])]
    if severe and not files.write_baseline:
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


def emit_covered(done: Mapping[str, Any], options: Mapping[str, Any], as_json: bool) -> None:
    """Prints what varying sizes has found; exit code 1 if that fails the run."""
    emit(done, as_json, render_covered)
    if any(is_as_severe(finding, options["fail_on"]) for finding in done["findings"]):
        raise typer.Exit(1)


def emulate_script(
    file: Path,
    arguments: Sequence[str],
    arch: str,
    options: Mapping[str, Any],
    files: FindingFiles,
    witness: Path | None,
    as_json: bool,
) -> None:
    """Runs a script and prints what was launched and found."""
    from fa4.commands.emulate_script import render_script, run_script

    if not file.is_file():
        raise ValueError(f"{file}: no such file")
    chosen = {**options, "accepted": files.accepted}
    done = run_script(file, arguments, arch, chosen, files, witness)
    emit(done, as_json, render_script)
    if code := 1 if done["failed"] else done["exit_code"]:
        raise typer.Exit(code)


def script_orders(given: Mapping[str, Any]) -> dict[str, Any]:
    """What --steer, --witness and --replay mean for a script. Raises ValueError."""
    if given["--witness"] and not given["--steer"]:
        raise ValueError("--witness of a script is what steering finds: give --steer RUNS, too")
    if given["--steer"] and given["--replay"]:
        raise ValueError("--replay FILE runs in one order: not with --steer")
    replay = emulate_witness.read(given["--replay"]) if given["--replay"] else None
    return {"steer": given["--steer"], "replay": replay}


def run_steered(job: PtxJob, given: Mapping[str, Any], options: Mapping[str, Any]) -> Exploration:
    """Runs the job and steers at what is found."""
    from fa4.emulator.machine.options import Options
    from fa4.emulator.orders.steer import run_steered
    from fa4.emulator.tools.seeds import Exploration

    if clash := [name for name in ("--replay", "--trace") if given[name]] or (
        ["--seeds"] if given["--seeds"] > 1 else []
    ):
        raise ValueError(f"{clash[0]} cannot be used with --steer")
    chosen = Options(**{**options, "collect": True})
    report = run_steered([job.launch], job.allocations, chosen, given["--steer"])
    return Exploration(report, [options["seed"]])


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


def describe(job: PtxJob, found: Exploration, accepted: Accepted | None) -> dict[str, Any]:
    """The report as plain data."""
    from fa4.emulator.tools.describe import describe_array, describe_report

    launch = job.launch
    return {
        "grid": launch.grid,
        "block": launch.block,
        "cluster": launch.cluster,
        "dynamic_smem_bytes": launch.dynamic_smem_bytes,
        **describe_report(found.report, launch.ptx),
        "unused_rules": accepted.unused() if accepted else [],
        "seeds": found.seeds,
        "differing": found.differing,
        "arrays": [describe_array(n, a, job.before[n]) for n, a in job.arrays.items()],
    }
