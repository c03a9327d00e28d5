"""From amounts of work to cycles on a machine's units, each rule with its source.

Units of one SM: tensor (products), smem (the shared-memory port: operand reads, register stores,
reduce reads), lsu (what threads take of that port, beside products where these come first), mufu,
fma, alu, issue (instruction slots), tmem_load, tmem_store, tma (bulk loads), tma_store, dsmem,
reduce. Rates come from `Gpu`, latencies and rules from `CostTable`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from fa4.config import PRODUCT_DEPTH_BYTES
from fa4.hardware import Gpu
from fa4.plan.schema import (
    Amount,
    Copy,
    GlobalStore,
    Math,
    Mma,
    PipelinePlan,
    Role,
    Semaphore,
    Signal,
    SmemAccess,
    Spill,
    Sync,
    TmemAccess,
    Work,
    steady_work,
    walk,
)
from fa4.sim.cost_table import CostTable
from fa4.sim.lower import SignalCost, WorkCost

WARP = 32
EXPS_PER_CLK = 16  # of the SM whose issue slots for an exponential were measured
GROUP_WARPS = 4
WHOLE_ROWS = 128  # of a product's accumulator; those of 64 are other instructions
REGISTER_BYTES = 4
# What a CTA's shared memory may take of an SM's first cache, and that: CUDA programming guide, 9.0.
CARVE_OUTS_KIB = (0, 8, 16, 32, 64, 100, 132, 164, 196, 228)
CACHE_KIB, RESERVED_KIB = 256, 1
PORT = frozenset({"smem"})  # shared by threads, copies and operand reads cycle by cycle
LEAST_LEFT = 0.027  # of the port, that bulk copies have: 0.85 bytes per cycle (ports.cu)


class PortShares(NamedTuple):
    """Beside products, of the shared-memory port's cycles: those of threads, those left free.

    full: share of the products' time in which they leave threads the least that these have.
    """

    threads: float = 1.0
    free: float = 1.0
    full: float = 0.0


class MachineCosts:
    """Cost functions of one machine for `lower`.

    ctas: that run at the same time and share L2 and HBM; None: one on each SM. plan: of which the
    work is; its warpgroups share the SM.
    """

    def __init__(
        self, gpu: Gpu, table: CostTable, *, plan: PipelinePlan | None = None,
        ctas: int | None = None,
    ) -> None:  # fmt: skip
        self.gpu, self.table = gpu, table
        self.ctas = gpu.sm_count if ctas is None else max(1, min(ctas, gpu.sm_count))
        self.groups = max(1, sum(_has_math(role) for role in plan.roles)) if plan else 1
        # In turns, the next warpgroup's products are queued behind this one's.
        self.in_turns = not plan or any(x.name.startswith("turn") for x in plan.signals)
        self.cache_bytes = _left_of_cache(plan.bytes_used("smem")) if plan else 0
        # Of the port, by loads and threads; None: work stands alone, a product for its own cycles.
        self.filled: float | None = None
        self.port = PortShares()
        clock_hz = gpu.clock_hz * table.sustained_clock
        self.l2_bytes_per_clk = gpu.l2_bytes_per_s / clock_hz / self.ctas
        self.hbm_bytes_per_clk = table.hbm_efficiency * gpu.hbm_bytes_per_s / clock_hz / self.ctas
        self._rules: dict[type, Callable[..., WorkCost]] = {
            Mma: self._mma,
            Copy: self._copy,
            TmemAccess: self._tmem,
            SmemAccess: self._smem,
            GlobalStore: self._global_store,
            Math: self._math,
            Sync: self._sync,
            Semaphore: self._semaphore,
            Spill: self._spill,
        }
        if plan:
            self.port = self._left_by_products(plan)
            self.filled = self._filled_of_step(plan)

    def work(self, role: Role, work: Work) -> WorkCost:
        """Cycles of a piece of work done by `role`."""
        return self.amount(work.amount, len(role.warps))

    def amount(self, amount: Amount, warps: int) -> WorkCost:
        """Cycles of an amount of work done by a number of warps."""
        return self._rules[type(amount)](amount, warps)

    def _left_by_products(self, plan: PipelinePlan) -> PortShares:
        """What a step's products leave of the port, in the mean over their time."""
        least, busy, threads, free, full = self.table.port_least_share, 0.0, 0.0, 0.0, 0.0
        for role in plan.roles:
            for work in steady_work(role.program):
                if isinstance(work.amount, Mma):
                    cycles = self.work(role, work).occupancy_cycles
                    left = max(0.0, 1.0 - cycles["smem"] / cycles["tensor"])
                    busy += cycles["tensor"]
                    free += cycles["tensor"] * left
                    threads += cycles["tensor"] * max(left, least)
                    full += cycles["tensor"] * (left < least)
        return PortShares(threads / busy, free / busy, full / busy) if busy else PortShares()

    def _filled_of_step(self, plan: PipelinePlan) -> float:
        """Share of the port that a step's loads and, up to their least share, threads take, at the
        fastest that it can be.

        They come all the time, so that products which need the whole port meet their share.
        """
        units, loads, threads = {"tensor": 0.0, "smem": 0.0}, 0.0, 0.0
        for role in plan.roles:
            for work in steady_work(role.program):
                cycles = self.work(role, work).occupancy_cycles
                units = {name: total + cycles.get(name, 0.0) for name, total in units.items()}
                if isinstance(work.amount, Copy) and work.amount.kind == "load":
                    loads += cycles.get("smem", 0.0)
                threads += cycles.get("lsu", 0.0)
        step = max(*units.values(), 1.0)
        return loads / step + min(threads / step, self.table.port_least_share)

    def signal(self, signal: Signal) -> SignalCost:
        """Cycles of arriving on and passing a barrier."""
        if signal.kind == "products":  # their latency is up to the end of this wait
            return SignalCost()
        if signal.kind != "mbarrier":  # a group of copies has no barrier to arrive at
            return SignalCost(latency_cycles=0.0, wait_cycles=self.table.named_barrier_cycles)
        # The leader of a pair waits for its peer's arrivals: one way of a DSMEM round trip.
        remote = self.table.dsmem_latency_cycles / 2 if signal.remote else 0.0
        return SignalCost(
            latency_cycles=self.table.mbarrier_arrive_cycles + remote,
            wait_cycles=self.table.mbarrier_wait_cycles,
        )

    def _mma(self, amount: Mma, warps: int) -> WorkCost:
        flops = 2 * amount.rows * amount.cols * amount.depth
        table = self.table
        latency, waited = table.mma_tmem_latency_cycles, table.mma_tmem_waited_cycles
        if amount.a_bytes:
            latency, waited = table.mma_latency_cycles, table.mma_waited_cycles
        if amount.cta_group == 2:
            latency += table.mma_pair_latency_cycles
        tensor = flops / (self.gpu.mma_flops_per_clk * 2 // amount.element_bytes)
        operands = (amount.a_bytes + amount.b_bytes) / self.gpu.smem_bytes_per_clk
        if self.filled is not None:  # an instruction reads its operands, beside bulk loads
            tensor = max(tensor, operands / (1.0 - self.filled))
        if amount.a_bytes and amount.rows >= WHOLE_ROWS and not amount.in_registers:
            instructions = amount.depth * amount.element_bytes / PRODUCT_DEPTH_BYTES
            tensor = max(tensor, instructions * table.mma_floor_cycles)
        if amount.in_registers:
            tensor = max(tensor, operands)  # products of a warpgroup wait for them in order
            if not self.in_turns:
                gap = table.mma_gap_cycles if amount.a_bytes else table.mma_tmem_gap_cycles
                tensor += gap * amount.depth * amount.element_bytes / PRODUCT_DEPTH_BYTES
        depth_bytes = amount.depth * amount.element_bytes
        return WorkCost(
            instructions=max(1, round(depth_bytes / PRODUCT_DEPTH_BYTES))
            if amount.in_registers
            else 1,
            queued=table.mma_queued,
            occupancy_cycles={"tensor": tensor, "smem": operands},
            latency_cycles=latency + waited * (amount.waits - 1),
            issue_cycles=table.mma_issue_cycles
            if amount.issue_cycles is None
            else amount.issue_cycles,
        )

    def _copy(self, amount: Copy, warps: int) -> WorkCost:
        table, size = self.table, amount.num_bytes
        issue = table.tma_issue_cycles * amount.boxes + amount.address_cycles
        if amount.kind == "reduce":
            cost = WorkCost(
                occupancy_cycles={"reduce": size / table.reduce_bytes_per_clk},
                issue_cycles=issue, latency_cycles=table.reduce_latency_cycles,
            )  # fmt: skip
            return self._read_in_bulk(cost, "reduce", table.reduce_bytes_per_clk, size)
        if amount.kind == "dsmem":
            # Read here, sent, and received from the peer: three passes of the port (the paper
            # charges 384 cycles for 16 KiB).
            occupancy = {
                "dsmem": size / table.dsmem_bytes_per_clk,
                "smem": 3 * size / self.gpu.smem_bytes_per_clk,
            }
            return WorkCost(occupancy_cycles=occupancy, issue_cycles=issue,
                            latency_cycles=table.dsmem_latency_cycles)  # fmt: skip
        if amount.kind == "store":
            cost = WorkCost(
                occupancy_cycles={"tma_store": size / table.tma_store_bytes_per_clk},
                issue_cycles=issue, latency_cycles=table.tma_store_latency_cycles,
            )  # fmt: skip
            if not table.bulk_read_bytes:
                return cost
            return self._read_in_bulk(cost, "tma_store", table.tma_store_bytes_per_clk, size)
        latency = table.tma_load_latency_cycles
        if amount.cold:  # behind what all the others load at the same time
            queue = table.hbm_queue_share * size / self.hbm_bytes_per_clk
            latency += table.hbm_latency_cycles + queue
        rate = min(table.tma_bytes_per_clk, self.l2_bytes_per_clk)
        occupancy = {"tma": size / rate}
        if table.fill_port_share:
            occupancy["smem"] = size / self.gpu.smem_bytes_per_clk * table.fill_port_share
        return WorkCost(occupancy_cycles=occupancy, issue_cycles=issue, passes=PORT,
                        latency_cycles=latency)  # fmt: skip

    def _read_in_bulk(self, cost: WorkCost, unit: str, rate: float, size: int) -> WorkCost:
        """A bulk copy out of shared memory: at `rate`, and beside products by what they leave."""
        port = {"smem": size / self.gpu.smem_bytes_per_clk}
        cost = replace(cost, occupancy_cycles=dict(cost.occupancy_cycles) | port)
        if not self.table.bulk_read_bytes:
            return cost
        left = max(self.port.free, LEAST_LEFT) * self.table.bulk_read_bytes
        stretch = {unit: max(rate / left - 1.0, 0.0)}
        return replace(cost, under="tensor", stretch=stretch, passes=PORT)

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
        cost = WorkCost(occupancy_cycles={})
        if amount.among != Math():
            cost = self._math(amount.among, warps)
        late = self.table.smem_latency_cycles + cost.latency_cycles
        late += self.port.full * self.table.full_port_latency_cycles * (self.groups - 1)
        occupancy = {"smem": cycles, **cost.occupancy_cycles}
        if self.table.port_least_share:  # products come first
            occupancy["lsu"] = cycles
            stretch = {"lsu": 1.0 / self.port.threads - 1.0, **cost.stretch}
            cost = replace(cost, under="tensor", stretch=stretch)
        return replace(cost, occupancy_cycles=occupancy, passes=PORT, latency_cycles=late)

    def _global_store(self, amount: GlobalStore, warps: int) -> WorkCost:
        rate = self.table.tma_store_bytes_per_clk  # what L2 takes of all SMs, whoever stores
        return WorkCost(occupancy_cycles={"tma_store": amount.num_bytes / rate})

    def _sync(self, amount: Sync, warps: int) -> WorkCost:
        cycles = self.table.sync_cycles if amount.fenced else self.table.named_barrier_cycles
        if amount.by_warp:
            cycles = self.table.warp_sync_cycles
        if amount.fenced:
            cycles += self.port.full * self.table.full_port_fence_cycles * (self.groups - 1)
        return WorkCost(occupancy_cycles={}, latency_cycles=cycles)

    def _semaphore(self, amount: Semaphore, warps: int) -> WorkCost:
        return WorkCost(occupancy_cycles={}, latency_cycles=self.table.semaphore_cycles)

    def _spill(self, amount: Spill, warps: int) -> WorkCost:
        """There and back; what the first cache does not hold of all warpgroups' crosses L2."""
        thread_bytes = WARP * warps * REGISTER_BYTES
        moved = 2 * amount.registers * thread_bytes
        missed = max(0.0, 1.0 - self.cache_bytes / (amount.held * thread_bytes * self.groups))
        occupancy = {"smem": moved / self.gpu.smem_bytes_per_clk}
        if missed:
            occupancy["tma"] = missed * moved / self.l2_bytes_per_clk
        late = missed * self.table.l2_load_latency_cycles
        late = amount.waits * (late + (1.0 - missed) * self.table.local_load_latency_cycles)
        return WorkCost(occupancy_cycles=occupancy, latency_cycles=late, passes=PORT)

    def _math(self, amount: Math, warps: int) -> WorkCost:
        """Vector instructions, beside which others' code is fetched and products use registers."""
        table, lanes = self.table, WARP * warps
        single = amount.fma / 2 + amount.alu + amount.other
        each = table.exp_issue_slots * EXPS_PER_CLK / self.gpu.exp_per_clk
        slots = single + max(1.0, each) * amount.mufu
        pipes = {
            "mufu": amount.mufu * lanes / self.gpu.exp_per_clk,
            "fma": amount.fma * lanes / self.gpu.fma_lanes_per_clk / table.vector_efficiency,
            "alu": amount.alu * lanes / table.alu_lanes_per_clk / table.vector_efficiency,
            "issue": slots * warps / table.issue_per_clk,
        }
        fetched = (single + amount.mufu) * warps / GROUP_WARPS * (self.groups - 1)
        return WorkCost(
            occupancy_cycles={unit: cycles for unit, cycles in pipes.items() if cycles > 0},
            latency_cycles=table.math_latency_cycles
            + amount.chain * table.fma_latency_cycles
            + fetched * table.fetch_stall_cycles,
            under="tensor" if table.register_contention else None,
            stretch=dict.fromkeys(pipes, table.register_contention),
        )


def _has_math(role: Role) -> bool:
    return any(isinstance(x, Work) and isinstance(x.amount, Math) for x in walk(role.program))


def _left_of_cache(smem_bytes: int) -> int:
    """Bytes of an SM's first cache beside a CTA with so much shared memory."""
    needed = min(smem_bytes / 1024 + RESERVED_KIB, CARVE_OUTS_KIB[-1])
    return 1024 * (CACHE_KIB - min(kib for kib in CARVE_OUTS_KIB if kib >= needed))
