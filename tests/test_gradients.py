"""Gradients from the public functions to the launch of the backward kernels, which are doubles.

What is launched, what is refused before, and what autograd, torch.compile and fake tensors see.
"""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import fa4
from fa4.backends import emulator, on_gpu
from fa4.call import choose
from fa4.call.checked import make_call
from fa4.config import BackwardConfig
from fa4.hardware import B300
from fa4.masks import Chunked
from tests.kernel_double import BackwardDouble, stand_in

BF16 = ml_dtypes.bfloat16


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[BackwardDouble]:
    return stand_in(monkeypatch)


def draw(rows: int = 20, keys: int = 30, heads: tuple[int, int] = (4, 2), dtype: Any = BF16) -> Any:
    """(dO, q, k, v), arrays."""
    rng = np.random.default_rng(0)
    shapes = (
        (rows, heads[0], 32),
        (rows, heads[0], 64),
        (keys, heads[1], 64),
        (keys, heads[1], 32),
    )
    return [rng.standard_normal((2, *shape)).astype(dtype) for shape in shapes]


def tensors(**options: Any) -> list[torch.Tensor]:
    return [torch.tensor(x.astype(np.float32)).bfloat16() for x in draw(**options)]


def saved(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    """O and LSE by the reference."""
    function = fa4.flash_attn_func if "cu_seqlens_q" not in options else fa4.flash_attn_varlen_func
    found: tuple[Any, Any] = function(q, k, v, **options, impl="reference", return_lse=True)
    return found


def same(ours: Any, expected: Any) -> None:
    """The doubles compute as the reference does: what differs is where it was read or written."""
    for name, one, two in zip(("dq", "dk", "dv", "dsink"), ours, expected, strict=True):
        assert (one is None) == (two is None), name
        if one is not None:
            assert type(one) is type(two), name
            one, two = (np.asarray(x, np.float32) if isinstance(x, np.ndarray) else x.float()
                        for x in (one, two))  # fmt: skip
            assert np.allclose(one, two, rtol=1e-2, atol=1e-4), name


SINK = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window_size": (3, 5), "softcap": 2.0, "deterministic": False},
    {"learnable_sink": SINK, "softmax_scale": 0.3},
    {"learnable_sink": SINK.astype(BF16), "causal": True, "num_splits": 3},
    {"mask_mod": Chunked(7)},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("with_dlse", [False, True])
def test_arrays(options: dict[str, Any], with_dlse: bool, built: list[BackwardDouble]) -> None:
    """Every feature reaches the kernel; gradients come in the types of their inputs."""
    dout, *inputs = draw()
    out, lse = saved(*inputs, **options)
    dlse = np.random.default_rng(1).standard_normal(lse.shape) if with_dlse else None
    found, expected = (
        fa4.flash_attn_backward(dout, *inputs, out, lse, dlse=dlse, impl=impl, **options)
        for impl in ("emulator", "reference")
    )
    same(found, expected)
    (double,) = built
    assert double.spec.deterministic == options.get("deterministic", True)
    assert double.spec.lse_gradient == with_dlse
    for x, grad in zip(inputs, found, strict=False):
        assert grad.dtype == x.dtype and grad.shape == x.shape
    if found.dsink is not None:
        assert found.dsink.dtype == options["learnable_sink"].dtype


VARLEN: list[dict[str, Any]] = [
    {"cu_seqlens_q": [0, 7, 7, 30], "cu_seqlens_k": [0, 20, 45, 50]},
    {"cu_seqlens_q": [0, 7, 7, 30], "cu_seqlens_k": [0, 20, 45, 50], "max_seqlen_q": 23,
     "max_seqlen_k": 25, "seqused_q": [5, 0, 20], "seqused_k": [0, 25, 2], "causal": True},
]  # fmt: skip


@pytest.mark.parametrize("options", VARLEN)
def test_rows_of_no_sequence_get_zeros(
    options: dict[str, Any], built: list[BackwardDouble]
) -> None:
    """Whatever lay in their memory, and whatever O, LSE and dO hold there."""
    rng = np.random.default_rng(0)
    shapes = ((40, 4, 32), (40, 4, 64), (60, 2, 64), (60, 2, 32))
    dout, *inputs = (rng.standard_normal(shape).astype(BF16) for shape in shapes)
    options = {
        name: np.array(x, np.int64) if isinstance(x, list) else x for name, x in options.items()
    }
    out, lse = saved(*inputs, **options)
    for x in (out, dout):
        x[30:] = np.nan
    lse[:, 30:] = np.nan
    found, expected = (
        fa4.flash_attn_varlen_backward(dout, *inputs, out, lse, impl=impl, **options)
        for impl in ("emulator", "reference")
    )
    same(found, expected)
    assert (found.dq[30:] == 0).all() and (found.dk[50:] == 0).all() and (found.dv[50:] == 0).all()
    (given,) = built[0].calls
    assert given.cu_seqlens_q.dtype == np.int32
    assert (given.max_seqlen_q, given.max_seqlen_k) == (
        options.get("max_seqlen_q", 40), options.get("max_seqlen_k", 60)
    )  # fmt: skip


def test_padded_sequences(built: list[BackwardDouble]) -> None:
    """seqused without offsets: the rest of each sequence is zero."""
    dout, *inputs = draw()
    options = {"seqused_q": np.array([20, 3]), "seqused_k": np.array([7, 30])}
    out, lse = fa4.flash_attn_varlen_func(*inputs, **options, impl="reference", return_lse=True)
    found, expected = (
        fa4.flash_attn_varlen_backward(dout, *inputs, out, lse, impl=impl, **options)
        for impl in ("emulator", "reference")
    )
    same(found, expected)
    assert (found.dq[1, 3:] == 0).all() and (found.dk[0, 7:] == 0).all()


@pytest.mark.parametrize("lse_too", [False, True])
def test_autograd(lse_too: bool, built: list[BackwardDouble]) -> None:
    """q, k, v and sink; strided and expanded gradients of O; a gradient of the LSE if one is."""
    grads = []
    for impl in ("emulator", "reference"):
        dout, *inputs = tensors()
        sink = torch.tensor(SINK).bfloat16()
        leaves = [x.requires_grad_() for x in (*inputs, sink)]
        out, lse = fa4.flash_attn_func(
            *leaves[:3], causal=True, learnable_sink=sink, impl=impl, return_lse=True
        )
        loss = (out.transpose(1, 3) * dout.transpose(1, 3)).sum() + out.sum()
        (loss + lse.square().sum() if lse_too else loss).backward()
        grads.append([x.grad for x in leaves])
        assert [x.grad.dtype for x in leaves] == [x.dtype for x in leaves]
    same(*grads)
    assert built[0].spec.lse_gradient == lse_too and len(built[0].calls) == 1


@pytest.mark.parametrize("traced", [False, True])
def test_a_gradient_of_the_lse_alone(traced: bool, built: list[BackwardDouble]) -> None:
    """dO is then zero."""

    def add_up(q: Any, k: Any, v: Any, impl: str) -> Any:
        return fa4.flash_attn_func(q, k, v, impl=impl, return_lse=True).lse.sum()

    torch._dynamo.reset()
    compiled = torch.compile(add_up, fullgraph=True, backend="eager") if traced else add_up
    grads = []
    for impl, function in (("emulator", compiled), ("reference", add_up)):
        _, *inputs = tensors()
        inputs = [x.requires_grad_() for x in inputs]
        function(*inputs, impl).backward()
        grads.append([*(x.grad for x in inputs), None])
    same(*grads)
    assert grads[0][2].abs().sum() == 0


def make_expanded(x: torch.Tensor) -> torch.Tensor:
    return x[:1, :1].expand(x.shape)


ODD: dict[str, Any] = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "last dimension strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "odd rows": lambda x: torch.cat([x, x[..., :1]], -1)[..., :-1],
    "odd address": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "expanded": make_expanded,
    "one element": lambda x: x[:1, :1, :1, :1].expand(x.shape),
}


@pytest.mark.parametrize("kind", ODD)
def test_strides_of_the_gradient_and_of_out(kind: str, built: list[BackwardDouble]) -> None:
    """Any: what TMA cannot address is copied, and only that; nothing is overwritten."""
    dout, *inputs = tensors()
    dout = ODD[kind](dout)
    out, lse = saved(*inputs)
    strided = ODD[kind](out) if kind not in ("expanded", "one element") else out
    before = [x.clone() for x in (dout, strided, lse)]
    found = fa4.flash_attn_backward(dout, *inputs, strided, lse, impl="emulator")
    same(found, fa4.flash_attn_backward(dout, *inputs, out, lse, impl="reference"))
    assert all(torch.equal(x, y) for x, y in zip((dout, strided, lse), before, strict=True))
    (given,) = built[0].calls
    assert (given.dout.data_ptr() == dout.data_ptr()) == (kind == "transposed")


def test_sizes_of_one(built: list[BackwardDouble]) -> None:
    """Strides that address nothing are made those of a contiguous tensor."""
    _, *inputs = tensors(rows=1, keys=1, heads=(1, 1))
    shape = (1, 1, 1)
    dout, q, k, v = (
        x[:1].as_strided((*shape, x.shape[-1]), (3, 5, 7, 1)) for x in (inputs[2], *inputs)
    )
    out, lse = saved(q, k, v)
    lse = lse.as_strided((1, 1, 1), (3, 5, 7))
    found = fa4.flash_attn_backward(dout, q, k, v, out, lse, dlse=lse, impl="emulator")
    expected = fa4.flash_attn_backward(dout, q, k, v, out, lse, dlse=lse, impl="reference")
    same(found, expected)
    assert built[0].calls[0].lse.stride() == (1, 1, 1)


def test_a_form_is_prepared_once(built: list[BackwardDouble]) -> None:
    """One kernel for calls of a form; another where what is asked of the kernel differs."""
    dout, *inputs = tensors()
    out, lse = saved(*inputs)
    for _ in range(3):
        fa4.flash_attn_backward(dout, *inputs, out, lse, impl="emulator")
    assert len(built) == 1 and len(built[0].calls) == 3
    fa4.flash_attn_backward(dout, *inputs, out, lse, dlse=lse, impl="emulator")
    fa4.flash_attn_backward(dout, *inputs, out, lse, deterministic=False, impl="emulator")
    assert [(x.spec.lse_gradient, x.spec.deterministic) for x in built] == [
        (False, True), (True, True), (False, False)
    ]  # fmt: skip


def test_torch_asks_for_determinism(built: list[BackwardDouble]) -> None:
    """Of calls that do not, and of a form that was prepared without."""
    dout, *inputs = tensors()
    out, lse = saved(*inputs)
    given = (dout, *inputs, out, lse)
    try:
        for strict in (False, True, False):
            torch.use_deterministic_algorithms(strict)
            fa4.flash_attn_backward(*given, deterministic=False, impl="emulator")
    finally:
        torch.use_deterministic_algorithms(False)
    assert [(x.spec.deterministic, len(x.calls)) for x in built] == [(False, 2), (True, 1)]


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (5, 0)])
@pytest.mark.parametrize("with_dlse", [False, True])
def test_empty_problems_launch_nothing(
    rows: int, keys: int, with_dlse: bool, built: list[BackwardDouble]
) -> None:
    """Zeros, but for the sink, which is the LSE where there are no keys."""
    dout, *inputs = draw(rows=rows, keys=keys)
    options = {"learnable_sink": SINK}
    out, lse = saved(*inputs, **options)
    dlse = np.random.default_rng(2).standard_normal(lse.shape, np.float32) if with_dlse else None
    found, expected = (
        fa4.flash_attn_backward(dout, *inputs, out, lse, dlse=dlse, impl=impl, **options)
        for impl in ("emulator", "reference")
    )
    same(found, expected)
    assert built == [] and (found.dsink.any() == (with_dlse and rows > 0))


def test_the_way_to_a_gpu(built: list[BackwardDouble], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a B200 would be given is what the emulator is given."""
    monkeypatch.setattr(on_gpu, "find_fault", lambda family, call: "")
    monkeypatch.setattr(on_gpu, "machine_of", lambda family: lambda call: (B300, 132))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    dout, *inputs = tensors()
    out, lse = saved(*inputs)
    found = [
        fa4.flash_attn_backward(dout, *inputs, out, lse, impl=impl)
        for impl in ("sm100", "emulator")
    ]
    same(*found)
    assert [len(double.calls) for double in built] == [1, 1] and built[0].spec.gpu is B300


N = np.zeros
DOUT, Q, K, V = draw()
OUT, LSE = saved(Q, K, V)
GIVEN = {"dout": DOUT, "q": Q, "k": K, "v": V, "out": OUT, "lse": LSE}
WRONG_LSE = LSE.copy()
WRONG_LSE[1, 2, 3] = np.nan
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dout": DOUT[:, :5]}, ValueError, "dout must have shape (2, 20, 4, 32); got (2, 5, 4, 32)"),
    ({"dout": N((2, 20, 4, 64), BF16)}, ValueError, "dout must have shape (2, 20, 4, 32)"),
    ({"dout": DOUT.astype(np.float32)}, TypeError, "dout must be bfloat16, as q is; got float32"),
    ({"dout": DOUT.astype(np.float16)}, TypeError, "dout must be bfloat16, as q is; got float16"),
    ({"dout": DOUT.astype(np.int32)}, TypeError, "of bf16, fp16, fp32, fp64; got int32"),
    ({"dout": torch.zeros(2, 20, 4, 32)}, TypeError, "dout must be no torch tensor, as q is"),
    ({"dout": None}, TypeError, "dout must be the gradient of the call's out; got None"),
    ({"dout": "yes"}, TypeError, "dout must be a NumPy array"),
    ({"out": None}, TypeError, "out must be the call's out; got None"),
    ({"out": OUT[:, :, :2]}, ValueError, "out must have shape (2, 20, 4, 32); got (2, 20, 2, 32)"),
    ({"out": OUT.astype(np.float64)}, TypeError, "out must be bfloat16, as q is; got float64"),
    ({"out_residual": OUT[:1]}, ValueError, "out_residual must have shape (2, 20, 4, 32)"),
    ({"out_residual": OUT.astype(np.float32)}, TypeError, "out_residual must be bfloat16, as q is"),
    ({"out_residual": torch.zeros(2, 20, 4, 32)}, TypeError, "must be no torch tensor"),
    ({"lse": None}, TypeError, "lse must be the call's lse (return_lse=True); got None"),
    ({"lse": LSE[:, :, :7]}, ValueError, "lse must have shape (2, 4, 20); got (2, 4, 7)"),
    ({"lse": np.moveaxis(LSE, 1, 2)}, ValueError, "lse must have shape (2, 4, 20)"),
    ({"lse": LSE.astype(np.float64)}, TypeError, "lse must be float32, as the forward"),
    ({"lse": LSE.astype(BF16)}, TypeError, "lse must be float32, as the forward"),
    ({"lse": WRONG_LSE}, ValueError, "finite where rows see keys; got nan at (1, 2, 3)"),
    ({"lse": np.where(LSE.max() == LSE, np.inf, LSE)}, ValueError, "rows see keys; got inf at ("),
    ({"lse": np.full_like(LSE, -np.inf)}, ValueError, "rows see keys; got -inf at (0, 0, 0)"),
    ({"dlse": LSE[:1]}, ValueError, "dlse must have shape (2, 4, 20); got (1, 4, 20)"),
    ({"dropout_p": 0.5, "dropout_seed": 1}, NotImplementedError, "dropout_p: no random numbers"),
    ({"score_mod": max}, NotImplementedError, "got score_mod without score_mod_bwd"),
    ({"config": BackwardConfig(tile_m=64)}, NotImplementedError, "config: 128 x 128 tiles"),
    ({"deterministic": None}, TypeError, "deterministic must be True or False; got None"),
    ({"impl": "sm100"}, ValueError, "torch tensors on a CUDA GPU; q is a ndarray"),
    ({"impl": "gpu"}, ValueError, "impl must be one of auto, sm100"),
    ({"q": Q.astype(np.float32), "k": K.astype(np.float32), "v": V.astype(np.float32)},
     NotImplementedError, "SM100 backward kernel, fp32, fp64"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), BAD)
def test_bad_calls_launch_nothing(
    changes: dict[str, Any], error: Any, message: str, built: list[BackwardDouble]
) -> None:
    """One line that names the argument, the value and what is allowed; nothing is overwritten."""
    given: dict[str, Any] = GIVEN | {"impl": "emulator"} | changes
    before = {name: x.copy() for name, x in given.items() if isinstance(x, np.ndarray)}
    with pytest.raises(error, match=re.escape(message)) as caught:
        fa4.flash_attn_backward(**given)
    assert "\n" not in str(caught.value)
    assert sum(len(double.calls) for double in built) == 0
    assert all(given[name].tobytes() == x.tobytes() for name, x in before.items())


def test_what_lies_where_no_rows_are_is_not_looked_at() -> None:
    """Also -inf where a mask may hide all keys of a row."""
    lse = LSE.copy()
    lse[0, :, 0] = -np.inf
    assert fa4.flash_attn_backward(**GIVEN | {"lse": lse}, window_size=(None, -31)) is not None
    lse[:, :, 15:] = np.nan
    options = {"seqused_q": np.array([15, 15]), "causal": True}
    assert fa4.flash_attn_varlen_backward(**GIVEN | {"lse": lse}, **options) is not None


def test_tensors_on_another_device(built: list[BackwardDouble]) -> None:
    dout, *inputs = tensors()
    out, lse = saved(*inputs)
    for name in ("dout", "out", "lse", "dlse"):
        given = {"dout": dout, "out": out, "lse": lse, "dlse": lse}
        given[name] = given[name].to("meta")
        dout_, out_, lse_, dlse_ = given.values()
        with pytest.raises(ValueError, match=f"{name} must be on cpu, as q is; got meta"):
            fa4.flash_attn_backward(dout_, *inputs, out_, lse_, dlse=dlse_, impl="emulator")
    assert built == []


NO_GRADIENT: list[tuple[dict[str, Any], str]] = [
    ({"dropout_p": 0.5}, "dropout_p: no random numbers in the kernel; got 0.5"),
    ({"score_mod": max}, "score_mod"),
    ({"config": BackwardConfig(tile_n=64)}, "config: 128 x 128 tiles"),
]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(("options", "message"), NO_GRADIENT)
def test_a_missing_gradient_is_refused_with_the_call(
    options: dict[str, Any], message: str, traced: bool, built: list[BackwardDouble]
) -> None:
    """In one line with the reason and the way out; under torch.compile too."""
    _, *inputs = tensors()
    function: Any = fa4.flash_attn_func
    if traced:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, backend="eager")
    with pytest.raises(NotImplementedError, match=re.escape(message)) as caught:
        function(*[x.requires_grad_() for x in inputs], **options, impl="emulator")
    assert "call under torch.no_grad()" in str(caught.value) and "\n" not in str(caught.value)
    assert built == []


def test_auto_takes_the_reference_for_a_missing_gradient(
    built: list[BackwardDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the forward kernel does is computed without gradients; with them it is refused."""
    _, *inputs = tensors()
    options = {"config": BackwardConfig(tile_n=64)}
    call = make_call(*inputs, options, varlen=False)
    assert emulator.supports(call) == "" and "tile_n" in emulator.supports(call, gradient=True)
    q, k, v = (x.requires_grad_() for x in inputs)
    with pytest.raises(NotImplementedError, match="got tile_n = 64"):
        fa4.flash_attn_func(q, k, v, **options, impl="emulator")
    monkeypatch.setenv(choose.EMULATE, "1")
    assert choose.choose(call) == "emulator" and choose.choose(call, gradient=True) == "reference"
    fa4.flash_attn_func(q, k, v, **options).float().sum().backward()
    assert q.grad is not None and built == []


@pytest.mark.parametrize(
    ("dims", "keys", "group"),
    [((192, 128), 30, 2), ((128, 128), 200, 2), ((128, 128), 30, 1), ((64, 128), 200, 1)],
)
def test_pairs_of_ctas(
    dims: tuple[int, int], keys: int, group: int, built: list[BackwardDouble]
) -> None:
    """Chosen by head dims and keys; what is launched is the same."""
    q, k = (torch.randn(1, n, 1, dims[0]).bfloat16() for n in (20, keys))
    v = torch.randn(1, keys, 1, dims[1]).bfloat16()
    out, lse = saved(q, k, v)
    given = (torch.ones_like(out), q, k, v, out, lse)
    found, expected = (
        fa4.flash_attn_backward(*given, impl=impl) for impl in ("emulator", "reference")
    )
    same(found, expected)
    assert built[0].spec.cta_group == group


@pytest.mark.parametrize("options", [{}, {"causal": True, "learnable_sink": None}])
def test_torch_compile(options: dict[str, Any], built: list[BackwardDouble]) -> None:
    """One graph, forward and backward: the same kernels, the same bits."""
    torch._dynamo.reset()
    compiled = torch.compile(fa4.flash_attn_func, fullgraph=True, backend="aot_eager")
    results = []
    for function in (fa4.flash_attn_func, compiled):
        _, *inputs = tensors()
        inputs = [x.requires_grad_() for x in inputs]
        if "learnable_sink" in options:
            options = options | {"learnable_sink": torch.tensor(SINK, requires_grad=True)}
            inputs.append(options["learnable_sink"])
        function(*inputs[:3], **options, impl="emulator").float().square().sum().backward()
        results.append([x.grad for x in inputs])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    assert sum(len(double.calls) for double in built) == 2


def test_operators_are_well_formed(built: list[BackwardDouble]) -> None:
    """torch's own checks of schema, fakes and autograd."""
    from fa4.call import torch_op

    dout, *inputs = tensors()
    sink = torch.tensor(SINK, requires_grad=True)
    q, k, v = (x.requires_grad_() for x in inputs)
    call = make_call(q, k, v, {"learnable_sink": sink}, varlen=False)
    arguments = torch_op.to_operator(call)
    out, lse, seed = torch.ops.fa4.attention_forward(*arguments, "emulator", True, True)
    given = [x.detach() for x in (dout, lse, out, lse, seed)]
    for dlse in (given[1], None):
        torch.library.opcheck(
            torch.ops.fa4.attention_backward,
            (given[0], dlse, *given[2:], *arguments, "emulator"),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_second_derivatives_are_refused(built: list[BackwardDouble]) -> None:
    """When they are asked for, not before."""
    _, *inputs = tensors()
    q, k, v = (x.requires_grad_() for x in inputs)
    out = fa4.flash_attn_func(q, k, v, impl="emulator")
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^fa4 has no second derivatives[^\n]*$"):
        grad.sum().backward()


def test_changed_inputs_are_noticed(built: list[BackwardDouble]) -> None:
    """Autograd keeps the tensors, and sees that one was written to."""
    _, *inputs = tensors()
    q, k, v = (x.requires_grad_() for x in inputs)
    out = fa4.flash_attn_func(q, k, v, impl="emulator")
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert built == []


@pytest.mark.parametrize("impl", ["reference", "oracle"])
@pytest.mark.parametrize("shape", [(0, 3, 4), (1, 0, 4), (1, 3, 0), (0, 0, 0)])
def test_a_sink_has_a_gradient_where_nothing_is_computed(impl: str, shape: tuple) -> None:
    """0, of its shape: not None, which says that there was no sink."""
    batch, rows, keys = shape
    q, k = (np.zeros((batch, n, 2, 8), np.float32) for n in (rows, keys))
    sink = np.ones(2, np.float32)
    out, lse = fa4.flash_attn_func(q, k, k, learnable_sink=sink, return_lse=True, impl=impl)
    grads = fa4.flash_attn_backward(out, q, k, k, out, lse, learnable_sink=sink, impl=impl)
    assert np.array_equal(grads.dsink, np.zeros(2))
