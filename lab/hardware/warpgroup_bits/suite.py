"""The emulator's bits of the Hopper forward kernel beside a GPU's; `lab.hardware.suite` runs it.

    python -m lab.hardware.warpgroup_bits.suite make FOLDER [--ptxas PTXAS]
    python3 -m lab.hardware.suite FOLDER RESULTS.npz                                  # GPU
    python -m lab.hardware.warpgroup_bits.suite compare FOLDER RESULTS.npz

Each call is launched with two kernels: "compiled", the cubin of CuTe-DSL, and "exact", its PTX
without approximate instructions, assembled by ptxas. The emulator runs the PTX of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fa4.compiled.artifact import compile_artifact, from_bytes, to_bytes
from fa4.compiled.forward import compile_warpgroup
from fa4.emulator import Allocation, Launch
from lab.hardware.launches import (
    ARCH,
    Arena,
    Made,
    Suite,
    assemble,
    capture,
    emulate,
    lay_out,
    stored,
    with_text,
)
from lab.hardware.warpgroup_bits.cases import BitCase, cases
from lab.hardware.warpgroup_bits.compare import KERNELS, is_wrong, judged, share_equal
from lab.hardware.warpgroup_bits.exact_ptx import without_approximations
from tests.sm100.forward_kernel import arguments, make_inputs

REPEATS = 20
ARGUMENTS = {3: "o", 4: "lse"}


def laid_out(call: Sequence[Any]) -> tuple[list[Any], Arena]:
    """(the arguments in one buffer, the buffer)."""
    import torch

    tensors: dict[str, Any] = {}

    def named(label: str, part: Any) -> None:
        if isinstance(part, tuple):
            for number, inner in enumerate(part):
                named(f"{label}.{number}", inner)
        elif isinstance(part, torch.Tensor):
            tensors[label] = part

    def placed(label: str, part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(placed(f"{label}.{i}", inner) for i, inner in enumerate(part))
        return arena.tensors.get(label, part)

    labels = [ARGUMENTS.get(number, str(number)) for number in range(len(call))]
    for label, part in zip(labels, call, strict=True):
        named(label, part)
    arena = lay_out(tensors)
    return [placed(label, part) for label, part in zip(labels, call, strict=True)], arena


def captured(case: BitCase) -> tuple[Launch, Sequence[Allocation], Arena, bytes]:
    """What is launched of a call, the memory of its tensors, all of it, the cubin."""
    kernel = from_bytes(to_bytes(compile_artifact(case.spec, ARCH, compile_warpgroup)), case.spec)
    inputs = make_inputs(case.spec, case.problem)
    call, arena = laid_out(arguments(case.spec, inputs, case.sms))
    return *capture(kernel, call), arena, kernel.cubin


def make(ptxas: str) -> Iterator[Made]:
    """Every call with its kernels and the emulator's outputs."""
    for name, case in cases().items():
        launch, memory, arena, cubin = captured(case)
        exact = with_text(launch, without_approximations(launch.ptx))
        outputs = arena.outputs("o", "lse")
        arrays = {"memory": arena.memory}
        for kind, form in zip(KERNELS, (launch, exact), strict=True):
            found, _ = emulate([form], arena.memory, outputs, memory, checks=False)
            arrays |= {f"emulated/{kind}/{output}": array for output, array in found.items()}
        stands = stored(
            name, [launch], arena.memory, places=outputs, repeats=REPEATS,
        )  # fmt: skip
        yield Made(stands, {"compiled": cubin, "exact": assemble(exact.ptx, ptxas)}, arrays)


def report(device: str, rows: dict[str, Any], wrong: list[str]) -> dict[str, Any]:
    """With the shares of elements that are equal."""
    shares = {
        f"{kernel} {output}": round(share_equal(rows, kernel, output), 6)
        for kernel in KERNELS
        for output in ("o", "lse")
    }
    return {"device": device, "launches": REPEATS, "equal_share": shares, "calls": rows,
            "wrong": wrong}  # fmt: skip


SUITE = Suite(
    "warpgroup_bits", make, judged,
    lambda name, row: is_wrong(row, cases()[name].spec.softcap), report,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(SUITE.main(__doc__))
