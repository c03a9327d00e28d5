"""The forward kernel on a Hopper GPU, which has no tcgen05: everything else is as compiled.

    python -m lab.hardware.forward_hopper.skeleton make FOLDER --ptxas PTXAS
    python3 -m lab.hardware.suite FOLDER RESULTS.npz                                  # GPU
    python -m lab.hardware.forward_hopper.skeleton compare FOLDER RESULTS.npz

`without_tensor_core` leaves products out, lets commits arrive at once, makes numbers of the address
where tensor memory is read and stores to global memory where it is written, and writes packed
float32 instructions as two. What is left is the kernel: TMA, mbarriers, named barriers, setmaxnreg,
work tiles, masks, softmax, correction and epilogue. It must come to its end, with the O and LSE
that those numbers have by definition, on the GPU and in the emulator. `with_soft_tensor_core`
computes the products by plain instructions in the warp that would issue them: then O and LSE are
attention's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from lab.hardware.forward_hopper.skeleton_cases import (
    OUTPUTS,
    cases,
    errors,
    find_case,
    operand,
    repeats,
    scale,
    view,
)
from lab.hardware.forward_hopper.skeleton_ptx import without_tensor_core
from lab.hardware.forward_hopper.soft_tensor_core import with_soft_tensor_core
from lab.hardware.launches import Arena, Made, Suite, assemble, capture, emulate, lay_out, stored
from lab.hardware.suite import Outcome

# Too long for the emulator.
ONLY_ON_THE_GPU = (
    "many tiles", "halves, many tiles", "halves, products", "halves, products, one after the other",
)  # fmt: skip
IMAGE = "hopper"
# Relative errors of O: bfloat16 rounds to 2^-8, O once and P once more, and exponentials add to it;
# of LSE: emulated exponentials are off by 8.8e-5 (docs/forward.md), the sums in float32 by less.
O_LIMIT, PRODUCTS_O_LIMIT, LSE_LIMIT = 1.02 * 2.0**-8, 1.02 * 2.0**-7, 1.2e-4


def tensors_of(case: dict[str, Any], spec: Any) -> dict[str, Any]:
    """The call's tensors, by name; O and LSE are NaN, Q, K and V zero where nothing reads them."""
    import torch

    lengths = case["lengths"]

    def tensor(name: str, which: int, dim: int) -> Any:
        sizes = [pair[which] for pair in lengths]
        shape = [sum(sizes) if spec.packed_q else sizes[0], case["heads"][which], dim]
        shape = shape if spec.packed_q else [len(sizes), *shape]
        bits = np.full(shape, 0xFFFF if name == "o" else 0, np.uint16)
        if case.get("products") and name != "o":
            bits = operand(name, shape)
        return torch.from_numpy(bits).view(torch.bfloat16)

    found = {
        "q": tensor("q", 0, spec.head_dim), "k": tensor("k", 1, spec.head_dim),
        "v": tensor("v", 1, spec.head_dim_v), "o": tensor("o", 0, spec.head_dim_v),
    }  # fmt: skip
    longest = max(rows for rows, _ in lengths)
    shape = [len(lengths), case["heads"][0], longest]
    if spec.packed_q:
        shape = [case["heads"][0], found["o"].shape[0]]
        for which in range(2):
            offsets = np.cumsum([0, *(pair[which] for pair in lengths)]).astype(np.int32)
            found[f"offsets{which}"] = torch.from_numpy(offsets)
    found["lse"] = torch.full(shape, -1, dtype=torch.int32).view(torch.float32)
    return found


def capture_case(case: dict[str, Any]) -> tuple[Any, Arena, Any]:
    """(launch, arena, spec): what CuTe-DSL's host function launches on tensors in an arena."""
    from fa4.designs import find_design
    from fa4.designs.design import named
    from fa4.hardware import B200

    compiler = find_design(B200, kernel=case.get("kernel")).compiled
    assert compiler is not None  # these kernels run
    spec = named(compiler.tuned)(gpu=B200, **case["spec"])
    numerics = replace(spec.numerics, q_tiles=case.get("q_tiles", 2))
    spec = replace(spec, numerics=numerics)
    arena = lay_out(tensors_of(case, spec))
    q, k, v, o, lse = (arena.tensors[name] for name in ("q", "k", "v", "o", "lse"))
    offsets = (arena.tensors.get("offsets0"), arena.tensors.get("offsets1"))
    longest = max(rows for rows, _ in case["lengths"])
    arguments = (
        q, k, v, o, lse, scale(case["spec"]), None, *case.get("window", (None, None)), longest,
        None, *offsets, None, None, None, case["sms"],
    )  # fmt: skip
    launch, _ = capture(named(compiler.compiler)(spec), arguments)
    return launch, arena, spec


def hopper_launch(case: dict[str, Any], launch: Any) -> Any:
    """What is launched in place of the kernel."""
    change = with_soft_tensor_core if case.get("products") else without_tensor_core
    return replace(launch, ptx=change(launch.ptx, int(np.prod(launch.grid))))


def columns_of(spec: Any) -> dict[str, int]:
    """Where S and O lie in tensor memory; of halves, the first keys, which the others follow."""
    names = {buffer.name.removesuffix("a"): buffer.start for buffer in spec.plan.buffers
             if buffer.space == "tmem"}  # fmt: skip
    return {f"{x}{i}": names[f"{x}{i}"] for x in "so" for i in range(spec.numerics.q_tiles)}


def emulate_case(name: str) -> tuple[dict[str, Any], list[str]]:
    """O, LSE and the findings of the emulator for the same text, under the adversarial schedule."""
    case = find_case(name)
    launch, arena, spec = capture_case(case)
    outputs = arena.outputs(*OUTPUTS)
    found, findings = emulate(
        [hopper_launch(case, launch)], arena.memory, outputs, collect=True, schedule="adversarial"
    )
    described = {"name": name, "places": arena.places, "columns": columns_of(spec)}
    return described | {x: view(found[x], outputs[x]) for x in OUTPUTS}, findings


def make(ptxas: str) -> Iterator[Made]:
    """Every case of the forward kernel."""
    yield from make_all(cases(), ptxas)


def make_all(named_cases: dict[str, dict[str, Any]], ptxas: str) -> Iterator[Made]:
    """Cases whose kernels have their tensor core taken out; what is left is assembled."""
    for name, case in named_cases.items():
        launch, arena, spec = capture_case(case)
        hopper = hopper_launch(case, launch)
        made = stored(
            name, [hopper], arena.memory, places=arena.outputs(*OUTPUTS), repeats=repeats(name),
            more={"places": arena.places, "columns": columns_of(spec)},
        )  # fmt: skip
        yield Made(made, {IMAGE: assemble(hopper.ptx, ptxas)}, {"memory": arena.memory})


def judge(outcome: Outcome) -> dict[str, Any]:
    """Errors of O and LSE on the GPU and in the emulator."""
    case, name = outcome.case, outcome.case.name
    o, lse = (view(outcome.after(IMAGE, x), case.places[x]) for x in OUTPUTS)
    o_error, lse_error = errors({"name": name, **case.more}, o, lse)
    row = {
        "launches": case.repeats,
        "different": max(outcome.different(IMAGE).values()),
        "values": o.size + lse.size,
        "o_error": o_error,
        "lse_error": lse_error,
    }
    if name not in ONLY_ON_THE_GPU:
        emulated, findings = emulate_case(name)
        mine = errors(emulated, emulated["o"], emulated["lse"])
        row |= {"emulator_errors": mine, "findings": findings}
    return row


def is_wrong(name: str, row: dict[str, Any]) -> bool:
    """Whether a case is off its definition, changes from launch to launch or has findings."""
    o_limit = PRODUCTS_O_LIMIT if find_case(name).get("products") else O_LIMIT
    pairs = [(row["o_error"], row["lse_error"]), row.get("emulator_errors", (0.0, 0.0))]
    inside = all(o <= o_limit and lse <= LSE_LIMIT for o, lse in pairs)
    return bool(not inside or row["different"] or row.get("findings"))


SUITE = Suite("forward_skeleton_hopper", make, judge, is_wrong)

if __name__ == "__main__":
    raise SystemExit(SUITE.main(__doc__))
