"""The main backward kernel on a Hopper GPU, which has no tcgen05: everything else is as compiled.

    python -m lab.hardware.backward_hopper.skeleton make FOLDER --ptxas PTXAS
    python3 -m lab.hardware.suite FOLDER RESULTS.npz                                  # GPU
    python -m lab.hardware.backward_hopper.skeleton compare FOLDER RESULTS.npz

As `lab.hardware.forward_hopper.skeleton`, with the same changes of the PTX: TMA, mbarriers, named
barriers, setmaxnreg, work tiles, masks, P and dS, the reductions of dQ and their turns are what was
compiled. It must come to its end, with the gradients that the definition has; in a fixed order of
sums with the same bits every time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from lab.hardware.backward_hopper.skeleton_cases import (
    ONLY_ON_THE_GPU,
    OUTPUTS,
    cases,
    repeats,
    same_every_time,
)
from lab.hardware.forward_hopper.skeleton_ptx import without_tensor_core
from lab.hardware.forward_hopper.soft_tensor_core import with_soft_tensor_core
from lab.hardware.launches import Arena, Made, Suite, assemble, capture, emulate, lay_out, stored
from lab.hardware.suite import Outcome

NAMES = ("q", "k", "v", "dout", "dk", "dv", "dq_accum", "stats", "turns")
IMAGE = "hopper"


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


def capture_case(name: str) -> tuple[Any, Arena]:
    """(launch, arena): what is launched in place of the kernel on tensors in an arena."""
    import torch

    from tests.sm100.backward_kernel import arguments, compile_gradients, prepare

    spec, inputs = problem(name)
    call = [torch.from_numpy(x) if isinstance(x, np.ndarray) else x
            for x in arguments(spec, inputs, prepare(spec, inputs))]  # fmt: skip
    labels = {place: NAMES[place] if place < len(NAMES) else f"offsets{place}"
              for place, value in enumerate(call) if isinstance(value, torch.Tensor)}  # fmt: skip
    arena = lay_out({label: call[place].contiguous() for place, label in labels.items()})
    for place, label in labels.items():
        call[place] = arena.tensors[label]
    launch, _ = capture(compile_gradients(spec), call)
    change = with_soft_tensor_core if cases()[name].get("products") else without_tensor_core
    return replace(launch, ptx=change(launch.ptx, int(np.prod(launch.grid)))), arena


def emulate_case(name: str) -> tuple[dict[str, Any], list[str]]:
    """The outputs and the findings of the emulator for the same text."""
    launch, arena = capture_case(name)
    fixed = cases()[name]["spec"].get("deterministic", False)
    return emulate(
        [launch], arena.memory, arena.outputs(*OUTPUTS), collect=True, schedule="random",
        ordered_sums=fixed,
    )  # fmt: skip


def make(ptxas: str) -> Iterator[Made]:
    """Every case, its tensor core taken out, what is left assembled."""
    for name in cases():
        launch, arena = capture_case(name)
        made = stored(name, [launch], arena.memory, places=arena.outputs(*OUTPUTS),
                      repeats=repeats(name))  # fmt: skip
        yield Made(made, {IMAGE: assemble(launch.ptx, ptxas)}, {"memory": arena.memory})


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


def judge(outcome: Outcome) -> dict[str, Any]:
    """Shares of the error budget on the GPU and in the emulator, and bytes that both have."""
    case, name = outcome.case, outcome.case.name
    found = {output: outcome.after(IMAGE, output) for output in case.places}
    row: dict[str, Any] = {
        "launches": case.repeats,
        "different": dict.fromkeys(OUTPUTS, 0) | outcome.different(IMAGE),
        "share": error_of(name, found),
    }
    if name not in ONLY_ON_THE_GPU:
        emulated, findings = emulate_case(name)
        same = {key: float((emulated[key] == found[key]).mean()) for key in found}
        row |= {"emulator_share": error_of(name, emulated), "findings": findings,
                "same_bytes": same}  # fmt: skip
    return row


SUITE = Suite("backward_skeleton_hopper", make, judge, is_wrong)

if __name__ == "__main__":
    raise SystemExit(SUITE.main(__doc__))
