"""Triton's dot_scaled on an emulated B200, beside float64."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from fa4 import emulator
from lab.foreign import SITE, missing

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore"),  # those of other people's code
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

TYPES = {
    "e4m3": (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
    "e5m2": (torch.float8_e5m2, ml_dtypes.float8_e5m2),
}
FACTORS = {"ue8m0": ml_dtypes.float8_e8m0fnu, "ue4m3": ml_dtypes.float8_e4m3fn}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the kernels; Triton is found where the foreign packages are."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(SITE)])
    return importlib.import_module("tests.conformance.triton_scaled")


def operand(kind: str, rows: int, k: int, seed: int) -> tuple[torch.Tensor, np.ndarray]:
    """As the kernel gets it, and its values."""
    rng = np.random.default_rng(seed)
    if kind == "e2m1":
        codes = rng.integers(0, 16, (rows, k)).astype(np.uint8)
        packed = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)
        return packed, codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    seen, exact = TYPES[kind]
    values = rng.standard_normal((rows, k)).astype(exact)
    return torch.from_numpy(values.view(np.uint8)).view(seen), values.astype(np.float64)


def factors(
    kind: str, rows: int, blocks: int, seed: int, block: int
) -> tuple[torch.Tensor, np.ndarray]:
    """As the kernel gets them, and their values for each element."""
    rng = np.random.default_rng(seed)
    low, high = (118, 136) if kind == "ue8m0" else (1, 0x7E)
    codes = rng.integers(low, high, (rows, blocks)).astype(np.uint8)
    tensor = torch.from_numpy(codes)
    values = np.repeat(codes.view(FACTORS[kind]).astype(np.float64), block, 1)
    return tensor if kind == "ue8m0" else tensor.view(torch.float8_e4m3fn), values


PAIRS = [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e2m1", "e2m1"), ("e4m3", "e2m1"), ("e2m1", "e5m2")]


def check(c: torch.Tensor, left: np.ndarray, right: np.ndarray, session: Any, kind: str) -> None:
    """Close to the sum of products in float64, by the instruction that was meant, no findings."""
    error = np.abs(c.double().numpy() - left @ right.T)
    assert (error <= 2.0**-22 * (np.abs(left) @ np.abs(right).T)).all()
    (report,) = session.reports
    opcodes = [name for name in report.instructions if name.startswith("tcgen05.mma")]
    assert len(opcodes) == 1 and f".kind::{kind}.block_scale" in opcodes[0]
    assert {finding.severity for finding in report.findings} <= {"style", "formal"}


@pytest.mark.parametrize(
    ("kinds", "scales", "block"),
    [*((pair, "ue8m0", 32) for pair in PAIRS), (("e2m1", "e2m1"), "ue4m3", 16)],
    ids=str,
)
@pytest.mark.parametrize("n", [64, 256])
def test_one_tile(kernels: Any, kinds: tuple[str, str], scales: str, block: int, n: int) -> None:
    """mxfp8, mxfp4, mixed (4 bits padded to 8 in shared memory) and nvfp4."""
    m, k = 128, 128
    (a, left), (b, right) = (operand(t, r, k, r) for t, r in zip(kinds, (m, n), strict=True))
    (sa, of_a), (sb, of_b) = (factors(scales, r, k // block, r + 1, block) for r in (m, n))
    c = torch.empty(m, n)
    with emulator.emulate(schedule="random", seed=n, collect=True) as session:
        kernels.scaled_product[(1,)](
            a, b, c, sa, sb, m, n, a.shape[1], b.shape[1], k // block, *kinds
        )
    kind = "mxf8f6f4" if kinds != ("e2m1", "e2m1") else "mxf4" if block == 32 else "mxf4nvf4"
    check(c, left * of_a, right * of_b, session, kind)


@pytest.mark.parametrize("kinds", PAIRS, ids=str)
def test_steps_of_descriptors(kernels: Any, kinds: tuple[str, str]) -> None:
    """TMA brings 4-bit elements as bytes of two, or pads them."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    m, n, k, depth = 128, 64, 512, 256
    (a, left), (b, right) = (operand(t, r, k, r) for t, r in zip(kinds, (m, n), strict=True))
    (sa, of_a), (sb, of_b) = (factors("ue8m0", r, k // 32, r + 1, 32) for r in (m, n))
    c = torch.empty(m, n)
    per = [2 if kind == "e2m1" else 1 for kind in kinds]
    with emulator.emulate(collect=True) as session:
        maps = [
            TensorDescriptor.from_tensor(x, [rows, depth // each])
            for x, rows, each in zip((a, b), (m, n), per, strict=True)
        ]
        kernels.scaled_matmul[(1,)](*maps, c, sa, sb, m, n, k, depth, *per, *kinds)
    kind = "mxf4" if kinds == ("e2m1", "e2m1") else "mxf8f6f4"
    check(c, left * of_a, right * of_b, session, kind)
