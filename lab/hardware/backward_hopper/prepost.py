"""The kernels before and behind the backward kernel on a Hopper GPU, compiled for it as they are.

    python -m lab.hardware.backward_hopper.prepost make FOLDER
    python3 -m lab.hardware.suite FOLDER RESULTS.npz                                  # GPU
    python -m lab.hardware.backward_hopper.prepost compare FOLDER RESULTS.npz

All memory of each call is compared with the definitions, and byte for byte with the emulator; a
large call is timed beside the driver's copy of as many bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fa4.sm100.backward.spec import BackwardSpec
from lab.hardware.launches import ARCH, Made, Suite, capture, emulate, stored
from lab.hardware.suite import Outcome
from tests.sm100.backward_prepost import FUNCTIONS, Call, Sizes, compile_small, errors, room
from tests.sm100.test_backward_prepost import SPECS

TIMED, IMAGE, ALL = "timed", "compiled", "memory"
REPEATS = 50  # launches on the same memory, which must all leave the same bits
APPROXIMATE = ("sink_parts",)  # exponentials of MUFU, whose last bits the emulator does not know
LARGE = Sizes((16384,), heads=16, gaps=False)


def calls() -> dict[str, Call]:
    """By name: a call for each variant of the tests, and one without a sequence in front."""
    dense = Sizes((700, 700), heads=2, dout="heads first", lse="rows first")
    ragged = Sizes((700, 1, 0, 129, 128, 257), heads=2, slack=3, tail=100, blind=0.2)
    found = {
        name: Call(spec, ragged if spec.packed_q or spec.used_q else dense)
        for name, spec in SPECS.items()
    }
    many = Sizes((0, *range(40), *[0, 300, 2] * 5), dout="one for all heads", dlse="one for all")
    return found | {"many sequences": Call(SPECS["packed"], many)}


def large_call() -> Call:
    """What is timed: 16k rows of 16 heads."""
    return Call(BackwardSpec(head_dim=128, head_dim_v=128), LARGE)


def label(variant: str, name: str) -> str:
    """A launch's name."""
    return f"{variant} {name}".strip()


def moved_bytes(name: str, call: Call) -> int:
    """What a kernel must read and write of a call without extras."""
    rows, spec = sum(call.sizes.lengths) * call.sizes.heads, call.spec
    if name == "postprocess":
        return rows * spec.head_dim * (4 + 2)
    return rows * (spec.head_dim_v * (2 + 2) + spec.head_dim * 4 + 4 + 8)


def make(ptxas: str) -> Iterator[Made]:
    """Every call of every kernel, with what the emulator leaves; then the large call."""
    for variant, call in {**calls(), TIMED: large_call()}.items():
        for name in FUNCTIONS:
            timed = variant == TIMED
            kernel = compile_small(name, call.spec, ARCH)
            memory = room(call.bytes_used) if timed else call.buffer(name)
            launch, allocations = capture(kernel, call.arguments(name, memory))
            places = {ALL: {"start": 0, "bytes": memory.size}}
            case = stored(
                label(variant, name), [launch], memory, places={} if timed else places,
                repeats=REPEATS, timed_bytes=moved_bytes(name, call) if timed else 0,
            )  # fmt: skip
            arrays = {}
            if not timed:
                emulated, _ = emulate([launch], memory, places, allocations)
                arrays = {"memory": memory, "emulated": emulated[ALL] ^ memory}
            yield Made(case, {IMAGE: kernel.artifacts.CUBIN}, arrays)


def judge(outcome: Outcome) -> dict[str, Any]:
    """One launch, or the rates of the large call."""
    case = outcome.case
    if case.timed_bytes:
        return rates(outcome.got[f"{case.name}/{IMAGE}/seconds"], case.timed_bytes)
    variant, _, name = case.name.rpartition(" ")
    before = outcome.given["memory"]
    after, emulated = outcome.after(IMAGE, ALL), before ^ outcome.given["emulated"]
    return judged(name, calls()[variant], before, after, emulated) | {
        "different": outcome.different(IMAGE)[ALL]
    }


def judged(name: str, call: Call, before: Any, after: Any, emulated: Any) -> dict[str, Any]:
    """Tensors that are not as defined, and bytes that are not the emulator's."""
    other = {
        tensor: int((call.bytes_of(after, tensor) != call.bytes_of(emulated, tensor)).sum())
        for tensor in call.places
    }
    return {
        "errors": errors(name, call, before, after),
        "other_bytes": {tensor: count for tensor, count in other.items() if count},
        "bytes": int((after != before).sum()),
    }


def is_wrong(name: str, row: dict[str, Any]) -> bool:
    """Not as defined, not the emulator's where there is one right answer, or not repeatable."""
    if "ratio" in row:
        return False
    return bool(row["errors"] or row["different"] or set(row["other_bytes"]) - set(APPROXIMATE))


def rates(seconds: Any, moved_bytes: int) -> dict[str, Any]:
    """GB/s of a kernel and of the copy, the median of their ratio."""
    ours, copy = (moved_bytes / seconds[:, i] / 1e9 for i in range(2))
    return {
        "gb_per_s": round(float(np.median(ours)), 1),
        "copy_gb_per_s": round(float(np.median(copy)), 1),
        "ratio": round(float(np.median(ours / copy)), 3),
        "microseconds": round(float(np.median(seconds[:, 0])) * 1e6, 2),
    }


def report(device: str, rows: dict[str, Any], wrong: list[str]) -> dict[str, Any]:
    """Launches, and the rates of the large call by kernel."""
    timed = {name: rows.pop(label(TIMED, name)) for name in FUNCTIONS}
    return {"device": device, "launches": rows, "timed": timed}


SUITE = Suite("backward_hopper", make, judge, is_wrong, report)

if __name__ == "__main__":
    raise SystemExit(SUITE.main(__doc__))
