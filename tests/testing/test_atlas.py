"""The atlas of published bugs: each case shows its bug, and nobody who is right is accused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fa4.testing import Backend, Case, Outputs, build_inputs, load_backend
from fa4.testing.atlas import BUGS, THEMES, Bug, check_bug, find_bugs, probes, run_corpus
from fa4.testing.atlas.arrangements import (
    ARRANGEMENTS,
    SAVED_ARRANGEMENTS,
    arrange_inputs,
    arrange_saved,
)
from fa4.testing.atlas.bug import ordinary
from fa4.testing.atlas.corpus import judge_bug
from fa4.testing.inputs import Inputs
from fa4.testing.plain import plain_attention, plain_gradients
from tests.testing.atlas import STAND_INS
from tests.testing.remembered import remembered_budgets

LEAST = 60  # bugs


@pytest.fixture(scope="module", autouse=True)
def shared_budgets() -> Iterator[None]:
    """What is expected of a case is the same for every back end."""
    with remembered_budgets():
        yield


def assert_caught(bug: Bug) -> str:
    """The stand-in of a bug fails the bug's own case; returns what was said."""
    result = judge_bug(bug, STAND_INS[bug.name].backend(), strict=True)
    assert result.status == "failed", f"{bug.name}: {result.status} {result.reason}"
    return result.error


@pytest.mark.parametrize("name", BUGS)
def test_each_bug_is_caught_by_its_case_alone(name: str) -> None:
    """By no other call, and with an element, an exception or an array that is named."""
    assert assert_caught(BUGS[name])


def test_every_bug_has_a_stand_in_and_a_place() -> None:
    """None without the other; names of probes, arrangements and groups exist."""
    assert set(STAND_INS) == set(BUGS) and len(BUGS) >= LEAST
    assert "pytorch#196678" in BUGS
    for bug in BUGS.values():
        assert bug.probe in probes.PROBES and set(probes.PROBES) == set(probes.PROBE_NEEDS)
        assert bug.arrangement in {**ARRANGEMENTS, **SAVED_ARRANGEMENTS}
        assert bug.group in ("core", "robustness")
        assert bug.summary.endswith(".") and bug.versions
    assert {bug.repository.partition("/")[2] for bug in BUGS.values()} >= {
        "flash-attention", "flashinfer", "cudnn-frontend", "pytorch", "vllm", "TransformerEngine",
        "xformers", "transformers", "triton", "jax",
    }  # fmt: skip
    assert all(len(bugs) >= 5 for bugs in THEMES.values())


class Plain(Backend):
    """Attention from its definition, in the element type: what the budget is measured with."""

    def forward(self, inputs: Inputs) -> Outputs:
        """O and the LSE of every sequence, where it lies."""
        *rows, heads, _ = inputs.q.shape
        found = plain_attention(inputs)
        out = np.zeros((*rows, heads, inputs.v.shape[-1]), np.float64)
        lse = np.full((*rows[:-1], heads, rows[-1]), -np.inf, np.float64)
        for index, part in zip(inputs.q_index, found, strict=True):
            out[index] = part.out
            np.moveaxis(lse, -2, -1)[index] = part.lse.T
        return Outputs(out, lse)

    def gradients(self, inputs: Inputs, saved: Outputs, *, with_dlse: bool = False) -> Outputs:
        """All gradients; 0 where no sequence is."""
        found = plain_gradients(inputs, with_dlse=with_dlse)
        arrays = [np.zeros(x.shape, np.float64) for x in (inputs.q, inputs.k, inputs.v)]
        for n, part in enumerate(found):
            arrays[0][inputs.q_index[n]] = part.dq
            arrays[1][inputs.kv_index[n]] = part.dk
            arrays[2][inputs.kv_index[n]] = part.dv
        sinks = [part.dsink for part in found if part.dsink is not None]
        return Outputs(saved.out, saved.lse, *arrays, np.sum(sinks, axis=0) if sinks else None)


def plain() -> Backend:
    """Plain attention as a back end; it has no function of its own that takes keywords."""
    honest = load_backend("reference")
    missing = {"return_lse": "plain attention has no keywords"}
    return Plain("plain", honest.function, honest.varlen, honest.backward, not_covered=missing)


RIGHT = {
    "reference": (lambda: load_backend("reference"), len(BUGS)),
    "oracle": (lambda: load_backend("oracle"), len(BUGS)),
    "plain": (plain, len(BUGS) - 1),
    "planted:honest": (lambda: load_backend("tests.testing.planted:honest"), len(BUGS)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_nobody_who_is_right_is_accused(name: str) -> None:
    """Every case is passed that the back end offers."""
    make, judged = RIGHT[name]
    report = run_corpus(make(), strict=True)
    assert [found.error for found in report.found] == []
    assert report.passed and len(report.with_status("passed")) == judged


def test_torch_is_not_accused() -> None:
    """Its mathematical path, on what SDPA offers."""
    pytest.importorskip("torch")
    report = run_corpus("torch-sdpa-math", strict=True)
    assert [found.error for found in report.found] == []
    assert len(report.with_status("passed")) >= 30


def _of_probe(probe: str) -> Bug:
    return next(bug for bug in BUGS.values() if bug.probe == probe)


@pytest.mark.parametrize("probe", ["forward", "gradients", "gradients_lse", "lse_requested"])
def test_a_check_that_is_disabled_is_noticed(monkeypatch, probe: str) -> None:
    """Of each kind: without it, the test above fails."""
    bug = _of_probe(probe)
    assert_caught(bug)
    monkeypatch.setitem(probes.PROBES, probe, lambda backend, bug: 0.0)
    with pytest.raises(AssertionError, match="passed"):
        assert_caught(bug)


@pytest.mark.parametrize(
    ("name", "check", "idle"),
    [
        ("pytorch#176793", "_assert_finite_outside", lambda inputs, grads: None),
        ("sglang#25957", "_results", lambda outputs: []),
        ("flash-attention#895", "assert_within_budget", lambda *given, **how: 0.0),
        ("cudnn-frontend#304", "arrange_saved", lambda name, saved: saved),
        ("flash-attention#355", "arrange_inputs", lambda name, inputs: inputs),
    ],
)
def test_each_part_of_a_check_is_needed(monkeypatch, name: str, check: str, idle: Any) -> None:
    """Results that stay, what lies outside, the budget, and how arrays lie."""
    bug = BUGS[name]
    assert_caught(bug)
    monkeypatch.setattr(probes, check, idle)
    with pytest.raises(AssertionError, match="passed"):
        assert_caught(bug)


def test_a_case_without_its_trigger_shows_nothing() -> None:
    """It is the bug that fails, not the stand-in as such."""
    bug = BUGS["pytorch#196678"]
    backend = STAND_INS[bug.name].backend()
    (case,) = bug.cases
    for change in ({"values": "normal"}, {"seqlen_k": 128}, {"window_size": (None, None)}):
        assert check_bug(replace(bug, cases=(replace(case, **change),)), backend) <= 1.0


def test_a_bug_is_named_with_a_test_that_shows_it() -> None:
    """Like its record, with code that runs."""
    report = run_corpus("tests.testing.atlas:pytorch_196678", only=["pytorch#*"])
    (found,) = report.found
    assert found.name == "pytorch#196678" and "NaN is never right" in found.error
    namespace: dict[str, Any] = {}
    exec(compile(found.test, "pasted", "exec"), namespace)
    with pytest.raises(AssertionError, match="NaN"):
        namespace["test_unlike_pytorch_196678"]()


@pytest.mark.parametrize("shift", [-1, 1])
def test_results_that_a_later_call_changes_are_seen(shift: int) -> None:
    """Upwards and downwards, by one in the last byte."""
    bug = BUGS["sglang#25957"]
    assert len(bug.cases) > 1
    kept: list[np.ndarray] = []

    def judge(backend: Backend, bug: Bug, case: Case) -> tuple[float, Outputs]:
        for array in kept:
            array += shift
        kept.append(np.full(4, 7, np.int8))
        return 0.5, Outputs(kept[-1])

    probe = probes._calls(judge)
    with pytest.raises(AssertionError, match="the result of call 1 was overwritten by a later one"):
        probe(STAND_INS[bug.name].backend(), bug)


def test_calls_say_which_of_them_is_wrong() -> None:
    """The second, of two."""
    assert assert_caught(BUGS["b12x#63"]).startswith("call 2 of 2: out[")


def test_robustness_is_reported_apart() -> None:
    """As in the suite: only a claim or --strict makes it a bug."""
    bug = BUGS["flash-attention#2374"]
    backend = STAND_INS[bug.name].backend()
    assert judge_bug(bug, backend).status == "not robust"
    assert judge_bug(bug, backend, strict=True).status == "failed"
    claims = replace(backend, claims=frozenset({"robustness"}))
    assert judge_bug(bug, claims).status == "failed"


def test_what_is_not_offered_is_not_passed() -> None:
    """A function of three arrays is judged on what is left; one of FP8 is not judged in bf16."""
    report = run_corpus("tests.testing.planted:minimal")
    assert report.passed and len(report.with_status("not covered")) > len(BUGS) // 2
    reasons = {result.reason for result in report.with_status("not covered")}
    assert "causal: its signature does not name causal" in " ".join(reasons) or any(
        "causal" in reason for reason in reasons
    )
    report = run_corpus("tests.testing.planted:only_fp32")
    assert not report.passed and not report.with_status("passed")


def test_patterns_choose() -> None:
    """All without one; several together, each bug once."""
    assert find_bugs() == tuple(BUGS.values())
    names = [bug.name for bug in find_bugs(["pytorch#1966??", "pytorch#*"])]
    assert names[0] == "pytorch#196678" and len(names) == len(set(names)) > 5
    with pytest.raises(ValueError, match="no bug of the atlas matches 'x'"):
        find_bugs(["x"])


@pytest.mark.parametrize(
    "wrong", [{"repository": "pytorch"}, {"number": 0}, {"cases": ()}, {"repository": "a b/c"}]
)
def test_records_are_checked(wrong: dict[str, Any]) -> None:
    """One line for what no record may be."""
    with pytest.raises(ValueError, match=r"a bug is|has no case"):
        replace(BUGS["pytorch#196678"], **wrong)


class TestArrangements:
    """Arrays lie as the name says, and hold what they held."""

    case = ordinary(seqlen_q=3, seqlen_k=4, heads_k=2)

    def test_dout(self) -> None:
        inputs = build_inputs(self.case)
        moved = arrange_inputs("transposed dO", inputs).dout
        assert not moved.flags.c_contiguous and np.array_equal(moved, inputs.dout)
        whole = arrange_inputs("expanded dO", inputs)
        assert whole.dout.strides == (0, 0, 0, 0) and whole.dout.shape == inputs.dout.shape
        assert all((seq.dout == 1).all() for seq in whole.sequences) and (whole.dout == 1).all()

    def test_lse(self) -> None:
        saved = load_backend("oracle").forward(build_inputs(self.case))
        lse = arrange_saved("strided LSE", saved).lse
        assert lse is not None and saved.lse is not None
        assert not lse.flags.c_contiguous and np.array_equal(lse, saved.lse)
        assert arrange_saved("", saved) is saved
        without = replace(saved, lse=None)
        assert arrange_saved("strided LSE", without) is without

    def test_batch(self) -> None:
        inputs = build_inputs(self.case)
        expanded = arrange_inputs("batch of stride 0", inputs)
        assert expanded.q.strides[0] == 0 and np.array_equal(expanded.q, inputs.q)
        two = build_inputs(replace(self.case, batch=2))
        assert arrange_inputs("batch of stride 0", two).q is two.q

    def test_slack(self) -> None:
        inputs = build_inputs(Case(layout="packed", lengths=((3, 4), (2, 1))))
        longer = arrange_inputs("slack behind the last sequence", inputs)
        assert longer.q.shape[0] == 8 and longer.k.shape[0] == 8 and longer.dlse.shape == (1, 8)
        assert np.isnan(longer.q[5:]).all() and np.array_equal(longer.q[:5], inputs.q)

    def test_none(self) -> None:
        inputs = build_inputs(self.case)
        assert arrange_inputs("", inputs) is inputs
