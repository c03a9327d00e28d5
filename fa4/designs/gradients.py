"""The main kernels of Hopper's backward passes, in the order of launches: plan, tiles, bytes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fa4.config import WARPGROUP_ROWS, Problem
from fa4.designs.tiles import Lengths, WorkTiles, divided, key_blocks, query_blocks
from fa4.hardware import Gpu
from fa4.plan.schema import PipelinePlan
from fa4.plan.warpgroup_backward import (
    LAST_ROUNDS,
    WarpgroupBackwardPipeline,
    warpgroup_backward_plan,
)
from fa4.plan.warpgroup_parts import GradientSizes, choose_key_parts, choose_query_parts
from fa4.plan.warpgroup_wide import CONSUMERS, TILE_ROWS, WideBackwardPipeline
from fa4.plan.warpgroup_wide_keys import wide_keys_plan
from fa4.plan.warpgroup_wide_queries import wide_queries_plan

SUMS = "sums of parts"
BLOCK_ROWS = 128  # of dQ's sums, whatever the tile


class MainKernel(NamedTuple):
    """A plan, its work tiles in the order of launches, and the bytes that it moves."""

    name: str
    plan: PipelinePlan
    tiles: WorkTiles
    num_bytes: int


class GradientPass(NamedTuple):
    """Kernels one behind the other.

    before: bytes of the first one; zeros: does it write them, and so about as much as it reads?
    behind: names and bytes of those after the main ones, which copy.
    """

    before: int
    zeros: bool
    mains: list[MainKernel]
    behind: dict[str, int]


def narrow_kernels(
    problem: Problem,
    pipeline: WarpgroupBackwardPipeline,
    gpu: Gpu,
    lengths: tuple[Lengths, ...] | None,
) -> GradientPass:
    """One kernel, which adds dQ up in memory."""
    rows, keys, read = _sizes(problem, lengths, pipeline.element_bytes)
    d, dv, size = problem.head_dim, problem.head_dim_v, pipeline.element_bytes
    parts = choose_key_parts(_work(problem, lengths, wide=False), gpu.sm_count)
    group = problem.heads_q // problem.heads_k // parts
    tiles = key_blocks(problem, pipeline.tile_m, pipeline.tile_n, group, lengths)
    tiles = tiles.take(_order(tiles, pipeline, problem, gpu.sm_count))
    stored, behind = _of_parts(keys * (d + dv), parts, size)
    summed = 4 * d * _block_rows(problem, lengths)
    main = MainKernel("dQ, dK, dV", warpgroup_backward_plan(pipeline, gpu), tiles,
                      read + stored + 2 * summed)  # fmt: skip
    return GradientPass(
        before=rows * 2 * dv * size + summed, zeros=True, mains=[main],
        behind={"postprocess": summed + rows * d * size} | ({SUMS: behind} if behind else {}),
    )  # fmt: skip


def wide_kernels(
    problem: Problem, pipeline: WideBackwardPipeline, gpu: Gpu, lengths: tuple[Lengths, ...] | None
) -> GradientPass:
    """One that has the keys, and one that has the queries."""
    rows, keys, read = _sizes(problem, lengths, pipeline.element_bytes)
    d, dv, size = problem.head_dim, problem.head_dim_v, pipeline.element_bytes
    work = _work(problem, lengths, wide=True)
    parts, parts_q = (
        choose(work, gpu.sm_count) for choose in (choose_key_parts, choose_query_parts)
    )
    group = problem.heads_q // problem.heads_k // parts
    of_keys = key_blocks(problem, TILE_ROWS, WARPGROUP_ROWS, group, lengths)
    of_rows = query_blocks(problem, CONSUMERS * WARPGROUP_ROWS, pipeline.tile_n, lengths)
    of_rows = divided(of_rows, parts_q)
    if pipeline.causal:
        of_rows = of_rows.take(np.argsort(-of_rows.trips[:, 0], kind="stable"))
    stored, behind = _of_parts(keys * (d + dv), parts, size)
    stored_q, behind_q = _of_parts(rows * d, parts_q, size)
    mains = [
        MainKernel("dK, dV", wide_keys_plan(pipeline, gpu), of_keys, read + stored),
        MainKernel("dQ", wide_queries_plan(pipeline, gpu), of_rows, read + stored_q),
    ]
    return GradientPass(
        before=rows * 2 * dv * size, zeros=False, mains=mains,
        behind={SUMS: behind + behind_q} if behind + behind_q else {},
    )  # fmt: skip


def _of_parts(elements: int, parts: int, size: int) -> tuple[int, int]:
    """Bytes of a gradient that the main kernel writes, and that the one which adds its parts up
    moves; 0 if there is one part."""
    if parts == 1:
        return elements * size, 0
    return 4 * parts * elements, elements * (4 * parts + size)


def _work(problem: Problem, lengths: tuple[Lengths, ...] | None, *, wide: bool) -> GradientSizes:
    """What decides whether sums are divided over CTAs."""
    each = _lengths(problem, lengths)
    return GradientSizes(
        batch=len(each), heads_q=problem.heads_q, heads_k=problem.heads_k,
        rows_q=sum(x.q for x in each), rows_k=sum(x.k for x in each),
        longest_q=max(x.q for x in each), longest_k=max(x.k for x in each),
        window=problem.window_size, wide=wide,
    )  # fmt: skip


def _lengths(problem: Problem, lengths: tuple[Lengths, ...] | None) -> tuple[Lengths, ...]:
    """Of each sequence."""
    return lengths or (Lengths(problem.seqlen_q, problem.seqlen_k),) * problem.batch


def _sizes(
    problem: Problem, lengths: tuple[Lengths, ...] | None, size: int
) -> tuple[int, int, int]:
    """Rows of all query heads, of all KV heads, and bytes of Q, dO, K and V."""
    each = _lengths(problem, lengths)
    rows = problem.heads_q * sum(x.q for x in each)
    keys = problem.heads_k * sum(x.k for x in each)
    return rows, keys, (rows + keys) * (problem.head_dim + problem.head_dim_v) * size


def _block_rows(problem: Problem, lengths: tuple[Lengths, ...] | None) -> int:
    """Rows of all blocks of the workspace: each sequence has whole ones."""
    blocks = sum(-(-x.q // BLOCK_ROWS) for x in _lengths(problem, lengths))
    return problem.heads_q * blocks * BLOCK_ROWS


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
    first = heads - last_heads(heads, blocks, tiles.group, sms)
    last = head >= first
    return np.lexsort((np.where(last, head, tiles.block), np.where(last, tiles.block, head), last))


def last_heads(heads: int, blocks: int, group: int, sms: int) -> int:
    """Of how many heads the longest tiles begin first, as `fa4.sm90.backward.order` has them."""
    return min(heads, -(-LAST_ROUNDS[group > 1] * sms // blocks))
