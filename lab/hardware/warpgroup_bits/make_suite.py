"""Compiles the kernels, draws inputs, runs the emulator: one .npz per call.

    python -m lab.hardware.warpgroup_bits.make_suite FOLDER [--ptxas PTXAS]

Each call is launched with two kernels: "compiled", the cubin of CuTe-DSL, and "exact", its PTX
without approximate instructions, assembled by ptxas. The emulator runs the PTX of both.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fa4.compiled.artifact import compile_artifact, from_bytes, to_bytes
from fa4.compiled.forward import compile_warpgroup
from fa4.emulator import Allocation, Launch, Options, Session, run
from lab.hardware.warpgroup_bits.cases import BitCase, cases
from lab.hardware.warpgroup_bits.exact_ptx import without_approximations
from tests.sm100.forward_kernel import arguments, make_inputs

ARCH = "sm_90a"
SLACK_BYTES = 1 << 22  # around the tensors: TMA views of ragged tensors start before them
ALIGN_BYTES = 256
O_ARGUMENT, LSE_ARGUMENT = 3, 4


def laid_out(call: Sequence[Any]) -> tuple[list[Any], Any, dict[str, Any]]:
    """(the arguments in one buffer, the buffer, where outputs are: offset, shape, strides, dtype).

    What lies between rows and tensors is NaN in every type.
    """
    import torch

    tensors = [x for part in call for x in (part if isinstance(part, tuple) else (part,))]
    tensors = [x for x in tensors if isinstance(x, torch.Tensor)]
    room = sum(_extent(x) * x.element_size() + ALIGN_BYTES for x in tensors)
    buffer = torch.full((room + 2 * SLACK_BYTES,), 0xFF, dtype=torch.uint8)
    used, places = SLACK_BYTES - buffer.data_ptr() % ALIGN_BYTES, {}

    def place(x: Any) -> Any:
        nonlocal used
        if isinstance(x, tuple):
            return tuple(map(place, x))
        if not isinstance(x, torch.Tensor):
            return x
        size = _extent(x) * x.element_size()
        moved = buffer[used : used + size].view(x.dtype).as_strided(x.shape, x.stride())
        moved.copy_(x)
        starts.append(used)
        used += -(-size // ALIGN_BYTES) * ALIGN_BYTES
        return moved

    found = []
    for number, part in enumerate(call):
        starts: list[int] = []
        found.append(place(part))
        if number in (O_ARGUMENT, LSE_ARGUMENT) and part is not None:
            places["o" if number == O_ARGUMENT else "lse"] = {
                "start": starts[0], "count": _extent(part), "shape": list(part.shape),
                "strides": list(part.stride()), "dtype": str(part.dtype).removeprefix("torch."),
            }  # fmt: skip
    return found, buffer.numpy(), places


def _extent(x: Any) -> int:
    """Elements from the first to the last."""
    spans = [(n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)]
    return 1 + sum(spans) if x.numel() else 0


def captured(kernel: Any, call: Sequence[Any]) -> tuple[Launch, Sequence[Allocation]]:
    """What the host function launches."""
    found: list[Any] = []
    session = Session(lambda launches, memory, options: found.append((launches, memory)), (), {})
    session.call(kernel, call, {})
    ((launch,), memory), = found  # fmt: skip
    return launch, memory


def output_bytes(buffer: Any, places: dict[str, Any]) -> dict[str, Any]:
    """The bytes of the outputs, from the first element to the last."""
    item = {"float32": 4}
    return {
        name: buffer[at["start"] : at["start"] + at["count"] * item.get(at["dtype"], 2)].copy()
        for name, at in places.items()
    }


def emulated(
    launch: Launch, memory: Sequence[Allocation], buffer: Any, places: dict[str, Any], **how: Any
) -> dict[str, Any]:
    """Bytes of the outputs after a run of the emulator; the buffer is left as it was.

    how: the emulator's options, in place of a quick run's.
    """
    before = buffer.copy()
    run([launch], memory, Options(**(how or {"checks": False})))
    after = output_bytes(buffer, places)
    buffer[:] = before
    return after


def assemble(ptx: str, ptxas: str) -> bytes:
    """The cubin of PTX. CalledProcessError if ptxas refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        subprocess.run([ptxas, f"-arch={ARCH}", "-o", target, source], check=True)
        return target.read_bytes()


def described(case: BitCase, ptxas: str) -> dict[str, Any]:
    """Everything of a call: memory, kernels, launch, the emulator's outputs."""
    kernel = from_bytes(to_bytes(compile_artifact(case.spec, ARCH, compile_warpgroup)), case.spec)
    inputs = make_inputs(case.spec, case.problem)
    call, buffer, places = laid_out(arguments(case.spec, inputs, case.sms))
    launch, memory = captured(kernel, call)
    exact = replace(launch, ptx=without_approximations(launch.ptx))
    text = {
        "kernel": launch.kernel, "grid": launch.grid, "block": launch.block,
        "smem": launch.dynamic_smem_bytes, "base": buffer.ctypes.data, "size": buffer.size,
        "parameters": [part.hex() for part in launch.parameters], "places": places,
    }  # fmt: skip
    arrays = {
        "launch": np.array(json.dumps(text)), "memory": buffer,
        "ptx": np.frombuffer(launch.ptx.encode(), np.uint8),
        "compiled": np.frombuffer(kernel.cubin, np.uint8),
        "exact": np.frombuffer(assemble(exact.ptx, ptxas), np.uint8),
    }  # fmt: skip
    for name, form in (("compiled", launch), ("exact", exact)):
        found = emulated(form, memory, buffer, places)
        arrays |= {f"emulated/{name}/{output}": array for output, array in found.items()}
    return arrays


def main() -> int:
    """Writes the suite."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ptxas", default="ptxas")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, case in cases().items():
        path = given.folder / f"{re.sub(r'[^a-z0-9]+', '_', name.lower())}.npz"
        np.savez_compressed(path, name=np.array(name), **described(case, given.ptxas))
        print(f"{name}: {path.stat().st_size} bytes", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
