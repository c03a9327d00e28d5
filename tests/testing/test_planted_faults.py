"""Every planted fault is caught, soon, by a property whose name says what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fa4.testing import PROPERTIES, Case, PropertyResult, build_inputs, load_backend, verify
from fa4.testing.backends import DTYPES
from tests.testing import planted
from tests.testing.planted import FAULTS, Fault
from tests.testing.remembered import key_of, remembered_budgets

HERE = "tests.testing.planted"

# At least so many faults of each class.
CLASSES = {
    "mask edges": 10,
    "head mapping": 5,
    "LSE": 6,
    "scale": 5,
    "modification order": 5,
    "feature lost in the presence of another": 20,
    "length-dependent": 8,
    "dtype-dependent": 5,
    "accumulation": 4,
    "rounding": 4,
    "batch and head aliasing": 5,
    "varlen offsets": 6,
    "gradients": 16,
    "behaviour": 3,
    "layout": 20,
    "state": 20,
    "gradients where features meet": 18,
    "values in gradients": 2,
    "sums over groups": 6,
    "FP8": 19,
    "MLA": 12,
    "calls that follow one another": 16,
}
AT_ONCE = 3  # of each class, by the properties that name them
# Classes of which one is looked for among all properties: caught by the first of these, in seconds.
SOON = ("mask edges", "head mapping", "LSE", "scale", "modification order", "behaviour")


def by_class(most: int) -> list[str]:
    """Names of the first faults of each class."""
    seen: Counter[str] = Counter()
    names = []
    for name, fault in FAULTS.items():
        seen[fault.group] += 1
        if seen[fault.group] <= most:
            names.append(name)
    return names


def by_speed() -> list[Any]:
    """Names of all faults, those that take longer marked as slow."""
    soon = {name for name in by_class(1) if FAULTS[name].group in SOON}
    return [pytest.param(x, marks=() if x in soon else pytest.mark.slow) for x in FAULTS]


@pytest.fixture(scope="module", autouse=True)
def shared_budgets() -> Iterator[None]:
    """What is expected of a case is the same for every fault."""
    with remembered_budgets():
        yield


def first_failure(fault: Fault, *, named: bool = False) -> PropertyResult:
    """What `fa4 verify --exitfirst --strict` reports; named: of the properties that name it."""
    only = [prop.name for prop in PROPERTIES if fault.is_named_by(prop.name)] if named else None
    report = verify(f"{HERE}:{fault.name}", exitfirst=True, strict=True, only=only)
    failed = report.with_status("failed")
    assert failed, f"{fault.description}: not noticed"
    # The first look at every property reports nothing but failures. It takes a few seconds, which
    # lab/benchmarks/results/verify.json states; the whole run takes a minute.
    assert len(report.results) == 1, f"{fault.description}: not noticed at the first look"
    return failed[0]


@pytest.mark.parametrize("name", by_speed())
def test_planted_faults_are_caught(name: str) -> None:
    """At the first look, with an example, by a property whose name says what is wrong."""
    result = first_failure(FAULTS[name])
    assert FAULTS[name].is_named_by(result.name), f"{name} is caught by {result.name}"
    assert result.error and result.example.startswith(("Case(", "Walk("))


@pytest.mark.parametrize("name", by_class(AT_ONCE))
def test_properties_that_name_a_fault_catch_it(name: str) -> None:
    """At the first look at them; the slow tests look at all properties."""
    result = first_failure(FAULTS[name], named=True)
    assert result.error and result.example.startswith(("Case(", "Walk("))


def test_what_the_backward_pass_alone_keeps_is_seen() -> None:
    """By the property of what calls keep, in a gradient."""
    result = first_failure(FAULTS["keeps_scale_backward"], named=True)
    assert result.name == "cached_scale" and result.error.startswith("d")


def test_faults_of_every_class() -> None:
    """Each class has its share, and each 16-bit type its accumulation and its truncation."""
    counts = Counter(fault.group for fault in FAULTS.values())
    assert set(counts) == set(CLASSES)
    assert {group for group, least in CLASSES.items() if counts[group] < least} == set()
    for dtype in ("bf16", "fp16"):
        assert {f"o_summed_in_{dtype}_every_{keys}" for keys in (8, 64)} <= set(FAULTS)
        assert f"o_truncated_to_{dtype}" in FAULTS


def test_gradients_have_faults_of_their_own() -> None:
    """Each of dQ, dK, dV, dsink and the gradient of the LSE."""
    names = [name for name, fault in FAULTS.items() if fault.group == "gradients"]
    for gradient in ("dq", "dk", "dv", "dsink", "dlse"):
        assert sum(name.startswith(gradient) for name in names) >= 2, gradient


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_honest_back_end_passes(dtype: str) -> None:
    """In each element type alone, so that what catches a fault is the fault."""
    others = dict.fromkeys(set(DTYPES) - {dtype}, "another type is asked for")
    backend = replace(load_backend(f"{HERE}:honest"), not_covered=others)
    names = ["plain", "window", "sink", "varlen", "paged", "dropout", "gradients_masked"]
    report = verify(backend, max_examples=4, only=names)
    assert [result.status for result in report.results] == ["passed"] * len(names)


@pytest.mark.parametrize(
    ("name", "prop"), [("wide_window", "window"), ("dk_unscaled", "gradients")]
)
def test_the_pasted_test_fails_too(name: str, prop: str) -> None:
    """What a report gives to paste shows the fault by itself."""
    result = first_failure(FAULTS[name], named=True)
    namespace: dict = {}
    exec(compile(result.test, "pasted", "exec"), namespace)
    (test,) = (value for key, value in namespace.items() if key.startswith("test_"))
    with pytest.raises(AssertionError):
        test()


@pytest.mark.parametrize("method", ["kernel", "call"])
def test_a_fault_replaces_what_is_there(method: str) -> None:
    """A misspelt method would plant nothing."""
    fault = Fault("x", "scale", "", ("plain",), **{method: {"no_such_method": abs}})
    with pytest.raises(ValueError, match="no_such_method"):
        fault.attention()


def test_names_say_what_is_wrong() -> None:
    """All words of one alternative, in any order."""
    fault = Fault("x", "scale", "", ("softcap window", "order"))
    assert fault.is_named_by("window_with_softcap") and fault.is_named_by("order")
    assert not fault.is_named_by("softcap") and not fault.is_named_by("causal_window")


def test_different_calls_have_different_budgets() -> None:
    """What is remembered is found by every array and option that the budget depends on."""
    plain = Case(seqlen_q=5, seqlen_k=6)
    changes = [{}, {"seed": 1}, {"dtype": "bf16"}, {"causal": True}, {"softcap": 2.0},
               {"score_mod": "alibi"}, {"score_mod": "temper"}, {"sink": 1.0}, {"dropout_p": 0.5},
               {"window_size": (1, None)}, {"softmax_scale": 0.3}, {"score_mod": "table"},
               {"score_mod": "table", "seed": 1}]  # fmt: skip
    inputs = [build_inputs(replace(plain, **change)) for change in changes]
    keys = {
        key_of(x.sequences, sorted(x.options.items(), key=lambda item: item[0])) for x in inputs
    }
    assert len(keys) == len(changes)


def test_faults_between_calls_are_planted() -> None:
    """Two calls show what one cannot: an input overwritten, results that do not last."""
    rng = np.random.default_rng(0)
    q, k, v, other = (rng.standard_normal((1, 5, 1, 16)).astype(np.float32) for _ in range(4))
    honest = planted.honest(q, k, v)
    kept = q.copy()
    np.testing.assert_array_equal(planted.scales_q_in_place(kept, k, v), honest)
    assert not np.array_equal(kept, q)
    first = planted.one_workspace(q, k, v)
    np.testing.assert_array_equal(first, honest)
    planted.one_workspace(other, k, v)
    assert not np.array_equal(first, honest)
    np.testing.assert_array_equal(planted.keys_of_last_call(q, k, v), honest)
    assert not np.array_equal(planted.keys_of_last_call(q, other, v), planted.honest(q, other, v))
