"""Triton kernels of Liger in the emulator, forward and backward, beside torch's own functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from fa4 import emulator
from lab.foreign import SITE

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(1200)]

Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def site(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton and Liger are."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(SITE)])


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of rows."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def sparsemax(x: torch.Tensor) -> torch.Tensor:
    """The projection of rows onto the simplex (Martins and Astudillo, ICML 2016, algorithm 1)."""
    falling, _ = x.sort(-1, descending=True)
    sums = falling.cumsum(-1) - 1
    count = (falling * torch.arange(1, x.shape[-1] + 1) > sums).sum(-1, keepdim=True)
    return (x - sums.gather(-1, count - 1) / count).clamp(min=0)


def liger(module: str, name: str, *rest: Any) -> Callable[..., Any]:
    """A function of Liger by module and class; rest: its further arguments."""

    def call(*tensors: torch.Tensor) -> Any:
        found = getattr(__import__(f"liger_kernel.ops.{module}", fromlist=[name]), name)
        out = found.apply(*tensors, *rest)
        return out[0] if isinstance(out, tuple) else out

    return call


# (Liger's, torch's, shapes of the operands)
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "rms_norm": (liger("rms_norm", "LigerRMSNormFunction", 1e-6, 0.0, "llama", False), rms_norm,
                 ((5, 100), (100,))),
    "layer_norm": (liger("layer_norm", "LigerLayerNormFunction", 1e-5),
                   lambda x, w, b: functional.layer_norm(x, (70,), w, b), ((7, 70), (70,), (70,))),
    "swiglu": (liger("swiglu", "LigerSiLUMulFunction"), lambda a, b: functional.silu(a) * b,
               ((5, 130), (5, 130))),
    "geglu": (liger("geglu", "LigerGELUMulFunction"),
              lambda a, b: functional.gelu(a, approximate="tanh") * b, ((3, 257), (3, 257))),
    "softmax": (liger("softmax", "LigerSoftmaxFunction"), lambda x: x.softmax(-1), ((5, 100),)),
    "sparsemax": (liger("sparsemax", "LigerSparsemaxFunction", -1), sparsemax, ((4, 60),)),
    "group_norm": (liger("group_norm", "LigerGroupNormFunction", 6, 3, 1e-5),
                   lambda x, w, b: functional.group_norm(x, 3, w, b, 1e-5),
                   ((2, 6, 40), (6,), (6,))),
    "dyt": (liger("dyt", "LigerDyTFunction"), lambda x, a, g, b: torch.tanh(a * x) * g + b,
            ((5, 100), (1,), (100,), (100,))),
    "fused_add_rms_norm": (
        liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction", 1e-6, 0.0, "llama", False),
        lambda x, y, weight: rms_norm(x + y, weight), ((5, 100), (5, 100), (100,))),
    "relu_squared": (liger("relu_squared", "LigerReLUSquaredFunction"),
                     lambda x: functional.relu(x) ** 2, ((5, 100),)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_like_torch(name: str, arch: str) -> None:
    """Outputs and gradients; nothing worse than formal is found."""
    function, exact, shapes = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    operands = [torch.randn(shape, generator=generator) for shape in shapes]
    wanted = evaluate(exact, operands)
    with emulator.emulate(arch=arch, cuda=True, schedule="random", seed=5) as session:
        got = evaluate(function, operands)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5)
    assert len(session.reports) >= 2
    found = {finding.severity for report in session.reports for finding in report.findings}
    assert found <= {"style", "formal"}


def test_cross_entropy() -> None:
    """Ignored labels included; its gradient is made by the forward pass."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((9, 1000), generator=generator)
    labels = torch.randint(0, 1000, (9,), generator=generator)
    labels[3] = -100
    leaf = logits.clone().requires_grad_()
    wanted = functional.cross_entropy(leaf, labels)
    (gradient,) = torch.autograd.grad(wanted, leaf)
    with emulator.emulate(cuda=True):
        mine = logits.clone().requires_grad_()
        loss = liger("cross_entropy", "LigerCrossEntropyFunction", None)(mine, labels)
        loss.backward()
    torch.testing.assert_close(loss.detach(), wanted.detach(), atol=1e-5, rtol=1e-5)
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad, gradient, atol=1e-6, rtol=1e-5)


def evaluate(function: Callable[..., Any], operands: list[torch.Tensor]) -> Tensors:
    """The output and the gradients of its sum with weights; operands are copied."""
    leaves = [x.clone().requires_grad_() for x in operands]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    gradients = torch.autograd.grad(out, leaves, weights)
    return (out.detach(), *gradients)
