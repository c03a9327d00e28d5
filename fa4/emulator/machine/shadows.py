"""The shadows of the memories of a run: what each access is checked against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from fa4.emulator.checks.clocks import Actor
from fa4.emulator.checks.conflict import Access
from fa4.emulator.checks.global_shadow import GlobalShadow
from fa4.emulator.checks.shadow import Shadow
from fa4.emulator.machine.unwritten import unwritten_granules
from fa4.emulator.translate.lanes import width_of
from fa4.emulator.translate.program import Program
from fa4.emulator.translate.table import Unsupported
from fa4.emulator.warp_lanes import Array

READ, WRITE, ATOMIC = "read", "write", "atomic"


class Change(Enum):
    """What a store does to memory: nothing, or nothing but another rounding of floats."""

    NOTHING = 0
    ROUNDING = 1
    VALUES = 2


@dataclass(frozen=True, slots=True)
class Touch:
    """Who makes an access and how. kind: READ, WRITE or ATOMIC.

    lanes: the lane of each unit of the access, or one lane for all of them. idle: of a store that
    is still to be made, tells what the chosen units of it will change.
    """

    actor: Actor
    how: Access
    kind: str
    lanes: Array | int = 0
    idle: Callable[[Array | slice], Change] | None = None


# Tensor memory is recorded per column of 16 lanes. All loads and stores and nearly all operations
# of the tensor pipe take such groups as a whole; where the pipe takes a part of one, two accesses
# overlap in the group only if they overlap in a lane, because loads and stores take all of it.
TMEM_COLUMNS, TMEM_GROUPS, TMEM_GROUP_LANES = 512, 8, 16
# Bulk and tensor copies move multiples of 16 bytes; no shadow needs a larger granule.
LARGEST_GRANULE = 16


def narrowest_access(program: Program, spaces: tuple[str, ...]) -> int:
    """Bytes of the narrowest thread access to one of the spaces, at most 16.

    A shadow of this granularity confuses no two neighbours.
    """
    narrowest = LARGEST_GRANULE
    for instruction in program.kernel.instructions:
        parts = instruction.parts
        if parts[0] not in ("ld", "ldu", "st", "atom", "red", "mbarrier", "cp"):
            continue
        space = {part.split("::")[0] for part in parts}
        if not space & set(spaces) and space & {"shared", "global", "param", "local", "const"}:
            continue
        if parts[0] == "cp":
            size = 4 if parts[:2] == ("cp", "async") and "bulk" not in parts else 16
            size = 1 if "cp_mask" in parts else size
        elif parts[0] == "mbarrier":
            size = 8
        else:
            try:
                size = max(width_of(parts[-1]) // 8, 1)
            except Unsupported:
                size = 1
        narrowest = min(narrowest, size)
    return narrowest


def element_bytes(program: Program, line: int) -> int:
    """Bytes of each element that a thread's load or store at a line accesses, as the memory model
    counts them (PTX ISA 8.2.2: a vector is a set of accesses of its elements); 0: unknown."""
    instruction = program.instruction_at(line)
    if instruction is None or instruction.parts[0] not in ("ld", "ldu", "st", "stmatrix"):
        return 0
    try:
        return max(width_of(instruction.parts[-1]) // 8, 1)
    except Unsupported:
        return 0


class Shadows:
    """Makes the shadows of a run. `enabled` False: there are none, nothing is recorded."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._granules: dict[int, int] = {}
        self.global_granule = LARGEST_GRANULE

    def add_program(self, program: Program) -> None:
        """Chooses granules fine enough for a program that will run."""
        self._granules[id(program)] = narrowest_access(program, ("shared",))
        self.global_granule = min(self.global_granule, narrowest_access(program, ("global",)))

    def of_smem(self, program: Program, size_bytes: int, rows: int) -> Shadow | None:
        """A fresh one for a CTA's shared memory. rows: of the actors of its cluster."""
        if not self.enabled:
            return None
        granule = self._granules[id(program)]
        return Shadow(-(-size_bytes // granule), granule, rows)

    def of_tmem(self, rows: int) -> Shadow | None:
        """A fresh one for a CTA's tensor memory: granule = lane // 16 * 512 + column."""
        if not self.enabled:
            return None
        return Shadow(TMEM_GROUPS * TMEM_COLUMNS, 4 * TMEM_GROUP_LANES, rows)

    def of_buffer(self, data: Array) -> GlobalShadow:
        """A fresh one for a global buffer, of which `data` are the bytes."""
        unwritten = unwritten_granules(data, self.global_granule)
        shadow = GlobalShadow(len(data), self.global_granule, initialised=unwritten is None)
        if unwritten is not None:
            shadow.mark_written(~unwritten)
        return shadow
