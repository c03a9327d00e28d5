"""The merge of partial results on a GPU, in one pass over memory: a Triton kernel.

out, lse = merged(out, lse; more, more_lse), in fp32 registers whatever the types in memory. It
reads both and writes one: 6 bytes an element in 16 bit. Importing this module needs Triton, which
comes with torch for GPUs.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

HEADS = 16  # of a program, at most
WARPS = 4


@triton.jit
def merge_rows(
    out,
    lse,
    more,
    more_lse,
    heads,
    dim,
    lse_row,
    lse_head,
    more_row,
    more_head,
    HEADS_: tl.constexpr,
    DIM_: tl.constexpr,
):
    """One row and HEADS_ heads: out and more are (rows, heads, dim), dense; LSE has strides."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_ + tl.arange(0, HEADS_)
    element = tl.arange(0, DIM_)
    there = head < heads
    a = tl.load(lse + row * lse_row + head * lse_head, there, -float("inf"))
    b = tl.load(more_lse + row * more_row + head * more_head, there, -float("inf"))
    top = tl.maximum(a, b)
    safe = tl.where(top == -float("inf"), 0.0, top)
    total = tl.exp(a - safe) + tl.exp(b - safe)
    empty = total == 0.0
    share = 1.0 / tl.where(empty, 1.0, total)
    place = (row * heads + head)[:, None] * dim + element[None, :]
    inside = there[:, None] & (element < dim)[None, :]
    x = tl.load(out + place, inside, 0.0).to(tl.float32)
    y = tl.load(more + place, inside, 0.0).to(tl.float32)
    merged = x * (tl.exp(a - safe) * share)[:, None] + y * (tl.exp(b - safe) * share)[:, None]
    tl.store(out + place, merged.to(out.dtype.element_ty), inside)
    found = tl.where(empty, -float("inf"), safe + tl.log(tl.where(empty, 1.0, total)))
    tl.store(lse + row * lse_row + head * lse_head, found, there)


def merge(out: Any, lse: Any, more: Any, more_lse: Any) -> None:
    """In place: (B, rows, heads, dim) and fp32 (B, rows, heads, 1), rows dense in each batch."""
    batch, rows, heads, dim = out.shape
    block = min(HEADS, triton.next_power_of_2(heads))
    grid = (rows, triton.cdiv(heads, block))
    width = triton.next_power_of_2(dim)
    for one in range(batch if rows else 0):
        mine, theirs = lse[one, ..., 0], more_lse[one, ..., 0]
        merge_rows[grid](
            out[one], mine, more[one], theirs, heads, dim, *mine.stride(), *theirs.stride(),
            HEADS_=block, DIM_=width, num_warps=WARPS,
        )  # fmt: skip


def fits(out: Any, more: Any) -> bool:
    """Are the rows of each batch entry dense, and the types what the kernel sums?"""
    import torch

    types = {out.dtype, more.dtype} <= {torch.float32, torch.bfloat16, torch.float16}
    return types and all(x[0].is_contiguous() for x in (out, more) if x.shape[0])
