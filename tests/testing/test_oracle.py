"""The judge stands alone: a fault in anything the reference uses is seen, whoever shares it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import fa4
from fa4 import config, dtypes, oracle
from fa4.reference import dropout, sequences, spec
from fa4.testing import Case, build_inputs, verify
from fa4.testing import oracle as kit_oracle
from fa4.testing.budget import expect_forward, expect_gradients
from fa4.testing.yardstick import YardstickError


@contextmanager
def everywhere(original: Any, wrong: Any) -> Iterator[int]:
    """Replace a function under every name that fa4 knows it by, the oracle's included."""
    places = [
        (holder, name)
        for module in list(sys.modules.values())
        if module is not None and module.__name__.partition(".")[0] == "fa4"
        for holder in (module, *(x for x in vars(module).values() if isinstance(x, type)))
        for name, value in list(vars(holder).items())
        if value is original
    ]
    for holder, name in places:
        setattr(holder, name, wrong)
    try:
        yield len(places)
    finally:
        for holder, name in places:
            setattr(holder, name, original)


def after(original: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
    """`original` with its result changed."""

    def wrong(*arguments: Any, **keywords: Any) -> Any:
        return change(original(*arguments, **keywords))

    wrong.__wrapped__ = original  # type: ignore[attr-defined]
    return wrong


def truncated(x: Any, name: str, *, saturate: bool = False) -> Any:
    nearest = original_round(x, name, saturate=saturate)
    wide, value = nearest.astype(np.float64), np.asarray(x).astype(np.float64)
    beyond = np.abs(wide) > np.abs(value)
    with np.errstate(all="ignore"):
        inward = np.nextafter(nearest, nearest.dtype.type(0))
    return np.where(beyond & np.isfinite(wide), inward, nearest)


original_round = dtypes.round_to
SHARED: dict[str, tuple[Any, Any, str]] = {
    "softcap": (
        spec.modify_scores,
        after(spec.modify_scores, lambda s: 0.9 * s),
        "softcap",
    ),
    "score_mod": (spec.modify_scores, after(spec.modify_scores, lambda s: s + 0.1), "score_mod"),
    "gradient": (
        spec.modify_gradient, after(spec.modify_gradient, lambda g: 0.9 * g),
        "gradients_with_softcap",
    ),
    "mask_mod": (
        spec.apply_mask_mod, after(spec.apply_mask_mod, lambda keep: np.roll(keep, 1, axis=-1)),
        "mask_mod",
    ),
    "blocks": (
        spec.block_states, after(spec.block_states, lambda s: np.roll(s, 1, axis=-1)),
        "block_sparse",
    ),
    "scale": (
        spec.Attention.head_scale, after(spec.Attention.head_scale, lambda s: 1.01 * s), "plain",
    ),
    "descale": (
        spec.Attention.value_scale, after(spec.Attention.value_scale, lambda s: 1.3 * s),
        "fp8_descale",
    ),
    "dropout": (
        dropout.keep_scale, after(dropout.keep_scale, lambda keep: 0.9 * keep), "dropout",
    ),
    "philox": (
        dropout.philox_4x32, after(dropout.philox_4x32, lambda words: words[::-1]), "dropout",
    ),
    "window": (
        config.normalize_window,
        after(config.normalize_window, lambda w: (w[0], w[1] if w[1] is None else w[1] + 1)),
        "causal",
    ),
    "packing": (
        sequences._spans,
        after(sequences._spans, lambda spans: spans[:1] + spans[:-1] if len(spans) > 1 else spans),
        "varlen",
    ),
    "pages": (
        sequences._page_rows,
        after(sequences._page_rows, lambda rows: (rows[0][::-1], rows[1][::-1])),
        "causal_with_paged",
    ),
    "rounding": (dtypes.round_to, truncated, "rounding_bias"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_a_fault_in_a_shared_helper_is_seen(name: str) -> None:
    """Changed wherever it is used, oracle and kit included: the reference fails."""
    original, wrong, prop = SHARED[name]
    with everywhere(original, wrong) as places:
        assert places
        report = verify("reference", only=(prop,), exitfirst=True)
    assert report.with_status("failed"), f"{name} is not noticed by {prop}"
    assert verify("reference", only=(prop,), max_examples=4).passed


@pytest.mark.parametrize("part", ["_log_sum_exp", "_combine"])
def test_a_wrong_oracle_is_caught_before_it_widens_a_budget(part: str) -> None:
    """Plain attention says that the yardstick is bent; nothing passes, nothing is judged."""
    from fa4.oracle import definition

    original = getattr(definition, part)
    for wrong in (after(original, lambda x: 1.05 * x), after(original, lambda x: x + 0.05)):
        with everywhere(original, wrong):
            with pytest.raises(YardstickError, match="oracle and plain attention disagree"):
                expect_forward(build_inputs(Case(seqlen_q=4, seqlen_k=9)))
            report = verify("reference", only=("plain",))
        assert "YardstickError" in report.with_status("failed")[0].error


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_wrong_oracle_gradients_are_caught(name: str, monkeypatch: Any) -> None:
    """The same for each gradient, in every element type."""
    original = oracle.differentiate

    def wrong(*arguments: Any, **keywords: Any) -> Any:
        grads = original(*arguments, **keywords)
        return grads._replace(**{name: 1.5 * getattr(grads, name)})

    monkeypatch.setattr(oracle, "differentiate", wrong)
    for dtype in ("fp64", "fp32", "bf16", "fp16"):
        with pytest.raises(YardstickError, match=f"disagree at {name}"):
            expect_gradients(build_inputs(Case(seqlen_q=3, seqlen_k=4, dtype=dtype)))


def test_the_oracle_agrees_with_the_public_function() -> None:
    """`impl="oracle"` in packed layout is the oracle, sequence by sequence."""
    case = Case(layout="packed", lengths=((3, 5), (0, 2), (4, 4)), causal=True, sink=0.5)
    inputs = build_inputs(case)
    out, lse = fa4.flash_attn_varlen_func(
        inputs.q, inputs.k, inputs.v, impl="oracle", return_lse=True, **inputs.options
    )
    expected = expect_forward(inputs)
    for part, wanted in zip(inputs.split_rows(out), expected["out"].oracle, strict=True):
        np.testing.assert_array_equal(part, wanted)
    for part, wanted in zip(inputs.split_lse(lse), expected["lse"].oracle, strict=True):
        np.testing.assert_array_equal(part, wanted)


def test_one_key_by_hand() -> None:
    """One visible key: its value, its score; a sink of the same logit takes half."""
    q, k, v = np.full((1, 1, 2), 2.0), np.full((1, 1, 2), 3.0), np.array([[[5.0]]])
    out, lse = oracle.attend(q, k, v, {"softmax_scale": 0.5})
    assert out.item() == 5.0 and lse.item() == 6.0
    out, lse = oracle.attend(q, k, v, {"softmax_scale": 0.5, "learnable_sink": np.array([6.0])})
    assert out.item() == pytest.approx(2.5) and lse.item() == pytest.approx(6.0 + np.log(2.0))


def test_finite_differences() -> None:
    """The oracle's gradients are the derivatives of its own forward pass."""
    case = Case(
        seqlen_q=3, seqlen_k=4, heads_k=1, group=2, dtype="fp64", softcap=2.0, sink=0.3,
        dropout_p=0.5, window_size=(2, 1), seed=3,
    )  # fmt: skip
    inputs = build_inputs(case)
    (seq,) = inputs.sequences

    def value(q: Any, k: Any, v: Any, sink: Any) -> float:
        options = inputs.options | {"learnable_sink": sink}
        out, lse = oracle.attend(q, k, v, options)
        return float((out * seq.dout).sum() + (lse * seq.dlse).sum())

    sink = inputs.options["learnable_sink"].astype(np.float64)
    options = inputs.options | {"learnable_sink": sink}
    grads = oracle.differentiate((seq.q, seq.k, seq.v), seq.dout, options, dlse=seq.dlse)
    arguments = [x.astype(np.float64) for x in (seq.q, seq.k, seq.v, sink)]
    rng = np.random.default_rng(0)
    for n, grad in enumerate(grads):
        step = rng.standard_normal(arguments[n].shape)
        up, down = list(arguments), list(arguments)
        up[n], down[n] = arguments[n] + 1e-6 * step, arguments[n] - 1e-6 * step
        slope = (value(*up) - value(*down)) / 2e-6
        assert slope == pytest.approx(float((grad * step).sum()), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(("batch", "heads_k", "group"), [(1, 2, 3), (3, 1, 2), (2, 3, 1)])
def test_factors_of_blocks_belong_to_their_heads(batch: int, heads_k: int, group: int) -> None:
    """q of a KV head's group, and its k and v, are multiplied by the factors of that head."""
    case = Case(batch=batch, heads_k=heads_k, group=group, seqlen_q=140, seqlen_k=131, dtype="e4m3",
                descale=True, scales="block")  # fmt: skip
    inputs = build_inputs(case)
    for b, seq in enumerate(inputs.sequences):
        arrays, left = kit_oracle._unscaled(seq, inputs.options, b)
        assert not any(name.endswith("_descale") for name in left)
        for name, x in zip("qkv", arrays, strict=True):
            table = inputs.options[f"{name}_descale"]
            heads_of = group if name == "q" else 1
            for row, head in ((0, 0), (130, x.shape[1] - 1)):
                factor = table[b, head // heads_of, row // 128]
                given = getattr(seq, name)[row, head].astype(np.float64)
                assert np.array_equal(x[row, head], given * factor)
