"""One record of a call: made and checked once, and every order of its fields made from it."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fa4
from fa4.backends import NAMES, AttentionGradients, find_backend
from fa4.call import checked, choose, form
from fa4.call.call import ARGUMENTS, INPUTS, Call, operator_schema
from fa4.call.checked import DENSE_DEFAULTS, VARLEN_DEFAULTS, make_call

N = np.zeros((1, 4, 1, 8), np.float32)
T = torch.zeros(1, 4, 1, 8)
LSE = np.zeros((1, 1, 4), np.float32)


def tensors(dtype: torch.dtype = torch.float32, grad: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 8, 2, 16).to(dtype).requires_grad_(grad) for _ in range(3)]


def test_the_operators_take_the_fields() -> None:
    """In order, and of their types: torch's schema is made from them."""
    from fa4.call import torch_op  # noqa: F401

    for name, before, after in (("forward", 0, 3), ("backward", 5, 1)):
        schema = getattr(torch.ops.fa4, f"attention_{name}").default._schema
        given = [argument.name for argument in schema.arguments][before:]
        assert tuple(given[:-after]) == ARGUMENTS
    assert operator_schema().startswith("Tensor q, Tensor k, Tensor v, Tensor? learnable_sink, ")
    assert Call._fields[: len(INPUTS)] == INPUTS


def test_the_kernel_takes_the_record() -> None:
    """Its parameters are the fields of `LaunchArguments`, in their order."""
    pytest.importorskip("cutlass")
    from fa4.compiled.launch import LaunchArguments
    from fa4.sm100.forward.kernel import forward

    names = [*inspect.signature(inspect.unwrap(forward)).parameters]
    assert tuple(names[: len(LaunchArguments._fields)]) == LaunchArguments._fields


def test_signatures_and_defaults_agree() -> None:
    """The options of the public functions are those that `make_call` knows."""
    for function, defaults in (
        (fa4.flash_attn_func, DENSE_DEFAULTS),
        (fa4.flash_attn_varlen_func, VARLEN_DEFAULTS),
    ):
        parameters = [*inspect.signature(function).parameters.values()][3:]
        found = {p.name: p.default for p in parameters if p.name not in ("impl", "return_lse")}
        assert found == defaults


def test_every_backend_has_the_interface() -> None:
    for name in NAMES:
        backend = find_backend(name)
        for method in ("supports", "forward", "backward"):
            assert callable(getattr(backend, method)), name


def test_a_form_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another call of the same form is not looked at again; one of another form is."""
    monkeypatch.setattr(form, "_forms", {})
    seen: list[Call] = []
    real = form._check_tensors
    monkeypatch.setattr(form, "_check_tensors", lambda call: (seen.append(call), real(call)))
    calls = [make_call(N + i, N, N, {}, varlen=False) for i in range(3)]
    assert len(seen) == 1 and len({id(call.form) for call in calls}) == 1
    for changed in ({"softcap": 1.0}, {"causal": True}, {"num_splits": 2}, {"dropout_p": 0.5}):
        assert make_call(N, N, N, changed, varlen=False).form is not calls[0].form
    wide = np.zeros((1, 4, 1, 16), np.float32)[..., ::2]
    for q in (N.astype(np.float64), wide):
        assert make_call(q, q, q, {}, varlen=False).form is not calls[0].form
    with pytest.raises(ValueError, match="share the batch size"):
        make_call(np.concatenate([N, N]), N, N, {}, varlen=False)


def test_a_repeated_call_holds_its_own_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch the way from the arguments is short the second time, and keeps nothing alive."""
    monkeypatch.setattr(checked, "_known", {})
    made: list[Any] = []
    real = checked._make_new
    monkeypatch.setattr(checked, "_make_new", lambda *a: made.append(a) or real(*a))
    options = {"causal": True, "softmax_scale": 0.5, "learnable_sink": torch.ones(1)}
    one = make_call(T, T, T, options, varlen=False)
    sink, other = torch.zeros(1), T + 1
    two = make_call(other, other, other, options | {"learnable_sink": sink}, varlen=False)
    assert len(made) == 1 and two.q is other and two.learnable_sink is sink
    assert two._replace(q=T, k=T, v=T, learnable_sink=one.learnable_sink) == one
    with pytest.raises(TypeError, match="causal must be True or False; got 1"):
        make_call(T, T, T, options | {"causal": 1}, varlen=False)
    with pytest.raises(TypeError, match="unknown option 'windows'"):
        make_call(T, T, T, {"windows": True} | options, varlen=False)
    for aux in ([T], (T,)):
        make_call(T, T, T, options | {"aux_tensors": aux}, varlen=False)
    held = [x for fields in checked._known.values() for x in fields if isinstance(x, torch.Tensor)]
    assert len(checked._known) == 1 and not held


def test_numbers_in_tensors_are_read_in_every_call() -> None:
    """A tensor that stands for a number is its value, not its form."""
    for name in ("softmax_scale", "softcap", "num_splits"):
        kind = int if name == "num_splits" else float
        for value in (1, 2):
            call = make_call(T, T, T, {name: torch.tensor(kind(value))}, varlen=False)
            assert getattr(call, name) == value
    for value in (4, 5):
        lengths = {"max_seqlen_q": torch.tensor(value)}
        assert make_call(T, T, T, lengths, varlen=True).max_seqlen_q == value


def test_auto_asks_a_backend_once_for_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again for a gradient, and for another form."""
    monkeypatch.setenv(choose.EMULATE, "1")
    monkeypatch.setattr(form, "_forms", {})
    asked: list[bool] = []
    backend = find_backend("emulator")
    monkeypatch.setattr(
        backend, "supports", lambda call, gradient: asked.append(gradient) or "not today"
    )
    for gradient in (False, False, True):
        call = make_call(N, N, N, {}, varlen=False)
        assert choose.choose(call, gradient=gradient) == "reference"
    assert asked == [False, True]
    choose.choose(make_call(N, N, N, {"causal": True}, varlen=False))
    assert asked == [False, True, False]


BAD: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ((N, T, T), {}, TypeError, "k must be no torch tensor, as q is; got Tensor"),
    ((T, N, T), {}, TypeError, "k must be a torch tensor, as q is; got ndarray"),
    ((T, T, T), {"learnable_sink": N[0, 0, 0]}, TypeError, "learnable_sink must be a torch tensor"),
    ((T, T, T), {"aux_tensors": [N]}, TypeError, "aux_tensors must be a torch tensor"),
    ((N, N, N), {"aux_tensors": N}, TypeError, "aux_tensors must be a list of tensors"),
    ((N, N, N), {"softmax_scale": "1"}, TypeError, "softmax_scale must be a number; got '1'"),
    ((N, N, N), {"softmax_scale": True}, TypeError, "softmax_scale must be a number; got True"),
    ((N, N, N), {"causal": "no"}, TypeError, "causal must be True or False; got 'no'"),
    ((N, N, N), {"deterministic": 1}, TypeError, "deterministic must be True or False; got 1"),
    ((N, N, N), {"return_lse": 2}, TypeError, "return_lse must be True or False; got 2"),
    ((N, N, N), {"dropout_p": 1.5}, ValueError, "dropout_p must be below 1; got 1.5"),
    ((N.astype(">f4"),) * 3, {}, TypeError, "dtype must be in native byte order; got >f4"),
    (([1], [1], [1]), {}, TypeError, "q must be a NumPy array"),
    ((T, T, T), {"impl": "sm100", "softcap": -1.0}, ValueError, "softcap must be at least 0"),
    ((T, T, T), {"impl": "sm100"}, NotImplementedError, "convert to bf16 or fp16; got fp32"),
    ((T, T, T[..., :0]), {}, ValueError, "v must have at least one head and head_dim 1"),
    (
        (N, N, N),
        {"block_sparse_tensors": SimpleNamespace(mask_block_cnt=N, mask_block_idx=N)},
        ValueError,
        "block_size must be (rows, columns); got None",
    ),
    ((N, N, N), {"mask_mod": 3}, TypeError, "mask_mod must be callable; got 3"),
]


@pytest.mark.parametrize(("inputs", "options", "error", "message"), BAD)
def test_bad_arguments(inputs: Any, options: Any, error: Any, message: str) -> None:
    """One line that names the argument, the value and what is allowed, for every implementation."""
    with pytest.raises(error, match=re.escape(message)) as caught:
        fa4.flash_attn_func(*inputs, **options)
    assert "\n" not in str(caught.value)


def test_unknown_options() -> None:
    with pytest.raises(TypeError, match="unknown option 'page_table'; allowed are softmax_scale"):
        fa4.flash_attn_backward(N, N, N, N, N, LSE, page_table=N)
    with pytest.raises(TypeError, match="unknown option 'windows'"):
        fa4.flash_attn_varlen_backward(N, N, N, N, N, LSE, windows=3)


COMPILED = [({}, ()), ({"causal": True, "return_lse": True}, ()), ({"softcap": 2.0}, (3, 2))]
# Dynamo takes seconds for each: every implementation with one of the options, the rest slowly.
FAST = {("auto", 0), ("oracle", 1), ("emulator", 2), ("reference", 1), ("reference", 2)}


@pytest.mark.parametrize(
    ("impl", "options", "window"),
    [
        pytest.param(impl, *COMPILED[n], marks=() if (impl, n) in FAST else pytest.mark.slow)
        for impl in ("auto", "reference", "oracle", "emulator")
        for n in range(len(COMPILED))
    ],
)
def test_torch_compile(impl: str, options: dict[str, Any], window: Any) -> None:
    """The public function itself, in one graph, with its gradients, by every implementation."""
    torch._dynamo.reset()
    given = options | ({"window_size": window} if window else {})
    dtype = torch.bfloat16 if impl == "emulator" else torch.float32
    compiled = torch.compile(fa4.flash_attn_func, fullgraph=True, backend="aot_eager")
    results = []
    for function in (fa4.flash_attn_func, compiled):
        q, k, v = tensors(dtype)
        result = function(q, k, v, impl=impl, **given)
        out = result[0] if given.get("return_lse") else result
        out.float().square().sum().backward()
        results.append((out.detach(), q.grad, k.grad, v.grad))
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("impl", ["reference", "oracle"])
def test_operators_are_well_formed(impl: str) -> None:
    """torch's own checks: schema, fakes, autograd, dynamic sizes."""
    from fa4.call import torch_op

    q, k, v = tensors()
    sink = torch.zeros(2, requires_grad=True)
    call = make_call(q, k, v, {"causal": True, "learnable_sink": sink}, varlen=False)
    arguments = torch_op.to_operator(call)
    torch.library.opcheck(torch.ops.fa4.attention_forward, (*arguments, impl, True, True))
    out, lse, seed = torch.ops.fa4.attention_forward(*arguments, impl, True, True)
    given = [x.detach() for x in (out, lse, out, lse, seed)]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.fa4.attention_backward, (*given, *arguments, impl), test_utils=tests
    )


def test_what_autograd_cannot_do_is_refused() -> None:
    """Second derivatives and vmap: one line each."""
    q, k, v = tensors()
    (grad,) = torch.autograd.grad(fa4.flash_attn_func(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^fa4 has no second derivatives[^\n]*$"):
        grad.sum().backward()
    with pytest.raises(NotImplementedError, match=r"^fa4 has no batching rule[^\n]*$"):
        torch.vmap(fa4.flash_attn_func)(q[None], k[None], v[None])


def test_dropout_draws_a_seed() -> None:
    """From the global generator of the tensors' framework; each call its own, and given back."""
    q, k, v = tensors(grad=False)
    one, two = (fa4.flash_attn_func(q, k, v, dropout_p=0.5, return_lse=True) for _ in range(2))
    assert not torch.equal(one.out, two.out)
    again = fa4.flash_attn_func(q, k, v, dropout_p=0.5, dropout_seed=one.dropout_seed)
    assert torch.equal(one.out, again)
    arrays = [x.numpy() for x in (q, k, v)]
    for seed_all, inputs in ((torch.manual_seed, (q, k, v)), (np.random.seed, arrays)):
        results = []
        for _ in range(2):
            seed_all(5)
            results.append(np.asarray(fa4.flash_attn_func(*inputs, dropout_p=0.5)))
        assert np.array_equal(*results)
    out, lse = fa4.flash_attn_func(q, k, v, dropout_p=0.5, return_lse=True)  # still a pair
    assert out.shape == q.shape and lse.shape == (1, 2, 8)
    with pytest.raises(ValueError, match="dropout_seed must be the forward call's"):
        fa4.flash_attn_backward(out, q, k, v, out, lse, dropout_p=0.5)


def test_the_gradient_drops_what_the_call_dropped() -> None:
    """By autograd, and by `flash_attn_backward` with the seed that came back."""
    q, k, v = tensors()
    result = fa4.flash_attn_func(q, k, v, dropout_p=0.5, return_lse=True)
    result.out.sum().backward()
    given = [x.detach() for x in (torch.ones_like(result.out), q, k, v, result.out, result.lse)]
    grads = fa4.flash_attn_backward(*given, dropout_p=0.5, dropout_seed=result.dropout_seed)
    assert isinstance(grads, AttentionGradients)
    for ours, expected in zip(grads[:3], (q.grad, k.grad, v.grad), strict=True):
        torch.testing.assert_close(ours, expected)
    other = fa4.flash_attn_backward(*given, dropout_p=0.5, dropout_seed=result.dropout_seed + 1)
    assert not torch.allclose(other.dv, grads.dv)


def test_gradients_through_a_mask_of_ours() -> None:
    """The kernels know `fa4.masks` as the reference does."""
    from fa4.masks import Chunked

    grads = []
    for impl in ("emulator", "reference"):
        q, k, v = tensors(torch.bfloat16)
        fa4.flash_attn_func(q, k, v, mask_mod=Chunked(3), impl=impl).float().sum().backward()
        grads.append([q.grad, k.grad, v.grad])
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.02)
    assert grads[0][2].abs().sum() > 0


def test_seeds_of_64_bits_pass_the_operator() -> None:
    q, k, v = tensors()
    seed = 2**64 - 3
    by_operator = fa4.flash_attn_func(q, k, v, dropout_p=0.5, dropout_seed=seed)
    with torch.no_grad():
        plain = fa4.flash_attn_func(q, k, v, dropout_p=0.5, dropout_seed=seed)
    assert torch.equal(by_operator.detach(), plain)


def test_a_plan_that_breaks_a_rule_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    from fa4.compiled.forward import compile_forward
    from fa4.sm100.forward.spec import ForwardSpec

    spec = ForwardSpec(head_dim=64, head_dim_v=64)
    plan = spec.plan
    broken = replace(plan, roles=plan.roles[1:])
    monkeypatch.setattr(ForwardSpec, "plan", property(lambda self: broken))
    with pytest.raises(ValueError, match=r"roles|signal|warps"):
        compile_forward(spec)
