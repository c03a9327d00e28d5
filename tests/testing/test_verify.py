"""Honest back ends pass, planted faults are caught, and what was not checked is said."""

from __future__ import annotations

import inspect
import json
import time

import numpy as np
import pytest

from fa4.testing import PROPERTIES, Case, NotCovered, check_property, load_backend, verify
from fa4.testing.atlas import run_corpus
from fa4.testing.backends import Backend
from fa4.testing.property import Property
from fa4.testing.report import NOT_COVERED, PASSED
from fa4.testing.reproduce import failing_test
from fa4.testing.runner import run_property
from tests.testing import planted

HERE = "tests.testing.planted"
NAMES = [prop.name for prop in PROPERTIES]


def test_names_are_unique() -> None:
    """`--only` picks one of each."""
    assert len(set(NAMES)) == len(NAMES) >= 150
    assert all(prop.description for prop in PROPERTIES)


def test_the_oracle_uses_no_budget() -> None:
    """Its results are what the budget is measured from."""
    report = verify("oracle", max_examples=3, only=["plain", "sink", "gradients_masked"])
    assert report.passed and all(result.worst_share < 1e-3 for result in report.results)


@pytest.mark.parametrize(
    ("refused", "status"), [((), PASSED), ((2.0,), NOT_COVERED), ((0.0, 2.0), NOT_COVERED),
                            ((0.0,), PASSED)]
)  # fmt: skip
def test_what_no_judged_case_used_is_not_covered(refused: tuple, status: str) -> None:
    """A property of an option passes only if a case with it was judged, whatever else was."""

    def check(backend: Backend, case: Case) -> float:
        if case.softcap in refused:
            raise NotCovered("softcap", "not now")
        return 0.5

    prop = Property("softcap_at_times", "", check, needs=frozenset({"softcap"}),
                    listed=lambda plan: [Case(), Case(softcap=2.0), Case(seed=3)])  # fmt: skip
    result = run_property(prop, load_backend("oracle"))
    assert result.status == status
    assert ("not now" in (result.reason or "")) == bool(refused)


def test_options_are_given_by_name() -> None:
    """Behind what is judged."""
    by_name = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
    for function, count in ((verify, 2), (run_corpus, 1)):
        parameters = list(inspect.signature(function).parameters.values())
        assert {parameter.kind for parameter in parameters[count:]} <= by_name, function


def test_failures_shrink() -> None:
    """The example is as small as it can be, and its source is short lines."""
    (result,) = verify(f"{HERE}:top_left_causal", only=["causal"]).results
    assert result.example == "Case(seqlen_k=2, causal=True)"
    assert max(len(line) for line in result.test.splitlines()) <= 100


def test_long_examples_are_wrapped() -> None:
    """A case with many fields stands one per line, and evaluates to itself."""
    case = Case(
        seqlen_q=257, seqlen_k=129, heads_k=3, window_size=(1, None), layout="packed",
        lengths=((1, 2), (3, 4)), sink=float("-inf"),
    )  # fmt: skip
    backend = load_backend("reference")
    source = failing_test("causal", backend, case, "x" * 300)
    assert max(len(line) for line in source.splitlines()) <= 100
    text = source[source.index("Case(\n") : source.index("    check_property")]
    assert eval(text.strip(), {"Case": Case}) == case


def test_a_pasted_test_says_what_was_wrong() -> None:
    """The first reason, not what stands behind it, and not its end if it is long."""
    backend = load_backend("reference")
    lines = failing_test("plain", backend, Case(), "O is 3; it printed: 7; 9").splitlines()
    assert lines[1] == "    # O is 3"
    lines = failing_test("plain", backend, Case(), "x" * 95 + "; more").splitlines()
    assert lines[1] == f"    # {'x' * 90} ..."


def test_what_the_signature_lacks_is_not_covered() -> None:
    """Three parameters: no mask, no LSE, no gradients; the rest passes."""
    report = verify(f"{HERE}:minimal", max_examples=4)
    assert not report.with_status("failed")
    status = {result.name: result.status for result in report.results}
    assert status["plain"] == status["gqa"] == status["convexity"] == "passed"
    for name in ("causal", "window", "sink", "paged", "gradients", "kv_concatenation", "dropout"):
        assert status[name] == "not covered"
    assert {"causal", "window_size", "lse", "gradients", "varlen"} <= set(report.not_covered)


def test_not_implemented_is_not_covered() -> None:
    """A **kwargs function that raises NotImplementedError, and one call that it cannot do."""
    names = ["plain", "causal", "window", "softcap", "gqa", "gqa_repeats"]
    report = verify(f"{HERE}:refuses", max_examples=10, only=names)
    status = {result.name: result.status for result in report.results}
    assert status == {
        "plain": "passed", "causal": "passed", "window": "not covered",
        "softcap": "not covered", "gqa": "not covered", "gqa_repeats": "not covered",
    }  # fmt: skip
    reasons = {result.name: result.reason for result in report.results}
    assert "no ['window_size']" in reasons["window"] and "no grouped heads" in reasons["gqa"]


def test_refused_element_types_are_not_covered() -> None:
    """TypeError for bf16: the property runs on fp32 alone, and the report says so."""
    report = verify(f"{HERE}:only_fp32", max_examples=10, only=["plain", "causal"])
    assert [result.status for result in report.results] == ["passed", "passed"]
    assert "float32 only" in report.not_covered["bf16"]


def test_other_type_errors_are_failures() -> None:
    """A TypeError on a type that is taken otherwise is a fault, not a refusal."""
    (result,) = verify(f"{HERE}:type_error_if_causal", max_examples=5, only=["causal"]).results
    assert result.status == "failed" and "TypeError: 'NoneType'" in result.error


def test_exceptions_and_wrong_shapes_are_failures() -> None:
    """Whatever else a back end raises or returns."""

    def raises(q, k, v):
        raise RuntimeError("illegal memory access")

    def transposed(q, k, v):
        return planted.honest(q, k, v).swapaxes(1, 2)

    def text(q, k, v):
        return "done"

    for function, message in (
        (raises, "RuntimeError: illegal memory access"),
        (transposed, "out must have shape"),
        (text, "out must be a NumPy array"),
    ):
        (result,) = verify(function, max_examples=20, only=["plain"]).results
        assert result.status == "failed" and message in result.error
        assert "your_function" in result.test


def test_flaky_back_ends_are_failures() -> None:
    """A wrong result now and then is reported as such."""
    calls = iter(range(10**6))

    def flaky(q, k, v):
        return planted.honest(q, k, v) + (next(calls) % 7 == 6)

    (result,) = verify(flaky, max_examples=30, only=["plain"]).results
    assert result.status == "failed" and "not deterministic" in result.error


def test_writes_to_inputs_are_failures() -> None:
    """Overwriting q spoils neither the judge nor the next call, and is reported."""

    def overwrites(q, k, v):
        out = planted.honest(q, k, v)
        q[:], k[:], v[:] = 0, 0, 0
        return out

    (result,) = verify(overwrites, max_examples=5, only=["plain"]).results
    assert result.status == "failed" and "q was changed in place" in result.error


def test_the_same_seed_gives_the_same_run() -> None:
    """Cases, shares and counts repeat; another seed draws others."""
    runs = [
        verify("reference", max_examples=8, seed=seed, only=["causal"]).results[0].worst_share
        for seed in (3, 3, 4)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_report_is_json_and_progress_is_called() -> None:
    """Schema version, counts and one entry per property; progress after each."""
    seen: list = []
    report = verify(
        "reference", max_examples=2, only=["plain", "causal"],
        progress=lambda *step: seen.append(step),
    )  # fmt: skip
    data = json.loads(json.dumps(report.as_dict()))
    assert data["schema_version"] == 3
    assert data["counts"] == {"passed": 2, "failed": 0, "not_covered": 0, "not_robust": 0}
    assert [entry["name"] for entry in data["properties"]] == ["plain", "causal"]
    assert seen == [(1, 2, "plain"), (2, 2, "causal")]


def test_seconds_are_those_that_went_by() -> None:
    """Of a property and of the run: as many as its calls took, and no more than the clock says."""

    def slow(q, k, v):
        time.sleep(0.02)
        return load_backend("oracle").function(q, k, v)

    start = time.monotonic()
    report = verify(slow, only=["plain", "kv_permutation"], dtypes=("fp32",), max_examples=3)
    corpus = run_corpus(slow, only=["pytorch#*"])
    gone = time.monotonic() - start
    assert report.passed
    for row in report.results:
        assert row.cases and 0.02 * row.cases <= row.seconds
    assert sum(row.seconds for row in report.results) <= report.seconds
    assert corpus.seconds > 0 and report.seconds + corpus.seconds <= gone


def test_nothing_run_is_nothing_passed() -> None:
    """A report without a passed property has not passed."""
    assert not verify(f"{HERE}:minimal", max_examples=2, only=["causal"]).passed


def test_check_property_on_one_case() -> None:
    """What a pasted test does; a case that the back end lacks raises NotCovered."""
    assert check_property("causal", load_backend("reference"), Case(seqlen_k=2, causal=True)) <= 1
    with pytest.raises(NotCovered):
        check_property("causal", load_backend(f"{HERE}:minimal"), Case(causal=True))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", 'must be one of reference, oracle, torch-sdpa, .* or "module:function"'),
        (":x", "must be one of"),
        ("no_such_module:x", "cannot import 'no_such_module'"),
        (f"{HERE}:missing", "has no 'missing'"),
        (f"{HERE}:not_callable", "must be callable"),
        (3, "must be a name or a callable"),
    ],
)
def test_bad_back_end_names(name, message: str) -> None:
    """One line that says what is wrong."""
    with pytest.raises(ValueError, match=message) as caught:
        load_backend(name)
    assert "\n" not in str(caught.value)


def test_bad_arguments() -> None:
    """Unknown properties and silly numbers."""
    with pytest.raises(ValueError, match="no property matches 'other'"):
        verify("reference", only=["other"])
    with pytest.raises(ValueError, match="max_examples must be between 1 and 100000"):
        verify("reference", max_examples=0)
    with pytest.raises(ValueError, match="dtype must be one of fp32, bf16"):
        verify("reference", dtypes=("int8",))
    with pytest.raises(ValueError, match="a timeout needs isolation"):
        verify("reference", isolate=False, timeout_s=1.0)


def test_failures_of_one_cause_are_grouped() -> None:
    """What all of them need, with the smallest example; the report says so first."""
    report = verify(f"{HERE}:sink_lost_in_fp16", only=["sink*", "[!g]*_with_sink"],
                    max_examples=8)  # fmt: skip
    (group,) = report.failures
    assert set(group.needs) == {"fp16", "sink"} and len(group.properties) >= 5
    assert "dtype='fp16'" in group.smallest.example


def test_exitfirst_stops_and_says_what_did_not_run() -> None:
    """One failure, the rest skipped."""
    report = verify(f"{HERE}:unscaled", exitfirst=True)
    assert [result.status for result in report.results] == ["failed"]
    assert len(report.skipped) == len(NAMES) - 1 and "plain" not in report.skipped


def test_several_processes_give_the_same_report() -> None:
    """Shares and cases do not depend on `jobs`."""
    only = ("plain", "causal", "softcap")
    one, two = (verify("reference", max_examples=4, only=only, jobs=n) for n in (1, 2))
    assert [(r.name, r.cases, r.worst_share) for r in one.results] == [
        (r.name, r.cases, r.worst_share) for r in two.results
    ]
    assert one.levels == two.levels
    with pytest.raises(ValueError, match="back end must be"):
        verify(lambda q, k, v: v, jobs=2)


def test_robustness_is_claimed_or_reported_apart() -> None:
    """NaN at hidden keys: not a failure unless the function claims it, or with strict."""
    name = f"{HERE}:reads_masked_keys"
    (result,) = verify(name, only=["masked_nan"]).results
    assert result.status == "not robust" and "NaN is never right" in result.error
    assert verify(name, only=["masked_nan", "plain"]).passed
    assert not verify(name, only=["masked_nan", "plain"], strict=True).passed
    backend = load_backend(name)
    backend.claims = frozenset({"robustness"})
    assert verify(backend, only=["masked_nan"]).with_status("failed")


def test_a_float32_lse_is_right_for_float64() -> None:
    """FlashAttention's LSE is float32 whatever the inputs are; a bf16 one is too coarse."""

    def attend(q, k, v, *, return_lse=True):
        out, lse = planted.honest(q, k, v, return_lse=True)
        return out, lse.astype(np.float32)

    def coarse(q, k, v, *, return_lse=True):
        from fa4.dtypes import round_to

        out, lse = planted.honest(q, k, v, return_lse=True)
        return out, round_to(lse, "bf16").astype(lse.dtype)

    only = ["plain", "gqa", "logit_shift", "kv_concatenation"]
    report = verify(attend, only=only, dtypes=("fp64",), max_examples=8)
    assert report.passed, report.failures
    assert not verify(coarse, only=["plain"], dtypes=("fp64",), max_examples=8).passed


def test_modules_in_the_current_directory(tmp_path, monkeypatch) -> None:
    """`module:function` finds files where the user is."""
    (tmp_path / "my_kernel.py").write_text(
        "import numpy as np\ndef attend(q, k, v):\n    return np.zeros(1)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert load_backend("my_kernel:attend").function.__name__ == "attend"


def test_varlen_in_the_signature() -> None:
    """A function that names cu_seqlens_q itself is its own varlen function."""

    def both(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None):
        if cu_seqlens_q is None:
            return planted.honest(q, k, v)
        return planted.honest.varlen(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)

    backend = load_backend(both)
    assert backend.reason_missing("varlen") is None and backend.reason_missing("paged")
    case = Case(layout="packed", lengths=((3, 5), (0, 2)), values="grid")
    assert check_property("varlen", backend, case) <= 1.0
    assert np.isfinite(case.scale)


def test_a_first_look_draws_no_more_than_was_asked_for() -> None:
    """With -x each property is looked at twice, at first with at most as many cases."""

    def count(exitfirst: bool) -> int:
        calls = []

        def attend(q, k, v):
            calls.append(q.shape)
            return planted.honest(q, k, v)

        assert verify(attend, only=("plain",), max_examples=1, exitfirst=exitfirst).passed
        return len(calls)

    once = count(False)
    assert once < count(True) <= 2 * once
