"""The state of a running grid: clusters of CTAs, their warps, and fragments of diverged warps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from fa4.emulator.checks.clocks import AsyncPool, Message, PipeActor, Stream, WarpClock, actor_id
from fa4.emulator.machine.described import describe_warp
from fa4.emulator.machine.waits import Countdown, Wait, Waitable
from fa4.emulator.masks import FULL_MASK, LANES, Array
from fa4.emulator.translate.layout import SHARED_BASE

if TYPE_CHECKING:
    from fa4.emulator.machine.engine import Machine
    from fa4.emulator.machine.grid import Grid
    from fa4.emulator.machine.mbarrier import MBarrier

# Of an SM: warp i of a CTA is in quarter i % 4, with registers of its own (measured on an H100:
# tests/emulator/test_hopper_facts.py).
QUARTERS = 4
# The coordinates of a CTA in the grid, and in its cluster.
Position: TypeAlias = "tuple[tuple[int, int, int], tuple[int, int, int]]"
POOL_ROWS = 4  # rows of 32 ids for a CTA's asynchronous operations
# Warps that share a row of ids for their tensor memory loads and stores: each of them reaches other
# lanes, so that the shadow, which remembers one read for each row, forgets none.
WARPS_PER_STREAM_ROW = 4


@dataclass(eq=False)
class Join:
    """Where the lanes of a diverged warp meet again: step `at`, lanes expected and arrived."""

    at: int
    expected: int
    arrived: int = 0


class Fragment:
    """Lanes of a warp that execute together.

    joins: the meeting points ahead, innermost last. wait: why it stands still, or None.
    timed_out: its wait ended without success.
    """

    __slots__ = ("joins", "mask", "number", "pc", "timed_out", "wait", "warp")

    def __init__(self, warp: Warp, pc: int, mask: int, joins: tuple[Join, ...]) -> None:
        self.warp = warp
        self.pc = pc
        self.mask = mask
        self.joins = joins
        self.wait: Wait | None = None
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


class TmemStream(Countdown):
    """The tensor memory loads, or the stores, of a warp that are under way."""

    def __init__(self, actors: Stream) -> None:
        super().__init__()
        self.actors = actors


class Warp:
    """32 threads: registers, the lanes still alive, and its clock.

    words, views: the register file as uint32, and by width in bits. tmem_loads: registers that a
    tcgen05.ld has not delivered yet, name -> PTX line. counts: executions of each step.
    described_at: where its WARP is, for compiled code (`fa4.emulator.machine.described`).
    """

    def __init__(self, cta: Cta, index: int, alive: int) -> None:
        program = cta.grid.program
        self.cta = cta
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
        self.row = cta.rank * cta.warp_count + index
        self.clock = WarpClock(self.row, cluster.rows, cluster.number, cluster.known_from)
        self.tmem_loads: dict[str, int] = {}
        group, place = divmod(index, WARPS_PER_STREAM_ROW)
        row = cluster.stream_row(cta.rank) + group
        self.tmem_loading = TmemStream(Stream(row, 2 * place, self.clock))
        self.tmem_storing = TmemStream(Stream(row, 2 * place + 1, self.clock))
        self.register_budget = 0
        self.counts = [0] * len(program.steps)
        self.unit: dict[Any, Any] = {}
        self._described = describe_warp(self)
        self.described_at = int(self._described.ctypes.data)

    @property
    def name(self) -> str:
        """For reports."""
        return f"CTA {self.cta.index} warp {self.index}"

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


@dataclass(frozen=True)
class RemoteArrival:
    """A warp of another CTA arrived. epoch: of the warp; phase: of the cluster barrier."""

    who: str
    line: int
    epoch: int
    phase: int


@dataclass(eq=False)
class NamedBarrier(Waitable):
    """One of the 16 barriers of bar.sync: threads that arrived, threads expected."""

    number: int = 0
    expected: int = 0
    arrived: int = 0
    message: Message | None = None
    votes: list[tuple[Any, int, Array]] = field(default_factory=list)
    generation: int = 0

    def __post_init__(self) -> None:
        super().__init__()


class Cta:
    """A CTA: shared memory, barriers, tensor memory, warps.

    smem[a] is the byte at shared address a; the first KiB belongs to the system. async_count: its
    asynchronous operations under way. pipe: the queue of its tensor pipe.
    """

    def __init__(self, cluster: Cluster, index: int, rank: int, position: Position) -> None:
        grid = cluster.grid
        self.grid: Grid = grid
        self.machine: Machine = grid.machine
        self.cluster = cluster
        self.index = index
        self.rank = rank
        self.position = position
        self.shared_end: int = (
            grid.program.variables.dynamic_shared_address + grid.dynamic_smem_bytes
        )
        self.smem: Array = np.zeros(max(self.shared_end, SHARED_BASE), np.uint8)
        self.smem_address = int(self.smem.ctypes.data)
        self.warp_count: int = grid.warp_count
        self.mbarriers: dict[int, MBarrier] = {}
        self.remote_arrivals: dict[int, RemoteArrival] = {}  # by the row of the warp
        self.barriers: dict[int, NamedBarrier] = {}
        self.pool = AsyncPool(cluster.pool_row(rank), POOL_ROWS)
        self.pipe_actor = PipeActor(cluster.pipe_row(rank))
        self.async_count = Countdown()
        self.tensor: Any = None  # tensor memory, made at the first tcgen05.alloc
        self.unit: dict[Any, Any] = {}
        self.local: dict[int, Array] = {}
        self.warps: list[Warp] = []
        self.exited = 0
        self.registers_free = [0] * QUARTERS
        self.register_waiters = Waitable()
        self.smem_shadow: Any = grid.machine.checks.smem_shadow(self)

    def barrier(self, number: int) -> NamedBarrier:
        """The named barrier of this number."""
        if number not in self.barriers:
            self.barriers[number] = NamedBarrier(number)
        return self.barriers[number]

    @property
    def done(self) -> bool:
        """Whether all its warps have exited."""
        return self.exited == len(self.warps)


class ClusterBarrier(Waitable):
    """barrier.cluster: threads that arrived in this phase."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self.threads = threads
        self.arrived = 0
        self.phase = 0
        self.message: Message | None = None
        self.last_message: Message | None = None


class Cluster:
    """The CTAs of a cluster, which run at the same time and see each other's shared memory."""

    def __init__(
        self, grid: Grid, index: int, number: int, ctas: list[tuple[int, Position]]
    ) -> None:
        self.grid = grid
        self.index = index
        self.number = number
        self.known_from: int = grid.known_from
        self.size = len(ctas)
        self.stream_rows: int = -(-grid.warp_count // WARPS_PER_STREAM_ROW)
        self.rows: int = self.size * (grid.warp_count + 1 + POOL_ROWS + self.stream_rows)
        self.ctas = [
            Cta(self, cta_index, rank, position) for rank, (cta_index, position) in enumerate(ctas)
        ]
        self.barrier = ClusterBarrier(self.size * grid.thread_count)

    def pipe_row(self, rank: int) -> int:
        """The clock row of a CTA's tensor pipe."""
        return self.size * self.grid.warp_count + rank

    def commit_id(self, warp: Warp) -> int:
        """The id whose epoch tells what a warp had done when it issued its latest tcgen05.commit.

        A commit publishes no accesses of its thread, but it comes after the thread's waits. The id
        is one of those in the row of the CTA's tensor pipe that no access has.
        """
        return actor_id(self.pipe_row(warp.cta.rank), 1 + warp.index % (LANES - 1))

    def pool_row(self, rank: int) -> int:
        """The first clock row of a CTA's asynchronous operations."""
        return self.size * (self.grid.warp_count + 1) + rank * POOL_ROWS

    def stream_row(self, rank: int) -> int:
        """The first clock row of the tensor memory loads and stores of a CTA's warps."""
        return self.size * (self.grid.warp_count + 1 + POOL_ROWS) + rank * self.stream_rows

    def name_of_id(self, identity: int) -> str:
        """Text for an actor id in reports."""
        row, lane = divmod(identity, 32)
        warps = self.grid.warp_count
        if row < self.size * warps:
            cta = self.ctas[row // warps]
            return f"CTA {cta.index} warp {row % warps} lane {lane}"
        row -= self.size * warps
        if row < self.size:
            return f"the tensor pipe of CTA {self.ctas[row].index}"
        row -= self.size
        if row < self.size * POOL_ROWS:
            return f"an asynchronous operation of CTA {self.ctas[row // POOL_ROWS].index}"
        rank, group = divmod(row - self.size * POOL_ROWS, self.stream_rows)
        warp = WARPS_PER_STREAM_ROW * group + lane // 2
        what = "tcgen05.st" if lane % 2 else "tcgen05.ld"
        return f"a {what} of CTA {self.ctas[rank].index} warp {warp}"

    @property
    def done(self) -> bool:
        """Whether all its CTAs are done."""
        return all(cta.done for cta in self.ctas)


@dataclass(eq=False)
class AsyncOperation:
    """Something a unit does later.

    complete: does it, and signals. queue: operations of one queue complete in order; None:
    whenever. what, line: for reports. order: age.
    """

    what: str
    line: int
    cta: Cta
    complete: Any
    queue: deque[AsyncOperation] | None = None
    order: int = 0
    harmless: bool = False  # may be under way when its CTA exits: it needs nothing of the CTA then
