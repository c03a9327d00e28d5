"""`fa4 run`: attention on your arrays or random ones, by any implementation, and its error."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from fa4.backends import EMULATED, KERNELS
from fa4.base.files import check_folder, require_replaceable, write_whole
from fa4.commands import emit
from fa4.commands.judge import compare, compare_gradients, render
from fa4.commands.limits import attention_seconds, require_memory, time_text
from fa4.config import ForwardConfig, require

if TYPE_CHECKING:
    import numpy as np

    from fa4.commands.job import Job
    from fa4.config import Problem
    from fa4.sim.hopper_backward import GradientPrediction
    from fa4.sim.predict import Prediction

    Operands: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]

SUFFIXES = (".npz", ".safetensors")
SAY_SECONDS = 10.0  # a shorter estimate is not worth a line

RandomOption = Annotated[
    str, typer.Option("--random", metavar="B,H,S,D", help="Draw q, k, v: batch, heads, length, d.")
]
KeysOption = Annotated[str, typer.Option(metavar="S", help="Keys of --random; default: length.")]
HeadsKOption = Annotated[int, typer.Option(help="KV heads of --random; 0: as many as heads.")]
DimVOption = Annotated[int, typer.Option(help="d of the values of --random; 0: d.")]
ImplOption = Annotated[
    str,
    typer.Option(
        help="auto, sm100, sm90, emulator, emulator_sm90, reference, oracle (fa4.call.choose)."
    ),
]
KernelOption = Annotated[
    str, typer.Option(metavar="NAME", help="Of several compiled ones: blackwell or halves.")
]
OutOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write out and lse: .npz or .safetensors.")
]
DtypeOption = Annotated[str, typer.Option(help="bf16 or fp16; default: as in the file, else bf16.")]
WindowOption = Annotated[str, typer.Option(metavar="LEFT,RIGHT", help="Visible keys; or none.")]
ScheduleOption = Annotated[
    str, typer.Option(help="Of the emulator: fifo (default), random or adversarial.")
]
MinutesOption = Annotated[
    float, typer.Option(help="Refuse what is estimated to take longer on this machine's CPU.")
]


def run(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", show_default=False)] = None,
    random: RandomOption = "",
    keys: KeysOption = "",
    heads_k: HeadsKOption = 0,
    head_dim_v: DimVOption = 0,
    layer: Annotated[str, typer.Option(help="Which of the file's layers.")] = "",
    dtype: DtypeOption = "",
    causal: Annotated[bool, typer.Option("--causal", help="Hide later keys.")] = False,
    window: WindowOption = "",
    scale: Annotated[float | None, typer.Option(help="Of scores; default: 1/sqrt(d).")] = None,
    softcap: Annotated[float, typer.Option(help="Soft cap of scores; 0: none.")] = 0.0,
    backward: Annotated[bool, typer.Option("--backward", help="Gradients of a drawn dO.")] = False,
    impl: ImplOption = "auto",
    kernel: KernelOption = "",
    schedule: ScheduleOption = "",
    seed: Annotated[int, typer.Option(help="Of --random and of the schedule.")] = 0,
    minutes: MinutesOption = 10.0,
    no_check: Annotated[bool, typer.Option("--no-check", help="Without the oracle.")] = False,
    out: OutOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Run attention on arrays q, k, v; show its error, its time and what the emulator found.

    FILE is a .npz or .safetensors file with q, k, v as (B, S, H, D) or (S, H, D). Exit code 0 if
    the result is within the error budget and the emulator's checks found nothing, 1 if not, 2 for
    bad input. --backward adds dq, dk and dv of a dO that --seed draws. With impl auto and
    FA4_EMULATE=1, the emulator is used where there is no GPU.

    Example: fa4 run --random 1,2,256,64 --causal --impl emulator
    """
    from fa4.commands.job import Job

    own = {"--keys": keys, "--heads-k": heads_k, "--head-dim-v": head_dim_v}
    check_options(file, random, own, layer)
    check_schedule(schedule)
    check_out(out)
    require(seed >= 0, "--seed must be at least 0", seed)
    require(minutes > 0, "--minutes must be more than 0", minutes)
    if file is not None:
        arrays, source = read_layer(file, layer, dtype), str(file)
    else:
        arrays, source = draw(random, keys, heads_k, head_dim_v, dtype or "bf16", seed), "random"
    options: dict[str, Any] = {"causal": causal, "softcap": softcap, "softmax_scale": scale}
    options["window_size"] = read_window(window)
    problem = describe_problem(arrays, options)
    if kernel:
        masked = problem.window_size != (None, None)
        options["config"] = ForwardConfig.tuned(problem.dtype, problem.head_dim, masked, kernel)
    how = {"schedule": schedule or "fifo", "seed": seed}
    job = Job(arrays, options, impl, how, say, gradient=backward)
    if kernel and job.impl not in KERNELS:
        raise ValueError(f"--kernel is for compiled kernels; got {kernel!r} with impl {job.impl}")
    if schedule and job.impl not in EMULATED:
        raise ValueError(f"--schedule is for the emulator; got {schedule!r} with impl {job.impl}")
    estimate(problem, job.impl, minutes, backward=backward)
    report = {"source": source, "problem": problem.__dict__, **job.execute()}
    checked = not no_check and job.impl != "oracle"
    if job.outputs is not None and checked:
        report |= compare(arrays, options, job.outputs, say)
    report["prediction"] = predict(problem, impl=job.impl, kernel=kernel)
    report["tflops"] = problem.forward_flops / report["seconds"] / 1e12 if job.on_gpu else None
    report["backward"] = None
    if backward and job.outputs is not None:
        report["backward"] = differentiate(job, problem, seed, checked)
    report["out"] = None
    if out is not None and job.outputs is not None:
        write(out, name_results(job))
        report["out"] = str(out)
    emit(report, as_json, render)
    if not all(map(passed, (report, report["backward"]))):
        raise typer.Exit(1)


def passed(report: Mapping[str, Any] | None) -> bool:
    """Did a pass have no findings and keep its budget? One that did not run did."""
    return report is None or (not report["findings"] and report.get("within_budget", True))


def name_results(job: Job) -> dict[str, np.ndarray]:
    """The arrays of a job by name, as they are written."""
    assert job.outputs is not None
    found = dict(zip(("out", "lse"), job.outputs, strict=True))
    if job.gradients is not None:
        found |= zip(("dq", "dk", "dv"), job.gradients, strict=True)
    return found


def check_options(file: Path | None, random: str, own: Mapping[str, Any], layer: str) -> None:
    """Raises ValueError unless there is one source, with only the options that are its own."""
    if (file is None) == (not random):
        raise ValueError("give either FILE or --random B,H,S,D")
    for name, value in own.items() if file is not None else ():
        if value:
            raise ValueError(f"{name} is an option of --random, not of FILE; got {value}")
    if layer and file is None:
        raise ValueError(f"--layer is an option of FILE, not of --random; got {layer!r}")


def check_schedule(schedule: str) -> None:
    """Raises ValueError unless the emulator has this order of events; "" is its own."""
    from fa4.emulator.machine.options import SCHEDULES

    allowed = ", ".join(SCHEDULES)
    require(schedule in ("", *SCHEDULES), f"--schedule must be one of {allowed}", schedule)


def check_out(out: Path | None) -> None:
    """Raises now what writing the results would raise after they are computed."""

    if out is None:
        return
    if out.suffix not in SUFFIXES:
        raise ValueError(f"--out must end in .npz or .safetensors; got {out.name!r}")
    require_replaceable(out)
    check_folder(out.parent)
    if out.suffix == ".safetensors":
        require_safetensors(out)


def require_safetensors(path: Path) -> None:
    """Raises ImportError if the package for that kind of file is missing."""
    try:
        import safetensors.numpy  # noqa: F401
    except ImportError:
        raise ImportError(
            f"{path} needs safetensors, not installed here: pip install safetensors"
        ) from None


def read_window(text: str) -> Any:
    """The window that --window names; both sides open without it."""
    from fa4.sim.fields import parse_window

    try:
        return parse_window(text) if text else (None, None)
    except ValueError as error:
        raise ValueError(f"--window {error}; got {text!r}") from None


def estimate(problem: Problem, impl: str, minutes: float, *, backward: bool = False) -> None:
    """Says how long it may take; raises ValueError if that is too long, or there is no memory."""
    p = problem
    pairs = p.batch * p.heads_q * p.visible_pairs
    if impl == "oracle":  # holds four float64 matrices and a mask of all heads
        scores = p.heads_q * p.seqlen_q * p.seqlen_k
        require_memory("impl oracle, whose scores are stored,", 33 * scores)
    seconds = attention_seconds(impl, pairs, p.head_dim + p.head_dim_v)
    if backward:
        seconds *= 1 + p.backward_flops / p.forward_flops if p.forward_flops else 1
    if seconds > 60 * minutes:
        raise ValueError(
            f"impl {impl} would take about {time_text(seconds)}; --minutes allows {minutes:g}: "
            "ask for less, or allow more"
        )
    if seconds > SAY_SECONDS:
        say(f"{impl}: about {time_text(seconds)}")


def draw(text: str, keys: str, heads_k: int, head_dim_v: int, dtype: str, seed: int) -> Operands:
    """Standard normal q, k, v of the sizes that --random names."""
    import numpy as np

    from fa4.dtypes import round_to
    from fa4.sim.fields import parse_count

    parts = text.split(",")
    try:
        batch, heads, rows, dim = (parse_count(part) for part in parts)
        length = parse_count(keys) if keys else rows
    except ValueError:
        raise ValueError(
            f"--random must be B,H,S,D, four whole numbers such as 1,8,4k,128; got {text!r}"
            + (f" and --keys {keys!r}" if keys else "")
        ) from None
    if min(batch, heads, dim) < 1:
        raise ValueError(f"--random: batch, heads and head dim must be at least 1; got {text!r}")
    require(heads_k >= 0, "--heads-k must be at least 0", heads_k)
    require(head_dim_v >= 0, "--head-dim-v must be at least 0", head_dim_v)
    heads_k, head_dim_v = heads_k or heads, head_dim_v or dim
    elements = batch * (rows * heads * (dim + head_dim_v) + length * heads_k * (dim + head_dim_v))
    require_memory(f"--random {text}", 10 * elements)  # float32, its 16-bit copy, and in between
    rng = np.random.default_rng(seed)
    shapes = ((rows, heads, dim), (length, heads_k, dim), (length, heads_k, head_dim_v))
    q, k, v = (round_to(rng.standard_normal((batch, *s), np.float32), dtype) for s in shapes)
    return q, k, v


def read_layer(file: Path, name: str, dtype: str) -> Operands:
    """q, k, v of a file, (B, S, H, D); 16-bit types stay, others become `dtype` or bf16."""
    from fa4.demo.inputs import file_source
    from fa4.dtypes import dtype_name, round_to

    if file.suffix not in SUFFIXES:
        raise ValueError(f"FILE must end in .npz or .safetensors; got {file.name!r}")
    layers = {layer.name: layer for layer in file_source(file).layers}
    if name not in layers and (name or len(layers) > 1):
        raise ValueError(f"--layer must be one of {', '.join(layers)}; got {name!r}")
    found = layers[name] if name else next(iter(layers.values()))
    arrays = (found.q, found.k, found.v)
    own = dtype_name(found.q.dtype)
    wanted = dtype or (own if own in ("bf16", "fp16") else "bf16")
    q, k, v = (round_to(array, wanted) for array in arrays)
    return q, k, v


def describe_problem(arrays: Operands, options: Mapping[str, Any]) -> Problem:
    """The sizes as a Problem. Raises ValueError where q, k and v do not fit together."""
    from fa4.backends.request import make_request
    from fa4.call.checked import make_call
    from fa4.config import Problem
    from fa4.dtypes import dtype_name

    q, k, v = arrays
    make_request(make_call(q, k, v, options, varlen=False))
    return Problem(
        batch=q.shape[0],
        seqlen_q=q.shape[1],
        seqlen_k=k.shape[1],
        heads_q=q.shape[2],
        heads_k=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        dtype=dtype_name(q.dtype),
        causal=options["causal"],
        window_size=options["window_size"],
    )


def differentiate(job: Job, problem: Problem, seed: int, checked: bool) -> dict[str, Any]:
    """The backward pass of a job with a dO that the seed draws: its time, findings and errors."""
    import numpy as np

    from fa4.dtypes import round_to

    rng = np.random.default_rng(seed + 1)
    p = problem
    shape = (p.batch, p.seqlen_q, p.heads_q, p.head_dim_v)
    dout = round_to(rng.standard_normal(shape, np.float32), p.dtype)
    report = job.differentiate(dout)
    if job.gradients is not None and checked:
        report |= compare_gradients(job.arrays, dout, job.options, job.gradients, say)
    report["prediction"] = predict(problem, backward=True, impl=job.impl)
    report["tflops"] = p.backward_flops / report["seconds"] / 1e12 if job.on_gpu else None
    return report


def predict(
    problem: Problem, *, backward: bool = False, impl: str = "sm100", kernel: str = ""
) -> dict[str, Any] | None:
    """The simulator's time on the machine of an implementation: an H200, or a B200 for the others.

    kernel: of a forward pass, "" for the machine's first. None for a problem that it has no kernel
    for.
    """
    from fa4.designs import backward as backward_kernel
    from fa4.designs import hopper_forward
    from fa4.designs.forward import default_forward
    from fa4.sim.hopper_backward import predict_hopper_backward
    from fa4.sim.machine import find_machine
    from fa4.sim.options import default_pipeline
    from fa4.sim.predict import predict as simulate

    hopper = KERNELS.get(impl) == "sm90"
    machine = find_machine("h200" if hopper else "b200")
    try:
        found: Prediction | GradientPrediction
        if backward and hopper:
            found = predict_hopper_backward(problem, machine, deterministic=True)
        elif backward:
            found = simulate(problem, backward_kernel.choose(problem, machine.gpu, True), machine)
        elif hopper:
            found = simulate(problem, hopper_forward.choose(problem, machine.gpu), machine)
        elif kernel:
            found = simulate(problem, default_pipeline(problem, machine, kernel=kernel), machine)
        else:
            found = simulate(problem, default_forward(problem, machine.gpu), machine)
    except ValueError:
        return None
    return {"machine": found.machine, "seconds": found.seconds, "tflops": found.tflops}


def write(path: Path, results: Mapping[str, np.ndarray]) -> None:
    """Writes the arrays in one step; .npz files, which have no bf16, get it as float32."""
    import io

    import numpy as np

    if path.suffix == ".npz":
        file = io.BytesIO()
        wide: dict[str, Any] = {
            name: array.astype(np.float32) if array.dtype.itemsize == 2 else array
            for name, array in results.items()
        }
        np.savez(file, **wide)
        write_whole(path, file.getvalue())
        return
    from safetensors.numpy import save

    write_whole(path, save({name: np.ascontiguousarray(a) for name, a in results.items()}))


def say(line: str) -> None:
    """Progress goes to stderr, and only to people."""
    if sys.stderr.isatty():
        print(f"fa4 run: {line}", file=sys.stderr, flush=True)
