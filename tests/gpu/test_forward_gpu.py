"""The forward kernels on a GPU: right, on the current stream, without host syncs."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from cutlass import cute

import fa4
from fa4.masks import Chunked
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


Case = tuple[dict[str, Any], dict[str, Any]]

CASES: list[Case] = [
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
    (dict(heads=8, heads_k=2), dict(pack_gqa=False)),
    (dict(batch=3), dict(window_size=(100, 50))),
    (dict(), dict(window_size=(30, None), causal=True)),
    (dict(), dict(softcap=20.0)),
    (dict(), dict(softmax_scale=0.3, causal=True)),
    (dict(), dict(learnable_sink=np.array([0.5, -1.0], np.float32))),
    (dict(), dict(mask_mod=Chunked(64))),
]  # fmt: skip
# Head dims that Blackwell's kernel refuses; calls with more work than SMs, by length and mask.
HOPPER_CASES: list[Case] = [
    (dict(dim=dim, dim_v=dim_v), dict(causal=causal))
    for dim, dim_v in ((256, 256), (160, 160), (64, 256), (256, 64), (248, 200), (192, 256))
    for causal in (False, True)
] + [
    (dict(rows=rows, keys=rows, heads=heads, heads_k=2, dim=dim), dict(causal=causal))
    for rows, heads in ((512, 40), (1000, 20)) for dim in (64, 96, 128) for causal in (False, True)
]  # fmt: skip


def check(place: Any, sizes: dict[str, Any], options: dict[str, Any]) -> None:
    """A call's O and LSE within their budget."""
    size = dict(batch=2, rows=300, keys=400, heads=2, heads_k=2, dim=128, dtype=ml_dtypes.bfloat16)
    size |= sizes
    dim_v = size.get("dim_v", size["dim"])
    shapes = [
        (size["batch"], size["rows"], size["heads"], size["dim"]),
        (size["batch"], size["keys"], size["heads_k"], size["dim"]),
        (size["batch"], size["keys"], size["heads_k"], dim_v),
    ]
    arrays = draw(shapes, size["dtype"])
    given = {
        name: torch.tensor(x, device=place.device) if isinstance(x, np.ndarray) else x
        for name, x in options.items()
    }
    result = fa4.flash_attn_func(
        *(to_gpu(x, place.device) for x in arrays), **given, impl=place.impl, return_lse=True
    )
    outputs = Outputs(to_array(result.out, size["dtype"]), result.lse.cpu().numpy())
    plain = {name: value for name, value in options.items() if name != "pack_gqa"}
    inputs = dense_inputs(*arrays, **plain)
    assert_within_budget(inputs, outputs)
    with pytest.raises(AssertionError):  # the budget sees a wrong row
        wrong = outputs.lse.copy()
        wrong[0, 0, -1] += 0.1
        assert_within_budget(inputs, Outputs(outputs.out, wrong))


@pytest.mark.parametrize(("sizes", "options"), CASES)
def test_within_the_budget(sizes, options, place) -> None:
    check(place, sizes, options)


@pytest.mark.parametrize(("sizes", "options"), HOPPER_CASES)
def test_within_the_budget_on_hopper(sizes, options, sm90) -> None:
    check(sm90, sizes, options)


@cute.jit
def biased(score, batch, head, row, key, info, aux):
    return score + aux[0][head, key]


@cute.jit
def listed(batch, head, row, key, info, aux):
    return aux[0][row] == aux[0][key]


def test_callables(place) -> None:
    """A bias per head and key; documents that see themselves: as the reference's of the same."""
    arrays = draw([(2, 200, 4, 128), (2, 260, 2, 128), (2, 260, 2, 128)], ml_dtypes.bfloat16)
    rng = np.random.default_rng(1)
    bias = (rng.integers(-8, 9, (4, 260)) / 8).astype(np.float32)
    documents = np.sort(rng.integers(0, 4, 260)).astype(np.int32)
    for name, kernel, array, plain in (
        ("score_mod", biased, bias, lambda s, b, h, i, j, info, aux: s + aux[0][h, j]),
        ("mask_mod", listed, documents, lambda b, h, i, j, info, aux: aux[0][i] == aux[0][j]),
    ):
        found = fa4.flash_attn_func(
            *(to_gpu(x, place.device) for x in arrays), **{name: kernel},
            aux_tensors=[torch.tensor(array, device=place.device)], impl=place.impl,
        )  # fmt: skip
        expected = fa4.flash_attn_func(
            *arrays, **{name: plain}, aux_tensors=[array], impl="reference"
        )
        np.testing.assert_allclose(
            found.float().cpu().numpy(), expected.astype(np.float32), rtol=0.02, atol=0.02
        )


def test_same_as_the_emulator(place) -> None:
    """To rounding: the same instructions, but for what the approximations leave open."""
    emulator = {"sm100": "emulator", "sm90": "emulator_sm90"}[place.impl]
    arrays = draw([(1, 200, 2, 64)] * 3, ml_dtypes.bfloat16)
    on_gpu = fa4.flash_attn_func(*(to_gpu(x, place.device) for x in arrays), impl=place.impl)
    emulated = fa4.flash_attn_func(*arrays, impl=emulator).astype(np.float32)
    np.testing.assert_allclose(on_gpu.float().cpu().numpy(), emulated, rtol=2**-6, atol=2**-8)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_variable_lengths_without_host_sync(place) -> None:
    offsets, used = [0, 100, 100, 350], [70, 0, 250]
    arrays = draw([(400, 4, 128), (400, 2, 128), (400, 2, 128)], ml_dtypes.bfloat16)
    q, k, v = (to_gpu(x, place.device) for x in arrays)
    cu, seen = (
        torch.tensor(numbers, dtype=torch.int32, device=place.device) for numbers in (offsets, used)
    )

    def call():
        return fa4.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, seqused_k=seen, causal=True,
            impl=place.impl, return_lse=True,
        )  # fmt: skip

    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = fa4.flash_attn_varlen_func(
        *arrays, cu_seqlens_q=np.array(offsets), cu_seqlens_k=np.array(offsets),
        seqused_k=np.array(used), causal=True, impl="reference", return_lse=True,
    )  # fmt: skip
    for found, wanted in zip(result, expected, strict=True):
        np.testing.assert_allclose(
            found.float().cpu().numpy(), wanted.astype(np.float32), rtol=0.02, atol=0.02
        )


def test_current_stream(place) -> None:
    """The kernel waits for what its own stream has still to write."""
    arrays = draw([(1, 256, 2, 64)] * 3, ml_dtypes.bfloat16)
    q, k, v = (to_gpu(x, place.device) for x in arrays)
    expected = fa4.flash_attn_func(q, k, v, impl=place.impl)
    late = torch.zeros_like(q)
    stream = torch.cuda.Stream(place.device)
    stream.wait_stream(torch.cuda.current_stream(place.device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        out = fa4.flash_attn_func(late, k, v, impl=place.impl)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_torch_compile_and_cuda_graph(place) -> None:
    """By impl="auto", which picks the GPU's kernel."""
    q, k, v = (to_gpu(x, place.device) for x in draw([(1, 256, 2, 64)] * 3, ml_dtypes.bfloat16))

    def call(q):
        return fa4.flash_attn_func(q, k, v, causal=True, impl="auto")

    expected = call(q)
    assert torch.equal(expected, fa4.flash_attn_func(q, k, v, causal=True, impl=place.impl))
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(q), expected)
    if os.environ.get("FA4_GUARDED"):
        pytest.skip("guarded memory has no pools, which a graph needs; the rest was right")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(q)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


FIRST = """
import sys, torch, fa4
device, impl, first = sys.argv[1:4]
lengths = {name: torch.tensor([0, int(a), int(a) + int(b)], dtype=torch.int32, device=device)
           for name, (a, b) in {"q": sys.argv[4:6], "k": sys.argv[6:8]}.items()}
torch.cuda.empty_cache()
rows = {"q": int(lengths["q"][-1]), "k": int(lengths["k"][-1]), "v": int(lengths["k"][-1])}
made = {name: torch.ones(rows[name], 2, 128, dtype=torch.bfloat16, device=device)
        for name in (first, *rows.keys() - {first})}
out = fa4.flash_attn_varlen_func(
    made["q"], made["k"], made["v"], cu_seqlens_q=lengths["q"], cu_seqlens_k=lengths["k"],
    max_seqlen_q=max(int(x) for x in sys.argv[4:6]), impl=impl)
torch.cuda.synchronize()
print(out.float().sum(dim=(1, 2)).tolist())
"""


@pytest.mark.parametrize("first", ["q", "k", "v"])
@pytest.mark.parametrize("lengths", [(64, 1, 1, 0), (64, 1, 0, 1), (5, 70, 300, 0)])
def test_no_memory_in_front_of_a_tensor(
    place: Any, first: str, lengths: tuple[int, int, int, int]
) -> None:
    """A fresh process, whose first tensor begins a segment; sequences without keys are zero."""
    command = [sys.executable, "-c", FIRST, place.device, place.impl, first, *map(str, lengths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [256.0 * bool(keys) for q, keys in zip(lengths[:2], lengths[2:], strict=True)
            for _ in range(q)]  # fmt: skip
    assert done.stdout.strip() == str(rows)


def test_the_other_kernels_are_refused(place) -> None:
    """One line that names both machines."""
    other = {"sm100": "sm90", "sm90": "sm100"}[place.impl]
    q, k, v = (to_gpu(x, place.device) for x in draw([(1, 64, 2, 64)] * 3, ml_dtypes.bfloat16))
    with pytest.raises(ValueError, match=r"kernel runs on .*this GPU has compute capability"):
        fa4.flash_attn_func(q, k, v, impl=other)
