"""The judge of foreign kernels sees wrong outputs, and results are kept as the table needs them."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from tests.conformance.cases import CASES, REFUSED, Foreign
from tests.conformance.program import Program, Verdict, compare, exactly, tensor_of
from tests.conformance.record import results_of, run_of

EXACT = {"x": np.array([1.0, 2.0, 3.0])}
PLAIN = {"x": np.array([1.0, 2.01, 3.0], np.float32)}


@pytest.mark.parametrize(
    ("change", "right"),
    [([0, 0, 0], True), ([0.015, 0, 0], True), ([0, -0.03, 0], False), ([0, 0, np.nan], False)],
)
def test_twice_the_error_of_plain_is_allowed(change, right):
    assert (compare({"x": EXACT["x"] + change}, EXACT, PLAIN).share <= 1) == right


def test_where_plain_is_exact_nothing_is_allowed():
    judge = exactly(EXACT)
    assert judge(EXACT) == Verdict(0.0, 0.0)
    assert judge({"x": EXACT["x"] + [0, 0, 1e-6]}).share == np.inf


def test_outputs_must_be_all_there_and_of_the_right_shape():
    with pytest.raises(AssertionError):
        compare({}, EXACT, PLAIN)
    with pytest.raises(AssertionError):
        compare({"x": EXACT["x"][:2]}, EXACT, PLAIN)


def test_tensors_keep_values_and_the_order_in_memory():
    pytest.importorskip("torch", reason="torch is not installed")
    array = np.arange(24).reshape(2, 3, 4).astype(ml_dtypes.bfloat16).transpose(2, 0, 1)
    tensor = tensor_of(array)
    assert tensor.stride() == (1, 12, 4) and tensor.data_ptr() % 64 == 0
    assert (tensor.float().numpy() == array.astype(np.float32)).all()


def test_names_are_unique_and_findings_have_reasons():
    names = [case.name for case in (*CASES, *REFUSED)]
    assert len(set(names)) == len(names)
    assert all(len(reason) > 20 for case in CASES for reason in case.known.values())


def test_only_kernels_with_right_outputs_confirm_opcodes():
    case = Foreign("name", "family", lambda: Program(lambda session: {}, lambda found: None))

    def report(opcode: str) -> SimpleNamespace:
        counts = Counter({opcode: 64})
        return SimpleNamespace(instructions=counts, seconds=0.5, kernels=["k"], findings=[])

    runs = [
        run_of(case, ("fifo", 0), [report("add.f32")], Verdict(0.25, 0.5)),
        run_of(case, ("random", 0), [report("sub.f32")], None),
    ]
    results = json.loads(json.dumps(results_of(runs)))
    assert results["opcodes"] == ["add.f32"]
    assert [run["thread_instructions_per_second"] for run in results["runs"]] == [128, 128]
    assert [run["max_error"] for run in results["runs"]] == [0.25, None]
