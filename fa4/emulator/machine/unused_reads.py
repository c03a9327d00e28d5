"""Reads of which nothing comes: a value that reaches only stores which its thread does not make.

Where a block of elements has fewer of them than the CTA has threads, Triton lets several threads
load an element, and one of them store what comes of it, by a predicate. In a kernel that works in
place the load of the others and the store are in no order, and that changes nothing.

What a load's registers reach is found in the text, whatever the order of execution: only through
instructions on registers, and at the end in stores with predicates. Shuffles carry it to the lanes
that they name: the sum of a row that a warp holds once more reaches nobody outside that warp.
Whether a lane makes such a store is asked of its predicate's register when the run is over; it has
to be written once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from operator import or_

from fa4.emulator.checks.clocks import Actor
from fa4.emulator.checks.conflict import READ_AFTER_WRITE, WRITE_AFTER_READ, Conflict
from fa4.emulator.checks.memory import ShadowMemory
from fa4.emulator.machine.state import Cta, Warp
from fa4.emulator.ptx.syntax import Address, Integer, PtxInstruction
from fa4.emulator.translate.program import MACHINE, RUN, Program, Step, registers_of
from fa4.emulator.translate.shuffle import constant_sources
from fa4.emulator.warp_lanes import FULL_MASK, LANES, Array


@dataclass(frozen=True)
class GuardedStore:
    """Steps of a store and of what writes its predicate; the predicate's word, and FULL_MASK if it
    is negated; lanes: those in which what it stores comes of the read."""

    step: int
    predicate_step: int
    word: int
    flip: int
    lanes: int

    def made_by(self, warp: Warp) -> int:
        """The lanes of the warp that may have made it."""
        if not warp.counts[self.step]:
            return 0
        if warp.counts[self.predicate_step] != 1:
            return FULL_MASK
        return int(warp.words[self.word]) ^ self.flip


@dataclass(frozen=True)
class IdleRead:
    """A read by lanes of a warp, and the stores that its value reaches in that warp."""

    warp: Warp
    lanes: int
    stores: tuple[GuardedStore, ...]

    def is_unused(self) -> bool:
        """Whether none of these stores was made with it; known when the run is over."""
        return not any(store.made_by(self.warp) & store.lanes for store in self.stores)


def conflicts_by_reader(conflicts: Iterable[Conflict]) -> list[Conflict]:
    """The conflicts of an access; those with reads by one warp, instruction and epoch as one, of
    all lanes that read what another one writes."""
    found: dict[tuple[str, int, int, int, int], Conflict] = {}
    for one in conflicts:
        row = one.other_id // LANES
        lanes = one.other_lanes
        if one.kind == WRITE_AFTER_READ and row == one.my_id // LANES and one.other_cluster < 0:
            lanes &= ~(1 << one.mine)
        key = one.kind, row, one.other_line, one.other_epoch, one.other_cluster
        known = found.setdefault(key, replace(one, other_lanes=0))
        found[key] = replace(known, other_lanes=known.other_lanes | lanes)
    return list(found.values())


def idle_read(
    conflict: Conflict, cta: Cta, shadow: ShadowMemory, actor: Actor, lanes: Array | int
) -> IdleRead | None:
    """The read of a race in global memory, if its value reaches guarded stores only; else None.

    conflict: of `conflicts_by_reader`. actor, lanes: of the later access.
    """
    warps = cta.cluster.rows.pipe(0)
    if conflict.kind == READ_AFTER_WRITE:
        row, lines = actor.row, frozenset((conflict.line,))
        each = [lanes] if isinstance(lanes, int) else lanes.tolist()
        mask = sum(1 << lane for lane in set(each))
    elif conflict.kind == WRITE_AFTER_READ and conflict.other_cluster < 0:
        row, mask = conflict.other_id // LANES, conflict.other_lanes
        lines = shadow.lines_of(row, conflict.other_epoch, actor.knowledge.cluster)
    else:
        return None
    if not 0 <= row < warps:
        return None
    rank, index = divmod(row, cta.warp_count)
    reader = cta.cluster.ctas[rank].warps[index]
    stores = _stores_reached(reader.program, lines, mask)
    return IdleRead(reader, mask, stores) if stores is not None else None


# Spaces from which the thread itself reads what it stores.
_PRIVATE = {"local", "param", "param::func"}


@lru_cache(maxsize=1024)
def _stores_reached(
    program: Program, lines: frozenset[int], lanes: int
) -> tuple[GuardedStore, ...] | None:
    """The stores that the values of loads by these lanes reach; None if they reach anything else,
    or no instruction has them. lines: of the loads, and of stores beside them."""
    found_at = [program.instruction_at(line) for line in lines]
    loads = [one for one in found_at if one is not None and one.parts[0] == "ld"]
    if len(loads) < sum(one is None or one.parts[0] != "st" for one in found_at):
        return None
    tainted = {name: lanes for load in loads for name in registers_of(load.operands[0])}
    found: dict[int, GuardedStore] = {}
    before: dict[str, int] = {}
    is_read = False
    while before != tainted:
        before = dict(tainted)
        for step, instruction in _instructions(program):
            reached = _any_of(tainted, _read(instruction))
            if not reached:
                continue
            is_read = True
            if step.kind == MACHINE:
                store = _guarded_store(program, step, tainted)
                if store is None:
                    return None
                found[step.index] = store
                continue
            if step.kind != RUN and instruction is step.instruction:
                return None
            if step.converges and instruction is step.instructions[0]:
                if instruction.parts[0] not in ("shfl", "vote", "match", "redux"):
                    return None
                reached = _handed(instruction, tainted)
            for name in registers_of(instruction.operands[0]):
                tainted[name] = tainted.get(name, 0) | reached
    return tuple(found.values()) if is_read else None


def _any_of(tainted: Mapping[str, int], names: Iterable[str]) -> int:
    """The lanes in which one of these registers comes of the read."""
    return reduce(or_, (tainted.get(name, 0) for name in names), 0)


def _handed(exchange: PtxInstruction, tainted: Mapping[str, int]) -> int:
    """The lanes that get a tainted value by an exchange; all, where it is not known who reads whom.

    Of a shuffle the text tells it if it has no predicate and its distance and bound are constants.
    """
    if exchange.parts[0] != "shfl":
        return FULL_MASK
    _, value, offset, clamp, members = exchange.operands
    given = _any_of(tainted, registers_of(value))
    others = set().union(*(registers_of(operand) for operand in (offset, clamp, members)))
    if exchange.guard is not None or _any_of(tainted, others):
        return FULL_MASK
    if not isinstance(offset, Integer) or not isinstance(clamp, Integer):
        return FULL_MASK
    sources = constant_sources(exchange.parts[2], offset.value, clamp.value)
    return sum(1 << lane for lane, (source, _) in enumerate(sources) if given >> source & 1)


def _instructions(program: Program) -> Iterator[tuple[Step, PtxInstruction]]:
    return ((step, instruction) for step in program.steps for instruction in step.instructions)


def _read(instruction: PtxInstruction) -> set[str]:
    """The registers that an instruction reads; of a store or another without a result, all."""
    is_store = instruction.parts[0] in ("st", "red", "bra", "brx", "bar", "barrier")
    sources = instruction.operands if is_store else instruction.operands[1:]
    names = set().union(*(registers_of(operand) for operand in sources), set())
    if instruction.operands and isinstance(instruction.operands[0], Address):
        names |= registers_of(instruction.operands[0])
    return names | ({instruction.guard.name} if instruction.guard is not None else set())


def _guarded_store(program: Program, step: Step, tainted: Mapping[str, int]) -> GuardedStore | None:
    """A store of a tainted value where and if nothing tainted says so; None: something else."""
    store = step.instruction
    guard = store.guard
    if store.parts[0] != "st" or guard is None or step.guard is None or guard.name in tainted:
        return None
    if tainted.keys() & registers_of(store.operands[0]) or _PRIVATE & set(store.parts):
        return None
    writers = [
        (one, instruction)
        for one, instruction in _instructions(program)
        if instruction.operands
        and instruction.parts[0] != "st"
        and guard.name in registers_of(instruction.operands[0])
    ]
    if len(writers) != 1 or writers[0][1].guard is not None or writers[0][0].kind == MACHINE:
        return None
    word, flip = step.guard
    lanes = _any_of(tainted, _read(store))
    return GuardedStore(step.index, writers[0][0].index, word, flip & FULL_MASK, lanes)
