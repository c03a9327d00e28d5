"""What a Hopper GPU's tensor core computed: the recorded comparison, and its replay.

`lab/hardware/wgmma_sums` runs wgmma on an H200; its result file holds digests of operands and
outputs.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fa4.emulator.tcgen05.formats import Format
from fa4.emulator.wgmma import sums
from fa4.emulator.wgmma.forms import ProductForm
from lab.hardware.wgmma_sums import compare, operands
from lab.hardware.wgmma_sums.operands import CASES, COMBINATIONS, Combination
from lab.records import read_record

ROOT = Path(__file__).resolve().parents[2]
OUTPUTS = 1_000_000  # of each combination of types, at least


@cache
def recorded() -> dict[str, Any]:
    return read_record("wgmma_sums")


def faults_of(report: dict[str, Any]) -> list[str]:
    """What is wrong with a result file."""
    found = []
    for types in COMBINATIONS:
        row = report["sums"].get(types.name)
        if row is None or row["outputs"] < OUTPUTS:
            found.append(f"{types.name}: too few outputs")
        elif row["mismatches"]:
            found.append(f"{types.name}: {row['mismatches']} mismatches")
        if any(report["forms_that_differ"].get(types.name, {"none": 1}).values()):
            found.append(f"{types.name}: forms differ")
    if any(report["integers_wrong"].values()) or len(report["integers_wrong"]) != 8:
        found.append("integers")
    return found


def test_a_gpu_agreed_in_every_output() -> None:
    report = recorded()
    assert faults_of(report) == []
    assert "H200" in report["hardware"]["gpu"]
    assert report["mma_sync_differs"]["f32.bf16.bf16"] == 0
    millions = sum(row["outputs"] for row in report["sums"].values()) / 1e6
    assert f"{millions:.1f} million outputs" in (ROOT / "docs/emulator.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("sums", "f32.bf16.bf16", "mismatches"), 1),
        (("sums", "f16.f16.f16", "outputs"), 1000),
        (("forms_that_differ", "f32.e4m3.e4m3", "n8"), 1),
        (("integers_wrong", "s8.s8"), 1),
    ],
)
def test_a_worse_result_file_is_refused(path: tuple[str, ...], value: int) -> None:
    changed = copy.deepcopy(recorded())
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert len(faults_of(changed)) == 1


@cache
def first_tiles(types: Combination, case: str) -> operands.Tiles:
    return compare.head(operands.tiles(types, case))


def replay(types: Combination, case: str) -> list[str]:
    """Digests of the operands and of what the package computes from them."""
    given = first_tiles(types, case)
    found = compare.modelled(types, given)
    return [compare.digest(given.a, given.b, given.d), compare.digest(found)]


@pytest.mark.parametrize("types", COMBINATIONS, ids=lambda types: types.name)
def test_the_package_repeats_what_the_gpu_computed(types: Combination) -> None:
    for case in CASES:
        assert replay(types, case) == recorded()["sums"][types.name]["replays"][case], case


@pytest.mark.parametrize("element", [Format.BF16, Format.E4M3])
@pytest.mark.parametrize("change", [-1, 1])
def test_another_alignment_is_noticed(
    element: Format, change: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit more or fewer than the tensor core keeps."""
    monkeypatch.setitem(sums.FRACTION_BITS, element, sums.FRACTION_BITS[element] + change)
    types = Combination("f32", str(element), str(element))
    assert replay(types, "cancel") != recorded()["sums"][types.name]["replays"]["cancel"]


# The same by hand: each sum shows one rule.

ROW = tuple[list[float], float, float]  # factors of ones, accumulator, sum
BIG = 2.0**100
RULES: dict[str, ROW] = {
    "bits within the alignment are kept": ([1.0, -1.0], 2.0**-25, 2.0**-25),
    "bits below it are cut off": ([1.0, -1.0], 2.0**-26, 0.0),
    "each addend is cut off for itself": ([1.0, *[2.0**-26] * 8, -1.0], 0.0, 0.0),
    "not downwards": ([1.0, -(2.0**-26), -1.0], 0.0, 0.0),
    "the order is none": ([2.0**-26, 1.0, -1.0], 2.0**-20, 2.0**-20),
    "the sum is cut off": ([1.0, 2.0**-24, 2.0**-25], 0.0, 1.0),
    "the accumulator is aligned as well": ([2.0**-30], 1.0, 1.0),
    "beyond the largest number is infinity": ([BIG * 2.0**27, BIG * 2.0**27], 0.0, np.inf),
    "zeros have no sign": ([-0.0, -0.0], -0.0, 0.0),
    "differences of infinities are no numbers": ([np.inf, -np.inf], 0.0, np.nan),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_of_the_sum(rule: str) -> None:
    factors, before, after = RULES[rule]
    a = np.zeros((64, 16), np.float32)
    a[:, : len(factors)] = factors
    ones = np.ones((8, 16), np.float32)
    form = ProductForm(8, Format.BF16, Format.BF16, Format.F32)
    d = np.full((64, 8), before, np.float32).view(np.uint32)
    words = sums.multiply(form, _bf16_bytes(a), _bf16_bytes(ones), d)
    expected = np.full((64, 8), after, np.float32)
    if np.isnan(after):
        assert (words == 0x7FFFFFFF).all()
    else:
        np.testing.assert_array_equal(words, expected.view(np.uint32))


def _bf16_bytes(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
