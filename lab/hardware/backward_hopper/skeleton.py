"""The main backward kernel on a Hopper GPU, which has no tcgen05: everything else is as compiled.

    python -m lab.hardware.backward_hopper.skeleton make out/skeleton --ptxas PTXAS
    python3 -m lab.hardware.backward_hopper.skeleton run out/skeleton FILE.npz     (on the GPU)
    python -m lab.hardware.backward_hopper.skeleton compare out/skeleton FILE.npz

As `lab.hardware.forward_hopper.skeleton`, with the same changes of the PTX: TMA, mbarriers, named
barriers, setmaxnreg, work tiles, masks, P and dS, the reductions of dQ and their turns are what was
compiled. It must come to its end, with the gradients that the definition has; in a fixed order of
sums with the same bits every time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.hardware.backward_hopper.skeleton_cases import (
    ONLY_ON_THE_GPU,
    OUTPUTS,
    cases,
    repeats,
    same_every_time,
)
from lab.hardware.backward_hopper.skeleton_driver import SkeletonDriver
from lab.hardware.forward_hopper.skeleton_ptx import without_tensor_core
from lab.hardware.forward_hopper.soft_tensor_core import with_soft_tensor_core

NAMES = ("q", "k", "v", "dout", "dk", "dv", "dq_accum", "stats", "turns")
ARENA_BYTES = 1 << 27


def problem(name: str) -> tuple[Any, Any]:
    """(spec, inputs) of a case."""
    from fa4.sm100.backward.spec import BackwardSpec
    from fa4.testing import Case
    from tests.sm100.forward_kernel import make_inputs

    case = cases()[name]
    spec, (heads_k, group) = BackwardSpec(**case["spec"]), case["heads"]
    shape = Case(
        layout="packed", lengths=tuple(map(tuple, case["lengths"])), heads_k=heads_k, group=group,
        head_dim=spec.head_dim, head_dim_v=spec.head_dim_v, dtype=spec.dtype, causal=spec.causal,
        window_size=case.get("window", (None, None)), seed=5,
    )  # fmt: skip
    return spec, make_inputs(spec, shape)


def capture_case(name: str) -> tuple[Any, Any, Any]:
    """(launch, arena, workspace): what the host function launches on tensors in an arena."""
    import torch

    from lab.benchmarks.emulated_kernels import capture
    from lab.hardware.forward_hopper.skeleton import Arena
    from tests.sm100.backward_kernel import arguments, compile_gradients, prepare

    spec, inputs = problem(name)
    space = prepare(spec, inputs)
    call = list(arguments(spec, inputs, space))
    arena = Arena(ARENA_BYTES if name in ONLY_ON_THE_GPU else ARENA_BYTES >> 2)
    for place, value in enumerate(call):
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if isinstance(value, torch.Tensor):
            label = NAMES[place] if place < len(NAMES) else f"offsets{place}"
            call[place] = arena.tensor(label, list(value.shape), value.dtype)
            call[place].copy_(value)
    compiled = compile_gradients(spec)
    kernel = capture(name, lambda session: session.call(compiled, call, {}))
    return kernel.launch, arena, space


def hopper_ptx(name: str, launch: Any) -> str:
    """What is launched in place of the kernel."""
    change = with_soft_tensor_core if cases()[name].get("products") else without_tensor_core
    return change(launch.ptx, int(np.prod(launch.grid)))


def make(folder: Path, ptxas: str) -> None:
    """Compiles every case, takes the tensor core out and assembles what is left."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(cases()):
        launch, arena, _ = capture_case(name)
        source = folder / f"case{number}.ptx"
        source.write_text(hopper_ptx(name, launch))
        cubin = source.with_suffix(".cubin")
        subprocess.run([ptxas, "-arch=sm_90a", "-o", cubin, source], check=True)
        described = {
            "name": name, "kernel": launch.kernel, "grid": launch.grid, "block": launch.block,
            "smem": launch.dynamic_smem_bytes, "base": arena.buffer.data_ptr(),
            "places": arena.places, "parameters": [part.hex() for part in launch.parameters],
        }  # fmt: skip
        source.with_suffix(".json").write_text(json.dumps(described))
        np.savez_compressed(source.with_suffix(".npz"), memory=arena.buffer.numpy())
        print(f"{name}: grid {launch.grid}", flush=True)


def run(folder: Path, results: Path) -> None:
    """Launches every case on GPU 0; a case that does not end ends the process."""
    driver = SkeletonDriver()
    kept: dict[str, Any] = {"device": np.array(driver.name)}
    for source in sorted(folder.glob("case*.json")):
        case = json.loads(source.read_text())
        name = case["name"]
        memory = np.load(source.with_suffix(".npz"))["memory"]
        found = driver.launch(case, source.with_suffix(".cubin").read_bytes(), memory)
        kept |= {f"{name}/{key}": array for key, array in found.items()}
        print(
            f"{name}: {repeats(name)} launches ended, other bits: {found['different']}", flush=True
        )
    results.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(results, **kept)


def emulate_case(name: str) -> tuple[dict[str, Any], list[str]]:
    """The outputs and the findings of the emulator for the same text."""
    from fa4.emulator import Allocation, Options
    from fa4.emulator import run as run_emulated

    launch, arena, _ = capture_case(name)
    memory = arena.buffer.numpy()
    whole = Allocation("arena", memory.ctypes.data, memory.nbytes, True, memory)
    fixed = cases()[name]["spec"].get("deterministic", False)
    options = Options(collect=True, schedule="random", ordered_sums=fixed)
    report = run_emulated([replace(launch, ptx=hopper_ptx(name, launch))], [whole], options)
    places = {key: place for key, place in arena.places.items() if key in OUTPUTS}
    found = {key: memory[start : start + size_of(*rest)].copy()
             for key, (start, *rest) in places.items()}  # fmt: skip
    return found, [finding.kind for finding in report.findings]


def size_of(shape: list[int], kind: str) -> int:
    """Bytes of a tensor in an arena."""
    return int(np.prod(shape)) * {"bfloat16": 2, "float32": 4, "int32": 4}[kind]


def error_of(name: str, got: dict[str, Any]) -> float:
    """The share of the error budget that gradients use; inf where they are not as defined."""
    import ml_dtypes

    from fa4.testing.budget import Outputs, check_budget
    from lab.hardware.backward_hopper.skeleton_expected import integer_error
    from tests.sm100.backward_kernel import finish, prepare

    spec, inputs = problem(name)
    space = prepare(spec, inputs)
    accum = got["dq_accum"].view(np.float32).reshape(space.dq_accum.shape)
    dk, dv = (
        got[key].view(ml_dtypes.bfloat16).reshape(x.shape)
        for key, x in (("dk", inputs.k), ("dv", inputs.v))
    )
    if not cases()[name].get("products"):
        return integer_error(spec, inputs, replace(space, dq_accum=accum), dk, dv)
    dq = finish(spec, inputs, replace(space, dq_accum=accum), spec.head_dim**-0.5)
    outputs = Outputs(None, dq=dq, dk=dk, dv=dv)  # type: ignore[arg-type]
    return check_budget(inputs, outputs, gradients_alone=True).share


def is_wrong(name: str, row: dict[str, Any]) -> bool:
    """Whether a case is off its definition, changes from launch to launch or has findings."""
    changed = any(row["different"][output] for output in same_every_time(name))
    shares = row["share"], row.get("emulator_share", 0.0)
    return bool(changed or max(shares) > 1.0 or row.get("findings"))


def compare(folder: Path, results: Path) -> int:
    """Prints a line per case and writes the result file; 1 if anything is off its definition."""
    from lab.records import record_path, write_record

    rows = {}
    got = np.load(results)
    for source in sorted(folder.glob("case*.json")):
        name = json.loads(source.read_text())["name"]
        found = {key: got[f"{name}/{key}"] for key in OUTPUTS if f"{name}/{key}" in got}
        row = rows[name] = {
            "device": str(got["device"]),
            "launches": repeats(name),
            "different": dict(zip(found, map(int, got[f"{name}/different"]), strict=True)),
            "share": error_of(name, found),
        }
        row["different"] = dict.fromkeys(OUTPUTS, 0) | row["different"]
        if name not in ONLY_ON_THE_GPU:
            emulated, findings = emulate_case(name)
            same = {key: float((emulated[key] == found[key]).mean()) for key in found}
            row |= {"emulator_share": error_of(name, emulated), "findings": findings,
                    "same_bytes": same}  # fmt: skip
        print(f"{name}: {row}{' WRONG' if is_wrong(name, row) else ''}", flush=True)
    bad = [name for name, row in rows.items() if is_wrong(name, row)]
    write_record(
        record_path("backward_skeleton_hopper"), {"cases": rows, "wrong": bad},
        ("numpy", "nvidia-cutlass-dsl"), machine=str(got["device"]),
    )  # fmt: skip
    return int(bool(bad))


def main() -> int:
    """One of make, run, compare; see the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("step", choices=("make", "run", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path, nargs="?")
    parser.add_argument("--ptxas", default="ptxas")
    options = parser.parse_args()
    if options.step == "make":
        make(options.folder, options.ptxas)
    elif options.results is None:
        parser.error(f"{options.step} needs RESULTS")
    elif options.step == "run":
        run(options.folder, options.results)
    else:
        return compare(options.folder, options.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
