"""Reads of which nothing comes: a value that reaches only stores which its thread does not make.

Where a block of elements has fewer of them than the CTA has threads, Triton lets several threads
load an element, and one of them store what comes of it, by a predicate. In a kernel that works in
place the load of the others and the store are in no order, and that changes nothing.

What a load's registers reach is found in the text, whatever the order of execution: only through
instructions on registers, and at the end in stores with predicates. Whether a thread makes such a
store is asked of its predicate's register when the run is over; it has to be written once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from fa4.emulator.checks.clocks import Actor
from fa4.emulator.checks.conflict import READ_AFTER_WRITE, WRITE_AFTER_READ, Conflict
from fa4.emulator.machine.state import Cta, Warp
from fa4.emulator.ptx.syntax import Address, PtxInstruction
from fa4.emulator.translate.program import MACHINE, RUN, Program, Step, registers_of
from fa4.emulator.warp_lanes import FULL_MASK, LANES, Array


@dataclass(frozen=True)
class GuardedStore:
    """Steps of a store and of what writes its predicate; the predicate's word, and FULL_MASK if it
    is negated."""

    step: int
    predicate_step: int
    word: int
    flip: int

    def made_by(self, warp: Warp) -> int:
        """The lanes that may have made it."""
        if not warp.counts[self.step]:
            return 0
        if warp.counts[self.predicate_step] != 1:
            return FULL_MASK
        return int(warp.words[self.word]) ^ self.flip


@dataclass(frozen=True)
class IdleRead:
    """A read by lanes of a warp, and the stores that its value reaches."""

    warp: Warp
    lanes: int
    stores: tuple[GuardedStore, ...]

    def is_unused(self) -> bool:
        """Whether the lanes have made none of these stores; known when the run is over."""
        return not any(store.made_by(self.warp) & self.lanes for store in self.stores)


def idle_read(conflict: Conflict, cta: Cta, actor: Actor, lanes: Array | int) -> IdleRead | None:
    """The read of a race in global memory, if its value reaches guarded stores only; else None.

    actor, lanes: of the later access.
    """
    warps = cta.cluster.rows.pipe(0)
    if conflict.kind == READ_AFTER_WRITE:
        row, line = actor.row, conflict.line
        each = [lanes] if isinstance(lanes, int) else lanes.tolist()
        mask = sum(1 << lane for lane in set(each))
    elif conflict.kind == WRITE_AFTER_READ and conflict.other_cluster < 0:
        row, line, mask = conflict.other_id // LANES, conflict.other_line, conflict.other_lanes
        if row == actor.row:
            mask &= ~(1 << conflict.mine)
    else:
        return None
    if not 0 <= row < warps:
        return None
    rank, index = divmod(row, cta.warp_count)
    reader = cta.cluster.ctas[rank].warps[index]
    stores = _stores_reached(reader.program, line)
    return IdleRead(reader, mask, stores) if stores is not None else None


# Spaces from which the thread itself reads what it stores.
_PRIVATE = {"local", "param", "param::func"}


@lru_cache(maxsize=1024)
def _stores_reached(program: Program, line: int) -> tuple[GuardedStore, ...] | None:
    """The stores that the value of a load reaches; None if it reaches anything else, or nothing."""
    load = program.instruction_at(line)
    if load is None or load.parts[0] != "ld":
        return None
    tainted = registers_of(load.operands[0])
    found: dict[int, GuardedStore] = {}
    size = -1
    while size != len(tainted):
        size = len(tainted)
        for step, instruction in _instructions(program):
            if instruction is load or not tainted & _read(instruction):
                continue
            if step.kind == MACHINE:
                store = _guarded_store(program, step, tainted)
                if store is None:
                    return None
                found[step.index] = store
            elif step.converges or (step.kind != RUN and instruction is step.instruction):
                return None
            else:
                tainted |= registers_of(instruction.operands[0])
    return tuple(found.values()) or None


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


def _guarded_store(program: Program, step: Step, tainted: set[str]) -> GuardedStore | None:
    """A store of a tainted value where and if nothing tainted says so; None: something else."""
    store = step.instruction
    guard = store.guard
    if store.parts[0] != "st" or guard is None or step.guard is None or guard.name in tainted:
        return None
    if tainted & registers_of(store.operands[0]) or _PRIVATE & set(store.parts):
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
    return GuardedStore(step.index, writers[0][0].index, word, flip & FULL_MASK)
