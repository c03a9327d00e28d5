"""The error budget: honest results pass, wrong ones do not, and it does not depend on luck."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import fa4
from fa4.dtypes import round_to
from fa4.testing import (
    Case,
    Outputs,
    assert_within_budget,
    build_inputs,
    check_budget,
    check_property,
    dense_inputs,
    load_backend,
    plain_attention,
    plain_gradients,
)
from fa4.testing.budget import Check, Expected, check_output, expect_forward
from fa4.testing.plain import GradientTerms, Terms, ordered_product

DTYPES = ("fp64", "fp32", "bf16", "fp16")
CASE = Case(
    batch=2, seqlen_q=65, seqlen_k=130, heads_k=2, group=2, head_dim=24, head_dim_v=16, seed=4
)  # fmt: skip
FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (7, 2)},
    "softcap": {"softcap": 2.0},
    "sink": {"sink": 1.0},
    "scale": {"softmax_scale": -0.3},
    "score_mod": {"score_mod": "temper"},
    "score_mod_inf": {"score_mod": "forbid"},
    "mask_mod": {"mask_mod": "odd_rows_empty"},
    "dropout": {"dropout_p": 0.5},
    "empty_rows": {"causal": True, "seqlen_q": 150},
    "packed": {"layout": "packed", "lengths": ((3, 0), (0, 5), (65, 130))},
}


def forward(case: Case) -> tuple:
    """Inputs and the oracle's results, as a back end that is exact would return them."""
    inputs = build_inputs(case)
    return inputs, load_backend("oracle").forward(inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", FEATURES)
def test_exact_results_use_no_budget(feature: str, dtype: str) -> None:
    """The oracle itself is within the budget, by a wide margin."""
    inputs, outputs = forward(replace(CASE, dtype=dtype, **FEATURES[feature]))
    assert check_budget(inputs, outputs).share <= 0.01


@pytest.mark.parametrize("sink", [None, 1.0])
def test_rows_without_keys_are_exact_also_beside_a_sink(sink: float | None) -> None:
    """There O is 0 to the bit, though a sink gives LSE a value; LSE itself is only where it is
    -inf, and O is where every score is -inf."""
    expected = expect_forward(build_inputs(replace(CASE, causal=True, seqlen_q=150, sink=sink)))
    for out, lse in zip(expected["out"].exact, expected["lse"].exact, strict=True):
        assert out[:20].all() and not out[20:].any()
        assert lse.any() == (sink is None)
    forbidden = expect_forward(build_inputs(replace(CASE, score_mod="forbid", seqlen_k=1)))
    for name in ("out", "lse"):
        assert all(np.array_equal(a.any(), True) for a in forbidden[name].exact), name


@pytest.mark.parametrize("feature", FEATURES)
def test_float64_terms_are_the_oracle(feature: str) -> None:
    """The kit's own definition, unrounded, and fa4's oracle are two programs with one answer."""
    inputs = build_inputs(replace(CASE, dtype="fp32", **FEATURES[feature]))
    expected = expect_forward(inputs)
    for b, seq in enumerate(inputs.sequences):
        out, lse = Terms(seq, b, inputs.options, None).forward()
        np.testing.assert_allclose(out, expected["out"].oracle[b], rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(lse, expected["lse"].oracle[b], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("feature", ["plain", "causal", "softcap", "sink", "empty_rows", "packed"])
def test_float64_gradient_terms_are_the_oracle(feature: str) -> None:
    """The same for gradients."""
    from fa4.testing.oracle import oracle_gradients

    inputs = build_inputs(replace(CASE, dtype="fp32", **FEATURES[feature]))
    oracle, dsink = oracle_gradients(inputs, with_dlse=True)
    total = 0.0
    for b, seq in enumerate(inputs.sequences):
        grads = GradientTerms(seq, b, inputs.options, None, with_dlse=True).backward()
        for name in ("dq", "dk", "dv"):
            np.testing.assert_allclose(getattr(grads, name), oracle[b][name], atol=1e-11)
        total = total + grads.dsink if grads.dsink is not None else total
    if dsink is not None:
        np.testing.assert_allclose(total, dsink, rtol=1e-11)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "e4m3"])
def test_plain_attention_is_within_its_own_budget(dtype: str) -> None:
    """By definition: its error is at most half of the budget."""
    inputs = build_inputs(replace(CASE, dtype=dtype))
    plain = plain_attention(inputs)
    outputs = Outputs(np.stack([p.out for p in plain]), np.stack([p.lse for p in plain]))
    assert 0.0 < check_budget(inputs, outputs).share <= 0.5


def test_plain_attention_rounds_operands_and_results_but_not_scores() -> None:
    """Probabilities and outputs are numbers of the element type; scores have more bits."""
    inputs = build_inputs(replace(CASE, dtype="bf16"))
    terms = Terms(inputs.sequences[0], 0, inputs.options, "bf16")
    assert not np.array_equal(terms.scaled, round_to(terms.scaled, "bf16").astype(np.float32))
    for array in (terms.p, terms.out):
        assert np.array_equal(array, round_to(array, "bf16").astype(np.float32))
    grads = plain_gradients(inputs)[0]
    assert np.array_equal(grads.dq, round_to(grads.dq, "bf16").astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("output", ["out", "lse"])
def test_an_error_beyond_the_budget_is_found(output: str, dtype: str) -> None:
    """One element off by 1.5 budgets fails and is named; off by half a budget, it passes."""
    inputs, exact = forward(replace(CASE, dtype=dtype))
    allowed = expect_forward(inputs)[output].allowed[1]
    at = (3, 2, 5) if output == "out" else (2, 3)
    for times, passes in ((0.5, True), (1.5, False)):
        wrong = getattr(exact, output).copy()
        wrong[(1, *at)] += times * allowed[at]
        report = check_budget(inputs, replace(exact, **{output: wrong}))
        assert report.passed is passes
        check = next(c for c in report.checks if c.output == output)
        # A budget of float64 is a few spacings, to which the sum is rounded.
        step = np.spacing(np.float64(abs(wrong[(1, *at)]))) / allowed[at]
        assert check.index == (1, *at)
        assert check.share == pytest.approx(times, rel=0.03, abs=step)


@pytest.mark.parametrize("name", ["dq", "dk", "dv", "dsink"])
def test_wrong_gradients_are_found(name: str) -> None:
    """A gradient 5 % too large fails, each on its own."""
    inputs, saved = forward(replace(CASE, dtype="fp32", sink=0.5))
    grads = load_backend("oracle").gradients(inputs, saved)
    assert assert_within_budget(inputs, grads) < 0.1
    with pytest.raises(AssertionError, match=rf"^{name}\["):
        assert_within_budget(inputs, replace(grads, **{name: 1.05 * getattr(grads, name)}))


def test_the_message_names_everything() -> None:
    """Output, index, value, oracle, error and budget."""
    inputs, exact = forward(Case(seqlen_k=3))
    wrong = exact.out.copy()
    wrong[0, 0, 0, 6] = 40.0
    with pytest.raises(AssertionError) as caught:
        assert_within_budget(inputs, Outputs(wrong))
    text = str(caught.value)
    assert text.startswith(f"out[0, 0, 0, 6] = 40, oracle {exact.out[0, 0, 0, 6]:.9g}: error ")
    assert "times its budget" in text


def test_nan_is_never_right() -> None:
    """Not even where the budget is large, nor in the LSE."""
    inputs, exact = forward(replace(CASE, dtype="bf16", values="scale_100"))
    for name in ("out", "lse"):
        wrong = getattr(exact, name).copy()
        wrong[(0,) * wrong.ndim] = np.nan
        with pytest.raises(AssertionError, match="NaN is never right"):
            assert_within_budget(inputs, replace(exact, **{name: wrong}))


def test_relations_do_not_accept_nan() -> None:
    """Two calls that both give NaN do not agree; equal infinities do."""
    from fa4.testing.metamorphic import agree

    nan, infinite, one = np.full(1, np.nan), np.full(1, -np.inf), np.ones(1)
    assert agree("x", infinite, infinite, one) == 0.0
    assert agree("x", one, one + 0.5, one) == 0.5
    for a, b in ((nan, nan), (nan, one), (infinite, one), (one, one + 1.5)):
        with pytest.raises(AssertionError, match=r"x\[0\]"):
            agree("x", a, b, one)


def test_rows_without_keys_are_exact() -> None:
    """The smallest number in place of 0 fails, and so does a finite LSE in place of -inf."""
    inputs, exact = forward(Case(seqlen_q=3, seqlen_k=1, causal=True))
    assert check_budget(inputs, exact).share == 0.0
    out, lse = exact.out.copy(), exact.lse.copy()
    out[0, 0, 0, 0], lse[0, 0, 1] = 1e-300, -1e30
    with pytest.raises(AssertionError, match=r"out\[0, 0, 0, 0\].*must be exact.*lse\[0, 0, 1\]"):
        assert_within_budget(inputs, Outputs(out, lse))


def test_infinite_values_count_only_where_the_oracle_has_them() -> None:
    """An infinite output is wrong; a wrong shape is, too."""
    inputs, exact = forward(Case(seqlen_k=2))
    with pytest.raises(AssertionError, match="infinite"):
        assert_within_budget(inputs, Outputs(np.full_like(exact.out, np.inf)))
    lse = np.full_like(exact.lse, -np.inf)
    with pytest.raises(AssertionError, match="infinite"):
        assert_within_budget(inputs, Outputs(exact.out, lse))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_budget_is_small(dtype: str) -> None:
    """Ordinary values, largest element: where any real fault is far beyond it."""
    inputs = build_inputs(replace(CASE, dtype=dtype))
    allowed = max(float(x.max()) for x in expect_forward(inputs)["out"].allowed)
    assert allowed < {"fp64": 3e-13, "fp32": 1e-4, "fp16": 0.01, "bf16": 0.08}[dtype]


def test_empty_problems_have_nothing_to_check() -> None:
    """No rows: share 0."""
    for case in (Case(seqlen_q=0), Case(batch=0), Case(seqlen_k=0)):
        inputs, exact = forward(case)
        assert check_budget(inputs, exact).share == 0.0


def test_your_own_arrays() -> None:
    """`dense_inputs` takes any arrays and options."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 9, 4, 8)).astype(np.float32) for _ in range(3))
    inputs = dense_inputs(q, k[:, :, :2], v[:, :, :2], causal=True, softcap=3.0)
    out, lse = fa4.flash_attn_func(
        q, k[:, :, :2], v[:, :, :2], causal=True, softcap=3.0, return_lse=True
    )
    assert assert_within_budget(inputs, Outputs(out, lse)) < 0.5
    with pytest.raises(AssertionError):
        assert_within_budget(inputs, Outputs(fa4.flash_attn_func(q, k[:, :, :2], v[:, :, :2])))


def test_equal_terms_may_be_summed_one_after_another() -> None:
    """128 equal products: partial sums all round the same way, and backward sums another way."""
    case = Case(seqlen_q=6, seqlen_k=128, head_dim=128, head_dim_v=128, values="equal")
    share = check_property("gradients_masked", load_backend("torch-sdpa"), case)
    assert share is not None and share <= 1.0


@pytest.mark.parametrize("error", [0.5, 1.0, 2.0])
def test_errors_of_any_size_count(error: float) -> None:
    """Those that are round numbers too; where nothing is allowed, what is right still passes."""
    oracle = np.ones((3, 1, 4))
    allowed, exact = np.full_like(oracle, 0.25), np.zeros(oracle.shape, bool)
    expected = Expected([oracle], [allowed], [exact], [oracle], 0.0)
    value = oracle.copy()
    value[1, 0, 2] += error
    found = check_output("out", [value], expected)
    assert (found.share, found.error, found.index) == (error / 0.25, error, (0, 1, 0, 2))
    nothing = expected._replace(allowed=[np.zeros_like(oracle)])
    assert check_output("out", [oracle], nothing).share == 0.0
    assert check_output("out", [value], nothing).share == np.inf


def test_an_output_without_elements_has_no_error() -> None:
    """Nothing is worst, and nothing is allowed for it."""
    none = np.ones((0, 1, 4))
    found = check_output("out", [none], Expected([none], [none], [none > 0], [none], 0.0))
    assert found == Check("out", 0.0, (), 0.0, 0.0, 0.0, 0.0, "")


def test_a_wrong_shape_is_allowed_nothing() -> None:
    """It is told apart from a number that is far off."""
    oracle = np.ones((3, 1, 4))
    expected = Expected([oracle], [oracle], [oracle > 2], [oracle], 0.0)
    found = check_output("out", [np.ones((3, 1, 5))], expected)
    assert (found.share, found.error, found.allowed, found.index) == (np.inf, np.inf, 0.0, (0,))
    assert found.rule == "shape (3, 1, 5) must be (3, 1, 4)"


@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_a_row_without_keys_must_be_zero(dtype: str) -> None:
    """Whatever else it holds is a finding with a message, however little is allowed there."""
    inputs, outputs = forward(Case(seqlen_q=5, seqlen_k=3, causal=True, dtype=dtype))
    outputs.out[:, 0] = 7
    with pytest.raises(AssertionError, match=r"out\[0, 0, 0, 0\] = 7, oracle 0: must be exact"):
        assert_within_budget(inputs, outputs)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 9999), (2, 1, 1, 300), (3, 5, 7, 40), (2, 130, 300, 6), (1, 2, 3, 0)]
)
def test_a_plain_product_adds_one_term_after_another(shape: tuple[int, ...]) -> None:
    """To the bit, whether its terms are added alone or by slices: pairs would err less."""
    heads, rows, columns, terms = shape
    rng = np.random.default_rng(1)
    a = rng.standard_normal((rows, heads, terms)).astype(np.float32).transpose(1, 0, 2)
    b = rng.standard_normal((heads, terms, columns)).astype(np.float32)
    total = np.zeros((heads, rows, columns), np.float32)
    for n in range(terms):
        total += a[:, :, n, None] * b[:, n, None, :]
    np.testing.assert_array_equal(ordered_product(a, b), total)
