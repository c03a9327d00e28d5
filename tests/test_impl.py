"""impl="auto", "sm100" and "emulator": what is picked, what runs, what is refused, and torch.

The kernel runs in the emulator. One kernel serves most tests here: d 64, causal, LSE, 2 query heads
packed on a KV head, at most 128 rows.
"""

from __future__ import annotations

import contextlib
import logging
import re
import types

import ml_dtypes
import numpy as np
import pytest
import torch
from cutlass import cute
from torch._subclasses.fake_tensor import FakeTensorMode

import fa4
from fa4.backends import emulator as emulator_backend
from fa4.backends import find_backend, on_gpu
from fa4.backends import kernel as kernel_backend
from fa4.backends import sm100 as sm100_backend
from fa4.backends.kernel_backward import describe_backward
from fa4.call import checked, choose, form, torch_op
from fa4.call.checked import make_call
from fa4.compiled import build as builder
from fa4.compiled import toolchain
from fa4.compiled.support import NotSupported
from fa4.compiled.variants import choose_backward_spec
from fa4.config import BackwardConfig
from fa4.testing import assert_within_budget
from fa4.testing.budget import Outputs
from fa4.testing.inputs import dense_inputs

ROWS, KEYS = 40, 150


def call_of(tensors, **options):
    return make_call(*tensors, options, varlen=False)


def forget_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call has been checked or given a kernel yet."""
    monkeypatch.setattr(form, "_forms", {})
    monkeypatch.setattr(checked, "_known", {})


def draw(dtype=ml_dtypes.bfloat16, rows=ROWS, keys=KEYS, dim=64, batch=1):
    rng = np.random.default_rng(0)
    shapes = ((batch, rows, 2, dim), (batch, keys, 1, dim), (batch, keys, 1, dim))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def tensors(**options):
    return [torch.tensor(x.astype(np.float32)).bfloat16() for x in draw(**options)]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Kernels that were built or launched; nothing runs."""
    seen: list[object] = []
    forget_forms(monkeypatch)
    monkeypatch.setattr(kernel_backend, "build", lambda *given: seen.append(given) or print)
    monkeypatch.setattr("fa4.emulator.launch", lambda *given, **_: seen.append(given) or [])
    return seen


@pytest.fixture
def picks(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """The log's lines, from a fresh start."""
    monkeypatch.setattr(choose, "_said", set())
    caplog.set_level(logging.INFO, "fa4")
    return lambda: [(record.levelno, record.getMessage()) for record in caplog.records]


def test_emulator_on_arrays() -> None:
    """The compiled kernel, within the budget; arrays of ml_dtypes in, the same out."""
    q, k, v = draw()
    out, lse = fa4.flash_attn_func(q, k, v, causal=True, impl="emulator", return_lse=True)
    assert (out.dtype, lse.dtype) == (q.dtype, np.float32)
    inputs = dense_inputs(q, k, v, causal=True)
    assert_within_budget(inputs, Outputs(out, lse))
    with pytest.raises(AssertionError):
        assert_within_budget(inputs, Outputs(out, lse + np.float32(0.01)))
    assert isinstance(fa4.flash_attn_func(q, k, v, causal=True, impl="emulator"), np.ndarray)


def test_emulator_on_tensors_with_gradients() -> None:
    """torch in, torch out; gradients by the kernels, also those through the LSE."""
    found = {}
    for impl in ("emulator", "reference"):
        q, k, v = (x.requires_grad_() for x in tensors())
        out, lse = fa4.flash_attn_func(q, k, v, causal=True, impl=impl, return_lse=True)
        (out.float().square().sum() + lse.sum()).backward()
        found[impl] = [out.detach(), lse.detach(), q.grad, k.grad, v.grad]
    for ours, expected in zip(*found.values(), strict=True):
        assert ours.dtype == expected.dtype and ours.shape == expected.shape
        torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.02)
    assert found["emulator"][2].abs().sum() > 0


def test_operator_is_well_formed() -> None:
    """torch's own checks: schema, fake implementation, autograd, tracing with dynamic sizes."""
    q, k, v = (x.requires_grad_() for x in tensors(rows=8, keys=16))
    call = torch_op.to_operator(call_of((q, k, v), causal=True))
    torch.library.opcheck(torch.ops.fa4.attention_forward, (*call, "emulator", True, True))


@pytest.mark.parametrize("impl", ["emulator", "auto"])
def test_torch_compile(impl, monkeypatch) -> None:
    """In one graph, forward and backward."""
    monkeypatch.setenv(choose.EMULATE, "1")

    def step(q, k, v):
        return fa4.flash_attn_func(2 * q, k, v, causal=True, impl=impl).float().sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for function in (step, compiled):
        q, k, v = (x.requires_grad_() for x in tensors())
        value = function(q, k, v)
        value.backward()
        results.append((value.detach(), q.grad))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_fake_tensors_of_a_gpu() -> None:
    """Shapes without a GPU; varlen without max_seqlen_q too, so nothing looks at the offsets."""
    with FakeTensorMode():
        q = torch.empty(10, 4, 64, dtype=torch.float16, device="cuda")
        k = torch.empty(12, 2, 64, dtype=torch.float16, device="cuda")
        v = torch.empty(12, 2, 32, dtype=torch.float16, device="cuda")
        offsets = torch.empty(3, dtype=torch.int32, device="cuda")
        out, lse = fa4.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, impl="sm100", return_lse=True
        )
    assert (out.shape, out.dtype, out.device.type) == ((10, 4, 32), torch.float16, "cuda")
    assert (lse.shape, lse.dtype) == ((4, 10), torch.float32)


@pytest.mark.parametrize("impl", ["auto", "reference", "sm90"])
def test_meta_tensors_have_shapes(impl: str) -> None:
    """As everywhere in torch, nothing is computed: O, LSE, packed offsets and gradients."""
    q, k, v = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for shape in ((10, 4, 64), (12, 2, 64), (12, 2, 32))
    )
    offsets = torch.empty(3, dtype=torch.int32, device="meta")
    given = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "impl": impl}
    out, lse = fa4.flash_attn_varlen_func(q, k, v, **given, return_lse=True)
    assert (out.shape, out.dtype, out.device.type) == ((10, 4, 32), torch.bfloat16, "meta")
    assert (lse.shape, lse.dtype) == ((4, 10), torch.float32)
    out.sum().backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v))
    dense = fa4.flash_attn_func(q[None], k[None], v[None], causal=True, impl=impl)
    assert dense.shape == (1, 10, 4, 32)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Architectures of the kernels that are built, for a B200 that is the emulator."""
    from fa4 import emulator

    built = []

    def build(spec, arch):
        kernel = builder.build(spec, arch)
        built.append(arch)
        return lambda *values: emulator.launch(kernel, *values)

    forget_forms(monkeypatch)
    monkeypatch.setattr(kernel_backend, "build", build)
    monkeypatch.setattr(on_gpu, "find_fault", lambda family, call: "")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    properties = types.SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return built


def test_the_way_to_a_gpu(monkeypatch) -> None:
    """What a B200 would be given is what the emulator is given."""
    q, k, v = tensors()
    expected = fa4.flash_attn_func(q, k, v, causal=True, impl="emulator", return_lse=True)
    built = pretend_gpu(monkeypatch)
    out, lse = sm100_backend.forward(call_of((q, k, v), causal=True))
    assert built == ["sm_100a"]
    assert torch.equal(out, expected.out) and torch.equal(lse, expected.lse)


def test_other_gpus_are_refused(monkeypatch) -> None:
    built = pretend_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ValueError, match=r"SM100 kernel.*B200.*has compute capability 9\.0"):
        sm100_backend.forward(call_of(tensors(), causal=True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(ValueError, match=r"SM90 kernel runs on sm_90a \(H200\); .* 10\.0"):
        find_backend("sm90").forward(call_of(tensors(), causal=True))
    assert built == []


def test_a_smaller_gpu_of_a_model_is_planned_for(monkeypatch) -> None:
    """As an H100 PCIe, with 114 SMs: CTAs that stay are as many, heads are divided for as many."""
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    properties = types.SimpleNamespace(multi_processor_count=114)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    call = call_of(tensors(), causal=True)
    gpu, num_sms = on_gpu.machine_of("sm90")(call)
    assert gpu.sm_count == num_sms == 114
    spec = choose_backward_spec(describe_backward(call), gpu)
    assert spec.gpu.sm_count == 114


def test_a_missing_compiler_is_named(monkeypatch) -> None:
    monkeypatch.setattr(toolchain, "installed_toolchains", dict)
    monkeypatch.setattr(toolchain, "loaded_flavour", lambda: None)
    monkeypatch.setattr(builder, "_plain_key", builder._plain_key.__wrapped__)
    with pytest.raises(ImportError, match=r"CuTe-DSL is not installed.*pip install"):
        fa4.flash_attn_func(*draw(), impl="emulator")


def misaligned():
    q, k, v = tensors()
    flat = torch.zeros(q.numel() + 1, dtype=q.dtype)
    return flat[1:].view(q.shape), k, v


BAD = [
    (draw(), {"impl": "sm100"}, ValueError, "torch tensors on a CUDA GPU; q is a ndarray"),
    (tensors(), {"impl": "sm100"}, ValueError, "torch tensors on a CUDA GPU; q is on cpu"),
    (draw(np.float32), {}, NotSupported, "convert to bf16 or fp16; got fp32"),
    (draw(ml_dtypes.float8_e5m2), {}, NotSupported, "16-bit types only; got e5m2"),
    (draw(np.int16), {}, TypeError, "int16"),
    (draw(dim=60), {}, NotSupported, "got (d, dv) = (60, 60)"),
    (misaligned(), {}, NotSupported, "at a multiple of 16 bytes; q has 0x"),
    ([x.transpose(1, 3) for x in tensors(dim=16)], {}, ValueError, "q and k must share head_dim"),
    ([x[..., ::2] for x in tensors()], {}, NotSupported, "the last dimension must be contiguous"),
    (draw(), {"dropout_p": 0.5}, NotSupported, "no random numbers in the kernel; got 0.5"),
    (draw(), {"num_splits": 3}, NotSupported, "num_splits: one CTA computes all keys"),
    (draw(), {"num_splits": -2}, ValueError, "num_splits must be between 0 and 256; got -2"),
    (draw(), {"num_splits": 257}, ValueError, "num_splits must be between 0 and 256; got 257"),
    (draw(), {"block_sparse_tensors": 1}, ValueError, "needs mask_block_cnt"),
    (draw(), {"q_descale": np.ones((1, 1))}, ValueError, "FP8 inputs only; q, k, v are bf16"),
    (draw(), {"score_mod": lambda s, *_: s}, NotSupported, "score_mod"),
    (draw(), {"softcap": -1.0}, ValueError, "softcap must be at least 0.0; got -1.0"),
    (draw(), {"softmax_scale": float("nan")}, ValueError, "softmax_scale must be finite; got nan"),
    (draw(), {"softmax_scale": -0.5}, NotSupported, "positive; got -0.5"),
    (draw(), {"learnable_sink": np.zeros(3)}, ValueError, "learnable_sink must be (2,); got shape"),
    (draw(), {"config": 3}, TypeError, "config must be a ForwardConfig or BackwardConfig; got 3"),
]  # fmt: skip


@pytest.mark.parametrize(("inputs", "options", "error", "message"), BAD)
def test_bad_calls_launch_nothing(inputs, options, error, message, launched) -> None:
    """One line that names what is wrong, before anything is compiled."""
    with pytest.raises(error, match=re.escape(message)) as caught:
        fa4.flash_attn_func(*inputs, **({"impl": "emulator"} | options))
    assert launched == [] and "\n" not in str(caught.value)
    with contextlib.suppress(AttributeError, RuntimeError):  # the fixture does see launches
        fa4.flash_attn_func(*draw(), impl="emulator")
    assert launched


def test_wrong_lengths_launch_nothing(launched) -> None:
    q, k, v = (x[0] for x in draw())
    for options, message in (
        ({"cu_seqlens_q": np.array([0, 50])}, "cu_seqlens_q must end within the 40 rows; got 50"),
        ({"cu_seqlens_q": np.array([0, 40, 40])}, "q has 2 sequences, k has 1"),
        ({"cu_seqlens_q": np.array([], int)}, "cu_seqlens must have at least one entry"),
        ({"cu_seqlens_q": np.array([0, 40]), "max_seqlen_q": 30}, "must be at least 40; got 30"),
        ({"cu_seqlens_q": np.array([0, 40]), "seqused_k": np.array([1, 2])}, "1 entries"),
    ):
        with pytest.raises(ValueError, match=message):
            fa4.flash_attn_varlen_func(
                q, k, v, cu_seqlens_k=np.array([0, 150]), impl="emulator", **options
            )
    with pytest.raises(NotSupported, match="page_table: keys and values in one tensor"):
        fa4.flash_attn_varlen_func(
            *draw(), page_table=np.zeros((1, 1), int), seqused_k=np.array([1]), impl="emulator"
        )
    assert launched == []


def test_gradients_of_fake_tensors() -> None:
    """Shapes and types of every gradient, with nothing computed."""
    with FakeTensorMode():
        q = torch.empty(1, 6, 4, 64, dtype=torch.float16, requires_grad=True)
        k = torch.empty(1, 9, 2, 64, dtype=torch.float16, requires_grad=True)
        v = torch.empty(1, 9, 2, 32, dtype=torch.float16, requires_grad=True)
        sink = torch.empty(4, dtype=torch.bfloat16, requires_grad=True)
        out = fa4.flash_attn_func(q, k, v, learnable_sink=sink, impl="sm100")
        out.sum().backward()
        for x in (q, k, v, sink):
            assert x.grad is not None
            assert (x.grad.shape, x.grad.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (5, 0)])
def test_empty_problems_launch_nothing(rows, keys, launched) -> None:
    """O = 0, LSE = -inf or the sink."""
    q, k, v = draw(rows=rows, keys=keys)
    sink = np.array([0.5, 2.0], np.float32)
    for given, expected in ((None, -np.inf), (sink, sink[:, None])):
        out, lse = fa4.flash_attn_func(
            q, k, v, learnable_sink=given, impl="emulator", return_lse=True
        )
        assert out.shape == q.shape and (out == 0).all()
        assert lse.shape == (1, 2, rows) and (lse == expected).all()
    out = fa4.flash_attn_func(*tensors(rows=rows, keys=keys), impl="emulator")
    assert out.shape == q.shape and not out.any()
    assert launched == []


def test_auto_says_once_what_it_picks(picks, launched, monkeypatch) -> None:
    """The reference, unless FA4_EMULATE asks for the emulator and the kernel can do the call."""
    monkeypatch.delenv(choose.EMULATE, raising=False)
    low, wide = draw(), draw(np.float32)
    for _ in range(2):
        fa4.flash_attn_func(*low)
        fa4.flash_attn_func(*tensors())
    assert picks() == [
        (logging.INFO, 'impl="auto" picks "reference": the tensors are not on a GPU, and '
                       "FA4_EMULATE is not set"),
    ]  # fmt: skip
    monkeypatch.setenv(choose.EMULATE, "1")
    assert choose.choose(call_of(low)) == "emulator"
    out = fa4.flash_attn_func(*wide)
    assert np.array_equal(out, fa4.flash_attn_func(*wide, impl="reference"))
    assert [text for _, text in picks()[1:]] == [
        'impl="auto" picks "emulator"',
        'impl="auto" picks "reference": SM100 kernel, fp32, fp64: the tensor core has no such '
        "product: convert to bf16 or fp16; got fp32",
    ]
    assert launched == []


@pytest.mark.parametrize(
    ("capability", "picked", "level"),
    [((10, 0), "sm100", logging.INFO), ((10, 3), "sm100", logging.INFO),
     ((9, 0), "sm90", logging.INFO), ((12, 0), "reference", logging.WARNING)],
)  # fmt: skip
def test_auto_looks_at_the_gpu(capability, picked, level, picks, monkeypatch) -> None:
    """Blackwell's and Hopper's run, gradients too; others warn, and use the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        given = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in tensors()]
        assert choose.choose(call_of(given)) == picked
        assert choose.choose(call_of(given, dropout_p=0.5)) == "reference"
        assert choose.choose(call_of(given), gradient=True) == picked
        small_tiles = call_of(given, config=BackwardConfig(tile_n=64))
        assert choose.choose(small_tiles) == picked
        assert choose.choose(small_tiles, gradient=True) == "reference"
    assert picks()[0][0] == level and f'picks "{picked}"' in picks()[0][1]
    if picked != "reference":
        assert "no random numbers" in picks()[1][1]
        assert f"{picked.upper()} backward kernel, config" in picks()[2][1]


def test_the_emulator_knows_the_cpu_only() -> None:
    q = torch.empty(1, 4, 1, 64, dtype=torch.float16, device="meta")
    with pytest.raises(ValueError, match=r"emulator.* takes tensors on the CPU; q is on meta"):
        emulator_backend.forward(call_of((q, q, q)))


def test_variable_lengths() -> None:
    """As the reference, also in rows that belong to no sequence."""
    q, k, v = (x[0] for x in draw(rows=60))
    options = {
        "cu_seqlens_q": np.array([0, 10, 10, 50]), "cu_seqlens_k": np.array([0, 20, 90, 140]),
        "seqused_k": np.array([20, 3, 0]), "causal": True, "return_lse": True,
    }  # fmt: skip
    ours = fa4.flash_attn_varlen_func(q, k, v, impl="emulator", **options)
    expected = fa4.flash_attn_varlen_func(q, k, v, impl="reference", **options)
    assert (ours.out[50:] == 0).all() and np.isneginf(ours.lse[:, 50:]).all()
    for found, wanted in zip(ours, expected, strict=True):
        np.testing.assert_allclose(
            found.astype(np.float32), wanted.astype(np.float32), rtol=2**-7, atol=1e-4
        )


@cute.jit
def shift(score, batch, head, row, key, info, aux):
    return score + aux[0][head]


@cute.jit
def pass_on(grad, score, batch, head, row, key, info, aux):
    return grad


def test_score_mod_of_the_kernel() -> None:
    """A CuTe-DSL function with an auxiliary tensor, also under torch.compile; with its derivative
    there are gradients, without it is refused when the call is made."""
    q, k, v = tensors(rows=8, keys=16)
    bias = torch.tensor([0.5, 2.0])

    def call(q, bias):
        return fa4.flash_attn_func(
            q, k, v, score_mod=shift, aux_tensors=[bias], impl="emulator", return_lse=True
        )

    ours = call(q, bias)
    plain = fa4.flash_attn_func(q, k, v, impl="reference", return_lse=True)
    torch.testing.assert_close(ours.lse, plain.lse + bias[:, None], rtol=1e-4, atol=1e-4)
    compiled = torch.compile(call, fullgraph=True, backend="eager")(q, bias)
    assert torch.equal(compiled.lse, ours.lse)
    q.requires_grad_()
    with pytest.raises(NotSupported, match=r"got score_mod without score_mod_bwd; an input requi"):
        call(q, bias)
    mods = {"score_mod": shift, "score_mod_bwd": pass_on, "aux_tensors": [bias]}
    shifted = {
        "score_mod": lambda s, b, h, i, j, info, aux: s + aux[0][h],
        "score_mod_bwd": lambda g, *_: g,
        "aux_tensors": [bias],
    }
    grads = []
    for impl, options in (("emulator", mods), ("reference", shifted)):
        q.grad = None
        fa4.flash_attn_func(q, k, v, **options, impl=impl).float().square().sum().backward()
        grads.append(q.grad)
    torch.testing.assert_close(*grads, rtol=0.02, atol=0.02)
