"""What a back end declares of its arithmetic is what it is judged by, everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.tcgen05.formats import Format
from fa4.emulator.wgmma.forms import ProductForm
from fa4.emulator.wgmma.sums import multiply
from fa4.testing import Case, build_inputs, find_properties
from fa4.testing import plain as plain_module
from fa4.testing.atlas import run_corpus
from fa4.testing.backends import load_backend
from fa4.testing.budget import expect_forward
from fa4.testing.numerics import Numerics
from fa4.testing.plain import GradientTerms, Terms, limited_product
from fa4.testing.report import PASSED
from fa4.testing.runner import VerifyOptions, run_property
from fa4.testing.symptoms import wrong_outputs
from fa4.testing.values import REGIMES
from fa4.testing.yardstick import YardstickError, _cut_off

LIMITED = Numerics(fp8_sums="limited")
LEAST_NORMAL = {"e4m3": 2.0**-6, "e5m2": 2.0**-14}
NARROW = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


@given(seed=st.integers(0, 2**32), terms=st.integers(1, 300), mean=st.sampled_from((0.0, 1.0)))
def test_limited_sums_lose_what_the_yardstick_says(seed: int, terms: int, mean: float) -> None:
    """At most; a step of 32 products cuts off these, the sum and the result."""
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal((n, terms)).astype(np.float32) + mean for n in (20, 30))
    a, b = (x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) for x in (a, b))
    lost = np.abs(limited_product(a, b.T) - a.astype(np.float64) @ b.T)
    most = _cut_off(terms)
    assert (lost <= most * (np.abs(a) @ np.abs(b).T) + 1e-12).all()
    assert most == pytest.approx(-(-terms // 32) * 34 * 2.0**-13)


@pytest.mark.parametrize("saved", ["rounded", "exact"])
def test_the_row_dot_is_of_the_output_that_is_declared(saved: str) -> None:
    """D = rowsum(dO O), of O in the call's type or in the work type: these differ."""
    inputs = build_inputs(Case(dtype="bf16", seqlen_q=20, seqlen_k=30, head_dim=16, head_dim_v=16))
    numerics = Numerics(saved_out=saved)
    terms = GradientTerms(inputs.sequences[0], 0, inputs.options, "bf16", numerics=numerics)
    others = {"rounded": terms.out, "exact": terms.wide_out}
    found = {name: (terms.dout * out).sum(axis=-1) for name, out in others.items()}
    np.testing.assert_array_equal(terms.row_dot, found[saved])
    assert (found["rounded"] != found["exact"]).mean() > 0.5


@given(
    dtype=st.sampled_from(("e4m3", "e5m2")), seed=st.integers(0, 2**32), steps=st.integers(1, 5),
    size=st.integers(-5, 6), mean=st.sampled_from((0.0, 0.5, 3.0)),
    zeros=st.sampled_from((0.0, 0.3, 0.97)),
)  # fmt: skip
def test_limited_sums_are_those_of_the_tensor_core(
    dtype: str, seed: int, steps: int, size: int, mean: float, zeros: float
) -> None:
    """To the bit what the emulator computes, which an H200 does, of numbers that are normal."""
    rng = np.random.default_rng(seed)
    shapes = ((64, 32 * steps), (8, 32 * steps))
    a, b = ((2.0**size * (rng.standard_normal(x) + mean)).astype(NARROW[dtype]) for x in shapes)
    for x in (a, b):
        wide = x.astype(np.float32)
        x[(np.abs(wide) < LEAST_NORMAL[dtype]) | (rng.random(x.shape) < zeros)] = 0
        x[~np.isfinite(wide)] = 1
    form = ProductForm(8, *(Format[dtype.upper()],) * 2, Format.F32)
    found: Any = None
    for step in range(steps):
        part = slice(32 * step, 32 * step + 32)
        operands = (np.ascontiguousarray(x[:, part]).view(np.uint8) for x in (a, b))
        found = multiply(form, *operands, found)
    sums = limited_product(a.astype(np.float32), b.astype(np.float32).T)
    np.testing.assert_array_equal(sums, found.view(np.float32))


def test_a_product_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are taken a few at a time where all at once are many; heads and odd lengths."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(x).astype(np.float32) for x in ((3, 7, 50), (3, 50, 9)))
    whole = limited_product(a, b)
    monkeypatch.setattr(plain_module, "_CACHED_ELEMENTS", 1)
    np.testing.assert_array_equal(limited_product(a, b), whole)
    assert limited_product(a[:, :, :0], b[:, :0]).tolist() == np.zeros((3, 7, 9)).tolist()
    assert 1e-5 < np.abs(whole - a @ b).max() < 1e-2


@st.composite
def narrow_cases(draw: st.DrawFn) -> tuple[Case, Numerics]:
    """Cases of 8-bit types in any regime, and any arithmetic with limited sums."""
    p = draw(st.sampled_from(("fp8", "bf16", "fp16", "fp32")))
    numerics = replace(LIMITED, fp8_p=p, fp8_p_offset_log2=draw(st.integers(0, 8)))
    dim = draw(st.sampled_from((1, 8, 16, 33, 64, 128, 200)))
    case = Case(
        dtype=draw(st.sampled_from(("e4m3", "e5m2"))), seqlen_q=draw(st.integers(1, 9)),
        seqlen_k=draw(st.integers(1, 300)), head_dim=dim, head_dim_v=dim,
        seed=draw(st.integers(0, 2**31)), values=draw(st.sampled_from(sorted(REGIMES))),
        causal=draw(st.booleans()), descale=draw(st.booleans()),
        softcap=draw(st.sampled_from((0.0, 5.0))), dropout_p=draw(st.sampled_from((0.0, 0.5))),
    )  # fmt: skip
    return case, numerics


@given(narrow_cases())
@settings(max_examples=60)
def test_the_yardstick_is_straight_whatever_is_declared(drawn: tuple[Case, Numerics]) -> None:
    """Plain attention with such sums is no contradiction to the oracle, and within the budget."""
    case, numerics = drawn
    inputs = build_inputs(case)
    expected = expect_forward(inputs, None, numerics)
    for output in expected.values():
        for allowed, oracle, plain in zip(output.allowed, output.oracle, output.plain, strict=True):
            with np.errstate(invalid="ignore"):
                error = np.abs(plain.astype(np.float64) - oracle)
            assert not (error > allowed)[np.isfinite(plain)].any()


@pytest.mark.parametrize("off", [0.06, 0.5])
def test_a_wrong_oracle_is_caught_with_limited_sums(
    off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is wider there, and no mistake fits in."""
    from fa4.testing import budget

    right = budget.oracle_forward

    def wrong(inputs: Any) -> Any:
        return [parts | {"lse": parts["lse"] + off} for parts in right(inputs)]

    inputs = build_inputs(Case(seqlen_q=4, seqlen_k=9, head_dim=16, dtype="e4m3"))
    expect_forward(inputs, None, LIMITED)
    monkeypatch.setattr(budget, "oracle_forward", wrong)
    with pytest.raises(YardstickError):
        expect_forward(inputs, None, LIMITED)


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> list[Numerics]:
    """The arithmetic of every plain attention that anything was held against."""
    seen: list[Numerics] = []
    make = Terms.__init__

    def noted(self: Terms, *arguments: Any, **keywords: Any) -> None:
        make(self, *arguments, **keywords)
        seen.append(self.numerics)

    monkeypatch.setattr(Terms, "__init__", noted)
    return seen


@pytest.mark.parametrize("prop", find_properties(None), ids=lambda prop: prop.name)
def test_every_property_judges_by_what_is_declared(prop: Any, declared: list[Numerics]) -> None:
    """Walks, too; and the reference passes. What plain attention is not asked for is judged by the
    oracle, or by bits, which the reference does not claim; factors of blocks it does not take."""
    scales = "block" if prop.name == "fp8_descale_blocks" else "head"
    numerics = Numerics(group_sum="element", fp8_p_offset_log2=7, fp8_scales=scales)
    claims = prop.needs & {"batch_invariant", "chunk_invariant"}
    backend = replace(load_backend("reference"), numerics=numerics, claims=claims)
    result = run_property(prop, backend, VerifyOptions(max_examples=1, quick=True, steps=3))
    assert result.cases
    if not prop.needs & (claims | {"scales_block"}):
        assert result.status == PASSED, result.error
    assert {replace(found, saved_out="rounded") for found in declared} <= {numerics}


def test_the_atlas_judges_by_what_is_declared(declared: list[Numerics]) -> None:
    """Every case of a published bug."""
    numerics = Numerics(group_sum="element", fp8_p_offset_log2=7)
    report = run_corpus(replace(load_backend("reference"), numerics=numerics))
    assert report.passed and len(declared) > 90
    assert {replace(found, saved_out="rounded") for found in declared} == {numerics}


def test_symptoms_judge_by_what_is_declared(declared: list[Numerics]) -> None:
    """O, LSE and gradients of a minimal case."""
    backend = replace(load_backend("reference"), numerics=Numerics(group_sum="element"))
    assert wrong_outputs(backend, Case(seqlen_q=3, seqlen_k=5, group=2), gradients=True) == {}
    assert declared and set(declared) == {backend.numerics}
