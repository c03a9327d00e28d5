"""Where the forward kernel keeps things: registers, shared memory, tensor memory."""

from __future__ import annotations

from typing import NamedTuple

from fa4.config import ForwardPipeline
from fa4.hardware import Gpu
from fa4.plan.memory import Layout, require_fit, ring_stages, tile_budget_bytes
from fa4.plan.schema import Buffer, Spill
from fa4.plan.work import FRAGMENT, WARPGROUP
from fa4.plan.work_stealing import RESPONSE_BYTES

# Registers of a softmax and a correction thread; the other warps get what is left of 512 per lane.
# 16-bit: with these nothing spills in the machine code of fa4.sm100 (FlashAttention-4 has 176 to
# 192, 72 to 88). FP8: FlashAttention-4's.
WIDE_REGISTERS = (184, 80)
FP8_REGISTERS = {(2, False): (160, 72), (1, False): (192, 80)}  # by CTA group, causal
FP8_CAUSAL_REGISTERS = (192, 72)
SMALL_HEAD_REGISTERS = {2: (200, 64, 48), 1: (168, 96, 80)}  # head dim below 96, by element bytes
# flash_attn.cute's pairs at head dim 128, until September 2026. There the compiled softmax loop for
# a B200, whose software exponentials need registers, has 18 stores to local memory and 21 loads a
# step (FlashAttention pull request 2869, Nsight Compute; with 184 and 80 it has none).
PUBLISHED_PAIR_REGISTERS = (176, 88)
SPILLED_STORES, SPILLED_LOADS = 18, 21
OTHER_BARRIERS = 32  # beside the K/V ring's: up to 20, the TMEM pointer, a scheduler's
REGISTERS_PER_LANE = 512  # 64K registers / 128 lanes of a warpgroup


class RegisterBudget(NamedTuple):
    """Registers per thread of each kind of warps."""

    softmax: int
    correction: int
    others: int


def registers(pipeline: ForwardPipeline) -> RegisterBudget:
    """What the warps of a kernel share the register file by."""
    if pipeline.head_dim < 96:
        return RegisterBudget(*SMALL_HEAD_REGISTERS[pipeline.element_bytes])
    softmax, correction = WIDE_REGISTERS
    if published_pair(pipeline):
        softmax, correction = PUBLISHED_PAIR_REGISTERS
    if pipeline.element_bytes == 1:
        key = (pipeline.cta_group, pipeline.causal)
        softmax, correction = FP8_REGISTERS.get(key, FP8_CAUSAL_REGISTERS)
    return RegisterBudget(softmax, correction, REGISTERS_PER_LANE - 2 * softmax - correction)


def published_pair(pipeline: ForwardPipeline) -> bool:
    """Is it a pair of flash_attn.cute with registers of its own? Those of 16-bit types at 128."""
    wide = 96 < pipeline.head_dim <= 128 and pipeline.element_bytes == 2
    return wide and pipeline.cta_group == 2 and pipeline.published


def spilled(pipeline: ForwardPipeline) -> Spill | None:
    """What a softmax thread moves to local memory and back in a step, if it does: as counted."""
    emulates = pipeline.numerics.exp2.share(pipeline.numerics.tile_n) > 0
    if not (published_pair(pipeline) and emulates):
        return None
    moved = (SPILLED_STORES + SPILLED_LOADS) // 2
    return Spill(registers=moved, held=SPILLED_STORES, waits=SPILLED_LOADS)


def kv_slot_bytes(pipeline: ForwardPipeline) -> int:
    """One slot of the ring that K and V share: the larger of the two, halved in a CTA pair."""
    wide = max(pipeline.head_dim, pipeline.head_dim_v)
    return pipeline.numerics.tile_n * wide * pipeline.element_bytes // pipeline.cta_group


def split_columns(pipeline: ForwardPipeline) -> int:
    """Columns of P before the split: split_p of the tile, rounded down to whole fragments."""
    tile_n = pipeline.numerics.tile_n
    if pipeline.split_p == 1.0:
        return tile_n
    return max(FRAGMENT, int(tile_n * pipeline.split_p) // FRAGMENT * FRAGMENT)


def output_over_queries(pipeline: ForwardPipeline) -> bool:
    """Does O take the place of wide Q tiles in shared memory? It leaves when they are used up."""
    return pipeline.head_dim >= 192 and pipeline.head_dim_v >= 64


def steals_work(pipeline: ForwardPipeline) -> bool:
    """Do CTAs ask the hardware for work tiles? Pairs are described without it."""
    return pipeline.scheduler == "clc" and pipeline.cta_group == 1


def lay_out(pipeline: ForwardPipeline, gpu: Gpu) -> list[Buffer]:
    """Shared and tensor memory; raises ValueError with the sum when something does not fit."""
    layout, q_tiles, tile_n = Layout(), pipeline.numerics.q_tiles, pipeline.numerics.tile_n
    q_bytes = WARPGROUP * pipeline.head_dim * pipeline.element_bytes
    o_bytes = WARPGROUP * pipeline.head_dim_v * max(2, pipeline.element_bytes)
    p_bytes = WARPGROUP * tile_n * pipeline.element_bytes
    layout.add("q", "smem", q_bytes, stages=q_tiles, align=1024)
    if output_over_queries(pipeline):
        safe = {"q": "load waits for o_stored before it loads the next Q"}
        layout.alias("o", "smem", 0, o_bytes * q_tiles, safe)
    else:
        layout.add("o", "smem", o_bytes, stages=q_tiles, align=1024)
    if pipeline.p_space == "smem":
        layout.add("p", "smem", p_bytes, stages=q_tiles, align=1024)
    stages = _add_ring(layout, pipeline, gpu)
    if pipeline.correction == "warpgroup":  # otherwise they stay in registers
        layout.add("row_stats", "smem", 2 * q_tiles * WARPGROUP * 4, align=16)
    if steals_work(pipeline):
        layout.add("work", "smem", RESPONSE_BYTES, align=16)
    layout.add("barriers", "smem", 8 * (2 * stages + OTHER_BARRIERS), align=8)
    for tile in range(q_tiles):
        layout.add(f"s{tile}", "tmem", tile_n)
    for tile in range(q_tiles):
        layout.add(f"o{tile}", "tmem", pipeline.head_dim_v)
    if pipeline.p_space == "tmem":
        width = tile_n * pipeline.element_bytes // 4
        for tile in range(q_tiles):
            safe = {f"s{tile}": "softmax has read S; products run in order"}
            layout.alias(f"p{tile}", "tmem", (tile + 1) * tile_n - width, width, safe)
    require_fit(layout.buffers, "tmem", gpu.tmem_cols, gpu.name)
    require_fit(layout.buffers, "smem", gpu.smem_bytes_per_cta, gpu.name)
    return layout.buffers


def _add_ring(layout: Layout, pipeline: ForwardPipeline, gpu: Gpu) -> int:
    """The K/V ring; returns its stages. Where (192, 128) has room for 2.67 slots, they become 3.

    K and V alternate, so every second slot holds the smaller V: a pitch of (K + V) / 2 suffices.
    The middle slot shifts by half the difference, to start where the tile before it ends.
    A K in the first slot reaches over the K that was in the middle one, and waits for that.
    """
    slot, budget = kv_slot_bytes(pipeline), tile_budget_bytes(gpu) - layout.ends["smem"]
    small = slot * pipeline.head_dim_v // pipeline.head_dim
    wide = (pipeline.head_dim, pipeline.head_dim_v) == (192, 128)
    uneven = wide and pipeline.kv_stages is None and 2 * slot + small <= budget < 3 * slot
    stages = 3 if uneven else ring_stages(budget, slot, pipeline.kv_stages)
    layout.add("kv", "smem", (slot + small) // 2 if uneven else slot, stages=stages, align=1024)
    if uneven:
        layout.add("kv_tail", "smem", (slot - small) // 2)
    return stages
