"""Triton kernels of the tests: what a GPU test suite has, and one that is wrong."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, count, SIZE: tl.constexpr):
    """out = x + y."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = i < count
    tl.store(out + i, tl.load(x + i, mask=inside) + tl.load(y + i, mask=inside), mask=inside)


@triton.autotune([triton.Config({"SIZE": 256}), triton.Config({"SIZE": 64})], key=["count"])
@triton.jit
def scale(x, out, count, factor, SIZE: tl.constexpr):
    """out = factor x, tuned."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i, mask=i < count) * factor, mask=i < count)


@triton.jit
def softmax(x, out, columns, SIZE: tl.constexpr):
    """out = softmax(x) along rows, one a program."""
    i = tl.arange(0, SIZE)
    row = tl.program_id(0) * columns
    values = tl.load(x + row + i, mask=i < columns, other=-float("inf"))
    powers = tl.exp(values - tl.max(values, 0))
    tl.store(out + row + i, powers / tl.sum(powers, 0), mask=i < columns)


@triton.jit
def matmul(a, b, c, depth, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """c = a b, of descriptors that the host made."""
    m, n = tl.program_id(0) * M, tl.program_id(1) * N
    total = tl.zeros((M, N), tl.float32)
    for k in range(0, depth, K):
        total = tl.dot(a.load([m, k]), b.load([k, n]), total)
    c.store([m, n], total.to(tl.float16))


@triton.jit
def copy_tile(x, out, rows, columns, M: tl.constexpr, N: tl.constexpr):
    """out = x by descriptors that the kernel makes."""
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [M, N])
    target = tl.make_tensor_descriptor(out, [rows, columns], [columns, 1], [M, N])
    target.store([tl.program_id(0) * M, 0], source.load([tl.program_id(0) * M, 0]))


@triton.jit
def shift(x, SIZE: tl.constexpr):
    """x[i] = x[i + 1]: programs read what their neighbours write, and nothing orders that."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(x + i, tl.load(x + i + 1))


@triton.jit(noinline=True)
def scaled_sum(x, scale, COUNT: tl.constexpr):
    """A function that stays one, with a barrier: called by the kernel and by `mean`."""
    return tl.sum(tl.load(x + tl.arange(0, COUNT)), 0) * scale


@triton.jit(noinline=True)
def mean(x, COUNT: tl.constexpr):
    """A call in a function."""
    return scaled_sum(x, 1.0 / COUNT, COUNT)


@triton.jit
def centre(x, out, COUNT: tl.constexpr):
    """Each value less the mean, plus twice the sum."""
    at = tl.arange(0, COUNT)
    values = tl.load(x + at)
    tl.store(out + at, values - mean(x, COUNT) + scaled_sum(x, 2.0, COUNT))


@triton.jit
def persistent(
    a, b, c, tiles_m, tiles_n, depth, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    PROGRAMS: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """c = a b by descriptors; each program works on several tiles, with roles for warps or not."""
    tiles = tiles_m * tiles_n
    for tile in tl.range(
        tl.program_id(0), tiles, PROGRAMS, flatten=True, warp_specialize=SPECIALIZED
    ):
        m, n = tile // tiles_n * M, tile % tiles_n * N
        total = tl.zeros((M, N), tl.float32)
        for k in range(depth):
            total = tl.dot(a.load([m, k * K]), b.load([k * K, n]), total)
        c.store([m, n], total.to(tl.float16))
