"""How many work tiles a call has, and how many bytes it moves across HBM."""

from __future__ import annotations

from typing import Any, NamedTuple

from fa4.config import Problem, WarpgroupPipeline
from fa4.plan.warpgroup_lengths import keys_seen


class HeadPacking(NamedTuple):
    """Query heads that share the rows of a tile: how many such groups there are, and how many rows
    a position takes."""

    heads: int
    rows: int


def warpgroup_packing(problem: Problem, pipeline: WarpgroupPipeline) -> HeadPacking:
    """That of this package's Hopper kernel."""
    return HeadPacking(problem.heads_q // pipeline.packed, pipeline.packed)


def element_bytes(dtype: str) -> int:
    """Bytes of an element; ValueError for a type the kernels do not take."""
    sizes = {"bf16": 2, "fp16": 2, "e4m3": 1, "e5m2": 1}
    if dtype not in sizes:
        raise ValueError(f"dtype must be one of {', '.join(sizes)}; got {dtype!r}")
    return sizes[dtype]


def forward_bytes(problem: Problem, pipeline: Any) -> tuple[int, int, int]:
    """Bytes that must cross HBM once: Q, K and V that a query sees, O and LSE; none else."""
    rows = problem.batch * problem.seqlen_q * problem.heads_q
    seen = keys_seen(problem.seqlen_q, problem.seqlen_k, problem.window_size)
    keys = problem.batch * seen * problem.heads_k
    kv_bytes = keys * (problem.head_dim + problem.head_dim_v) * pipeline.element_bytes
    q_bytes = rows * problem.head_dim * pipeline.element_bytes
    return 0, q_bytes + kv_bytes + output_bytes(problem, pipeline), 0


def output_bytes(problem: Problem, pipeline: Any) -> int:
    """Bytes of O (bf16 for FP8 inputs) and of the float32 LSE."""
    rows = problem.batch * problem.seqlen_q * problem.heads_q
    return rows * (problem.head_dim_v * max(2, pipeline.element_bytes) + 4)


def partial_bytes(problem: Problem, pipeline: Any) -> int:
    """Bytes of the float32 partial O and LSE of a split forward; 0 without splits."""
    if pipeline.num_splits == 1:
        return 0
    rows = problem.batch * problem.seqlen_q * problem.heads_q
    return pipeline.num_splits * rows * (problem.head_dim_v + 1) * 4


def backward_bytes(problem: Problem, pipeline: Any) -> tuple[int, int, int]:
    """Bytes across HBM: preprocess (O, dO, zeroed dQ), main kernel, postprocess (dQ to 16 bits)."""
    size, d, dv = pipeline.element_bytes, problem.head_dim, problem.head_dim_v
    rows = problem.batch * problem.seqlen_q * problem.heads_q
    keys = problem.batch * problem.seqlen_k * problem.heads_k
    before = rows * (2 * dv * size + 4 * d)
    main = rows * ((d + dv) * size + 2 * 4 * d) + 2 * keys * (d + dv) * size
    return before, main, rows * d * (4 + size)


def forward_count(problem: Problem, pipeline: Any, rows: int, keys: int) -> int:
    """Work tiles of one sequence of a forward call, at least one per head."""
    packed = rows * (problem.heads_q // problem.heads_k)
    blocks = max(1, -(-packed // pipeline.block_rows))
    return int(problem.heads_k * blocks * pipeline.num_splits)


def warpgroup_count(problem: Problem, pipeline: Any, rows: int, keys: int) -> int:
    """Likewise of this package's Hopper kernel."""
    heads, each = warpgroup_packing(problem, pipeline)
    return int(heads * max(1, -(-rows * each // pipeline.block_rows)) * pipeline.num_splits)


def backward_count(problem: Problem, pipeline: Any, rows: int, keys: int) -> int:
    """Likewise of a backward call, whose CTAs visit the query heads of a KV head in turn."""
    return problem.heads_k * _key_blocks(pipeline, keys)


def backward_count_of_heads(problem: Problem, pipeline: Any, rows: int, keys: int) -> int:
    """Likewise where each CTA visits one query head."""
    return problem.heads_q * _key_blocks(pipeline, keys)


def _key_blocks(pipeline: Any, keys: int) -> int:
    step = pipeline.numerics.tile_n * pipeline.numerics.cta_group
    return max(1, -(-keys // step))
