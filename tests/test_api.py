"""The public functions: bad input, arrays of every kind, torch and its gradients."""

import inspect
import re

import ml_dtypes
import numpy as np
import pytest
import torch

import fa4
from fa4.call.checked import VARLEN_DEFAULTS
from fa4.reference import BlockSparseTensors
from tests.reference.support import arrays, worst

SHAPE = (2, 6, 10, 4, 2, 8, 8)


def changed(**shapes):
    """q, k, v with one of them replaced by zeros of another shape."""
    q, k, v = arrays(SHAPE)
    given = {"q": q, "k": k, "v": v}
    return {n: np.zeros(shapes[n]) if n in shapes else x for n, x in given.items()}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (changed(q=(6, 4, 8)), "q must have rank 4, (B, S, heads, dim); got shape (6, 4, 8)"),
        (changed(k=(2, 10, 2, 9), v=(2, 10, 2, 8)), "q and k must share head_dim; got 8 and 9"),
        (changed(v=(2, 11, 2, 8)), "k and v must agree but for head_dim"),
        (changed(q=(2, 6, 3, 8)), "must be a multiple of those of k; got 3 and 2"),
        (changed(q=(3, 6, 4, 8)), "q and k must share the batch size; got 3 and 2"),
        (changed(q=(2, 6, 0, 8)), "q must have at least one head and head_dim 1"),
    ],
)
def test_wrong_shapes_are_named(inputs, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        fa4.flash_attn_func(**inputs)


def sparse(cnt=((1, 1),), idx=None, size=(4, 8)):
    """Block lists for SHAPE: 2 blocks of 4 rows, 2 of 8 keys."""
    counts = np.array(cnt)[None]
    indices = np.zeros((*counts.shape, 2), int) if idx is None else np.array(idx)
    return BlockSparseTensors(counts, indices, block_size=size)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale must be finite; got nan"),
        ({"softmax_scale": "x"}, TypeError, "softmax_scale must be a number; got 'x'"),
        ({"window_size": (1, -5)}, ValueError, "got left 1 and right -5"),
        ({"window_size": 3}, TypeError, "window_size must be a pair (left, right); got 3"),
        ({"window_size": (1.5, 0)}, TypeError, "left must be an integer or None; got 1.5"),
        ({"softcap": -1.0}, ValueError, "softcap must be at least 0.0; got -1.0"),
        ({"softcap": 1.0, "score_mod": max}, ValueError, "softcap and score_mod exclude"),
        ({"mask_mod": max, "causal": True}, ValueError, "mask_mod replaces causal"),
        ({"mask_mod": 3}, TypeError, "mask_mod must be callable; got 3"),
        ({"learnable_sink": np.zeros(3)}, ValueError, "learnable_sink must be (4,); got"),
        ({"num_splits": -1}, ValueError, "num_splits must be between 0 and 256; got -1"),
        ({"num_splits": 2.0}, TypeError, "num_splits must be an integer; got 2.0"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p must be below 1; got 1.0"),
        ({"dropout_p": -0.1}, ValueError, "dropout_p must be at least 0.0; got -0.1"),
        ({"dropout_seed": -1}, ValueError, "dropout_seed must be in [0, 2**64); got -1"),
        ({"pack_gqa": "yes"}, TypeError, "pack_gqa must be True, False or None; got 'yes'"),
        ({"config": 128}, TypeError, "config must be a ForwardConfig or BackwardConfig; got 128"),
        ({"q_descale": np.ones((2, 2))}, ValueError, "q_descale applies to FP8 inputs only"),
        ({"impl": "cuda"}, ValueError, "impl must be one of auto, sm100, sm90, emulator, "),
        ({"block_sparse_tensors": sparse(((1, 1, 1),))}, ValueError, "mask_block_cnt must be"),
        ({"block_sparse_tensors": sparse(((3, 1),))}, ValueError, "must be in [0, 2]; got 3"),
        (
            {"block_sparse_tensors": sparse(((1, 1),), np.full((1, 1, 2, 2), 7))},
            ValueError,
            "mask_block_idx must be in [0, 2); got 7",
        ),
    ],
)  # fmt: skip
def test_wrong_options_are_named(options, error, message) -> None:
    with pytest.raises(error, match=re.escape(message)) as caught:
        fa4.flash_attn_func(*arrays(SHAPE), **options)
    assert "\n" not in str(caught.value)


def varlen(**options):
    """A packed call with one option changed."""
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in arrays(SHAPE))
    good = {"cu_seqlens_q": np.array([0, 6, 12]), "cu_seqlens_k": np.array([0, 10, 20])}
    return fa4.flash_attn_varlen_func(q, k, v, **(good | options))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cu_seqlens_q": np.array([0, 8, 6])}, ValueError, "must not decrease; got 8 then 6"),
        ({"cu_seqlens_q": np.array([1, 6, 12])}, ValueError, "cu_seqlens_q must start with 0"),
        ({"cu_seqlens_k": np.array([0, 10, 21])}, ValueError, "end within the 20 rows; got 21"),
        ({"cu_seqlens_k": np.array([0, 10.0])}, TypeError, "cu_seqlens_k must hold integers"),
        ({"cu_seqlens_k": np.array([0, 20])}, ValueError, "q has 2 sequences, k has 1"),
        ({"cu_seqlens_q": None}, ValueError, "q must have rank 4"),
        ({"seqused_k": np.array([10, 11])}, ValueError, "seqused_k[1] must be in [0, 10]; got 11"),
        ({"seqused_q": np.array([1, 2, 3])}, ValueError, "seqused_q must have 2 entries; got 3"),
        ({"max_seqlen_q": 5}, ValueError, "max_seqlen_q must be at least 6; got 5"),
        ({"page_table": np.zeros((2, 2), int)}, ValueError, "page_table and cu_seqlens_k exclude"),
    ],
)
def test_wrong_packing_is_named(options, error, message) -> None:
    assert varlen().shape == (12, 4, 8)
    with pytest.raises(error, match=re.escape(message)):
        varlen(**options)


def test_page_indices_are_checked_where_they_are_used() -> None:
    q, _, _ = arrays(SHAPE)
    pages = np.zeros((3, 4, 2, 8))
    table, used = np.array([[0, 1, 99], [2, 3, -1]]), np.array([8, 4])
    run = fa4.flash_attn_varlen_func
    assert run(q, pages, pages, page_table=table, seqused_k=used).shape == q.shape
    with pytest.raises(ValueError, match=re.escape("page_table[1, 1] must be in [0, 3); got 3")):
        run(q, pages, pages, page_table=table, seqused_k=np.array([8, 5]))
    with pytest.raises(ValueError, match="page_table needs seqused_k"):
        run(q, pages, pages, page_table=table)


def test_wrong_types_are_named() -> None:
    q, k, v = arrays(SHAPE)
    with pytest.raises(TypeError, match="q, k, v must share one dtype"):
        fa4.flash_attn_func(q, k.astype(np.float32), v)
    with pytest.raises(TypeError, match="int64"):
        fa4.flash_attn_func(*(x.astype(np.int64) for x in (q, k, v)))
    with pytest.raises(TypeError, match="q must be a NumPy array, a torch tensor or have"):
        fa4.flash_attn_func([1.0], k, v)
    out, lse = fa4.flash_attn_func(q, k, v, return_lse=True)
    with pytest.raises(TypeError, match="unknown option 'casual'"):
        fa4.flash_attn_backward(out, q, k, v, out, lse, casual=True)
    with pytest.raises(ValueError, match=r"dout must have shape \(2, 6, 4, 8\)"):
        fa4.flash_attn_backward(out[:, :3], q, k, v, out, lse)
    with pytest.raises(ValueError, match="needs score_mod_bwd"):
        fa4.flash_attn_backward(out, q, k, v, out, lse, score_mod=lambda s, *_: s)
    low = [x.astype(ml_dtypes.float8_e4m3fn) for x in (q, k, v)]
    with pytest.raises(ValueError, match="backward pass takes fp64, fp32, bf16 or fp16; got e4m3"):
        fa4.flash_attn_backward(out, *low, out, lse)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (np.float32, np.float32),
        (np.float16, np.float16),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
        (ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16),
        (ml_dtypes.float8_e5m2, ml_dtypes.bfloat16),
    ],
)
def test_what_goes_in_comes_out(dtype, expected) -> None:
    inputs = arrays(SHAPE, dtype=dtype)
    out, lse = fa4.flash_attn_func(*inputs, return_lse=True)
    assert out.dtype == expected and lse.dtype == np.float32
    assert isinstance(fa4.flash_attn_func(*inputs), np.ndarray)
    raw = {2: torch.uint16, 1: torch.uint8}
    kinds = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn,
             "float8_e5m2": torch.float8_e5m2}  # fmt: skip
    name = np.dtype(dtype).name
    tensors = [
        torch.tensor(x.view(f"uint{8 * x.itemsize}")).view(raw[x.itemsize]).view(kinds[name])
        if name in kinds
        else torch.tensor(x)
        for x in inputs
    ]
    got, got_lse = fa4.flash_attn_func(*tensors, return_lse=True)
    assert isinstance(got, torch.Tensor) and got_lse.dtype == torch.float32
    assert worst(got.double(), out) == 0 and worst(got_lse, lse) == 0


class _DLPack:
    """An array of some other library: only the DLPack protocol."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_anything_with_dlpack_goes_in() -> None:
    inputs = arrays(SHAPE)
    assert worst(fa4.flash_attn_func(*map(_DLPack, inputs)), fa4.flash_attn_func(*inputs)) == 0


@pytest.mark.parametrize("impl", ["reference", "oracle"])
def test_torch_gradcheck(impl) -> None:
    tensors = [torch.tensor(x, requires_grad=True) for x in arrays((1, 3, 4, 2, 1, 2, 2))]
    sink = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)

    def run(q, k, v, s):
        return tuple(
            fa4.flash_attn_func(q, k, v, causal=True, learnable_sink=s, impl=impl, return_lse=True)
        )

    assert torch.autograd.gradcheck(run, (*tensors, sink))


def test_torch_gradients_keep_the_element_type() -> None:
    tensors = [torch.tensor(x).bfloat16().requires_grad_() for x in arrays(SHAPE)]
    fa4.flash_attn_func(*tensors).float().square().sum().backward()
    assert all(x.grad.dtype == torch.bfloat16 and x.grad.abs().sum() > 0 for x in tensors)


def test_oracle_results_stay_float64() -> None:
    inputs = arrays(SHAPE, dtype=ml_dtypes.bfloat16)
    out, lse = fa4.flash_attn_func(*inputs, impl="oracle", return_lse=True)
    assert out.dtype == lse.dtype == np.float64


@pytest.mark.parametrize("function", [fa4.flash_attn_func, fa4.flash_attn_varlen_func])
def test_every_option_arrives_under_its_name(function, monkeypatch) -> None:
    """Each keyword of the signature, with its own value; the defaults are the request's."""
    seen = {}
    monkeypatch.setattr(fa4.api, "make_call", lambda q, k, v, options, **_: seen.update(options))
    monkeypatch.setattr(fa4.api, "attend", lambda *_, **__: None)
    names = [*inspect.signature(function).parameters][3:]
    given = {name: object() for name in names if name not in ("impl", "return_lse")}
    function(1, 2, 3, **given)
    assert seen == given
    function(1, 2, 3)
    assert seen == {name: VARLEN_DEFAULTS[name] for name in given}
