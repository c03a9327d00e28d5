"""Where the forward kernel keeps things: registers, shared memory, tensor memory."""

from __future__ import annotations

from fa4.config import ForwardPipeline
from fa4.hardware import Gpu
from fa4.plan.memory import TILE_BUDGET_BYTES, Layout, require_fit, ring_stages
from fa4.plan.schema import Buffer
from fa4.plan.work import WARPGROUP

# (cta_group, causal, padded head dim) -> registers of a softmax and a correction thread
# (flash_attn.cute's tuning table for B200); the other warps get what is left of 512 per lane.
TUNED_REGISTERS = {
    (2, False, 128): (176, 88),
    (1, True, 128): (192, 72),
    (2, False, 192): (184, 80),
    (1, True, 192): (192, 72),
}
SMALL_HEAD_REGISTERS = (200, 64, 48)  # head dim below 96
DEFAULT_REGISTERS = (192, 80)
REGISTERS_PER_LANE = 512  # 64K registers / 128 lanes of a warpgroup


def registers(pipeline: ForwardPipeline) -> tuple[int, int, int]:
    """Registers per thread of the softmax, correction and other warps."""
    padded = max(96, 128 if pipeline.head_dim <= 128 else 192)
    if pipeline.head_dim < 96:
        return SMALL_HEAD_REGISTERS
    key = (pipeline.cta_group, pipeline.causal, padded)
    softmax, correction = TUNED_REGISTERS.get(key, DEFAULT_REGISTERS)
    return softmax, correction, REGISTERS_PER_LANE - 2 * softmax - correction


def kv_slot_bytes(pipeline: ForwardPipeline) -> int:
    """One slot of the ring that K and V share: the larger of the two, halved in a CTA pair."""
    assert pipeline.head_dim_v is not None
    wide = max(pipeline.head_dim, pipeline.head_dim_v)
    return pipeline.numerics.tile_n * wide * pipeline.element_bytes // pipeline.cta_group


def lay_out(pipeline: ForwardPipeline, gpu: Gpu) -> list[Buffer]:
    """Shared and tensor memory; raises ValueError with the sum when something does not fit."""
    assert pipeline.head_dim_v is not None
    layout, q_tiles, tile_n = Layout(), pipeline.numerics.q_tiles, pipeline.numerics.tile_n
    q_bytes = WARPGROUP * pipeline.head_dim * pipeline.element_bytes
    o_bytes = WARPGROUP * pipeline.head_dim_v * max(2, pipeline.element_bytes)
    p_bytes = WARPGROUP * tile_n * pipeline.element_bytes
    layout.add("q", "smem", q_bytes, stages=q_tiles, align=1024)
    # O leaves when Q is no longer needed: with wide Q tiles it takes their place.
    overlay = pipeline.head_dim >= 192 and pipeline.head_dim_v >= 64
    if overlay:
        layout.alias("o", "smem", 0, o_bytes * q_tiles, {"q": "load waits for the epilogue"})
    else:
        layout.add("o", "smem", o_bytes, stages=q_tiles, align=1024)
    if pipeline.p_space == "smem":
        layout.add("p", "smem", p_bytes, stages=q_tiles, align=1024)
    slot = kv_slot_bytes(pipeline)
    stages = ring_stages(
        TILE_BUDGET_BYTES - layout.ends["smem"], slot, pipeline.kv_stages or _uneven(pipeline)
    )
    _add_ring(layout, pipeline, slot, stages)
    layout.add("row_stats", "smem", 2 * q_tiles * WARPGROUP * 4, align=16)
    layout.add("barriers", "smem", 8 * 64, align=8)
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


def _uneven(pipeline: ForwardPipeline) -> int | None:
    """Three stages for (192, 128) in one CTA: large, small, large slots (see _add_ring)."""
    wide = (pipeline.head_dim, pipeline.head_dim_v) == (192, 128)
    return 3 if wide and pipeline.cta_group == 1 and pipeline.numerics.tile_n == 128 else None


def _add_ring(layout: Layout, pipeline: ForwardPipeline, slot: int, stages: int) -> None:
    """The K/V ring. With K larger than V and three stages, slots of pitch (K + V) / 2 suffice.

    K and V alternate, so every second slot holds the smaller V; the middle slot shifts by half the
    difference depending on the phase, and a K waits for both of its neighbours.
    """
    assert pipeline.head_dim_v is not None
    if _uneven(pipeline) is not None and pipeline.kv_stages is None:
        small = slot * pipeline.head_dim_v // pipeline.head_dim
        layout.add("kv", "smem", (slot + small) // 2, stages=stages, align=1024)
        layout.add("kv_tail", "smem", (slot - small) // 2)
    else:
        layout.add("kv", "smem", slot, stages=stages, align=1024)
