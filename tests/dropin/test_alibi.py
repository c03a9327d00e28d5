"""ALiBi in every implementation, with gradients, against the formula in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fa4
from fa4 import emulator, flash_attn
from tests.dropin.support import assert_within, sum_sizes


def formula(q: Any, k: Any, v: Any, slopes: Any, causal: bool, softcap: float = 0.0) -> Any:
    """out (B, Sq, Hq, dv): softmax of the scores minus slope |i + Sk - Sq - j|."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    rows, keys = scores.shape[-2:]
    distance = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
    bias = slopes.expand(q.shape[0], -1)[..., None, None].to(q.dtype) * distance.abs()
    scores = scores - bias
    if causal:
        scores = scores.masked_fill(distance > 0, -torch.inf)
    p = torch.where((distance > 0).all(-1)[:, None] & causal, 0.0, scores.softmax(-1))
    return (p @ v).transpose(1, 2)


def run(function: Any, inputs: Any, dtype: Any) -> list[Any]:
    """out and the gradients of q, k and v, in `dtype`."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    out = function(*leaves).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def compare(ours: Any, plain: Any, inputs: Any, dtype: Any) -> None:
    """`ours` against the formula in `dtype` and in float64."""
    exact = run(plain, inputs, torch.float64)
    sizes = sum_sizes(inputs, torch.ones_like(exact[0]), sequence=-3)[: len(exact)]
    results = run(ours, inputs, dtype), run(plain, inputs, dtype), exact
    for *values, size in zip(*results, sizes, strict=True):
        assert_within(*values, size=size)


def draw_inputs(batch: int, heads: int, group: int, rows: int, keys: int, dim: int) -> Any:
    """q, k and v that bf16 holds exactly, in float64."""
    shapes = ((batch, rows, heads * group), (batch, keys, heads), (batch, keys, heads))
    return [torch.randn(*shape, dim).bfloat16().double() for shape in shapes]


@settings(max_examples=60)
@given(
    st.sampled_from(("reference", "oracle", "auto")),
    st.booleans(),
    st.booleans(),
    st.sampled_from((0.0, 2.0)),
    st.tuples(*(st.sampled_from(n) for n in ((1, 2), (1, 2), (1, 3), (1, 5, 140), (5, 9, 150)))),
    st.integers(0, 2**31),
)
def test_on_arrays(
    impl: str, causal: bool, by_batch: bool, softcap: float, sizes: Any, seed: int
) -> None:
    """Slopes (Hq,) and (B, Hq), with a softcap too, any lengths."""
    torch.manual_seed(seed)
    if causal:  # the formula's softmax has no gradient in rows without keys
        sizes = (*sizes[:3], min(sizes[3:]), max(sizes[3:]))
    inputs = draw_inputs(*sizes, 16)
    heads = inputs[0].shape[2]
    slopes = torch.rand(*((sizes[0], heads) if by_batch else (heads,)))
    compare(
        lambda q, k, v: flash_attn.flash_attn_func(
            q, k, v, causal=causal, softcap=softcap, alibi_slopes=slopes, impl=impl
        ),
        lambda q, k, v: formula(q, k, v, slopes, causal, softcap),
        inputs,
        torch.float32,
    )


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_in_the_kernel(shape: tuple[int, ...]) -> None:
    """The compiled kernels in the emulator, with their gradients."""
    torch.manual_seed(1)
    inputs, slopes = draw_inputs(2, 2, 2, 40, 150, 64), torch.rand(shape)
    compare(
        lambda q, k, v: flash_attn.flash_attn_func(
            q, k, v, causal=True, alibi_slopes=slopes, impl="emulator"
        ),
        lambda q, k, v: formula(q, k, v, slopes, True),
        inputs,
        torch.bfloat16,
    )


def test_auto_takes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel runs, ALiBi does not send the call away; with a softcap it does."""
    monkeypatch.setenv("FA4_EMULATE", "1")
    q, k, v = (x.bfloat16() for x in draw_inputs(1, 2, 2, 40, 150, 64))
    slopes = torch.rand(4)
    taken: list[Any] = []
    launch = emulator.launch
    monkeypatch.setattr(
        emulator, "launch", lambda *given, **named: taken.append(1) or launch(*given, **named)
    )
    with torch.no_grad():
        flash_attn.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)
        assert len(taken) == 1
        flash_attn.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, softcap=2.0)
    assert len(taken) == 1


def test_a_gpu_is_asked_for_its_own_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """impl="sm100" gets the tensors that want gradients, and the derivative."""
    seen: list[Any] = []
    monkeypatch.setattr(
        "fa4.dropin.attend.flash_attn_func", lambda *given, **named: seen.append((given, named))
    )
    q, k, v = (x.requires_grad_() for x in draw_inputs(1, 2, 2, 4, 5, 64))
    flash_attn.flash_attn_func(q, k, v, alibi_slopes=torch.rand(4), impl="sm100")
    ((given, named),) = seen
    assert given[0] is q and named["impl"] == "sm100" and callable(named["score_mod"])
    assert callable(named["score_mod_bwd"])
    bias = torch.zeros(1, 4, 4, 5, requires_grad=True)
    with pytest.raises(NotImplementedError, match="has no gradient of a bias: detach it"):
        fa4.sdpa(*(x.transpose(1, 2) for x in (q, k, v)), bias, impl="sm100", enable_gqa=True)


def test_what_is_refused() -> None:
    """ALiBi with a softcap in the kernel; a second derivative."""
    q, k, v = (x.bfloat16().requires_grad_() for x in draw_inputs(1, 2, 2, 4, 5, 64))
    with pytest.raises(NotImplementedError, match="ALiBi with softcap is not in the kernel"):
        flash_attn.flash_attn_func(
            q, k, v, softcap=2.0, alibi_slopes=torch.rand(4), impl="emulator"
        )
    out = flash_attn.flash_attn_func(q, k, v, alibi_slopes=torch.rand(4))
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        gradient.sum().backward()


def test_gradient_through_the_lse() -> None:
    """Of the sum of the LSE: dK is the sum of the probabilities times q."""
    q, k, v = (x.requires_grad_() for x in draw_inputs(1, 2, 1, 5, 5, 16))
    slopes = torch.rand(2)
    _, lse, _ = flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes, return_attn_probs=True)
    (found,) = torch.autograd.grad(lse.sum(), k)
    eye = torch.eye(5, dtype=torch.float64)[None, :, None].expand(1, 5, 2, 5)
    p = formula(q, k, eye, slopes, False)
    torch.testing.assert_close(
        found, torch.einsum("bihj,bihd->bjhd", p, q) / 4, rtol=1e-10, atol=1e-12
    )


def test_packed_sequences_have_their_own_distances() -> None:
    """Each sequence as if it were alone, with the slopes of its batch entry."""
    torch.manual_seed(2)
    q, k, v = (x[0] for x in draw_inputs(1, 2, 1, 9, 9, 16))
    slopes, offsets = torch.rand(2, 2), torch.tensor([0, 4, 9], dtype=torch.int32)
    for impl in ("reference", "oracle"):
        out = flash_attn.flash_attn_varlen_func(
            q, k, v, offsets, offsets, 5, 5, causal=True, alibi_slopes=slopes, impl=impl
        )
        for b, part in enumerate((slice(0, 4), slice(4, 9))):
            alone = formula(*(x[None, part] for x in (q, k, v)), slopes[b], True)[0]
            torch.testing.assert_close(out[part], alone, rtol=1e-12, atol=1e-13)


def test_the_comparison_sees_wrong_slopes_and_distances() -> None:
    """A slope of the next head; distances from the top left; a gradient without the cap."""
    inputs, slopes = draw_inputs(1, 2, 2, 5, 9, 16), torch.rand(4)

    def shifted(q: Any, k: Any, v: Any) -> Any:
        return flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes.roll(1))

    def top_left(q: Any, k: Any, v: Any) -> Any:
        return flash_attn.flash_attn_func(q, k[:, :5], v[:, :5], alibi_slopes=slopes)

    for wrong in (shifted, top_left):
        with pytest.raises(AssertionError):
            compare(wrong, lambda q, k, v: formula(q, k, v, slopes, False), inputs, torch.float32)
