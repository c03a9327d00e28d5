"""A launched grid: which clusters run, which are still to start, and how CTAs begin and end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from fa4.emulator.machine.memory import Buffer
from fa4.emulator.machine.options import WARP_START_STEPS
from fa4.emulator.machine.state import QUARTERS, Cluster, Cta, Fragment, Position, Warp
from fa4.emulator.masks import FULL_MASK, Array
from fa4.emulator.translate.layout import MODULE_WINDOW, PARAMETER_WINDOW, SHARED_BASE

if TYPE_CHECKING:
    from fa4.emulator.machine.engine import Machine
    from fa4.emulator.machine.launch_record import Launch
    from fa4.emulator.translate.program import Program

Triple = tuple[int, int, int]
# Registers of an SM, and the granularity of the allocation per warp: CUDA programming guide,
# compute capability 9.0 and 10.0; 512 per warp from the occupancy calculator.
REGISTERS_PER_SM = 65536

# Called with each warp that exits: instructions that wait for others register here.
EXIT_HOOKS: list[Callable[[Warp], None]] = []


class Grid:
    """One launch. number: of its first cluster, unique over all launches of the process.

    prior: the launch before it in the stream, when this one may overlap it (programmatic
    dependent launch). module_buffers: the variables of each module, shared by its launches.
    """

    def __init__(
        self, machine: Machine, launch: Launch, program: Program, number: int, prior: Grid | None
    ) -> None:
        self.machine = machine
        self.launch = launch
        self.program = program
        self.number = number
        self.prior = prior if prior is not None and launch.programmatic else None
        self.known_from: int = self.prior.known_from if self.prior is not None else number
        self.dynamic_smem_bytes: int = launch.dynamic_smem_bytes
        x, y, z = launch.block
        self.thread_count: int = x * y * z
        self.warp_count: int = -(-self.thread_count // 32)
        self.parameter_buffer = self._parameters()
        self.parameter_address = int(self.parameter_buffer.data.ctypes.data)
        image = bytearray(program.variables.module_image)
        self.module_buffer = Buffer(
            "module variables", MODULE_WINDOW, np.frombuffer(image, np.uint8), True
        )
        self.started = 0  # clusters that run, ran or were taken over: the first ones
        self.resident: list[Cluster] = []
        self.triggered = 0
        self.ctas_done = 0
        self.warp_step_counts: dict[int, list[int]] = {}

    @property
    def cluster_grid(self) -> Triple:
        """The grid's shape in clusters."""
        grid, cluster = self.launch.grid, self.launch.cluster
        return (grid[0] // cluster[0], grid[1] // cluster[1], grid[2] // cluster[2])

    @property
    def cluster_count(self) -> int:
        """How many clusters the grid has."""
        x, y, z = self.cluster_grid
        return x * y * z

    @property
    def cta_count(self) -> int:
        """How many CTAs the grid has."""
        x, y, z = self.launch.grid
        return x * y * z

    @property
    def done(self) -> bool:
        """Whether all its CTAs are done."""
        return self.ctas_done == self.cta_count

    @property
    def may_start(self) -> bool:
        """Whether its CTAs may run: the launch before is over, or has let it start early."""
        return self.prior is None or self.prior.done or self.prior.all_triggered

    @property
    def all_triggered(self) -> bool:
        """Every CTA has executed griddepcontrol.launch_dependents, or exited."""
        return self.triggered >= self.cta_count

    def _parameters(self) -> Buffer:
        variables = self.program.variables
        storage = np.zeros(variables.parameter_bytes + 128, np.uint8)
        start = -storage.ctypes.data % 128
        block = storage[start : start + variables.parameter_bytes]
        for offset, value in zip(variables.parameter_offsets, self.launch.parameters, strict=True):
            block[offset : offset + len(value)] = np.frombuffer(value, np.uint8)
        return Buffer("kernel parameters", PARAMETER_WINDOW, block, False)

    # Starting.

    def start(self) -> None:
        """Starts the first clusters."""
        while len(self.resident) < self.machine.options.resident_clusters and self.start_next():
            pass

    def start_next(self) -> bool:
        """Starts one more cluster, if one is left and the chip has room. Returns whether it did."""
        if self.started == self.cluster_count or not self.may_start:
            return False
        if len(self.resident) * self.cluster_size >= self.machine.options.clusters_limit:
            return False
        self.started += 1
        self.start_cluster(self.started - 1)
        return True

    @property
    def cluster_size(self) -> int:
        """CTAs in a cluster."""
        x, y, z = self.launch.cluster
        return x * y * z

    def cluster_position(self, index: int) -> Triple:
        """Coordinates of a cluster in the grid of clusters."""
        x, y, _ = self.cluster_grid
        return (index % x, index // x % y, index // (x * y))

    def start_cluster(self, index: int) -> None:
        """Creates the CTAs of a cluster and makes their warps ready."""
        position = self.cluster_position(index)
        shape = self.launch.cluster
        ctas: list[tuple[int, Position]] = []
        for rank in range(self.cluster_size):
            inner = (rank % shape[0], rank // shape[0] % shape[1], rank // (shape[0] * shape[1]))
            x, y, z = (p * s + i for p, s, i in zip(position, shape, inner, strict=True))
            linear = x + self.launch.grid[0] * (y + self.launch.grid[1] * z)
            ctas.append((linear, ((x, y, z), inner)))
        cluster = Cluster(self, index, self.number + index, ctas)
        self.resident.append(cluster)
        for cta in cluster.ctas:
            self._start_warps(cta)
        if self.machine.events is not None:
            self.machine.events.cluster_started(cluster, self.machine.ticks)

    def _start_warps(self, cta: Cta) -> None:
        self.machine.steps_left -= WARP_START_STEPS * self.warp_count
        budget = self._registers_per_thread()
        # The pools of setmaxnreg hold what the CTA's own warps of a quarter gave back, not what the
        # SM has free or other quarters have: a Hopper GPU waits for ever for more.
        cta.registers_free = [0] * QUARTERS
        for index in range(self.warp_count):
            lanes = min(32, self.thread_count - 32 * index)
            warp = Warp(cta, index, FULL_MASK >> (32 - lanes))
            warp.register_budget = budget
            cta.warps.append(warp)
            self._set_specials(warp)
            fragment = Fragment(warp, 0, warp.alive, ())
            warp.fragments.append(fragment)
            self.machine.ready.append(fragment)

    def _registers_per_thread(self) -> int:
        """What the compiler may use: .maxnreg, or an even share of a quarter, at most 255.

        A multiple of 8 (the allocation's granularity).
        """
        listed = self.program.kernel.directives.get("maxnreg")
        if listed:
            return listed[0]
        warps = -(-self.warp_count // QUARTERS) * QUARTERS
        return min(255, REGISTERS_PER_SM // (32 * warps)) // 8 * 8

    def _set_specials(self, warp: Warp) -> None:
        cta, launch = warp.cta, self.launch
        place, inner = cta.position
        threads = np.arange(32 * warp.index, 32 * warp.index + 32, dtype=np.uint32)
        x, y, _ = (np.uint32(size) for size in launch.block)
        warp.set_special("%tid.x", threads % x)
        warp.set_special("%tid.y", threads // x % y)
        warp.set_special("%tid.z", threads // (x * y))
        triples = {
            "ntid": launch.block,
            "ctaid": place,
            "nctaid": launch.grid,
            "clusterid": self.cluster_position(cta.cluster.index),
            "nclusterid": self.cluster_grid,
            "cluster_ctaid": inner,
            "cluster_nctaid": launch.cluster,
        }
        for name, values in triples.items():
            for axis, value in zip("xyz", values, strict=True):
                warp.set_special(f"%{name}.{axis}", value)
        lane = np.arange(32, dtype=np.uint64)
        at = np.uint64(1) << lane
        singles: dict[str, Array | int] = {
            "%laneid": lane,
            "%lanemask_eq": at,
            "%lanemask_lt": at - np.uint64(1),
            "%lanemask_le": 2 * at - np.uint64(1),
            "%lanemask_gt": np.uint64(FULL_MASK) - (2 * at - np.uint64(1)),
            "%lanemask_ge": np.uint64(FULL_MASK) - (at - np.uint64(1)),
            "%warpid": warp.index,
            "%nwarpid": self.warp_count,
            "%smid": cta.index % self.machine.options.clusters_limit,
            "%nsmid": self.machine.options.clusters_limit,
            "%cluster_ctarank": cta.rank,
            "%cluster_nctarank": self.cluster_size,
            "%is_explicit_cluster": int(self.cluster_size > 1),
            "%dynamic_smem_size": launch.dynamic_smem_bytes,
            # In units of 128 bytes; the second with what the system keeps (seen on an H200).
            "%total_smem_size": -(-(cta.shared_end - SHARED_BASE) // 128) * 128,
            "%aggr_smem_size": -(-cta.shared_end // 128) * 128,
            "%gridid": self.number,
        }
        for name, number in singles.items():
            warp.set_special(name, number)

    # Ending.

    def warp_exited(self, warp: Warp) -> None:
        """A warp is done; perhaps its CTA and its cluster are."""
        cta = warp.cta
        cta.exited += 1
        self._add_counts(warp)
        self.machine.checks.warp_exited(warp)
        for leave in EXIT_HOOKS:
            leave(warp)
        if not cta.done:
            return
        self.ctas_done += 1
        if "triggered" not in cta.unit:
            self.trigger(cta)
        self.machine.checks.cta_exited(cta)
        if cta.cluster.done:
            self.resident.remove(cta.cluster)
            self.start_next()
            if self.done:
                for grid in self.machine.grids:
                    if grid.prior is self:
                        grid.prior_finished()

    def count_running(self) -> None:
        """Adds the steps of warps that a finding stopped before their end."""
        for cluster in self.resident:
            for cta in cluster.ctas:
                for warp in cta.warps:
                    if warp.alive:
                        self._add_counts(warp)
        self.resident = []

    def _add_counts(self, warp: Warp) -> None:
        totals = self.warp_step_counts.setdefault(warp.index, [0] * len(warp.counts))
        for index, count in enumerate(warp.counts):
            if count:
                totals[index] += count

    def trigger(self, cta: Cta) -> None:
        """griddepcontrol.launch_dependents by a CTA (or its end)."""
        if "triggered" not in cta.unit:
            cta.unit["triggered"] = True
            self.triggered += 1
            self.machine.progress += 1
        if self.all_triggered:
            for grid in self.machine.grids:
                if grid.prior is self and not grid.resident:
                    grid.start()

    def prior_finished(self) -> None:
        """The launch before is over: waits for it end."""
        if not self.resident:
            self.start()
        for cluster in self.resident:
            for cta in cluster.ctas:
                cta.unit.setdefault("prior", None)
                waiting = cta.unit.get("prior_waiters")
                if waiting is not None:
                    waiting.wake()

    def take_cluster(self) -> int | None:
        """clusterlaunchcontrol.try_cancel: a cluster that has not started, or None."""
        if self.started == self.cluster_count:
            return None
        self.ctas_done += self.cluster_size  # they will never run
        self.triggered += self.cluster_size
        self.started += 1
        return self.started - 1
