"""The warps that transpose V, beside the one that loads: products of 8-bit types on Hopper read
K-major operands only, and V lies in global memory with its columns side by side.

They read pairs of neighbouring columns transposed (ldmatrix on 16-bit units), part the pairs by
byte permutes, and store 16 keys of a column side by side (stmatrix), in an order in which the
accumulator of S, packed, is P's operand.
"""

from __future__ import annotations

from fa4.config import WarpgroupPipeline
from fa4.plan.schema import Arrive, Loop, Math, Role, SmemAccess, Sync, Wait, Work
from fa4.plan.work_queue import read_number

TRANSPOSING_WARPS = 3  # with the warp that loads they are a warpgroup
BLOCK_BYTES = 512  # of V, that a warp moves by one ldmatrix and one stmatrix
# Instructions of a thread for a block: byte permutes and addresses; the two accesses.
BLOCK_ALU, BLOCK_OTHER = 6.0, 2.0


def transposing_role(pipeline: WarpgroupPipeline, registers: int) -> Role:
    """What they do per work tile: each V from its ring `raw` into the ring `v`."""
    num_bytes = pipeline.tile_n * pipeline.head_dim_v * pipeline.element_bytes
    blocks = num_bytes / BLOCK_BYTES / TRANSPOSING_WARPS
    among = Math(alu=BLOCK_ALU * blocks, other=BLOCK_OTHER * blocks)
    step = (
        Wait("raw_full"),
        Wait("v_empty"),
        Work("transpose V", SmemAccess(num_bytes=2 * num_bytes, among=among), reads=("raw",),
             writes=("v",)),
        Work("show V", Sync(fenced=True, by_warp=True)),
        Arrive("raw_empty"),
        Arrive("v_full"),
    )  # fmt: skip
    first = 4 * pipeline.consumers + 1
    return Role(
        name="transpose",
        warps=tuple(range(first, first + TRANSPOSING_WARPS)),
        registers=registers,
        program=(Loop("kv_tiles", step), *(read_number() if pipeline.scheduler == "queue" else ())),
    )
