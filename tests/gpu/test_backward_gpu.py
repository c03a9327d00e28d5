"""The backward kernels on a GPU: within budget, same bits every time, no host syncs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import fa4
from fa4.testing import assert_within_budget
from fa4.testing.budget import Outputs
from fa4.testing.inputs import dense_inputs
from tests.gpu.test_forward_gpu import draw, to_array, to_gpu

pytestmark = pytest.mark.gpu

CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (dict(rows=rows, keys=keys), dict(causal=causal))
    for rows, keys in ((1, 1), (127, 129), (257, 513), (700, 300), (1, 1000))
    for causal in (False, True)
] + [
    (dict(dim=dim, dim_v=dim_v), {})
    for dim, dim_v in ((8, 8), (64, 64), (72, 40), (96, 128), (192, 128))
] + [
    (dict(dtype=np.float16), {}),
    (dict(heads=8, heads_k=1), {}),
    (dict(heads=6, heads_k=2), dict(causal=True)),
    (dict(batch=3), dict(window_size=(100, 50))),
    (dict(), dict(softcap=20.0)),
    (dict(), dict(learnable_sink=np.array([0.5, -1.0], np.float32))),
    (dict(), dict(causal=True, deterministic=False)),
]  # fmt: skip

# Head dims of which Hopper alone has kernels, those of wide heads among them.
HOPPER_CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (dict(dim=dim, dim_v=dim_v, heads=4), dict(causal=causal))
    for dim, dim_v in ((256, 256), (136, 136), (256, 64), (64, 256), (208, 200))
    for causal in (False, True)
] + [
    (dict(dim=256, dtype=np.float16), dict(window_size=(100, 50))),
    (dict(dim=192), dict(softcap=20.0, learnable_sink=np.array([0.5, -1.0], np.float32))),
]  # fmt: skip


def gradients(arrays: list[np.ndarray], options: dict[str, Any], impl: str, place: str) -> Outputs:
    """dQ, dK, dV and dsink by autograd, from dO in `arrays[3]`."""
    q, k, v, dout = (to_gpu(x, place) for x in arrays)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if "learnable_sink" in options:
        sink = torch.tensor(options["learnable_sink"], device=place, requires_grad=True)
        options, leaves = options | {"learnable_sink": sink}, [*leaves, sink]
    out = fa4.flash_attn_func(q, k, v, **options, impl=impl)
    dq, dk, dv, *dsink = torch.autograd.grad(out, leaves, dout)
    kind = arrays[0].dtype
    return Outputs(
        to_array(out.detach(), kind), None, *(to_array(x, kind) for x in (dq, dk, dv)),
        *(x.cpu().numpy() for x in dsink),
    )  # fmt: skip


def check(sizes: dict[str, Any], options: dict[str, Any], impl: str, place: str) -> None:
    """A call's gradients within their budget."""
    size = dict(batch=2, rows=300, keys=400, heads=2, heads_k=2, dim=128, dtype=ml_dtypes.bfloat16)
    size |= sizes
    dim_v = size.get("dim_v", size["dim"])
    queries, keys = (size["batch"], size["rows"], size["heads"]), (size["batch"], size["keys"])
    shapes = [
        (*queries, size["dim"]), (*keys, size["heads_k"], size["dim"]),
        (*keys, size["heads_k"], dim_v),
    ]  # fmt: skip
    arrays = draw(shapes, size["dtype"])
    plain = {name: value for name, value in options.items() if name != "deterministic"}
    inputs = dense_inputs(*arrays, **plain)
    found = gradients([*arrays, inputs.dout], options, impl, place)
    assert_within_budget(inputs, found, gradients_alone=True)


@pytest.mark.parametrize(("sizes", "options"), CASES)
def test_within_the_budget(sizes, options, place) -> None:
    check(sizes, options, *place)


@pytest.mark.parametrize(("sizes", "options"), HOPPER_CASES)
def test_within_the_budget_on_hopper(sizes, options, sm90) -> None:
    check(sizes, options, *sm90)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)])
def test_the_same_bits_every_time(dims, place) -> None:
    """In a fixed order of sums, over launches on a busy GPU."""
    d, dv = dims
    shapes = [(2, 1500, 4, d), (2, 1500, 4, d), (2, 1500, 4, dv), (2, 1500, 4, dv)]
    arrays = draw(shapes, ml_dtypes.bfloat16)
    first = gradients(arrays, {"causal": True}, *place)
    for _ in range(20):
        again = gradients(arrays, {"causal": True}, *place)
        for name in ("dq", "dk", "dv"):
            assert np.array_equal(getattr(first, name), getattr(again, name)), name


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_host_sync_and_no_wait_for_ever(place) -> None:
    """Variable lengths, forward and backward, many launches behind one another."""
    offsets = [0, 100, 100, 350, 1900]
    cu = torch.tensor(offsets, dtype=torch.int32, device=place.device)
    shapes = [(2000, 4, 128), (2000, 2, 128), (2000, 2, 128)]
    q, k, v = (to_gpu(x, place.device).requires_grad_() for x in draw(shapes, ml_dtypes.bfloat16))

    def call() -> None:
        out = fa4.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, impl=place.impl
        )
        out.backward(torch.ones_like(out))

    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
