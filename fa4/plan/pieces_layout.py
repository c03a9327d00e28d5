"""Where a kernel with scores in pieces keeps things: registers, shared memory, tensor memory."""

from __future__ import annotations

from fa4.hardware import B200, Gpu
from fa4.plan.forward_layout import RegisterBudget
from fa4.plan.memory import MAX_STAGES, RESERVED_BYTES, Layout, require_fit, ring_stages
from fa4.plan.pieces import PiecesPipeline, chain_name, slot_name
from fa4.plan.schema import Buffer
from fa4.plan.work import WARPGROUP, launch_registers

# Registers with which the softmax loop of `fa4.sm100` for tiles of so many keys, of which a thread
# holds a row, compiles without local memory and within 3% of the instructions that it has with
# more (ptxas, sm_100a, bf16, head dim 128; `python -m lab.benchmarks.pieces`).
COMPILED_REGISTERS = {64: 96, 96: 136, 128: 184}
BESIDE_SCORES = 56  # of a thread with other pieces: as beside 128 scores, the most
ROW_BYTES = 4  # a statistic of a row
SUM_COLUMNS = 16  # of V and O for the column of ones: the least step of a product's columns
MOST_SOFTMAX_REGISTERS = 248
OTHER_BARRIERS = 48  # beside the K/V ring's: of four warpgroups with two buffers each, and of O
# Registers of correction and other threads, by how many softmax warpgroups there are.
SPARE_REGISTERS = {1: (96, 64), 2: (80, 64), 3: (72, 48), 4: (64, 32)}
INLINE_OTHERS = 64  # where no correction warps take registers


def held_registers(pipeline: PiecesPipeline) -> int:
    """Registers that a softmax thread needs: of its pieces, of which interleaving holds two."""
    held = pipeline.piece * (2 if pipeline.softmax == "interleaved" else 1)
    return COMPILED_REGISTERS.get(held, held + BESIDE_SCORES)


def registers(pipeline: PiecesPipeline) -> RegisterBudget:
    """What the warps share the register file by: the softmax warps get what others leave."""
    chains = len(pipeline.chains)
    correction, others = SPARE_REGISTERS.get(chains, (64, 32))
    if pipeline.correction == "inline":
        correction, others = 0, INLINE_OTHERS
    groups = chains + 1 + (correction > 0)
    launched = groups * launch_registers(groups, B200.registers_per_sm)
    left = launched - others - correction
    softmax = min(left // chains // 8 * 8, MOST_SOFTMAX_REGISTERS)
    return RegisterBudget(softmax, correction, others)


def require_registers(pipeline: PiecesPipeline) -> None:
    """Raise ValueError if a softmax thread holds more than its share of the register file."""
    held, share = held_registers(pipeline), registers(pipeline).softmax
    if held > share:
        raise ValueError(
            f"registers: a softmax thread needs {held} and has {share}, with "
            f"{len(pipeline.chains)} softmax warpgroups"
        )


def output_over_queries(pipeline: PiecesPipeline) -> bool:
    """Does O take the place of wide Q tiles in shared memory? It leaves when they are used up."""
    return pipeline.head_dim >= 192 and pipeline.head_dim_v >= 64 and pipeline.q_buffers == 1


def output_columns(pipeline: PiecesPipeline) -> int:
    """Columns of an accumulator O, those of the row sums included."""
    return pipeline.head_dim_v + (SUM_COLUMNS if pipeline.row_sums == "tensor" else 0)


def key_bytes(pipeline: PiecesPipeline) -> int:
    """A tile of K, halved in a pair."""
    return pipeline.tile_n * pipeline.head_dim * pipeline.element_bytes // pipeline.cta_group


def value_bytes(pipeline: PiecesPipeline) -> int:
    """A tile of V, halved in a pair; a column of ones lies beside it for good."""
    return pipeline.tile_n * pipeline.head_dim_v * pipeline.value_bytes // pipeline.cta_group


def kv_slot_bytes(pipeline: PiecesPipeline) -> int:
    """One slot of the ring that K and V share."""
    return max(key_bytes(pipeline), value_bytes(pipeline))


def lay_out(pipeline: PiecesPipeline, gpu: Gpu) -> list[Buffer]:
    """Shared and tensor memory; raises ValueError with the sum when something does not fit."""
    layout, tiles = Layout(), range(pipeline.q_tiles)
    q_bytes = WARPGROUP * pipeline.head_dim * pipeline.element_bytes
    o_bytes = WARPGROUP * pipeline.head_dim_v * 2
    for i in tiles:
        layout.add(f"q{i}", "smem", q_bytes, stages=pipeline.q_buffers, align=1024)
    if output_over_queries(pipeline):
        safe = {f"q{i}": "load waits for o_stored before it loads the next Q" for i in tiles}
        safe = {name: why for name, why in safe.items()
                if int(name[1:]) * q_bytes < o_bytes * pipeline.q_tiles}  # fmt: skip
        layout.alias("o", "smem", 0, o_bytes * pipeline.q_tiles, safe)
    else:
        layout.add("o", "smem", o_bytes, stages=pipeline.q_tiles, align=1024)
    if pipeline.row_sums == "tensor":
        ones = pipeline.tile_n * SUM_COLUMNS * pipeline.value_bytes
        layout.add("ones", "smem", ones // pipeline.cta_group, align=1024)
    slot, beside = kv_slot_bytes(pipeline), statistics_bytes(pipeline)
    left = gpu.smem_bytes_per_cta - max(RESERVED_BYTES, beside) - layout.ends["smem"]
    stages = ring_stages(left, slot, pipeline.kv_stages)
    layout.add("kv", "smem", slot, stages=stages, align=1024)
    _add_statistics(layout, pipeline)
    layout.add("barriers", "smem", 8 * (2 * stages + OTHER_BARRIERS), align=8)
    _add_columns(layout, pipeline)
    require_fit(layout.buffers, "tmem", gpu.tmem_cols, gpu.name)
    require_fit(layout.buffers, "smem", gpu.smem_bytes_per_cta, gpu.name)
    return layout.buffers


def statistics_bytes(pipeline: PiecesPipeline) -> int:
    """Shared memory beside the tiles, with the barriers of a ring of 32 stages."""
    layout = Layout()
    _add_statistics(layout, pipeline)
    return layout.ends.get("smem", 0) + 8 * (2 * MAX_STAGES + OTHER_BARRIERS)


def _add_statistics(layout: Layout, pipeline: PiecesPipeline) -> None:
    """Factors and sums for the correction warps; maxima that the groups of a Q tile exchange."""
    row = WARPGROUP * ROW_BYTES
    for i, g in pipeline.chains:
        name = chain_name(pipeline, i, g)
        if pipeline.correction == "warpgroup":
            layout.add(f"row_stats{name}", "smem", 2 * row, align=16)
        if pipeline.groups > 1:
            layout.add(f"row_max{name}", "smem", row, stages=2, align=16)


def _add_columns(layout: Layout, pipeline: PiecesPipeline) -> None:
    """Scores, the groups of a product side by side; accumulators; each P over its scores."""
    width = pipeline.piece * pipeline.value_bytes // 4
    at: dict[str, int] = {}
    for i in range(pipeline.q_tiles):
        for turn in range(pipeline.buffers):
            for g in range(pipeline.groups):
                name = slot_name(pipeline, i, g, turn)
                at[name] = layout.add(f"s{name}", "tmem", pipeline.piece).stop
    for i in range(pipeline.q_tiles):
        layout.add(f"o{i}", "tmem", output_columns(pipeline))
    for name, stop in at.items():
        safe = {f"s{name}": "softmax has read S; products run in order"}
        layout.alias(f"p{name}", "tmem", stop - width, width, safe)
