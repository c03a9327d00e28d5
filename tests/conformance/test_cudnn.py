"""Open CuTe-DSL kernels of the cuDNN frontend by their own Python functions, beside float64."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from fa4 import emulator
from lab.foreign import SITE, missing

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.skipif(not (SITE / "cudnn").is_dir(), reason=f"no cuDNN frontend in {SITE}"),
]

Judged = dict[str, tuple[torch.Tensor, torch.Tensor]]  # name -> what came, what is right


@pytest.fixture(autouse=True)
def site(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the frontend is."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(SITE)])


def wrapper(module: str, name: str) -> Callable[..., Any]:
    """A function of the frontend."""
    function: Callable[..., Any] = getattr(importlib.import_module(f"cudnn.{module}"), name)
    return function


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Standard normal numbers on the GPU."""
    return torch.randn(shape).to(dtype).cuda()


def gemm_swiglu() -> Judged:
    """Columns in pairs of 32: the product, and the first times silu of the second."""
    a, b = (normal(1, n, 128, dtype=torch.float16).permute(1, 2, 0) for n in (256, 384))
    got = wrapper("gemm.cutedsl.dense.swiglu.api", "gemm_swiglu_wrapper_sm100")(a, b)
    product = torch.einsum("mkl,nkl->mnl", a.double(), b.double())
    first, second = product[:, :, 0].reshape(256, -1, 2, 32).unbind(2)
    gated = (first * functional.silu(second)).reshape(256, 192, 1)
    return {"product": (got["ab12_tensor"], product), "gated": (got["c_tensor"], gated)}


def rmsnorm_rht() -> Judged:
    """RMSNorm, then a Hadamard transform of each 16 columns."""
    x, weight = normal(32, 2048), normal(2048)
    got = wrapper("rmsnorm_rht_amax.api", "rmsnorm_rht_amax_wrapper_sm100")(x, weight)
    wide = x.double()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + 1e-5) * weight.double()
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        hadamard = torch.kron(torch.tensor([[1.0, 1], [1, -1]]).double(), hadamard)
    turned = (scaled.reshape(32, -1, 16) @ hadamard / 4).reshape(32, 2048)
    return {"out": (got["o_tensor"], turned)}


def causal_conv1d() -> Judged:
    """Four taps for each channel, then silu."""
    x, weight = normal(2, 48, 256), normal(256, 4)
    function = wrapper("causal_conv1d_bulk_sm100.api", "causal_conv1d_bulk_fwd_wrapper_sm100")
    padded = functional.pad(x.double(), (0, 0, 3, 0))
    sums = sum(padded[:, k : k + 48] * weight.double()[:, k] for k in range(4))
    return {"out": (function(x, weight)["output_tensor"], functional.silu(torch.as_tensor(sums)))}


def top_k() -> Judged:
    """The largest of each row's first values, and where they are."""
    x, lengths = normal(3, 700, dtype=torch.float32), torch.tensor([700, 513, 64]).int().cuda()
    function = wrapper("deepseek_sparse_attention.indexer_top_k.api", "indexer_top_k_wrapper")
    got = function(x, lengths, 64)
    beyond = torch.arange(700) >= lengths[:, None]
    right = x.masked_fill(beyond, -torch.inf).topk(64, 1).values.sort(1).values
    found = x.gather(1, got["indices"].long())
    return {"values": (got["values"].sort(1).values, right), "at": (found.sort(1).values, right)}


def compression_attention() -> Judged:
    """Causal attention where there are as many keys as queries."""
    q, k, v = (normal(1, 256, 2, 128, dtype=torch.float16).transpose(1, 2) for _ in range(3))
    name = "compression_attention_wrapper"
    got = wrapper("native_sparse_attention.compression.api", name)(q, k, v)
    scores = q.double() @ k.double().transpose(2, 3) / 128**0.5
    shown = torch.ones(256, 256).tril().bool()
    weights = scores.masked_fill(~shown, -torch.inf).softmax(-1)
    return {"out": (got["o_tensor"], weights @ v.double())}


def sparse_attention() -> Judged:
    """Latent attention over 128 listed keys of 192."""
    q, kv = normal(3, 64, 512), normal(192, 512)
    listed = torch.stack([torch.randperm(192)[:128] for _ in range(3)]).int().cuda()
    name = "sparse_attention_forward_wrapper"
    function = wrapper("deepseek_sparse_attention.sparse_attention_forward.api", name)
    keys = kv.double()[listed.long()]
    weights = (q.double() @ keys.transpose(1, 2) * 512**-0.5).softmax(-1)
    return {"out": (function(q, kv, listed)["out"], weights @ keys)}


CASES = (
    gemm_swiglu, rmsnorm_rht, causal_conv1d, top_k, compression_attention, sparse_attention,
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_like_float64(case: Callable[[], Judged]) -> None:
    """Rounding to the output's type, and that of intermediate values, is all that differs."""
    torch.manual_seed(11)
    with emulator.emulate(cuda=True, schedule="random", seed=5) as session:
        judged = case()
    assert session.reports
    for name, (got, right) in judged.items():
        step = max(torch.finfo(got.dtype).eps, 2.0**-12)
        error = (got.double() - right).abs().max() / right.abs().max()
        assert error < step, (name, float(error))


def test_indexer_forward() -> None:
    """Right scores, and two hazards: a warp's lanes store weights, and an elected lane arrives at
    the mbarrier for all with no bar.warp.sync between; tensor memory is freed under a load."""
    torch.manual_seed(12)
    name, module = "indexer_forward_wrapper", "deepseek_sparse_attention.indexer_forward.api"
    with emulator.emulate(cuda=True, fail_on="error", max_findings=10**6) as session:
        q, k, weights = normal(1, 256, 64, 128), normal(1, 64, 1, 128), normal(1, 256, 64)
        scores = wrapper(module, name)(q, k, weights, ratio=4)["scores"].double()
        heads = torch.einsum("bshd,btd->bsht", q.double(), k[:, :, 0].double()).relu()
        right = (heads * weights.double()[..., None]).sum(2)
        shown = torch.arange(64) < (torch.arange(256)[:, None] + 1) // 4
    assert (torch.isfinite(scores[0]) == shown).all()
    assert (scores - right)[0][shown].abs().max() < 2.0**-20 * right.abs().max()
    findings = [finding for report in session.reports for finding in report.findings]
    assert {(f.kind, f.severity) for f in findings} == {("race", "hazard")}
    writers = [re.search(r"what CTA 0 warp 0 lane (\d+) .*st.shared.b32\) wrote", f.message)
               for f in findings]  # fmt: skip
    lanes = {int(writer[1]) for writer in writers if writer}
    assert lanes == {1, 4, 8, 12, 16, 20, 24, 28}  # of each 16 bytes the first, but for lane 0
    others = [f for f, writer in zip(findings, writers, strict=True) if not writer]
    assert len(others) == 1 and "tcgen05.dealloc" in others[0].message
