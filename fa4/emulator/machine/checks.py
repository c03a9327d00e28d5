"""Joins the machine with the happens-before engine: what each access is checked against."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fa4.emulator.checks.clocks import Actor
from fa4.emulator.checks.conflict import (
    SAME_INSTRUCTION_WRITE,
    WRITE_AFTER_WRITE,
    Access,
    Conflict,
    describe,
)
from fa4.emulator.checks.global_shadow import GlobalShadow
from fa4.emulator.checks.memory import ShadowMemory
from fa4.emulator.checks.shadow import Shadow
from fa4.emulator.machine.memory import Buffer
from fa4.emulator.masks import LANES, Array
from fa4.emulator.translate.lanes import width_of
from fa4.emulator.translate.table import Unsupported

if TYPE_CHECKING:
    from fa4.emulator.machine.state import Cta, Warp
    from fa4.emulator.translate.program import Program

READ, WRITE, ATOMIC = "read", "write", "atomic"


@dataclass(frozen=True, slots=True)
class Touch:
    """Who makes an access and how. kind: READ, WRITE or ATOMIC.

    lanes: the lane of each unit of the access, or one lane for all of them. idle: of a store to
    global memory that is still to be made, tells whether it will leave all bytes as they are.
    """

    actor: Actor
    how: Access
    kind: str
    lanes: Array | int = 0
    idle: Callable[[], bool] | None = None


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


class Checks:
    """The shadows of all memories. `enabled` False: accesses are not recorded at all."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._granules: dict[int, int] = {}
        self.global_granule = LARGEST_GRANULE

    def add_program(self, program: Program) -> None:
        """Chooses granules fine enough for a program that will run."""
        self._granules[id(program)] = narrowest_access(program, ("shared",))
        self.global_granule = min(self.global_granule, narrowest_access(program, ("global",)))

    def smem_shadow(self, cta: Cta) -> ShadowMemory | None:
        """A fresh shadow for a CTA's shared memory."""
        if not self.enabled:
            return None
        granule = self._granules[id(cta.grid.program)]
        return Shadow(-(-len(cta.smem) // granule), granule, cta.cluster.rows)

    def tmem_shadow(self, cta: Cta) -> ShadowMemory | None:
        """A fresh shadow for a CTA's tensor memory: granule = lane // 16 * 512 + column."""
        if not self.enabled:
            return None
        return Shadow(TMEM_GROUPS * TMEM_COLUMNS, 4 * TMEM_GROUP_LANES, cta.cluster.rows)

    def shared(self, target: Cta, offsets: Array, size_bytes: int, touch: Touch) -> None:
        """Records units of size_bytes at byte offsets of a CTA's shared memory."""
        shadow = target.smem_shadow
        if shadow is not None and len(offsets):
            conflict, start = self._record(shadow, offsets, size_bytes, touch)
            if conflict is not None:
                where = f"shared address {start:#x} of CTA {target.index}"
                self._report(conflict, target, where, touch.actor)

    def tensor(self, target: Cta, granules: Array, touch: Touch) -> None:
        """Records accesses to tensor memory; granule = lane // 16 * 512 + column."""
        if target.tensor is None or target.tensor.shadow is None or not len(granules):
            return
        shadow = target.tensor.shadow
        conflict = getattr(shadow, touch.kind)(granules, touch.lanes, touch.actor, touch.how)
        if conflict is not None:
            group, column = divmod(conflict.granule, TMEM_COLUMNS)
            first = group * TMEM_GROUP_LANES
            place = f"in TMEM column {column}, lanes {first}..{first + TMEM_GROUP_LANES - 1}"
            self._report(conflict, target, f"CTA {target.index}", touch.actor, place)

    def buffer(
        self, cta: Cta, buffer: Buffer, offsets: Array, size_bytes: int, touch: Touch
    ) -> None:
        """Records units of size_bytes at byte offsets of a global buffer."""
        if not self.enabled or not len(offsets):
            return
        if buffer.shadow is None:
            buffer.shadow = GlobalShadow(len(buffer.data), self.global_granule, initialised=True)
            cta.machine.memory.refresh()
        conflict, start = self._record(buffer.shadow, offsets, size_bytes, touch)
        if conflict is None:
            return
        # Whichever of two equal stores is last, the memory is the same (PTX ISA 8.7.2: races of
        # accesses of one size have a defined outcome).
        if conflict.kind == WRITE_AFTER_WRITE and touch.idle is not None and touch.idle():
            return
        self._report(conflict, cta, f"{buffer.name} byte {start}", touch.actor)

    @staticmethod
    def _record(
        shadow: ShadowMemory, offsets: Array, size_bytes: int, touch: Touch
    ) -> tuple[Conflict | None, int]:
        granule = shadow.granule_bytes
        unit = (granule, max(size_bytes // granule, 1))
        access = getattr(shadow, touch.kind)
        conflict = access(offsets, touch.lanes, touch.actor, touch.how, unit)
        return conflict, conflict.granule * granule if conflict is not None else 0

    def _report(
        self, conflict: Conflict, cta: Cta, where: str, actor: Actor, place: str = ""
    ) -> None:
        if conflict.kind == SAME_INSTRUCTION_WRITE:
            return
        text = describe(conflict, cta.cluster.name_of_id, place)
        row = actor.row
        warps = cta.grid.warp_count * cta.cluster.size
        cluster_ctas = cta.cluster.ctas
        owner, warp = (
            (cluster_ctas[row // cta.grid.warp_count], row % cta.grid.warp_count)
            if row < warps
            else (cta, -1)
        )
        program = cta.grid.program
        text = re.sub(r"PTX line (\d+)", lambda m: program.describe_line(int(m[1])), text)
        kind = "race" if conflict.kind.startswith("race") else conflict.kind
        cta.machine.report(kind, f"{text}; {where}", conflict.line, owner, warp)

    # Ends.

    def warp_exited(self, warp: Warp) -> None:
        """Nothing that a warp started in its registers may still be under way."""
        if warp.tmem_loading.count:
            warp.cta.machine.report(
                "exit",
                "exits while a tcgen05.ld is under way",
                next(iter(warp.tmem_loads.values()), 0),
                warp.cta,
                warp.index,
            )

    def cta_exited(self, cta: Cta) -> None:
        """No operation of a CTA may be under way; its tensor memory must be free again."""
        machine = cta.machine
        under_way = [o for o in machine.operations if o.cta is cta and not o.harmless]
        if under_way:
            listed = ", ".join(sorted({f"{o.what} (PTX line {o.line})" for o in under_way}))
            machine.report(
                "exit",
                f"the CTA exits while operations are under way: {listed}",
                under_way[0].line,
                cta,
            )
        if self.enabled and cta.remote_arrivals:
            self._check_remote_arrivals(cta)
        if cta.tensor is not None and cta.tensor.allocated_columns:
            machine.report(
                "tmem",
                f"the CTA exits without tcgen05.dealloc of {cta.tensor.allocated_columns} columns",
                cta.tensor.line,
                cta,
            )

    @staticmethod
    def _check_remote_arrivals(cta: Cta) -> None:
        """Other CTAs may signal mbarriers of a CTA only while it lives: it has to wait for them.

        A cluster barrier since then will do, even a relaxed one.
        """
        for row, arrival in cta.remote_arrivals.items():
            own = slice(row * LANES, (row + 1) * LANES)
            known = max(int(warp.clock.knowledge.seen[own].max()) for warp in cta.warps)
            if known < arrival.epoch and arrival.phase == cta.cluster.barrier.phase:
                cta.machine.report(
                    "exit",
                    f"{arrival.who} arrives at an mbarrier of CTA {cta.index}, and nothing keeps "
                    "that CTA from exiting before",
                    arrival.line,
                    cta,
                )
