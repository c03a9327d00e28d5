"""What rounding took from O, handed to the backward pass: D = rowsum(dO (O + residual))."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fa4
from tests.kernel_double import BackwardDouble, stand_in

DTYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}
Arrays = dict[str, np.ndarray]


def alike_values(seed: int, dtype: str, spread: float, dim: int = 32) -> tuple[Arrays, Any]:
    """A call whose values are nearly the same for all keys, so that dP - D cancels; its gradients.

    O, its LSE and its residual come from float64.
    """
    rng, kind = np.random.default_rng(seed), DTYPES[dtype]
    shapes = {"dout": (17, 4), "q": (17, 4), "k": (40, 2), "v": (40, 2)}
    found = {name: rng.standard_normal((2, *shape, dim)) for name, shape in shapes.items()}
    found["v"] = rng.standard_normal((2, 1, 2, dim)) + spread * found["v"]
    found = {name: x.astype(kind) for name, x in found.items()}
    q, k, v = (found[name] for name in "qkv")
    out, lse = fa4.flash_attn_func(q, k, v, impl="oracle", return_lse=True)
    found["out"], found["lse"] = out.astype(kind), lse.astype(np.float32)
    found["out_residual"] = (out - found["out"].astype(np.float64)).astype(kind)
    plain = {name: x for name, x in found.items() if name != "out_residual"}
    return found, fa4.flash_attn_backward(**plain, impl="oracle")


def error(found: Any, exact: Any) -> float:
    """Of dQ, relative to its size."""
    wrong = found.dq.astype(np.float64) - exact.dq
    return float(np.linalg.norm(wrong) / np.linalg.norm(exact.dq))


def without(call: Arrays) -> Arrays:
    """The same call, O as it was rounded."""
    return {name: x for name, x in call.items() if name != "out_residual"}


@settings(max_examples=40)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(sorted(DTYPES)),
    st.sampled_from((2.0**-7, 2.0**-5, 2.0**-4)),
)
def test_dq_is_no_worse_where_d_cancels(seed: int, dtype: str, spread: float) -> None:
    """The residual never costs accuracy there."""
    call, exact = alike_values(seed, dtype, spread)
    better = error(fa4.flash_attn_backward(**call, impl="reference"), exact)
    worse = error(fa4.flash_attn_backward(**without(call), impl="reference"), exact)
    assert better <= worse


@pytest.mark.parametrize(("dtype", "spread"), [("bf16", 2.0**-5), ("fp16", 2.0**-8)])
def test_dq_is_far_better_where_d_cancels(dtype: str, spread: float) -> None:
    """By more than a factor of five, and then as good as rounding of dS and dQ lets it be."""
    call, exact = alike_values(0, dtype, spread)
    better = error(fa4.flash_attn_backward(**call, impl="reference"), exact)
    worse = error(fa4.flash_attn_backward(**without(call), impl="reference"), exact)
    assert 5 * better < worse
    wrong = call | {"out_residual": -call["out_residual"]}  # planted: taken off, not added
    assert error(fa4.flash_attn_backward(**wrong, impl="reference"), exact) > worse


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[BackwardDouble]:
    """Doubles of the kernels that calls build."""
    return stand_in(monkeypatch)


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("varlen", [False, True])
def test_the_kernels_get_it(tensors: bool, varlen: bool, built: list[BackwardDouble]) -> None:
    """As the reference does: dense and packed, arrays and tensors, of any strides."""
    call, _ = alike_values(1, "bf16", 2.0**-5)
    options: dict[str, Any] = {}
    run = fa4.flash_attn_backward
    if varlen:
        run = fa4.flash_attn_varlen_backward
        lse = call["lse"][0]
        call = {name: x[0] for name, x in call.items()} | {"lse": lse}
        options = {"cu_seqlens_q": np.array([0, 9, 17], np.int32),
                   "cu_seqlens_k": np.array([0, 30, 40], np.int32)}  # fmt: skip
    if tensors:
        call = {name: torch.tensor(x.astype(np.float32)) for name, x in call.items()}
        call = {name: x if name == "lse" else x.bfloat16() for name, x in call.items()}
        options = {name: torch.tensor(x) for name, x in options.items()}
    wide = call["out_residual"].repeat(2, 0) if not tensors else (
        call["out_residual"].repeat_interleave(2, 0)
    )  # fmt: skip
    call = call | {"out_residual": wide[::2]}
    found, expected = (run(**call, **options, impl=impl) for impl in ("emulator", "reference"))
    for one, two in zip(found[:3], expected[:3], strict=True):
        one, two = (np.asarray(x.float() if tensors else x, np.float32) for x in (one, two))
        assert np.allclose(one, two, rtol=1e-2, atol=1e-4)
    other = run(**without(call), **options, impl="emulator")
    assert [double.spec.out_residual for double in built] == [True, False]
    one, two = (np.asarray(x.float() if tensors else x, np.float32) for x in (found.dq, other.dq))
    assert not np.array_equal(one, two)


def test_the_kernels_in_the_emulator() -> None:
    """All three kernels, compiled: dQ is better by the residual, as in the reference."""
    pytest.importorskip("cutlass")
    call, exact = alike_values(0, "bf16", 2.0**-5, dim=64)
    better = error(fa4.flash_attn_backward(**call, impl="emulator"), exact)
    worse = error(fa4.flash_attn_backward(**without(call), impl="emulator"), exact)
    assert 5 * better < worse
