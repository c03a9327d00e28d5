"""The main kernels of Hopper's backward passes, in the order of launches: plan, tiles, bytes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fa4.config import WARPGROUP_ROWS, Problem
from fa4.designs.tiles import Lengths, WorkTiles, key_blocks, query_blocks
from fa4.hardware import Gpu
from fa4.plan.schema import PipelinePlan
from fa4.plan.warpgroup_backward import (
    LAST_ROUNDS,
    WarpgroupBackwardPipeline,
    warpgroup_backward_plan,
)
from fa4.plan.warpgroup_wide import CONSUMERS, TILE_ROWS, WideBackwardPipeline
from fa4.plan.warpgroup_wide_keys import wide_keys_plan
from fa4.plan.warpgroup_wide_queries import wide_queries_plan


class MainKernel(NamedTuple):
    """A plan, its work tiles in the order of launches, and the bytes that it moves."""

    name: str
    plan: PipelinePlan
    tiles: WorkTiles
    num_bytes: int


# Bytes of the kernel before, the main kernels, bytes of the kernel behind.
Pass = tuple[int, list[MainKernel], int]


def narrow_kernels(
    problem: Problem,
    pipeline: WarpgroupBackwardPipeline,
    gpu: Gpu,
    lengths: tuple[Lengths, ...] | None,
) -> Pass:
    """One kernel, which adds dQ up in memory."""
    rows, keys, read = _sizes(problem, pipeline.element_bytes)
    d, dv, size = problem.head_dim, problem.head_dim_v, pipeline.element_bytes
    group = problem.heads_q // problem.heads_k
    tiles = key_blocks(problem, pipeline.tile_m, pipeline.tile_n, group, lengths)
    tiles = tiles.take(_order(tiles, pipeline, problem, gpu.sm_count))
    moved = read + keys * (d + dv) * size + rows * 8 * d
    main = MainKernel("dQ, dK, dV", warpgroup_backward_plan(pipeline, gpu), tiles, moved)
    return rows * (2 * dv * size + 4 * d), [main], rows * d * (4 + size)


def wide_kernels(
    problem: Problem, pipeline: WideBackwardPipeline, gpu: Gpu, lengths: tuple[Lengths, ...] | None
) -> Pass:
    """One that has the keys, and one that has the queries."""
    rows, keys, read = _sizes(problem, pipeline.element_bytes)
    d, dv, size = problem.head_dim, problem.head_dim_v, pipeline.element_bytes
    group = problem.heads_q // problem.heads_k
    of_keys = key_blocks(problem, TILE_ROWS, WARPGROUP_ROWS, group, lengths)
    of_rows = query_blocks(problem, CONSUMERS * WARPGROUP_ROWS, pipeline.tile_n, lengths)
    if pipeline.causal:
        of_rows = of_rows.take(np.argsort(-of_rows.trips[:, 0], kind="stable"))
    mains = [
        MainKernel("dK, dV", wide_keys_plan(pipeline, gpu), of_keys,
                   read + keys * (d + dv) * size),
        MainKernel("dQ", wide_queries_plan(pipeline, gpu), of_rows, read + rows * d * size),
    ]  # fmt: skip
    return rows * 2 * dv * size, mains, 0


def _sizes(problem: Problem, size: int) -> tuple[int, int, int]:
    """Rows of all query heads, of all KV heads, and bytes of Q, dO, K and V."""
    rows = problem.batch * problem.seqlen_q * problem.heads_q
    keys = problem.batch * problem.seqlen_k * problem.heads_k
    return rows, keys, (rows + keys) * (problem.head_dim + problem.head_dim_v) * size


def _order(
    tiles: WorkTiles, pipeline: WarpgroupBackwardPipeline, problem: Problem, sms: int
) -> np.ndarray:
    """As `fa4.sm90.backward.order`: the longest of the last heads first."""
    head = tiles.batch * (int(tiles.head.max(initial=0)) + 1) + tiles.head
    if pipeline.deterministic:
        last_first = pipeline.scheduler == "spt"
        return np.lexsort((-tiles.block if last_first else tiles.block, head))
    if problem.window_size[1] is None:
        return np.lexsort((tiles.block, head))
    heads, blocks = (int(x.max(initial=0)) + 1 for x in (head, tiles.block))
    first = heads - last_heads(heads, blocks, problem.heads_q // problem.heads_k, sms)
    last = head >= first
    return np.lexsort((np.where(last, head, tiles.block), np.where(last, tiles.block, head), last))


def last_heads(heads: int, blocks: int, group: int, sms: int) -> int:
    """Of how many heads the longest tiles begin first, as `fa4.sm90.backward.order` has them."""
    return min(heads, -(-LAST_ROUNDS[group > 1] * sms // blocks))
