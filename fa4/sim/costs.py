"""From amounts of work to cycles on a machine's units, each rule with its source.

Units of one SM: tensor (products), smem (the shared-memory port: operand reads, register stores,
reduce reads), mufu, fma, alu, issue (instruction slots), tmem_load, tmem_store, tma (bulk loads and
stores), dsmem, reduce. Rates come from `Gpu`, latencies and rules from `CostTable`. Bulk loads
take the shared-memory port too, which the paper's budgets (and `roofline`) leave out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from fa4.config import require, require_finite
from fa4.hardware import Gpu
from fa4.plan.schema import (
    Amount,
    Copy,
    Math,
    Mma,
    Role,
    Semaphore,
    Signal,
    SmemAccess,
    Sync,
    TmemAccess,
    Work,
)
from fa4.sim.lower import SignalCost, WorkCost

WARP = 32
SLIP_CYCLES = 8.0  # one warp-wide access per row statistic of a warpgroup


def _figure(value: float, source: str) -> Any:
    """A default that carries its source."""
    return field(default=value, metadata={"source": source})


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Latencies and rules of one machine, in SM cycles unless named otherwise.

    Defaults are B200's. `sources()` says where each comes from; those in FREE_CONSTANTS are fitted.
    """

    mma_latency_cycles: float = _figure(
        136.0, "last product to visible, both operands in SMEM: SemiAnalysis umma_latency, B200"
    )
    mma_tmem_latency_cycles: float = _figure(
        104.0, "the same with A in TMEM: SemiAnalysis umma_latency, B200"
    )
    mma_pair_latency_cycles: float = _figure(
        34.0, "added by cta_group 2 (170 instead of 136): SemiAnalysis umma_latency, B200"
    )
    mma_issue_cycles: float = _figure(30.0, "Triton AutoWS LatencyModel, B200 probes")
    tmem_load_bytes_per_clk: float = _figure(512.0, "TileSight 466-504, QuickRunCUDA 4 x 128")
    tmem_store_bytes_per_clk: float = _figure(1024.0, "TileSight b200.py, 1023.9 measured")
    tmem_load_latency_cycles: float = _figure(
        115.0, "115 + 1 per register: Triton AutoWS LatencyModel, B200 probes"
    )
    tmem_store_latency_cycles: float = _figure(
        32.0, "32 + 0.5 per register: Triton AutoWS LatencyModel, B200 probes"
    )
    alu_lanes_per_clk: float = _figure(64.0, "QuickRunCUDA B300 pipe catalogue")
    issue_per_clk: float = _figure(4.0, "one warp instruction per sub-core: QuickRunCUDA")
    math_latency_cycles: float = _figure(
        14.0, "what the dependent instructions of a fragment expose; MUFU alone 14: QuickRunCUDA"
    )
    fma_latency_cycles: float = _figure(4.0, "FFMA, FADD, FMUL: QuickRunCUDA B300 catalogue")
    smem_latency_cycles: float = _figure(26.0, "LDS 24-28: QuickRunCUDA")
    tma_bytes_per_clk: float = _figure(126.0, "241 GB/s of one CTA: QuickRunCUDA")
    fill_bytes_per_clk: float = _figure(
        128.0, "bulk loads and operand reads share the SMEM port: mixed 27 TB/s, QuickRunCUDA"
    )
    tma_load_latency_cycles: float = _figure(
        400.0, "L2 hit 460 + 6 per KiB (AutoWS LatencyModel), less the 8 per KiB of 126 B/clk"
    )
    tma_store_latency_cycles: float = _figure(130.0, "Triton AutoWS LatencyModel, B200 probes")
    tma_issue_cycles: float = _figure(48.0, "cp.async.bulk: QuickRunCUDA")
    dsmem_latency_cycles: float = _figure(215.0, "round trip in a cluster of 2: QuickRunCUDA")
    dsmem_bytes_per_clk: float = _figure(
        128.0, "a pass of 16 KiB is 128 cycles: FlashAttention-4 paper's dS exchange"
    )
    reduce_bytes_per_clk: float = _figure(
        64.0, "no measurement found; half of the SMEM port, above what dQ needs"
    )
    reduce_latency_cycles: float = _figure(
        700.0, "an L2 round trip, 364 near and 725 far: Fan et al. 2026"
    )
    mbarrier_wait_cycles: float = _figure(30.0, "Triton AutoWS LatencyModel, B200 probes")
    mbarrier_arrive_cycles: float = _figure(20.0, "Triton AutoWS LatencyModel, B200 probes")
    named_barrier_cycles: float = _figure(31.0, "bar.sync of 128 threads: QuickRunCUDA")
    hbm_efficiency: float = _figure(
        0.88, "copies and TMA reads of 6.95-7.26 TB/s of 8: TileSight, SemiAnalysis"
    )
    vector_efficiency: float = _figure(1.0, "share of the FMA and ALU peak of real code")
    sync_cycles: float = _figure(31.0, "a barrier within a role with the fences around it")
    hbm_latency_cycles: float = _figure(2000.0, "first load of a tile with all SMs loading")
    cta_start_cycles: float = _figure(2000.0, "launch, barriers, TMEM allocation of a CTA")
    semaphore_cycles: float = _figure(700.0, "polling a counter in L2 until it is this CTA's turn")
    launch_ns: float = _figure(2000.0, "kernel launch on the GPU's side: TileSight b200.py")
    sustained_clock: float = _figure(
        1.0, "share of the GPU's clock_hz that its power limit leaves under tensor-core load"
    )

    def __post_init__(self) -> None:
        """Every figure is finite and not negative; rates and efficiencies are positive."""
        for item in fields(self):
            value = getattr(self, item.name)
            require_finite(item.name, value, 0.0)
            if item.name.endswith(("per_clk", "efficiency", "clock")):
                require(value > 0, f"{item.name} must be positive", value)

    @classmethod
    def sources(cls) -> dict[str, str]:
        """Field -> where its default comes from."""
        return {item.name: item.metadata["source"] for item in fields(cls)}


# What no measurement gives and calibration may choose: name -> (least, most, why these bounds).
FREE_CONSTANTS: dict[str, tuple[float, float, str]] = {
    "vector_efficiency": (
        0.4, 1.0, "three-register FMAs run at 0.65 of peak (QuickRunCUDA); 1 is the pipes' peak",
    ),
    "sync_cycles": (
        31.0, 300.0, "a bare barrier is 31 to 54 cycles, a gpu fence about 280 (QuickRunCUDA)",
    ),
    "hbm_latency_cycles": (
        800.0, 5500.0, "552 to 920 unloaded (Fan et al.); 5405 with 64 KiB per SM (SemiAnalysis)",
    ),
    "cta_start_cycles": (
        500.0, 9000.0, "TMEM allocation alone is 253 cycles; upper end 5 us, a whole launch",
    ),
    "semaphore_cycles": (
        300.0, 4000.0, "one L2 access is 364 to 725 cycles (Fan et al.); a few per turn",
    ),
    "math_latency_cycles": (
        14.0, 120.0, "one MUFU result, to the FMA, MUFU, convert and store chain of a fragment",
    ),
}  # fmt: skip


class MachineCosts:
    """Cost functions of one machine for `lower`."""

    def __init__(self, gpu: Gpu, table: CostTable) -> None:
        self.gpu, self.table = gpu, table
        self._rules: dict[type, Callable[..., WorkCost]] = {
            Mma: self._mma,
            Copy: self._copy,
            TmemAccess: self._tmem,
            SmemAccess: self._smem,
            Math: self._math,
            Sync: self._sync,
            Semaphore: self._semaphore,
        }

    def work(self, role: Role, work: Work) -> WorkCost:
        """Cycles of a piece of work done by `role`."""
        return self.amount(work.amount, len(role.warps))

    def amount(self, amount: Amount, warps: int) -> WorkCost:
        """Cycles of an amount of work done by a number of warps."""
        return self._rules[type(amount)](amount, warps)

    def signal(self, signal: Signal) -> SignalCost:
        """Cycles of arriving on and passing a barrier."""
        if signal.kind != "mbarrier":  # groups of copies and products have no barrier to arrive at
            return SignalCost(latency_cycles=0.0, wait_cycles=self.table.named_barrier_cycles)
        # The leader of a pair waits for its peer's arrivals: one way of a DSMEM round trip.
        remote = self.table.dsmem_latency_cycles / 2 if signal.remote else 0.0
        return SignalCost(
            latency_cycles=self.table.mbarrier_arrive_cycles + remote,
            wait_cycles=self.table.mbarrier_wait_cycles,
        )

    def _mma(self, amount: Mma, warps: int) -> WorkCost:
        flops = 2 * amount.rows * amount.cols * amount.depth
        latency = (
            self.table.mma_latency_cycles
            if amount.a_bytes
            else (self.table.mma_tmem_latency_cycles)
        )
        if amount.cta_group == 2:
            latency += self.table.mma_pair_latency_cycles
        return WorkCost(
            occupancy_cycles={
                "tensor": flops / (self.gpu.mma_flops_per_clk * 2 // amount.element_bytes),
                "smem": (amount.a_bytes + amount.b_bytes) / self.gpu.smem_bytes_per_clk,
            },
            latency_cycles=latency,
            issue_cycles=self.table.mma_issue_cycles,
        )

    def _copy(self, amount: Copy, warps: int) -> WorkCost:
        table, size = self.table, amount.num_bytes
        issue = table.tma_issue_cycles
        if amount.kind == "reduce":
            occupancy = {
                "reduce": size / table.reduce_bytes_per_clk,
                "smem": size / self.gpu.smem_bytes_per_clk,
            }
            return WorkCost(occupancy_cycles=occupancy, issue_cycles=issue,
                            latency_cycles=table.reduce_latency_cycles)  # fmt: skip
        if amount.kind == "dsmem":
            # Read here, sent, and received from the peer: three passes of the port (the paper
            # charges 384 cycles for 16 KiB).
            occupancy = {
                "dsmem": size / table.dsmem_bytes_per_clk,
                "smem": 3 * size / self.gpu.smem_bytes_per_clk,
            }
            return WorkCost(occupancy_cycles=occupancy, issue_cycles=issue,
                            latency_cycles=table.dsmem_latency_cycles)  # fmt: skip
        latency = table.tma_store_latency_cycles
        if amount.kind == "load":
            latency = table.hbm_latency_cycles if amount.cold else table.tma_load_latency_cycles
        occupancy = {"tma": size / table.tma_bytes_per_clk}
        if amount.kind == "load":
            occupancy["smem"] = size / table.fill_bytes_per_clk
        return WorkCost(
            occupancy_cycles=occupancy,
            latency_cycles=latency,
            issue_cycles=issue,
        )

    def _tmem(self, amount: TmemAccess, warps: int) -> WorkCost:
        num_bytes = WARP * warps * amount.cols * 4
        if amount.kind == "load":
            cycles = num_bytes / self.table.tmem_load_bytes_per_clk
            return WorkCost(occupancy_cycles={"tmem_load": cycles},
                            latency_cycles=self.table.tmem_load_latency_cycles)  # fmt: skip
        cycles = num_bytes / self.table.tmem_store_bytes_per_clk
        return WorkCost(occupancy_cycles={"tmem_store": cycles},
                        latency_cycles=self.table.tmem_store_latency_cycles)  # fmt: skip

    def _smem(self, amount: SmemAccess, warps: int) -> WorkCost:
        cycles = amount.num_bytes / self.gpu.smem_bytes_per_clk
        # A few cycles slip in between the operand reads of a product instead of queueing behind.
        queued = {"smem": cycles} if cycles > SLIP_CYCLES else {}
        return WorkCost(occupancy_cycles=queued, latency_cycles=self.table.smem_latency_cycles)

    def _sync(self, amount: Sync, warps: int) -> WorkCost:
        cycles = self.table.sync_cycles if amount.fenced else self.table.named_barrier_cycles
        return WorkCost(occupancy_cycles={}, latency_cycles=cycles)

    def _semaphore(self, amount: Semaphore, warps: int) -> WorkCost:
        return WorkCost(occupancy_cycles={}, latency_cycles=self.table.semaphore_cycles)

    def _math(self, amount: Math, warps: int) -> WorkCost:
        lanes = WARP * warps
        slots = amount.mufu + amount.fma / 2 + amount.alu + amount.other
        efficiency = self.table.vector_efficiency
        pipes = {
            "mufu": amount.mufu * lanes / self.gpu.exp_per_clk,
            "fma": amount.fma * lanes / self.gpu.fma_lanes_per_clk / efficiency,
            "alu": amount.alu * lanes / self.table.alu_lanes_per_clk / efficiency,
            "issue": slots * warps / self.table.issue_per_clk,
        }
        used = {unit: cycles for unit, cycles in pipes.items() if cycles > 0}
        exposed = self.table.math_latency_cycles + amount.chain * self.table.fma_latency_cycles
        return WorkCost(occupancy_cycles=used, latency_cycles=exposed)
