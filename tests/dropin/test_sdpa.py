"""`fa4.sdpa` against torch's function, forward and backward, and in its place."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import fa4
from tests.dropin.support import assert_within, sum_sizes

TORCH_SDPA = torch.nn.functional.scaled_dot_product_attention
LENGTHS = st.sampled_from((1, 2, 3, 7, 16, 33, 130, 150))
LEAST = torch.finfo(torch.float32).min


@st.composite
def calls(draw: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """([query, key, value], options) in float64."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    lead = draw(st.sampled_from(((), (1,), (3,), (2, 2))))
    heads, group = draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 1, 3)))
    rows, keys = draw(LENGTHS), draw(LENGTHS)
    q = torch.randn(*lead, heads * group, rows, 16, dtype=torch.float64)
    k = torch.randn(*lead, heads, keys, 16, dtype=torch.float64)
    v = torch.randn(*lead, heads, keys, draw(st.sampled_from((8, 16))), dtype=torch.float64)
    options: dict[str, Any] = {"enable_gqa": group > 1}
    options["scale"] = draw(st.sampled_from((None, 0.3, 1.0)))
    kind = draw(st.sampled_from(("none", "causal", "bool", "added", "least")))
    options["is_causal"] = kind == "causal"
    if kind in ("bool", "added", "least"):
        whole = (*lead, heads * group, rows, keys)
        shape = tuple(n if draw(st.booleans()) else 1 for n in whole)
        shape = shape[draw(st.integers(0, len(shape) - 2)) :]
        seen = torch.rand(shape) < 0.7
        bias = torch.randn(shape, dtype=torch.float64)
        shown = seen.clone()
        shown[..., 0] = True  # else torch's float32 loses the scores: see the test of that
        options["attn_mask"] = {
            "bool": seen,
            "added": torch.where(seen | (torch.rand(shape) < 0.5), bias, -torch.inf),
            "least": torch.where(shown, 0.0, LEAST).double(),
        }[kind]
    return [q, k, v], options


def run(function: Any, inputs: Any, options: dict[str, Any], dtype: torch.dtype) -> list[Any]:
    """out, the gradients of query, key, value and a mask that is added."""
    mask = options.get("attn_mask")
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype).requires_grad_()
        leaves.append(mask)
    out = function(*leaves[:3], **options | {"attn_mask": mask})
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream_of(out))]


def upstream_of(out: torch.Tensor) -> torch.Tensor:
    """1 to 4 by channel: exact in any type."""
    return (1 + torch.arange(out.shape[-1]) % 4).to(out.dtype).expand_as(out)


def compare(results: Any, inputs: Any) -> None:
    """(ours, plain, exact), each as `run` gives them."""
    results = [list(values) for values in results]
    sizes = sum_sizes(inputs, upstream_of(results[0][0]))
    for *values, size in zip(*results, sizes[: len(results[0])], strict=True):
        assert_within(*values, size=size)


@settings(max_examples=150)
@given(calls())
def test_like_torch(call: tuple[list[torch.Tensor], dict[str, Any]]) -> None:
    """Results and gradients of any rank, mask, alignment and grouping."""
    inputs, options = call
    ours = run(fa4.sdpa, inputs, options, torch.float32)
    plain = run(TORCH_SDPA, inputs, options, torch.float32)
    compare((ours, plain, run(TORCH_SDPA, inputs, options, torch.float64)), inputs)


def test_the_comparison_sees_a_wrong_alignment() -> None:
    """Bottom right in place of top left, and a mask that is off by one, are far outside."""
    inputs = [torch.randn(1, 2, n, 16, dtype=torch.float64) for n in (5, 9, 9)]
    exact, plain = (
        run(TORCH_SDPA, inputs, {"is_causal": True}, kind)
        for kind in (torch.float64, torch.float32)
    )
    for shift in (4, 1):
        mask = torch.ones(5, 9, dtype=torch.bool).tril(shift)
        ours = run(fa4.sdpa, inputs, {"attn_mask": mask}, torch.float32)
        for values in zip(ours[:1], plain[:1], exact[:1], strict=True):
            with pytest.raises(AssertionError):
                assert_within(*values)


def test_bias_gradient_is_the_sum_over_what_shares_it() -> None:
    """A bias of one head and one batch entry: a relative position bias, learned."""
    bias = torch.randn(1, 1, 4, 4, dtype=torch.float64, requires_grad=True)
    inputs = [torch.randn(2, 3, 4, 8, dtype=torch.float64) for _ in range(3)]
    for function in (fa4.sdpa, TORCH_SDPA):
        function(*inputs, bias).square().sum().backward()
    ours, twice = bias.grad.clone(), bias.grad
    bias.grad = None
    TORCH_SDPA(*inputs, bias).square().sum().backward()
    torch.testing.assert_close(twice - bias.grad, bias.grad, rtol=1e-12, atol=1e-12)
    assert ours.shape == bias.shape and bias.grad.abs().max() > 0.01


def test_a_row_of_the_least_float() -> None:
    """One bias for all keys changes nothing, as it should; torch's float32 forgets the scores."""
    q, k, v = (torch.randn(1, 1, 3, 8) for _ in range(3))
    mask = torch.full((1, 1, 3, 3), LEAST)
    exact, plain = TORCH_SDPA(q.double(), k.double(), v.double()), TORCH_SDPA(q, k, v)
    assert_within(fa4.sdpa(q, k, v, mask), plain, exact)
    uniform = v.mean(-2, keepdim=True).expand_as(v)
    assert_within(TORCH_SDPA(q, k, v, mask), plain, uniform)


def test_a_tile_of_the_least_float() -> None:
    """The last 30 of 150 keys hidden so, a tile of the reference: nothing overflows in it."""
    q, k, v = (torch.randn(1, 1, 150, 8) for _ in range(3))
    mask = torch.zeros(1, 150)
    mask[:, 120:] = LEAST
    exact = TORCH_SDPA(q.double(), k[..., :120, :].double(), v[..., :120, :].double())
    assert_within(fa4.sdpa(q, k, v, mask), TORCH_SDPA(q, k, v, mask), exact)


@pytest.mark.parametrize("mask", ["bool", "added"])
def test_masks_in_the_kernel(mask: str) -> None:
    """The compiled kernel in the emulator, with gradients; bf16, grouped heads."""
    torch.manual_seed(0)
    seen = torch.rand(2, 1, 40, 50) < 0.7
    seen[0, 0, 3] = False
    bias = torch.randn(1, 4, 40, 50, dtype=torch.float64)
    options = {"attn_mask": seen if mask == "bool" else bias, "enable_gqa": True}
    inputs = [torch.randn(2, n, s, 64, dtype=torch.float64) for n, s in ((4, 40), (2, 50), (2, 50))]
    inputs = [x.bfloat16().double() for x in inputs]
    if mask == "added":
        options["attn_mask"] = bias.bfloat16().double()

    def emulated(*given: Any, **named: Any) -> Any:
        return fa4.sdpa(*given, **named, impl="emulator")

    results = (
        run(function, inputs, options, kind)
        for function, kind in (
            (emulated, torch.bfloat16),
            (TORCH_SDPA, torch.bfloat16),
            (TORCH_SDPA, torch.float64),
        )
    )
    compare(results, inputs)


def test_dropout_follows_torchs_generator() -> None:
    """The same after the same seed, another mask in each call, and a mean that is kept."""
    q, k, v = (torch.randn(2, 4, 64, 16) for _ in range(3))
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        draws.append([fa4.sdpa(q, k, v, dropout_p=0.5) for _ in range(3)])
    assert all(a.equal(b) for a, b in zip(*draws, strict=True))
    assert not any(a.equal(b) for a, b in pairwise(draws[0]))
    many = torch.stack([fa4.sdpa(q, k, torch.ones_like(v), dropout_p=0.5) for _ in range(20)])
    assert abs(many.mean() - 1) < 0.02


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"attn_mask": torch.ones(4, 5) > 0, "is_causal": True}, ValueError, "exclude each other"),
        ({"attn_mask": torch.ones(4, 6) > 0}, ValueError, r"broadcast to \(1, 2, 4, 5\); got"),
        ({"attn_mask": torch.ones(4, 5, dtype=torch.int32)}, TypeError, "bool or floating"),
        ({"key": torch.ones(1, 3, 5, 8)}, ValueError, "heads of key and value"),
        ({"key": torch.ones(8)}, ValueError, "rank 2 or more"),
        ({"impl": "fast"}, ValueError, "impl must be one of"),
    ],
)
def test_refusals(change: dict[str, Any], error: type[Exception], text: str) -> None:
    """One line each."""
    good = {"query": torch.ones(1, 2, 4, 8), "key": torch.ones(1, 2, 5, 8)}
    good["value"] = torch.ones(1, 2, 5, 8)
    with pytest.raises(error, match=text) as raised:
        fa4.sdpa(**good | change)
    assert "\n" not in str(raised.value)


class Model(torch.nn.Module):
    """Attention by a name that was imported before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, H, S, D) onto itself."""
        return TORCH_SDPA(x, x, x, is_causal=True)


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of `fa4.sdpa` by `fa4.replace_sdpa`, from now on."""
    seen: list[Any] = []
    from fa4.dropin import replace

    def counted(*given: Any, **options: Any) -> Any:
        seen.append(options)
        return fa4.sdpa(*given, **options)

    monkeypatch.setattr(replace, "sdpa", counted)
    return seen


def test_replaced_under_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old name, torch's own modules in inference and training; and torch's again afterwards."""
    seen = count_calls(monkeypatch)
    x = torch.randn(2, 2, 5, 8, requires_grad=True)
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
    y = torch.randn(2, 5, 16)
    for call in (lambda: Model()(x), lambda: layer(y, y, y, need_weights=False)[0]):
        plain = call()
        with fa4.replace_sdpa(impl="reference"):
            assert_within(call(), plain, plain)
    with torch.no_grad(), fa4.replace_sdpa():
        layer(y, y, y, need_weights=False)
    assert [options["impl"] for options in seen] == ["reference", "reference", "auto"]
    Model()(x).sum().backward()
    assert len(seen) == 3
    assert torch.nn.functional.scaled_dot_product_attention is TORCH_SDPA


def test_replaced_in_nested_blocks_of_one_thread_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The innermost block counts; another thread keeps torch's function; errors end a block."""
    seen = count_calls(monkeypatch)
    x = torch.randn(1, 1, 3, 8)
    with pytest.raises(ValueError, match="exclude"), fa4.replace_sdpa("oracle"):
        with fa4.replace_sdpa("reference"):
            Model()(x)
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
        other = threading.Thread(target=lambda: Model()(x))
        other.start()
        other.join()
        TORCH_SDPA(x, x, x, torch.ones(3, 3), is_causal=True)
    assert [options["impl"] for options in seen] == ["reference", "oracle", "oracle"]
    assert torch.nn.functional.scaled_dot_product_attention is TORCH_SDPA


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["after the block", "another thread", "another block"])
def test_replaced_again_for_the_backward_pass_of_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, reentrant: bool, where: str
) -> None:
    """What is computed a second time is what was computed: the same calls, the same gradient."""
    seen = count_calls(monkeypatch)
    x = torch.randn(2, 2, 5, 8, requires_grad=True)
    plain, exact = (
        torch.autograd.grad(Model()(y).square().sum(), y)[0]
        for y in (x, x.detach().double().requires_grad_())
    )
    with fa4.replace_sdpa(impl="reference"):
        loss = checkpoint(Model(), x, use_reentrant=reentrant).square().sum()
    if where == "another block":
        with fa4.replace_sdpa(impl="oracle"):
            loss.backward()
    elif where == "another thread":
        other = threading.Thread(target=loss.backward)
        other.start()
        other.join()
    else:
        loss.backward()
    assert [options["impl"] for options in seen] == ["reference", "reference"]
    assert_within(x.grad, plain, exact, size=10.0)
    checkpoint(Model(), x, use_reentrant=reentrant).sum().backward()
    assert len(seen) == 2
