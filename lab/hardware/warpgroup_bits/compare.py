"""What the emulator's outputs and a GPU's differ in, of the kernels of `suite`.

"exact" kernels must agree in every bit. In "compiled" ones the last bits of MUFU's results differ
from the emulator's, which are the true values rounded once: elements that are equal are counted,
distances are given in units in the last place (ulp) of the element, and as a share of the largest
element of its row of O, which is what an error of a probability is to be compared with.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lab.hardware.launches import view_of
from lab.hardware.suite import Outcome

KERNELS = ("compiled", "exact")
# Largest distances in compiled kernels. MUFU's 2 ulp of float32 move a probability that lies
# between two 16-bit numbers to the other, and O by at most an ulp of the row's largest element; O's
# own rounding may add one. LSE: those 2 ulp in the sum, MUFU's logarithm, float32's rounding.
O_ULP_OF_ROW, LSE_RELATIVE = 2.0, 2.0**-20
SOFTCAP_FACTOR = 4  # tanh is of an exponential and a reciprocal, and scores are it times the cap


def ordered(x: Any) -> Any:
    """Integers that count the numbers of a type: neighbours differ by 1, +0 is -0."""
    signed = {2: np.int16, 4: np.int32}[x.dtype.itemsize]
    bits = np.ascontiguousarray(x).view(signed).astype(np.int64)
    return np.where(bits < 0, np.iinfo(signed).min - bits, bits)


def distances(here: Any, there: Any) -> dict[str, float]:
    """How two outputs differ."""
    ulp = np.abs(ordered(here) - ordered(there))
    same = here.tobytes() == there.tobytes()
    finite = np.isfinite(here.astype(np.float64)) & np.isfinite(there.astype(np.float64))
    one, other = (np.where(finite, x, 0).astype(np.float64) for x in (here, there))
    return {
        "elements": int(ulp.size),
        "other_bits": int((ulp != 0).sum()) if not same else 0,
        "largest_ulp": int(ulp.max(initial=0)),
        "largest_difference": float(np.abs(one - other).max(initial=0.0)),
        "largest_relative": float(
            (np.abs(one - other) / np.maximum(np.abs(one), 1.0)).max(initial=0.0)
        ),
        "other_specials": int(((ulp != 0) & ~finite).sum()),
    }


def ulp_of_rows(here: Any, there: Any) -> float:
    """The largest difference of O in ulp of the largest element of its row."""
    one, other = (np.where(np.isfinite(x.astype(np.float64)), x, 0).astype(np.float64)
                  for x in (here, there))  # fmt: skip
    largest = np.maximum(np.abs(other).max(-1, keepdims=True), 2.0**-100)
    mantissa = {"bfloat16": 7, "float16": 10}[str(here.dtype)]
    step = 2.0 ** (np.floor(np.log2(largest)) - mantissa)
    return float((np.abs(one - other) / step).max(initial=0.0))


def judged(outcome: Outcome) -> dict[str, Any]:
    """Both kernels of a call."""
    rows: dict[str, Any] = {}
    for kernel in KERNELS:
        different = max(outcome.different(kernel).values())
        row = rows[kernel] = {"different_launches": different}
        for name, place in outcome.case.places.items():
            here = view_of(outcome.given[f"emulated/{kernel}/{name}"], place)
            there = view_of(outcome.after(kernel, name), place)
            row[name] = distances(here, there)
            if name == "o":
                row[name]["largest_ulp_of_row"] = round(ulp_of_rows(here, there), 3)
    return rows


def is_wrong(rows: dict[str, Any], softcap: bool = False) -> bool:
    """Other bits in the exact kernel or from launch to launch, or far off in the compiled one."""
    lse_relative = LSE_RELATIVE * (SOFTCAP_FACTOR if softcap else 1)
    outputs = [name for name in ("o", "lse") if name in rows["exact"]]
    compiled = rows["compiled"]
    return bool(
        any(rows[kernel]["different_launches"] for kernel in KERNELS)
        or any(rows["exact"][name]["other_bits"] for name in outputs)
        or any(compiled[name]["other_specials"] for name in outputs)
        or compiled["o"]["largest_ulp_of_row"] > O_ULP_OF_ROW
        or ("lse" in compiled and compiled["lse"]["largest_relative"] > lse_relative)
    )


def share_equal(calls: dict[str, Any], kernel: str, output: str) -> float:
    """Of all elements of an output, over all calls."""
    rows = [rows[kernel][output] for rows in calls.values() if output in rows[kernel]]
    return 1 - sum(row["other_bits"] for row in rows) / sum(row["elements"] for row in rows)
