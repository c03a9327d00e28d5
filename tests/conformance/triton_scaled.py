"""Triton kernels with block-scaled products, of pointers and of descriptors."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scaled_product(
    a, b, c, scale_a, scale_b, M: tl.constexpr, N: tl.constexpr, BYTES_A: tl.constexpr,
    BYTES_B: tl.constexpr, BLOCKS: tl.constexpr, KIND_A: tl.constexpr, KIND_B: tl.constexpr,
):  # fmt: skip
    """c = (a scale_a) (b scale_b)^T, one tile; 4-bit elements two to a byte."""
    m, n, blocks = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCKS)
    left = tl.load(a + m[:, None] * BYTES_A + tl.arange(0, BYTES_A)[None, :])
    right = tl.load(b + n[None, :] * BYTES_B + tl.arange(0, BYTES_B)[:, None])
    of_a = tl.load(scale_a + m[:, None] * BLOCKS + blocks[None, :])
    of_b = tl.load(scale_b + n[:, None] * BLOCKS + blocks[None, :])
    product = tl.dot_scaled(left, of_a, KIND_A, right, of_b, KIND_B)
    tl.store(c + m[:, None] * N + n[None, :], product)


@triton.jit
def scaled_matmul(
    a, b, c, scale_a, scale_b, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    DEPTH: tl.constexpr, PER_A: tl.constexpr, PER_B: tl.constexpr, KIND_A: tl.constexpr,
    KIND_B: tl.constexpr,
):  # fmt: skip
    """The same in steps along K, of descriptors. PER_A, PER_B: elements of a byte."""
    m, n = tl.arange(0, M), tl.arange(0, N)
    blocks = tl.arange(0, DEPTH // 32)
    total = tl.zeros((M, N), tl.float32)
    for k in range(0, K, DEPTH):
        of_a = tl.load(scale_a + m[:, None] * (K // 32) + k // 32 + blocks[None, :])
        of_b = tl.load(scale_b + n[:, None] * (K // 32) + k // 32 + blocks[None, :])
        left, right = a.load([0, k // PER_A]), b.load([0, k // PER_B])
        total = tl.dot_scaled(left, of_a, KIND_A, right.T, of_b, KIND_B, total)
    tl.store(c + m[:, None] * N + n[None, :], total)
