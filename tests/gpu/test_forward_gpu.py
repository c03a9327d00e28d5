"""The forward kernel on a B200 or B300: right, on the current stream, without host syncs."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

import fa4
from fa4.testing import assert_within_budget
from fa4.testing.budget import Outputs
from fa4.testing.inputs import dense_inputs

pytestmark = pytest.mark.gpu


def draw(shapes, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def to_gpu(array, device):
    kind = torch.float16 if array.dtype == np.float16 else torch.bfloat16
    return torch.tensor(array.astype(np.float32), device=device).to(kind)


def to_array(tensor, dtype):
    return tensor.float().cpu().numpy().astype(dtype)


CASES = [
    (dict(rows=rows, keys=keys), dict(causal=causal))
    for rows, keys in ((1, 1), (127, 129), (128, 128), (257, 513), (700, 300), (1, 1000))
    for causal in (False, True)
] + [
    (dict(dim=dim, dim_v=dim_v), {})
    for dim, dim_v in ((8, 8), (64, 64), (72, 40), (96, 128), (192, 128))
] + [
    (dict(dtype=np.float16), {}),
    (dict(heads=8, heads_k=1), {}),
    (dict(heads=6, heads_k=2), dict(causal=True)),
    (dict(batch=3), dict(window_size=(100, 50))),
    (dict(), dict(window_size=(30, None), causal=True)),
    (dict(), dict(learnable_sink=np.array([0.5, -1.0], np.float32))),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "options"), CASES)
def test_within_the_budget(sizes, options, device) -> None:
    size = dict(batch=2, rows=300, keys=400, heads=2, heads_k=2, dim=128, dtype=ml_dtypes.bfloat16)
    size |= sizes
    dim_v = size.get("dim_v", size["dim"])
    shapes = [
        (size["batch"], size["rows"], size["heads"], size["dim"]),
        (size["batch"], size["keys"], size["heads_k"], size["dim"]),
        (size["batch"], size["keys"], size["heads_k"], dim_v),
    ]
    arrays = draw(shapes, size["dtype"])
    result = fa4.flash_attn_func(
        *(to_gpu(x, device) for x in arrays), **options, impl="sm100", return_lse=True
    )
    outputs = Outputs(to_array(result.out, size["dtype"]), result.lse.cpu().numpy())
    assert_within_budget(dense_inputs(*arrays, **options), outputs)


def test_same_as_the_emulator(device) -> None:
    """To rounding: the same instructions, but for what the approximations leave open."""
    arrays = draw([(1, 200, 2, 64)] * 3, ml_dtypes.bfloat16)
    on_gpu = fa4.flash_attn_func(*(to_gpu(x, device) for x in arrays), impl="sm100")
    emulated = fa4.flash_attn_func(*arrays, impl="emulator").astype(np.float32)
    np.testing.assert_allclose(on_gpu.float().cpu().numpy(), emulated, rtol=2**-6, atol=2**-8)


def test_variable_lengths_without_host_sync(device) -> None:
    offsets = [0, 100, 100, 350]
    arrays = draw([(400, 4, 128), (400, 2, 128), (400, 2, 128)], ml_dtypes.bfloat16)
    q, k, v = (to_gpu(x, device) for x in arrays)
    cu = torch.tensor(offsets, dtype=torch.int32, device=device)

    def call():
        return fa4.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, impl="sm100", return_lse=True
        )

    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = fa4.flash_attn_varlen_func(
        *arrays, cu_seqlens_q=np.array(offsets), cu_seqlens_k=np.array(offsets), causal=True,
        impl="reference",
    )  # fmt: skip
    np.testing.assert_allclose(
        result.out.float().cpu().numpy(), expected.astype(np.float32), rtol=0.02, atol=0.02
    )


def test_current_stream(device) -> None:
    """The kernel waits for what its own stream has still to write."""
    arrays = draw([(1, 256, 2, 64)] * 3, ml_dtypes.bfloat16)
    q, k, v = (to_gpu(x, device) for x in arrays)
    expected = fa4.flash_attn_func(q, k, v, impl="sm100")
    late = torch.zeros_like(q)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        out = fa4.flash_attn_func(late, k, v, impl="sm100")
    stream.synchronize()
    assert torch.equal(out, expected)


def test_torch_compile_and_cuda_graph(device) -> None:
    q, k, v = (to_gpu(x, device) for x in draw([(1, 256, 2, 64)] * 3, ml_dtypes.bfloat16))

    def call(q):
        return fa4.flash_attn_func(q, k, v, causal=True, impl="auto")

    expected = call(q)
    assert torch.equal(torch.compile(call, fullgraph=True)(q), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(q)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
