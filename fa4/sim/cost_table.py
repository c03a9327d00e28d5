"""Latencies, rates and rules of a machine that `Gpu` does not hold, each with its source.

Blackwell's are published measurements, Hopper's were measured for this package on an H200
(`lab/hardware/hopper_units`). What nobody measured is a free constant, fitted within bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from fa4.config import require, require_finite

Interval = tuple[float, float]


def figure(value: float, source: str, interval: Interval | None = None) -> Any:
    """A default that carries its source, and between what it lies if it was put together."""
    return field(default=value, metadata={"source": source, "interval": interval})


@dataclass(frozen=True)
class SourcedFigures:
    """A record whose fields are made by `figure`."""

    @classmethod
    def sources(cls) -> dict[str, str]:
        """Field -> where its default comes from."""
        return {item.name: item.metadata["source"] for item in fields(cls)}

    @classmethod
    def intervals(cls) -> dict[str, Interval]:
        """Field -> between what its default lies, where it was put together of measurements."""
        known = ((item.name, item.metadata["interval"]) for item in fields(cls))
        return {name: interval for name, interval in known if interval is not None}


class TakenOver(SourcedFigures):
    """An H100's figures: the chip is an H200's, whose measurements stand for it."""

    @classmethod
    def sources(cls) -> dict[str, str]:
        """Those of an H200 say that they were taken over."""
        return {
            name: source.replace("measured on an H200", "as on an H200, the same chip")
            for name, source in super().sources().items()
        }


@dataclass(frozen=True, kw_only=True)
class CostTable(SourcedFigures):
    """Latencies and rules of one machine, in SM cycles unless named otherwise.

    Defaults are Blackwell's. `sources()` says where each comes from; FREE_CONSTANTS are fitted.
    """

    mma_latency_cycles: float = figure(
        136.0, "last product to visible, both operands in SMEM: SemiAnalysis umma_latency, B200"
    )
    mma_tmem_latency_cycles: float = figure(
        104.0, "the same with A in TMEM (wgmma: registers): SemiAnalysis umma_latency, B200"
    )
    mma_pair_latency_cycles: float = figure(
        34.0, "added by cta_group 2 (170 instead of 136): SemiAnalysis umma_latency, B200"
    )
    mma_waited_cycles: float = figure(
        136.0,
        "of each product that is waited for before the next one: none on Blackwell, as the last",
    )
    mma_tmem_waited_cycles: float = figure(104.0, "the same with A in TMEM (wgmma: registers)")
    mma_gap_cycles: float = figure(
        0.0, "of the tensor core between instructions of a lone warpgroup: no such thing in TMEM"
    )
    mma_tmem_gap_cycles: float = figure(0.0, "the same with A in TMEM (wgmma: registers)")
    mma_floor_cycles: float = figure(
        43.0,
        "an instruction of 128 rows and 32 bytes of depth with both operands in SMEM, however few "
        "its columns: a pair's of 64 (SemiAnalysis umma_throughput, B200); 40 by what it reads, "
        "44 on a B300 (QuickRunCUDA)",
        (40.0, 44.0),
    )
    mma_issue_cycles: float = figure(30.0, "Triton AutoWS LatencyModel, B200 probes")
    mma_queued: float = figure(
        0.0, "instructions of a role behind the one that runs: here a product is one piece of work"
    )
    tmem_load_bytes_per_clk: float = figure(
        512.0, "TileSight 466-504, QuickRunCUDA 4 x 128", (466.0, 512.0)
    )
    tmem_store_bytes_per_clk: float = figure(1024.0, "TileSight b200.py, 1023.9 measured")
    tmem_load_latency_cycles: float = figure(
        115.0, "115 + 1 per register: Triton AutoWS LatencyModel, B200 probes"
    )
    tmem_store_latency_cycles: float = figure(
        32.0, "32 + 0.5 per register: Triton AutoWS LatencyModel, B200 probes"
    )
    alu_lanes_per_clk: float = figure(64.0, "QuickRunCUDA B300 pipe catalogue")
    issue_per_clk: float = figure(4.0, "one warp instruction per sub-core: QuickRunCUDA")
    math_latency_cycles: float = figure(
        14.0, "what the dependent instructions of a fragment expose; MUFU alone 14: QuickRunCUDA"
    )
    fma_latency_cycles: float = figure(4.0, "FFMA, FADD, FMUL: QuickRunCUDA B300 catalogue")
    smem_latency_cycles: float = figure(26.0, "LDS 24-28: QuickRunCUDA")
    port_least_share: float = figure(
        0.0,
        "of the SMEM port that threads have beside products which could take all of it; 0: not "
        "measured, each has every other cycle",
    )
    full_port_latency_cycles: float = figure(
        0.0,
        "more of a thread's access for each other warpgroup whose products take all of the port: "
        "not measured",
    )
    full_port_fence_cycles: float = figure(
        0.0, "more of a fence.proxy.async behind stores there: not measured"
    )
    bulk_read_bytes: float = figure(
        0.0, "of shared memory by bulk copies, in cycles of the port that products leave; 0: any"
    )
    local_load_latency_cycles: float = figure(
        26.0, "a register back from the first cache: as LDS 24-28, the same memory", (26.0, 40.0)
    )
    l2_load_latency_cycles: float = figure(364.0, "a thread's load, near: Fan et al. 2026")
    tma_bytes_per_clk: float = figure(126.0, "241 GB/s of one CTA: QuickRunCUDA")
    fill_port_share: float = figure(
        0.65,
        "of a bulk load's cycles at the SMEM port those in which products read operands: as busy "
        "as the tensor core is in the published kernels, 55% to 71% (FlashAttention-4 paper)",
        (0.0, 1.0),
    )
    tma_store_bytes_per_clk: float = figure(
        19.7, "52 cycles per KiB: Triton AutoWS LatencyModel, B200 probes"
    )
    half_sector_share: float = figure(
        1.0, "of L2's rate, where half of the rows begin in the middle of a sector: not measured"
    )
    tma_load_latency_cycles: float = figure(
        400.0, "L2 hit 460 + 6 per KiB (AutoWS LatencyModel), less the 8 per KiB of 126 B/clk"
    )
    tma_store_latency_cycles: float = figure(130.0, "Triton AutoWS LatencyModel, B200 probes")
    tma_issue_cycles: float = figure(48.0, "cp.async.bulk: QuickRunCUDA")
    dsmem_latency_cycles: float = figure(
        215.0, "round trip in a cluster of 2, 180 of 3 and more: QuickRunCUDA", (180.0, 215.0)
    )
    dsmem_bytes_per_clk: float = figure(
        128.0, "a pass of 16 KiB is 128 cycles: FlashAttention-4 paper's dS exchange"
    )
    reduce_bytes_per_clk: float = figure(
        64.0, "no measurement found; half of the SMEM port, above what dQ needs"
    )
    reduce_latency_cycles: float = figure(
        700.0, "an L2 round trip, 364 near and 725 far: Fan et al. 2026"
    )
    mbarrier_wait_cycles: float = figure(
        30.0, "Triton AutoWS LatencyModel, B200 probes; 6 to 50 elsewhere", (6.0, 50.0)
    )
    mbarrier_arrive_cycles: float = figure(
        20.0, "Triton AutoWS LatencyModel, B200 probes; 8 to 24: QuickRunCUDA", (8.0, 24.0)
    )
    named_barrier_cycles: float = figure(31.0, "bar.sync of 128 threads: QuickRunCUDA")
    warp_sync_cycles: float = figure(20.0, "as on an H200: fence.proxy.async 15, syncwarp 4.75")
    hbm_efficiency: float = figure(
        0.88, "copies and TMA reads of 6.95-7.26 TB/s of 8: TileSight, SemiAnalysis"
    )
    hbm_copy_efficiency: float = figure(0.88, "the same: copies are among them")
    exp_issue_slots: float = figure(
        3.0,
        "issue slots that an exponential takes from the other pipes where an SM has 16 a cycle, in "
        "proportion where it has more: its own at the least, at most an H200's 4.5, with which "
        "emulated exponentials would not pay",
        (1.0, 4.5),
    )
    register_contention: float = figure(
        0.0, "tensor memory holds the accumulators: products leave the registers alone"
    )
    fetch_stall_cycles: float = figure(
        0.0, "per instruction and further warpgroup: not told apart from vector_efficiency"
    )
    vector_efficiency: float = figure(
        0.65, "share of the FMA and ALU peak of real code: three-register FMAs, QuickRunCUDA"
    )
    sync_cycles: float = figure(
        280.0, "a barrier within a role with its fences: a gpu fence is 280, QuickRunCUDA"
    )
    hbm_latency_cycles: float = figure(
        800.0, "552 near and 920 far, unloaded: Fan et al.; what all SMs ask for queues behind it"
    )
    hbm_queue_share: float = figure(
        0.4,
        "as on an H200: of a cold load's time at its SM's part of HBM, spent behind others",
        (0.24, 1.07),
    )
    first_round_share: float = figure(
        0.0, "of HBM's rate, where all SMs begin at once: not measured; 0 for no such round"
    )
    cta_start_cycles: float = figure(
        1059.0,
        "as on an H200: a CTA of 512 threads replaced 418, 30 barriers and maps 331, setmaxnreg "
        "310; TMEM allocation (253) goes on beside the first loads",
        (585.0, 1312.0),
    )
    semaphore_cycles: float = figure(
        2710.0, "a turn at dQ: reduction done 700, two gpu fences 2 x 280, counter in L2 2 x 725"
    )
    launch_ns: float = figure(2000.0, "kernel launch on the GPU's side: TileSight b200.py")
    sustained_clock: float = figure(1.0, "share of the GPU's clock_hz: that of the paper's peak")
    throttle_from: float = figure(
        1.0, "share of the time with the tensor core at work beyond which the clock falls: not seen"
    )
    throttle_slope: float = figure(
        0.0, "share of the clock lost per share of the tensor core beyond that: not measured"
    )

    def __post_init__(self) -> None:
        """Every figure is finite and not negative; rates and efficiencies are positive."""
        for item in fields(self):
            value = getattr(self, item.name)
            require_finite(item.name, value, 0.0)
            if item.name.endswith(("per_clk", "efficiency", "clock")):
                require(value > 0, f"{item.name} must be positive", value)


def _measured(value: float, what: str, interval: Interval | None = None) -> Any:
    return figure(value, f"measured on an H200: {what}", interval)


@dataclass(frozen=True, kw_only=True)
class HopperCosts(CostTable):
    """Those of an H200: measured on one except where a source says otherwise."""

    mma_latency_cycles: float = _measured(
        81.0, "8 wgmma and their wait, less n N / 2; Q, K in SMEM"
    )
    mma_tmem_latency_cycles: float = _measured(66.0, "the same with A in registers")
    mma_waited_cycles: float = _measured(
        54.0, "16 wgmma in a row, each waited for, less N / 2", (54.0, 57.1)
    )
    mma_tmem_waited_cycles: float = _measured(45.0, "the same with A in registers", (45.0, 45.1))
    mma_gap_cycles: float = _measured(
        1.8,
        "chains of 32 wgmma less chains of 8, beyond N / 2 for N 64 to 128; filled by others",
    )
    mma_tmem_gap_cycles: float = _measured(4.2, "the same with A in registers, 4.1 to 4.5")
    mma_queued: float = _measured(
        7.0,
        "instructions of a warpgroup that wait: the last of 24 is done 242 cycles after its issue "
        "for N 64, 466 for N 128, alone and beside another warpgroup's, between which they run",
    )
    alu_lanes_per_clk: float = _measured(64.0, "FMNMX, F2FP, LOP3 (63)")
    issue_per_clk: float = _measured(4.0, "FFMA with FMNMX, 1 per sub-core")
    fma_latency_cycles: float = _measured(4.0, "dependent FFMA, FADD, FMUL, FMNMX, F2FP")
    smem_latency_cycles: float = _measured(28.0, "STS to LDS; LDS 23 to 29")
    port_least_share: float = _measured(
        0.085,
        "a warpgroup's 16-byte stores, 128 cycles of the port, take 1,500 beside products that "
        "read 128 bytes per cycle, 474 beside 96, 288 beside 64: products come first",
    )
    full_port_latency_cycles: float = _measured(
        36.0,
        "a load beside products that read 128 bytes per cycle: of one warpgroup 42 longer than "
        "alone, of two 61",
        (30.5, 42.0),
    )
    full_port_fence_cycles: float = _measured(
        100.0,
        "there, a store shown to the async proxy: of one warpgroup 178 longer than alone, of two "
        "364, of which the store 69 and 171",
        (96.5, 109.0),
    )
    bulk_read_bytes: float = _measured(
        32.0,
        "bulk sums of one SM beside products that leave half, a quarter, none of the port: 16.4, "
        "8.4, 0.9 bytes per cycle",
    )
    local_load_latency_cycles: float = figure(
        0.0, "spilled registers are asked for early; what waits is what misses the first cache"
    )
    l2_load_latency_cycles: float = _measured(287.0, "ld.acquire.gpu")
    tma_bytes_per_clk: float = _measured(109.0, "one SM loads 8 to 32 KiB from L2: 9.4 per KiB")
    half_sector_share: float = _measured(
        0.76,
        "all SMs load 64 rows of 200 to 248 columns, of every other head from the middle of a "
        "sector on, in 1,140 to 1,226 cycles on average; of 256 in 890",
        (0.73, 0.78),
    )
    tma_load_latency_cycles: float = _measured(357.0, "L2 hit, 407 less the wait for the barrier")
    fill_port_share: float = _measured(0.0, "products beside all that L2 gives lose 0% to 2.6%")
    tma_store_latency_cycles: float = _measured(80.0, "80 + bytes / 32, one SM")
    tma_store_bytes_per_clk: float = _measured(19.5, "all SMs store to L2; one alone 32")
    tma_issue_cycles: float = _measured(56.5, "one load, whatever its size")
    reduce_bytes_per_clk: float = _measured(15.8, "all SMs add to L2; one alone 25.6", (15.6, 16.0))
    reduce_latency_cycles: float = _measured(123.0, "123 + bytes / 25.6, one SM adds to L2")
    dsmem_latency_cycles: float = _measured(193.0, "ld.shared::cluster")
    dsmem_bytes_per_clk: float = _measured(20.0, "bulk copy to the peer")
    mbarrier_wait_cycles: float = _measured(45.8, "try_wait on a completed phase")
    mbarrier_arrive_cycles: float = _measured(5.0, "51 from arrive to behind the wait, less that")
    named_barrier_cycles: float = _measured(34.8, "a turn handed to another warpgroup")
    warp_sync_cycles: float = _measured(20.0, "fence.proxy.async 15, syncwarp 4.75")
    sync_cycles: float = _measured(63.0, "bar.sync with fence.proxy.async, 91 less a store")
    vector_efficiency: float = _measured(1.0, "FMNMX, F2FP, FFMA at their peaks")
    math_latency_cycles: float = _measured(4.0, "a dependent instruction")
    exp_issue_slots: float = _measured(4.5, "mixes of F FFMA, A FMNMX and an ex2 take F + A + 4.5")
    register_contention: float = figure(0.8, "vector instructions beside products in registers")
    fetch_stall_cycles: float = figure(0.5, "per instruction and further warpgroup of the SM")
    hbm_latency_cycles: float = figure(573.0, "490 near and 655 far: Fan et al.")
    hbm_efficiency: float = _measured(0.955, "a stream of 4 GiB read at 4.586 TB/s")
    hbm_copy_efficiency: float = _measured(
        0.84, "torch's copy beside the kernels around a backward pass, 4.00 and 4.07 TB/s",
        (0.834, 0.848),
    )  # fmt: skip
    hbm_queue_share: float = _measured(
        0.4,
        "CTAs out of step load 96 KiB: 0.24 to 1.07 with 36% to 64% of HBM's rate in use",
        (0.24, 1.07),
    )
    first_round_share: float = _measured(
        0.61,
        "of HBM's rate, 11.7 bytes per cycle where all SMs begin with 16 to 128 KiB, of 19.1",
        (0.53, 0.65),
    )
    cta_start_cycles: float = _measured(
        855.0, "CTA replaced on an SM 417, 10 barriers 182, setmaxnreg 256", (584.0, 1004.0)
    )
    semaphore_cycles: float = _measured(867.0, "a counter handed to another SM, 770 to 1134")
    launch_ns: float = _measured(542.0, "empty kernels of 132 CTAs in a graph")
    sustained_clock: float = _measured(0.975, "1.785 GHz of 1.83 in attention kernels (counters)")
    throttle_from: float = _measured(0.53, "the same counters: less than that and the clock stays")
    throttle_slope: float = _measured(0.157, "1.708 GHz with the tensor core busy 80% of the time")


@dataclass(frozen=True, kw_only=True)
class H100Costs(TakenOver, HopperCosts):
    """An H100's: the chip is an H200's, so are these figures, which nobody has measured on it."""

    hbm_efficiency: float = figure(
        0.84,
        "2.8 TB/s of 3.35 loaded, one report (mikamirai.com, 2026); HBM3e of an H200: 0.955",
        (0.84, 0.955),
    )
    hbm_copy_efficiency: float = figure(
        0.74, "as an H200's copies to its reads: 0.88 of 0.84, not measured", (0.74, 0.848)
    )


# What no measurement gives and calibration may choose: name -> (least, most, why these bounds).
FREE_CONSTANTS: dict[str, tuple[float, float, str]] = {
    "vector_efficiency": (
        0.4, 1.0, "1 is the pipes' peak",
    ),
    "math_latency_cycles": (
        14.0, 120.0, "one MUFU result, to the FMA, MUFU, convert and store chain of a fragment",
    ),
    "register_contention": (
        0.0, 2.0, "a product reads and writes its accumulator at up to all of a register file port",
    ),
    "fetch_stall_cycles": (
        0.0, 1.0, "warpgroups in different parts of a loop longer than a sub-core's cache of code",
    ),
}  # fmt: skip


def free_constants(table: CostTable) -> tuple[str, ...]:
    """Those that a machine's figures leave open: on Hopper all others are measured."""
    hopper = ("register_contention", "fetch_stall_cycles")
    if isinstance(table, HopperCosts):
        return hopper
    return tuple(name for name in FREE_CONSTANTS if name not in hopper)
