"""The forward kernel on a Hopper GPU, which has no tcgen05: everything else is as compiled.

    python -m lab.hardware.forward_hopper.skeleton make out/skeleton --ptxas PTXAS
    python3 -m lab.hardware.forward_hopper.skeleton run out/skeleton FILE.npz     (on the GPU)
    python -m lab.hardware.forward_hopper.skeleton compare out/skeleton FILE.npz

`without_tensor_core` leaves products out, lets commits arrive at once, makes numbers of the address
where tensor memory is read and stores to global memory where it is written, and writes packed
float32 instructions as two. What is left is the kernel: TMA, mbarriers, named barriers, setmaxnreg,
work tiles, masks, softmax, correction and epilogue. It must come to its end, with the O and LSE
that those numbers have by definition, on the GPU and in the emulator. `with_soft_tensor_core`
computes the products by plain instructions in the warp that would issue them: then O and LSE are
attention's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.hardware.forward_hopper.skeleton_cases import (
    OUTPUTS,
    SUITES,
    errors,
    find_case,
    operand,
    output,
    repeats,
    scale,
)
from lab.hardware.forward_hopper.skeleton_driver import Driver
from lab.hardware.forward_hopper.skeleton_ptx import without_tensor_core
from lab.hardware.forward_hopper.soft_tensor_core import with_soft_tensor_core

SLACK_BYTES = 1 << 24  # around the tensors: TMA views of ragged tensors start before them
# Too long for the emulator.
ONLY_ON_THE_GPU = (
    "many tiles", "halves, many tiles", "halves, products", "halves, products, one after the other",
)  # fmt: skip
# Relative errors of O: bfloat16 rounds to 2^-8, O once and P once more, and exponentials add to it;
# of LSE: emulated exponentials are off by 8.8e-5 (docs/forward.md), the sums in float32 by less.
O_LIMIT, PRODUCTS_O_LIMIT, LSE_LIMIT = 1.02 * 2.0**-8, 1.02 * 2.0**-7, 1.2e-4


class Arena:
    """Tensors side by side in one buffer, with room around them, so that it can move as a whole."""

    def __init__(self, num_bytes: int) -> None:
        import torch

        self.buffer = torch.zeros(num_bytes + 2 * SLACK_BYTES, dtype=torch.uint8)
        self.places: dict[str, tuple[int, list[int], str]] = {}
        self._used = SLACK_BYTES

    def tensor(self, name: str, shape: list[int], dtype: Any) -> Any:
        """The next tensor, of zeros."""
        import torch

        count = int(np.prod(shape))
        size = count * torch.empty(0, dtype=dtype).element_size()
        part = self.buffer[self._used : self._used + size].view(dtype).view(shape)
        self.places[name] = (self._used, shape, str(dtype).removeprefix("torch."))
        self._used += -(-size // 256) * 256
        return part


def capture_case(case: dict[str, Any]) -> tuple[Any, Arena, Any]:
    """(launch, arena, spec): what CuTe-DSL's host function launches on tensors in an arena."""
    import torch

    from fa4.designs import find_design
    from fa4.designs.design import named
    from fa4.hardware import B200
    from lab.benchmarks.emulated_kernels import capture

    compiler = find_design(B200, kernel=case.get("kernel")).compiled
    assert compiler is not None  # these kernels run
    spec = named(compiler.tuned)(gpu=B200, **case["spec"])
    numerics = replace(spec.numerics, q_tiles=case.get("q_tiles", 2))
    spec = replace(spec, numerics=numerics)
    lengths, (heads_q, heads_k) = case["lengths"], case["heads"]
    packed = spec.packed_q
    longest = max(rows for rows, _ in lengths)
    arena = Arena(1 << 28)

    def make(name: str, which: int, heads: int, dim: int) -> Any:
        sizes = [pair[which] for pair in lengths]
        shape = [sum(sizes), heads, dim] if packed else [len(sizes), sizes[0], heads, dim]
        tensor = arena.tensor(name, shape, torch.bfloat16)
        if case.get("products") and name != "o":
            tensor.view(torch.uint16)[...] = torch.from_numpy(operand(name, shape))
        return tensor

    q, k = make("q", 0, heads_q, spec.head_dim), make("k", 1, heads_k, spec.head_dim)
    v, o = make("v", 1, heads_k, spec.head_dim_v), make("o", 0, heads_q, spec.head_dim_v)
    shape = [heads_q, o.shape[0]] if packed else [len(lengths), heads_q, longest]
    lse = arena.tensor("lse", shape, torch.float32)
    offsets = []
    for which in range(2) if packed else ():
        offsets.append(arena.tensor(f"offsets{which}", [len(lengths) + 1], torch.int32))
        offsets[-1][1:] = torch.tensor([pair[which] for pair in lengths]).cumsum(0)
    window = case.get("window", (None, None))
    arguments = (
        q, k, v, o, lse, scale(case["spec"]), None, *window, longest, None,
        *(offsets or (None, None)), None, None, None, case["sms"],
    )  # fmt: skip
    compiled = named(compiler.compiler)(spec)
    kernel = capture("", lambda session: session.call(compiled, arguments, {}))
    return kernel.launch, arena, spec


def make(suite: str, folder: Path, ptxas: str) -> None:
    """Compiles every case of a suite, takes the tensor core out and assembles what is left."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, case) in enumerate(SUITES[suite]().items()):
        launch, arena, spec = capture_case(case)
        text = hopper_ptx(case, launch)
        source = folder / f"case{number}.ptx"
        source.write_text(text)
        cubin = source.with_suffix(".cubin")
        subprocess.run([ptxas, "-arch=sm_90a", "-o", cubin, source], check=True)
        described = {
            "name": name, "kernel": launch.kernel, "grid": launch.grid, "block": launch.block,
            "smem": launch.dynamic_smem_bytes, "base": arena.buffer.data_ptr(),
            "size": arena.buffer.numel(), "places": arena.places,
            "parameters": [part.hex() for part in launch.parameters],
            "columns": columns_of(spec),
            "ints": {x: arena.buffer[place : place + 4 * shape[0]].tolist()
                     for x, (place, shape, kind) in arena.places.items() if kind == "int32"},
        }  # fmt: skip
        source.with_suffix(".json").write_text(json.dumps(described))
        print(f"{name}: grid {launch.grid}, {len(text.splitlines())} lines")


def hopper_ptx(case: dict[str, Any], launch: Any) -> str:
    """What is launched in place of the kernel."""
    ctas = int(np.prod(launch.grid))
    if case.get("products"):
        return with_soft_tensor_core(launch.ptx, ctas)
    return without_tensor_core(launch.ptx, ctas)


def run(folder: Path, results: Path) -> None:
    """Launches every case on GPU 0; a case that does not end ends the process."""
    driver = Driver()
    kept: dict[str, Any] = {"device": np.array(driver.name)}
    for source in sorted(folder.glob("case*.json")):
        case = json.loads(source.read_text())
        name = case["name"]
        found = driver.launch(case, source.with_suffix(".cubin").read_bytes())
        kept |= {f"{name}/{key}": array for key, array in found.items()}
        launches, different = repeats(name), found["different"]
        print(f"{name}: {launches} launches ended, {different} unlike the first", flush=True)
    results.parent.mkdir(parents=True, exist_ok=True)
    np.savez(results, **kept)


def emulate_case(name: str) -> tuple[dict[str, Any], list[str]]:
    """O, LSE and the findings of the emulator for the same text, under the adversarial schedule."""
    from fa4.emulator import Allocation, Options
    from fa4.emulator import run as run_emulated

    launch, arena, spec = capture_case(find_case(name))
    memory = arena.buffer.numpy()
    described = {"name": name, "places": arena.places, "columns": columns_of(spec)}
    for output_name in OUTPUTS:
        _part(memory, described, output_name)[...] = output(described, output_name)
    text = hopper_ptx(find_case(name), launch)
    whole = Allocation("arena", memory.ctypes.data, memory.nbytes, True, memory)
    options = Options(collect=True, schedule="adversarial")
    report = run_emulated([replace(launch, ptx=text)], [whole], options)
    found = {one: _part(memory, described, one).copy() for one in OUTPUTS}
    return described | found, [finding.kind for finding in report.findings]


def _part(memory: Any, case: dict[str, Any], name: str) -> Any:
    array = output(case, name)
    place = case["places"][name][0]
    return memory[place : place + array.nbytes].view(array.dtype).reshape(array.shape)


def columns_of(spec: Any) -> dict[str, int]:
    """Where S and O lie in tensor memory; of halves, the first keys, which the others follow."""
    names = {buffer.name.removesuffix("a"): buffer.start for buffer in spec.plan.buffers
             if buffer.space == "tmem"}  # fmt: skip
    return {f"{x}{i}": names[f"{x}{i}"] for x in "so" for i in range(spec.numerics.q_tiles)}


def is_wrong(name: str, row: dict[str, Any]) -> bool:
    """Whether a case is off its definition, changes from launch to launch or has findings."""
    o_limit = PRODUCTS_O_LIMIT if find_case(name).get("products") else O_LIMIT
    pairs = [(row["o_error"], row["lse_error"]), row.get("emulator_errors", (0.0, 0.0))]
    inside = all(o <= o_limit and lse <= LSE_LIMIT for o, lse in pairs)
    return bool(not inside or row["different"] or row.get("findings"))


def compare(suite: str, folder: Path, results: Path) -> int:
    """Prints a line per case and writes the result file; 1 if anything is off its definition."""
    from lab.records import record_path, write_record

    rows = {}
    got = np.load(results)
    for source in sorted(folder.glob("case*.json")):
        described = json.loads(source.read_text())
        name = described["name"]
        o, lse, different = (got[f"{name}/{key}"] for key in (*OUTPUTS, "different"))
        o_error, lse_error = errors(described, o, lse)
        row = rows[name] = {
            "device": str(got["device"]),
            "launches": repeats(name),
            "different": int(different),
            "values": o.size + lse.size,
            "o_error": o_error,
            "lse_error": lse_error,
        }
        if name not in ONLY_ON_THE_GPU:
            emulated, findings = emulate_case(name)
            mine = errors(emulated, emulated["o"], emulated["lse"])
            row |= {"emulator_errors": mine, "findings": findings}
        print(f"{name}: {row}", flush=True)
    bad = [name for name, row in rows.items() if is_wrong(name, row)]
    print(f"off the definition: {', '.join(bad) or 'none'}")
    write_record(
        record_path(f"{suite}_skeleton_hopper"), {"cases": rows, "wrong": bad},
        ("numpy", "nvidia-cutlass-dsl"), machine=str(got["device"]),
    )  # fmt: skip
    return int(bool(bad))


def main() -> int:
    """One of make, run, compare; see the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("step", choices=("make", "run", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path, nargs="?")
    parser.add_argument("--suite", choices=SUITES, default="forward")
    parser.add_argument("--ptxas", default="ptxas")
    options = parser.parse_args()
    if options.step == "make":
        make(options.suite, options.folder, options.ptxas)
    elif options.results is None:
        parser.error(f"{options.step} needs RESULTS")
    elif options.step == "run":
        run(options.folder, options.results)
    else:
        return compare(options.suite, options.folder, options.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
