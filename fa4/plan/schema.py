"""The vocabulary in which a kernel's pipeline is described once, as data.

A `PipelinePlan` has warp roles, each with a program of `Wait`, `Arrive`, `Work` and `Loop`; one-way
signals between roles; and buffers in shared and tensor memory. It holds amounts (tile shapes,
bytes, instructions per thread), never cycles and never run-time values: the simulator, the kernels,
the checks and the documentation all read the same object. Standard library only.

Two signals make a producer/consumer ring (`ring`), but a signal may have several arrivers: phase k
of a signal is complete when every arriver has arrived k + 1 times. `free` phases count as complete
from the start (the empty slots of a ring).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

GROUP_WARPS = 4  # of a warpgroup
LEAST_REGISTERS = 24  # that setmaxnreg leaves a thread (PTX ISA)
THREAD_REGISTERS = 255  # that one thread's instructions can name
FOLLOWING = "following"  # trips of a loop: 1, but 0 in the last work tile of a CTA
UNSTEADY_TRIPS = ("masked_tiles", FOLLOWING)


@dataclass(frozen=True, kw_only=True)
class Mma:
    """One tile of matrix products on the tensor core, as one CTA sees it.

    rows x cols x depth multiply-adds of this CTA. `a_bytes` and `b_bytes` are what the products
    read from shared memory (0 for an operand in tensor memory); cta_group 2 spans a CTA pair.
    in_registers: the accumulator, and A unless in shared memory, are registers of the warpgroup
    that issues it (wgmma) instead of tensor memory. issue_cycles: that its warps take to issue all
    of its instructions, where the code says so; None: as the machine does. waits: how often its
    warps wait until what they have issued of it is done.
    """

    rows: int
    cols: int
    depth: int
    a_bytes: int
    b_bytes: int
    cta_group: int = 1
    element_bytes: int = 2
    in_registers: bool = False
    issue_cycles: float | None = None
    waits: int = 1


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A bulk copy: kind is "load", "store", "reduce" (add into global) or "dsmem" (to the peer).

    `cold` loads touch data for the first time, so they come from HBM and not from L2. boxes: how
    many instructions it takes, one after the other. address_cycles: what its warp computes for it.
    """

    kind: str
    num_bytes: int
    cold: bool = False
    boxes: int = 1
    address_cycles: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TmemAccess:
    """A warpgroup loads or stores (`kind`) `cols` 32-bit columns of its 128 TMEM lanes."""

    kind: str
    cols: int


@dataclass(frozen=True, kw_only=True)
class Math:
    """Instructions per thread of every warp of a role, by execution pipe.

    mufu: exponentials. fma: FMA-pipe instructions (a packed f32x2 one counts 2). alu: max, convert,
    integer, select. other: moves, address arithmetic, control: issue slots only. chain: dependent
    FMA and ALU instructions that nothing hides at the end.
    """

    mufu: float = 0.0
    fma: float = 0.0
    alu: float = 0.0
    other: float = 0.0
    chain: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SmemAccess:
    """A role reads or writes `num_bytes` of shared memory with ordinary loads and stores.

    among: other instructions that stand between them.
    """

    num_bytes: int
    among: Math = Math()


@dataclass(frozen=True, kw_only=True)
class GlobalStore:
    """A role writes `num_bytes` of global memory with ordinary stores, in whole sectors of L2.

    It goes on when all are issued, for which L2 must have taken them.
    """

    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Sync:
    """A barrier among the warps of one role; `fenced` with fences of tensor and shared memory.

    by_warp: among the lanes of each warp only.
    """

    fenced: bool = False
    by_warp: bool = False


@dataclass(frozen=True, kw_only=True)
class Spill:
    """So many registers of every thread of a role go to local memory and come back.

    held: registers of a thread that it has room for; some go there more than once. waits: how often
    something waits for some of them to come back.
    """

    registers: int
    held: int
    waits: int = 1


@dataclass(frozen=True)
class Semaphore:
    """Poll a counter in global memory until it is this CTA's turn."""


Amount = Mma | Copy | TmemAccess | SmemAccess | GlobalStore | Math | Sync | Semaphore | Spill


@dataclass(frozen=True)
class Wait:
    """Block until this role's next phase of `signal` is complete."""

    signal: str


@dataclass(frozen=True)
class Arrive:
    """Arrive on `signal`, at once, or when all of this role's earlier work on unit `after` is done.

    after="tensor" is tcgen05.commit, after="tma" a transaction-byte completion.
    """

    signal: str
    after: str | None = None


@dataclass(frozen=True)
class Work:
    """Something that takes time. `asynchronous` work lets the role go on once it is issued.

    `reads` and `writes` name buffers, or parts of them (`places`). by_group: each warpgroup of the
    role has one of the named places for itself; else all have all. `share` names a run-time
    fraction (such as the rescale rate) by which the amount is multiplied.
    """

    what: str
    amount: Amount
    asynchronous: bool = False
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    share: str | None = None
    by_group: bool = False


@dataclass(frozen=True)
class Loop:
    """Repeat `body` max(0, trips[trip] + offset) times.

    Over FOLLOWING it begins the next work tile, if there is one, as the end of the prologue begins
    the first.
    """

    trip: str
    body: tuple[Step, ...]
    offset: int = 0


Step = Wait | Arrive | Work | Loop
Program = tuple[Step, ...]


@dataclass(frozen=True, kw_only=True)
class Role:
    """Warps that run one program: `prologue` once per CTA, `program` once per work tile.

    `closing`, after the last work tile, only waits: for others that still use this CTA's memory.
    Nobody waits for it, so that the simulator leaves it out. `passing` takes the place of a step of
    the program's loops for a tile that others of the CTA need and this role does not: the same
    signals, no work. `live` says how many registers of a thread hold what where most hold
    something; empty if the plan does not say.
    """

    name: str
    warps: tuple[int, ...]
    registers: int
    program: Program
    prologue: Program = ()
    passing: Program = ()
    closing: Program = ()
    live: Mapping[str, int] = field(default_factory=dict)

    @property
    def spilled_registers(self) -> int:
        """Values of a thread that find no register and wait in local memory."""
        return max(0, sum(self.live.values()) - min(self.registers, THREAD_REGISTERS))

    @property
    def steps(self) -> Program:
        """Everything it does, in order, its program once; what it passes over comes first."""
        begun = next((step.body for step in self.program if _begins(step)), ())
        before = self.prologue[: len(self.prologue) - len(begun)]
        program = (
            part
            for step in self.program
            for part in ((*self.passing, step) if _begins(step) else (step,))
        )
        return (*before, *self.passing, *begun, *program, *self.closing)


@dataclass(frozen=True, kw_only=True)
class Signal:
    """One-way synchronisation. kind is "mbarrier", "named", or, without a barrier, what a role
    waits for by itself: "group", its bulk copies, "products", its warpgroup's in registers.

    `arrivals` gives, per arriver, how many arrivals of the hardware barrier one `Arrive` stands for
    (threads, or 1 for an elected thread, a commit or a TMA completion); their sum is the barrier's
    arrive count. `stages` is the number of barriers used in turn, `tx_bytes` the transaction bytes
    of one phase (of the largest tile, where tiles of several sizes share a ring) and
    `first_tx_bytes` what a work tile's first phase carries on top. `remote` signals are completed
    by arrivals from the other CTA of a pair.
    """

    name: str
    arrivals: Mapping[str, int]
    waiters: tuple[str, ...]
    kind: str = "mbarrier"
    stages: int = 1
    free: int = 0
    tx_bytes: int = 0
    first_tx_bytes: int = 0
    remote: bool = False

    @property
    def arrive_count(self) -> int:
        """Count that the barrier is initialised with."""
        return sum(self.arrivals.values())


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A region of shared memory (bytes) or tensor memory (columns).

    space is "smem" or "tmem"; start is a column for TMEM and a byte offset for SMEM. `overlaps`
    names the buffers that are allowed to share its memory, with the protocol that makes it safe.
    """

    name: str
    space: str
    start: int
    size: int
    stages: int = 1
    overlaps: Mapping[str, str] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        """One past the last byte or column."""
        return self.start + self.size * self.stages


@dataclass(frozen=True, kw_only=True)
class Turns:
    """CTAs of a head add to the same tiles one after the other, and hold their SMs meanwhile.

    order: of KV tiles, "ascending" or "descending". launches: orders in which they may start.
    """

    order: str
    launches: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """One kernel on one machine: roles, signals and memory. `cta_group` CTAs work together.

    persistent: a CTA may have several work tiles, one after the other. turns: None where CTAs do
    not wait for each other.
    """

    name: str
    roles: tuple[Role, ...]
    signals: tuple[Signal, ...]
    buffers: tuple[Buffer, ...]
    cta_group: int = 1
    trips: tuple[str, ...] = ("kv_tiles",)
    persistent: bool = True
    shares: tuple[str, ...] = ()
    turns: Turns | None = None

    def role(self, name: str) -> Role:
        """The role called `name`; KeyError otherwise."""
        role: Role = _named(self.roles, name)
        return role

    def signal(self, name: str) -> Signal:
        """The signal called `name`; KeyError otherwise."""
        signal: Signal = _named(self.signals, name)
        return signal

    def buffer(self, name: str) -> Buffer:
        """The buffer called `name`; KeyError otherwise."""
        buffer: Buffer = _named(self.buffers, name)
        return buffer

    @property
    def warps(self) -> int:
        """Warps per CTA: whole warpgroups, so that each quarter of the SM has as many registers."""
        last = max(warp for role in self.roles for warp in role.warps)
        return (last // GROUP_WARPS + 1) * GROUP_WARPS

    @property
    def idle_warps(self) -> dict[int, int]:
        """Registers of each warp without a role: those of its warpgroup, or the least there are."""
        counts = {warp: role.registers for role in self.roles for warp in role.warps}
        groups = {warp // GROUP_WARPS: count for warp, count in counts.items()}
        return {
            warp: groups.get(warp // GROUP_WARPS, LEAST_REGISTERS)
            for warp in range(self.warps)
            if warp not in counts
        }

    def bytes_used(self, space: str) -> int:
        """Extent of a memory space: bytes of "smem" or columns of "tmem"."""
        return max((b.stop for b in self.buffers if b.space == space), default=0)


def _named(items: tuple[Any, ...], name: str) -> Any:
    for item in items:
        if item.name == name:
            return item
    raise KeyError(name)


def in_order(tiles: Iterable[Mapping[str, int]]) -> Iterator[Mapping[str, int]]:
    """The trips of a CTA's work tiles, none of which follows the last."""
    tiles = list(tiles)
    return ({FOLLOWING: int(number < len(tiles)), **trips} for number, trips in enumerate(tiles, 1))


def ring(
    name: str,
    producer: str,
    consumer: str,
    stages: int,
    *,
    tx_bytes: int = 0,
    first_tx_bytes: int = 0,
    releases: int = 1,
) -> tuple[Signal, Signal]:
    """`<name>_full` and `<name>_empty` of a ring of `stages` slots.

    The producer arrives once per slot, the consumer with `releases` arrivals.
    """
    full = Signal(
        name=f"{name}_full",
        arrivals={producer: 1},
        waiters=(consumer,),
        stages=stages,
        tx_bytes=tx_bytes,
        first_tx_bytes=first_tx_bytes,
    )
    empty = Signal(
        name=f"{name}_empty",
        arrivals={consumer: releases},
        waiters=(producer,),
        stages=stages,
        free=stages,
    )
    return full, empty


def _begins(step: Step) -> TypeGuard[Loop]:
    return isinstance(step, Loop) and step.trip == FOLLOWING


def walk(program: Program) -> Iterator[Wait | Arrive | Work]:
    """Every step of a program once, loop bodies included."""
    for step in program:
        if isinstance(step, Loop):
            yield from walk(step.body)
        else:
            yield step


def steady_work(program: Program) -> Iterator[Work]:
    """The work inside the loops of a program, except of loops that a steady state skips: a masked
    step replaces a plain one where a tile crosses the mask's edge, and most steps are plain."""
    for step in program:
        if isinstance(step, Loop) and step.trip not in UNSTEADY_TRIPS:
            yield from (inner for inner in walk(step.body) if isinstance(inner, Work))


def unroll(program: Program, trips: Mapping[str, int]) -> Iterator[Wait | Arrive | Work]:
    """The steps as executed, loops unrolled with concrete trip counts.

    A work tile follows unless trips[FOLLOWING] is 0.
    """
    for step in program:
        if isinstance(step, Loop):
            count = trips.get(FOLLOWING, 1) if _begins(step) else trips[step.trip]
            for _ in range(max(0, count + step.offset)):
                yield from unroll(step.body, trips)
        else:
            yield step
