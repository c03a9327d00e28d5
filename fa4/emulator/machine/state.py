"""The state of a running grid: clusters of CTAs, their warps, and fragments of diverged warps.

Each knows the one that it is a part of, so they stand in one file. What they do not need to know
one another for lies below; what starts, checks, ends and explains them lies above.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np

from fa4.emulator.checks.clocks import (
    AsyncActor,
    AsyncPool,
    PipeActor,
    Stream,
    WarpClock,
)
from fa4.emulator.checks.shadow import Shadow
from fa4.emulator.errors import KernelFinding, Site
from fa4.emulator.machine.activation import Activation
from fa4.emulator.machine.actor_rows import POOL_ROWS, WARPS_PER_STREAM_ROW, ActorRows
from fa4.emulator.machine.barriers import ClusterBarrier, ClusterVisits, NamedBarrier
from fa4.emulator.machine.copies import CopyGroups, ThreadCopies
from fa4.emulator.machine.handover import WarpFences
from fa4.emulator.machine.launch_record import Launch
from fa4.emulator.machine.machine_state import MachineState, Stop
from fa4.emulator.machine.mbarrier import MBarrier
from fa4.emulator.machine.memory import GlobalBuffer
from fa4.emulator.machine.operations import AsyncOperation
from fa4.emulator.machine.state_addresses import WARP
from fa4.emulator.machine.tensor import SwizzleNotes, TensorGroup, TensorMemory
from fa4.emulator.machine.waits import Blocked, Countdown, Waitable
from fa4.emulator.machine.warpgroups import WarpgroupUnit, WarpProducts
from fa4.emulator.translate.layout import (
    MODULE_WINDOW,
    PARAMETER_WINDOW,
    RANK_SHIFT,
    SHARED_BASE,
)
from fa4.emulator.translate.program import Program
from fa4.emulator.warp_lanes import FULL_MASK, LANES, Array

# Of an SM: warp i of a CTA is in quarter i % 4, with registers of its own (measured on an H100:
# tests/emulator/test_hopper_facts.py).
QUARTERS = 4
TAKEN, NOT_TAKEN = 1, 2  # the ways of a branch
Triple: TypeAlias = tuple[int, int, int]
# The coordinates of a CTA in the grid, and in its cluster.
Position: TypeAlias = tuple[Triple, Triple]


@dataclass(eq=False)
class Join:
    """Where the lanes of a diverged warp meet again: step `at` of the function that they were in.

    expected, arrived: lanes.
    """

    at: int
    expected: int
    activation: Activation | None
    arrived: int = 0


class Fragment:
    """Lanes of a warp that execute together.

    joins: the meeting points ahead, innermost last. activation: the function that they are in,
    None in the kernel itself. wait: why it stands still, or None.
    timed_out: its wait ended without success. awaited: the mbarrier that it waits for, and its
    phase when it looked last.
    """

    __slots__ = (
        "activation", "awaited", "joins", "mask", "number", "pc", "timed_out", "wait", "warp"
    )  # fmt: skip

    def __init__(
        self,
        warp: Warp,
        pc: int,
        mask: int,
        joins: tuple[Join, ...] = (),
        activation: Activation | None = None,
    ) -> None:
        self.warp = warp
        self.pc = pc
        self.mask = mask
        self.joins = joins
        self.activation = activation
        self.wait: Blocked | None = None
        self.awaited: tuple[MBarrier, int] | None = None
        self.timed_out = False
        self.number = warp.cta.machine.next_number()

    def make_ready(self) -> None:
        """Its wait is over."""
        wait, self.wait = self.wait, None
        if wait is not None and wait.wake is not None and not self.timed_out:
            wait.wake(self)
        self.warp.cta.machine.ready.append(self)

    @property
    def line(self) -> int:
        """PTX line of the step it stands at."""
        step = self.warp.program.steps[min(self.pc, len(self.warp.program.steps) - 1)]
        return step.instructions[0].line if step.instructions else 0

    def fault(
        self, kind: str, message: str, *, excuse: str = "", sites: tuple[Site, ...] = ()
    ) -> None:
        """Records a finding of the instruction that it executes."""
        warp = self.warp
        warp.cta.report(kind, message, self.line, warp.index, excuse=excuse, sites=sites)

    def fatal(self, kind: str, message: str) -> Stop:
        """Records a finding after which the kernel cannot go on; raise the result."""
        self.fault(kind, message)
        return Stop()


class TmemStream(Countdown):
    """The tensor memory loads, or the stores, of a warp that are under way."""

    def __init__(self, actors: Stream) -> None:
        super().__init__()
        self.actors = actors


class Warp:
    """32 threads: registers, the lanes still alive, and its clock.

    words, views: the register file as uint32, and by width in bits. tmem_loads: registers that a
    tcgen05.ld has not delivered yet, name -> PTX line. counts: executions of each step.
    described_at: where its WARP is, for compiled code (`fa4.emulator.machine.state_addresses`).
    polled: PTX line -> what a strong access there saw last. thread_copies, bulk_copies: cp.async,
    cp.async.bulk. pipe_latest: lane -> the operation of a tensor pipe that it issued last;
    uncommitted: lane -> its name and PTX line, until a tcgen05.commit. products: its wgmma
    instructions.
    """

    def __init__(self, cta: Cta, index: int, alive: int) -> None:
        program = cta.grid.program
        self.cta: Cta = cta
        self.index = index
        self.program = program
        size = program.registers.size_bytes
        memory = np.zeros(size + 64, np.uint8)
        start = -memory.ctypes.data % 64
        self.memory: Array = memory[start : start + size]
        self.base = int(self.memory.ctypes.data)
        self.words: Array = self.memory.view(np.uint32)
        self.views: dict[int, Array] = {
            16: self.memory.view(np.uint16),
            32: self.words,
            64: self.memory.view(np.uint64),
        }
        self.alive = alive
        self.threads = alive
        self.fragments: list[Fragment] = []
        cluster = cta.cluster
        self.row = cluster.rows.warp(cta.rank, index)
        self.clock = WarpClock(self.row, cluster.rows.count, cluster.number, cluster.known_from)
        self.tmem_loads: dict[str, int] = {}
        row, place = cluster.rows.stream(cta.rank, index), index % WARPS_PER_STREAM_ROW
        self.tmem_loading = TmemStream(Stream(row, 2 * place, self.clock))
        self.tmem_storing = TmemStream(Stream(row, 2 * place + 1, self.clock))
        products = Stream(cluster.rows.products(cta.rank, index), 0, self.clock)
        self.products = WarpProducts(products)
        self.register_budget = 0
        self.counts = [0] * len(program.steps)
        handed = cluster.rows.handed_id(cta.rank, index)
        self.fences = WarpFences(self.clock, cluster.rows.of_tensor, handed)
        self.polled: dict[int, bytes] = {}
        self.cluster_visits = ClusterVisits()
        self.thread_copies = ThreadCopies()
        self.bulk_copies = CopyGroups()
        self.pipe_latest: dict[int, AsyncActor] = {}
        self.uncommitted: dict[int, tuple[str, int]] = {}
        self._described = self._describe()
        self.described_at = int(self._described.ctypes.data)

    @property
    def local(self) -> Array:
        """The local memory of its threads, (32, bytes)."""
        kept = self.cta.local
        if self.index not in kept:
            kept[self.index] = np.zeros((LANES, self.program.variables.local_bytes), np.uint8)
        return kept[self.index]

    @property
    def name(self) -> str:
        """For reports."""
        return f"CTA {self.cta.index} warp {self.index}"

    def site(self, line: int) -> Site:
        """It, at a PTX line."""
        step = self.program.step_of_line.get(line)
        return Site(self.cta.index, self.index, line, 0 if step is None else self.counts[step])

    def settle(self, stream: TmemStream) -> None:
        """Its tensor memory loads (or stores) are done: what follows is ordered behind them."""
        stream.actors.settle()
        if stream is self.tmem_loading:
            self.tmem_loads.clear()

    def set_special(self, name: str, values: Array | int) -> None:
        """Writes a special register in all lanes."""
        offset, bits = self.program.registers.offsets[name]
        if bits == 1:
            self.words[offset // 4] = FULL_MASK if values else 0
        else:
            first = offset // (bits // 8)
            self.views[bits][first : first + 32] = values

    def _describe(self) -> Any:
        """The WARP of this warp, an array of one; it is valid as long as the warp lives."""
        cta, known = self.cta, self.clock.knowledge.known
        described = np.zeros(1, WARP)
        values = {
            "registers": self.base,
            "shared_base": cta.rank << RANK_SHIFT,
            "shared_end": cta.shared_end,
            "smem": cta.smem_address,
            "shadow": cta.smem_shadow.state_address if cta.smem_shadow is not None else 0,
            "buffers": cta.machine.memory.table_address,
            "row": self.row,
            "cluster": cta.cluster.number,
            "known": known.ctypes.data,
            "ids": known.shape[1],
        }
        for name, value in values.items():
            described[name] = value
        return described


@dataclass(frozen=True)
class RemoteArrival:
    """A warp of another CTA arrived, or accessed shared memory.

    epoch: of the warp; phase: of the cluster barrier.
    """

    who: str
    line: int
    epoch: int
    phase: int


class Cta:
    """A CTA: shared memory, barriers, tensor memory, warps.

    smem[a] is the byte at shared address a; the first KiB belongs to the system. tensor: made at
    the first tcgen05.alloc. tensor_groups: by size, those that it is the first CTA of. warpgroups:
    by number, those that have executed wgmma instructions. triggered: it has executed
    griddepcontrol.launch_dependents, or exited.
    """

    def __init__(self, cluster: Cluster, index: int, rank: int, position: Position) -> None:
        grid = cluster.grid
        self.grid = grid
        self.machine = grid.machine
        self.cluster = cluster
        self.index = index
        self.rank = rank
        self.position = position
        variables, rows = grid.program.variables, cluster.rows
        self.shared_end = variables.dynamic_shared_address + grid.launch.dynamic_smem_bytes
        self.smem: Array = np.zeros(max(self.shared_end, SHARED_BASE), np.uint8)
        self.smem_address = int(self.smem.ctypes.data)
        self.warp_count = grid.warp_count
        self.mbarriers: dict[int, MBarrier] = {}
        # By the row of the warp: at its mbarriers, and of its shared memory.
        self.remote_arrivals: dict[int, RemoteArrival] = {}
        self.remote_uses: dict[int, RemoteArrival] = {}
        self.barriers: dict[int, NamedBarrier] = {}
        self.pool = AsyncPool(rows.pool(rank), POOL_ROWS)
        self.pipe_actor = PipeActor(rows.pipe(rank))
        self.tensor: TensorMemory | None = None
        self.tensor_groups: dict[int, TensorGroup] = {}
        self.warpgroups: dict[int, WarpgroupUnit] = {}
        self.swizzles = SwizzleNotes()
        self.triggered = False
        self.prior_waiters = Waitable()
        self.local: dict[int, Array] = {}
        self.warps: list[Warp] = []
        self.exited = 0
        self.registers_free = [0] * QUARTERS
        self.register_waiters = Waitable()
        self.smem_shadow: Shadow | None = self.machine.shadows.of_smem(
            grid.program, len(self.smem), rows.count
        )

    def barrier(self, number: int) -> NamedBarrier:
        """The named barrier of this number."""
        if number not in self.barriers:
            self.barriers[number] = NamedBarrier()
        return self.barriers[number]

    @property
    def done(self) -> bool:
        """Whether all its warps have exited."""
        return self.exited == len(self.warps)

    @property
    def live_threads(self) -> int:
        """Threads that named barriers for all wait for: whole warps of which lanes are alive."""
        return sum(LANES for warp in self.warps if warp.alive)

    def report(
        self,
        kind: str,
        message: str,
        line: int = 0,
        warp: int = -1,
        *,
        excuse: str = "",
        sites: tuple[Site, ...] = (),
    ) -> None:
        """Records a finding at a `PtxInstruction.line`. Raises Stop when there are many."""
        program = self.grid.program
        source, message = program.source_of(line), program.written(message)
        instruction, text, shared = program.instruction_at(line), "", ""
        if instruction is not None:
            line, text = instruction.written_line, instruction.text
            shared = text if line in program.shared_lines else ""
        self.machine.report(
            KernelFinding(
                kind, message, line, source, self.index, warp, shared,
                excuse=excuse, kernel=program.name, text=text, sites=sites,
            )
        )  # fmt: skip

    def note_moved(self, owner: Cta, line: int, num_bytes: int) -> None:
        """An asynchronous operation of this CTA moves bytes of a CTA's shared memory."""
        self.grid.moved_bytes[line] += num_bytes
        if self.machine.events is not None:
            self.machine.events.moved(self, owner, line, num_bytes)

    def note_product(self, line: int, macs: int) -> None:
        """This CTA issues a product of so many multiplications to its tensor cores."""
        self.grid.products[line] += 1
        self.grid.macs[line] += macs

    def submit(
        self,
        what: str,
        line: int,
        complete: Callable[[], None],
        queue: deque[AsyncOperation] | None = None,
    ) -> AsyncOperation:
        """Hands an operation to a unit; `complete` runs at some later time."""
        me = self.cluster.number, self.index
        return self.machine.submit(me, what, line, complete, queue)


class Cluster:
    """The CTAs of a cluster, which run at the same time and see each other's shared memory."""

    def __init__(
        self, grid: Grid, index: int, number: int, ctas: list[tuple[int, Position]]
    ) -> None:
        self.grid = grid
        self.index = index
        self.number = number
        self.known_from = grid.known_from
        self.size = len(ctas)
        self.rows = grid.rows
        self.ctas = [
            Cta(self, cta_index, rank, position) for rank, (cta_index, position) in enumerate(ctas)
        ]
        self.barrier = ClusterBarrier(self.size * grid.thread_count)

    @property
    def done(self) -> bool:
        """Whether all its CTAs are done."""
        return all(cta.done for cta in self.ctas)


class Grid:
    """One launch. index: among those of the run. number: of its first cluster, unique over all
    launches of the process.

    prior: the launch before it in the stream, when this one may overlap it (programmatic
    dependent launch); follower: the other way round. started: clusters that run, ran or were taken
    over, the first ones. resident: those that run. warp_step_counts: warp -> executions of each
    step, by the warps that are done. branch_ways: of each step that branches, whether lanes took
    it (TAKEN), and whether lanes did not (NOT_TAKEN). skipped: how often a warp passed a step
    of which the predicate was false for all its lanes. moved_bytes, products, macs: by PTX line,
    bytes of shared memory that asynchronous operations have moved, products of tensor cores, and
    their multiplications.
    """

    def __init__(
        self,
        machine: MachineState,
        launch: Launch,
        program: Program,
        index: int,
        number: int,
        prior: Grid | None,
    ) -> None:
        self.machine = machine
        self.launch = launch
        self.program = program
        self.index = index
        self.number = number
        self.prior = prior if launch.programmatic else None
        self.follower: Grid | None = None
        self.known_from = number
        if self.prior is not None:
            self.prior.follower = self
            self.known_from = self.prior.known_from
        self.thread_count = prod(launch.block)
        self.warp_count = -(-self.thread_count // LANES)
        self.cluster_size = prod(launch.cluster)
        held = bool(program.held_registers)
        self.rows = ActorRows(self.cluster_size, self.warp_count, held)
        x, y, z = (g // c for g, c in zip(launch.grid, launch.cluster, strict=True))
        self.cluster_grid: Triple = (x, y, z)
        self.cluster_count = x * y * z
        self.cta_count = prod(launch.grid)
        self.parameter_buffer = _parameters(launch, program)
        self.parameter_address = int(self.parameter_buffer.data.ctypes.data)
        image = bytearray(program.variables.module_image)
        self.module_buffer = GlobalBuffer(
            "module variables", MODULE_WINDOW, np.frombuffer(image, np.uint8), True
        )
        self.started = 0
        self.resident: list[Cluster] = []
        self.triggered = 0
        self.ctas_done = 0
        self.warp_step_counts: dict[int, list[int]] = {}
        self.branch_ways = bytearray(len(program.steps))
        self.skipped: Counter[int] = Counter()
        self.moved_bytes: Counter[int] = Counter()
        self.products: Counter[int] = Counter()
        self.macs: Counter[int] = Counter()

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

    def cluster_position(self, index: int) -> Triple:
        """Coordinates of a cluster in the grid of clusters."""
        x, y, _ = self.cluster_grid
        return (index % x, index // x % y, index // (x * y))

    def add_counts(self, warp: Warp) -> None:
        """Adds the steps that a warp has executed."""
        totals = self.warp_step_counts.setdefault(warp.index, [0] * len(warp.counts))
        for index, count in enumerate(warp.counts):
            if count:
                totals[index] += count


def _parameters(launch: Launch, program: Program) -> GlobalBuffer:
    """The parameters of a kernel, at an address that is a multiple of 128."""
    variables = program.variables
    storage = np.zeros(variables.parameter_bytes + 128, np.uint8)
    start = -storage.ctypes.data % 128
    block = storage[start : start + variables.parameter_bytes]
    for offset, value in zip(variables.parameter_offsets, launch.parameters, strict=True):
        block[offset : offset + len(value)] = np.frombuffer(value, np.uint8)
    return GlobalBuffer("kernel parameters", PARAMETER_WINDOW, block, False)
