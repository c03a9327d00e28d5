"""Names of the counters that are read, and what they stand for."""

from __future__ import annotations

from collections.abc import Mapping

PIPES = ("alu", "fma", "fmaheavy", "xu", "lsu", "uniform", "tma", "tensor_op_gmma", "adu", "cbu")
STALLS = (
    "barrier", "dispatch_stall", "gmma", "long_scoreboard", "math_pipe_throttle", "mio_throttle",
    "no_instruction", "not_selected", "selected", "short_scoreboard", "sleeping", "wait",
)  # fmt: skip
# Key in the result file -> ncu's name.
METRICS: Mapping[str, str] = {
    "duration_ns": "gpu__time_duration.sum",
    "active_cycles": "sm__cycles_active.avg",
    "elapsed_cycles": "sm__cycles_elapsed.max",
    "registers": "launch__registers_per_thread",
    "grid": "launch__grid_size",
    "block": "launch__block_size",
    "instructions": "smsp__inst_executed.sum",
    "issue_percent": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "dram_bytes": "dram__bytes.sum",
    "l2_bytes": "lts__t_bytes.sum",
    "tma_read_bytes": "l1tex__m_xbar2l1tex_read_bytes_pipe_tma.sum",
    "tma_write_bytes": "l1tex__m_l1tex2xbar_write_bytes_pipe_tma.sum",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    **{f"pipe_{pipe}": f"sm__inst_executed_pipe_{pipe}.sum" for pipe in PIPES},
    **{
        f"stall_{reason}": f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"
        for reason in STALLS
    },
}
