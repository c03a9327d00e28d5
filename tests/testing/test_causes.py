"""Failures by cause: names, groups, and what joined faults are told apart by."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from fa4.testing import Case, build_inputs, load_backend, verify
from fa4.testing.budget import expect_forward
from fa4.testing.causes import Evidence, Symptom, describe_needs, group_failures, name_cause
from fa4.testing.diagnosis import Doctor
from fa4.testing.properties import find_properties
from fa4.testing.report import FAILED, NOT_ROBUST
from fa4.testing.shrink import needed_features
from fa4.testing.symptoms import wrong_outputs
from tests.testing.planted import FAULTS, Fault
from tests.testing.remembered import remembered_budgets

HERE = "tests.testing.planted"


def finding(name: str, what: str, *needs: str, status: str = FAILED) -> Evidence:
    """A property that shows this with these features."""
    words = " x ".join(needs)
    symptom = Symptom(
        what=what, needs=needs, words=words, example=f"Case({words})", error="error", test=""
    )
    return Evidence(name=name, status=status, symptom=symptom)


def groups_of(*findings: Evidence) -> list[tuple[str, tuple[str, ...]]]:
    """Causes and properties of the groups."""
    return [(group.cause, group.properties) for group in group_failures(findings)]


def test_the_same_features_are_one_cause() -> None:
    """Whatever property shows it; the fewest features first, what is not robust last."""
    assert groups_of(
        finding("a", "out", "fp64", "softcap"),
        finding("b", "out", "paged"),
        finding("c", "lse", "softcap", "fp64"),
        finding("d", "out", "sink", status=NOT_ROBUST),
    ) == [
        ("O wrong with paged", ("b",)),
        ("O and LSE wrong with fp64 x softcap", ("a", "c")),
        ("O wrong with sink", ("d",)),
    ]


def test_more_features_are_another_cause() -> None:
    """A case that needs both fails without neither."""
    groups = groups_of(finding("a", "out", "softcap"), finding("b", "out", "softcap", "window"))
    assert [properties for _, properties in groups] == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("gradients", "count"), [(("dq", "dk", "dv"), 1), (("dv",), 1), (("dq", "dk"), 2)]
)
def test_the_forward_pass_and_gradients(gradients: tuple[str, ...], count: int) -> None:
    """One cause where P is wrong, which dV shows; otherwise two."""
    findings = [finding("a", "out", "causal"), *(finding("b", x, "causal") for x in gradients)]
    assert len(groups_of(*findings)) == count


def test_sizes_are_no_causes() -> None:
    """Lengths of one class are the same cause, and those of different classes are not."""
    near, far = finding("b", "out", "length 300"), finding("c", "out", "length 2000")
    assert len(groups_of(finding("a", "out", "length 257"), near)) == 1
    assert len(groups_of(near, far)) == 2


def test_what_is_no_output_has_a_group_of_its_own() -> None:
    """An exception, a write, or a property that is broken."""
    kinds = finding("a", "cached_window"), finding("b", "ValueError: #"), finding("c", "out")
    assert set(groups_of(*kinds)) == {
        ("O wrong on the plainest input", ("c",)),
        ("cached_window broken", ("a",)),
        ("error", ("b",)),
    }


def test_the_same_steps_are_one_cause_behind_single_calls() -> None:
    """A page table that is read wrongly fails every session that adds twice."""
    report = verify(f"{HERE}:page_table_row_of_first", only=["cache_*", "paged"], quick=True)
    first, *others = report.failures
    assert first.cause == "O wrong with pages x several sequences"
    added = next(x for x in others if x.cause == "cache_session broken with add")
    assert len(added.properties) >= 3 and len(others) <= 4


def test_state_that_shows_everywhere_is_one_cause() -> None:
    """Two caches are two causes; what every call leaves behind is one."""
    names = [f"cached_{name}" for name in ("window", "scale", "sink", "dtype")]
    findings = [finding(name, name) for name in names]
    assert len(groups_of(*findings[:2])) == 2
    assert groups_of(*findings) == [("a call changes the next one", tuple(names))]


def test_names() -> None:
    """Features in words, with the values that say more than the name."""
    case = Case(group=3, causal=True, dtype="fp16", heads_k=2, values="low", seqlen_k=300,
                softmax_scale=-0.5, window_size=(1, None))  # fmt: skip
    assert describe_needs(case, needed_features(case)) == (
        "GQA 3 x fp16 x values 'low' x causal x window x negative scale x several KV heads "
        "x length 300"
    )
    assert name_cause(("dk",), "GQA 3 x causal", ["wrong"]) == "dK wrong with GQA 3 x causal"
    nan = "out[0] = nan, oracle 0: NaN is never right"
    assert name_cause(("out", "lse"), "", [nan]) == "O and LSE NaN on the plainest input"
    assert name_cause(("out",), "", [nan, "wrong"]) == "O wrong on the plainest input"
    assert name_cause(("x y",), "", ["z" * 100]) == "z" * 100
    assert name_cause(("x y",), "", ["z" * 101]) == "z" * 96 + " ..."


def diagnose(name: str, prop: str, case: Case) -> dict[str, tuple[str, ...]]:
    """What is wrong with a case of a planted fault, and what each of it needs."""
    backend = load_backend(f"{HERE}:{name}")
    (found,) = find_properties([prop])
    try:
        found.check(backend, case)
    except Exception as error:
        return {x.what: x.needs for x in Doctor(backend).diagnose(found, case, error)}
    raise AssertionError(f"{name} passes {prop}")


GROUPED = Case(seqlen_q=9, seqlen_k=40, group=3, causal=True, sink=0.5, softcap=2.0, seed=3)


def test_a_wrong_output_is_no_excuse_for_gradients() -> None:
    """O is wrong with a sink; dQ, dK and dV are judged with the right O and are right."""
    found = diagnose("sink_of_kv_head", "gradients_with_sink", GROUPED)
    assert set(found) >= {"out", "lse"} and not {"dq", "dk", "dv"} & set(found), found


def test_gradients_alone() -> None:
    """dK is wrong with groups under the causal mask, and nothing else."""
    found = diagnose("dk_causal_gqa", "gradients_with_gqa", GROUPED)
    assert found == {"dk": ("group", "causal")}


def test_a_call_that_is_wrong_alone_is_no_matter_of_state() -> None:
    """`cached_softcap` calls with a softcap, which this function loses with grouped heads."""
    case = Case(seqlen_q=17, seqlen_k=40, group=2, seed=3)
    found = diagnose("softcap_lost_with_groups", "cached_softcap", case)
    assert set(found) == {"out", "lse"} and set(found["out"]) == {"softcap", "group"}


def test_a_pasted_test_checks_what_is_wrong() -> None:
    """Also where the property that showed it does not judge that output."""
    report = verify(f"{HERE}:sink_of_kv_head", only=["gradients_with_sink"], quick=True)
    for symptom in report.results[0].symptoms:
        namespace: dict = {}
        exec(compile(symptom.test, "pasted", "exec"), namespace)
        with pytest.raises(AssertionError):
            namespace["test_gradients_with_sink"]()


@pytest.mark.parametrize("times", [0.6, 1.4, 1.8, 4.0])
def test_wrong_is_what_is_beyond_its_budget(times: float) -> None:
    """By how much does not matter: one element of O is moved by so many times its budget."""
    case = Case(seqlen_q=3, seqlen_k=5, dtype="fp32")
    expected = expect_forward(build_inputs(case))["out"]

    def moved(q: Any, k: Any, v: Any, **_: Any) -> np.ndarray:
        exact, allowed = expected.oracle[0], expected.allowed[0]
        out = exact.astype(np.float64)
        out[1, 0, 2] += times * allowed[1, 0, 2]
        return out[None].astype(q.dtype)

    wrong = wrong_outputs(load_backend(moved), case, gradients=False)
    assert set(wrong) == ({"out"} if times > 1.0 else set())


# Classes of faults that show everywhere, behind which nothing of their outputs can be seen.
EVERYWHERE = {"LSE", "scale", "accumulation", "rounding", "behaviour", "dtype-dependent"}
# Five faults that can be joined, their causes, and the properties that show them.
FIVE = {
    "softcap_lost_with_window": "O and LSE wrong with window x softcap",
    "dk_causal_gqa": "dK wrong with GQA 2 x causal",
    "dsink_causal": "dsink wrong with causal x sink",
    "page_table_row_of_first": "O wrong with pages x several sequences",
    "keeps_scale": "cached_scale broken",
}
SHOW_FIVE = ("window_with_softcap", "gradients_with_causal_and_gqa", "paged", "cached_scale",
             "gradients_with_causal_and_sink")  # fmt: skip


def joined(faults: Sequence[Fault]) -> Callable[..., Any]:
    """One back end with all of these faults, which replace different methods."""
    kernel = [method for fault in faults for method in fault.kernel.items()]
    call = [method for fault in faults for method in fault.call.items()]
    assert len(dict(kernel)) == len(kernel) and len(dict(call)) == len(call)
    return Fault("joined", "", "", (), dict(kernel), dict(call)).attention()


def draw_five(seed: int) -> list[Fault]:
    """Five faults of different classes that can be joined."""
    chosen: list[Fault] = []
    rng = random.Random(seed)
    for fault in rng.sample(list(FAULTS.values()), len(FAULTS)):
        apart = all(
            fault.group != x.group and not fault.kernel.keys() & x.kernel.keys()
            and not fault.call.keys() & x.call.keys()
            for x in chosen
        )  # fmt: skip
        everywhere = fault.group in EVERYWHERE or "plain" in fault.named_by
        if apart and not everywhere and len(chosen) < 5:
            chosen.append(fault)
    return chosen


def test_joined_faults_are_told_apart() -> None:
    """Five at once have five causes, each with its name."""
    backend = load_backend(joined([FAULTS[name] for name in FIVE]))
    report = verify(backend, only=SHOW_FIVE, max_examples=8)
    causes = [group.cause for group in report.failures]
    found = {name: [x for x in causes if x.startswith(start)] for name, start in FIVE.items()}
    assert all(found.values()) and len(causes) <= 7, causes


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_drawn_faults_are_told_apart(seed: int) -> None:
    """Five of different classes, joined, give at least four causes."""
    faults = draw_five(seed)
    with remembered_budgets():
        report = verify(load_backend(joined(faults)), quick=True, strict=True)
    causes = [group.cause for group in report.failures]
    assert len(causes) >= 4, ([fault.name for fault in faults], causes)
