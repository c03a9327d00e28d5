"""Orders of events in which one warp or operation is late: what nothing keeps from being late."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fa4.emulator.errors import LaunchError
from fa4.emulator.machine.operations import AsyncOperation
from fa4.emulator.machine.schedule import Fifo, Ready, Schedule

# Choices without any progress before what is held goes on: others poll for what it would do.
PATIENCE = 256
POLLS = ("mbarrier.test_wait", "mbarrier.try_wait", "ld.", "atom.", "nanosleep")


class Hold(NamedTuple):
    """The warp of a CTA stands still before it comes to a PTX line for the time `visit` (from 0);
    or, with warp -1, that operation of the line is under way; until nothing else can go on."""

    cta: int
    warp: int
    line: int
    visit: int

    def __str__(self) -> str:
        times = f", visit {self.visit}" if self.visit else ""
        until = "until nothing else can go on"
        if self.warp < 0:
            return f"an operation of CTA {self.cta} (PTX line {self.line}{times}) is late, {until}"
        where = f"before PTX line {self.line}{times}"
        return f"CTA {self.cta} warp {self.warp} stands still {where}, {until}"


class LateOperations(Fifo):
    """Warps take turns; operations complete, the oldest first, when no warp can run."""

    def choose(
        self, ready: Sequence[Ready], operations: Sequence[AsyncOperation]
    ) -> tuple[Ready | AsyncOperation, int]:
        """The oldest warp, else the oldest operation."""
        if ready:
            return ready[0], 1 << 30
        return operations[0], 0


BASES: dict[str, type[Fifo]] = {"fifo": Fifo, "late": LateOperations}


@dataclass
class _HoldState:
    """Of a hold: how often its warp has come there, whether it stands there, or is done."""

    visits: int = 0
    standing: bool = False
    done: bool = False


class HeldOrder:
    """One of BASES, but for these holds. reached: those that something stood at."""

    def __init__(self, holds: Iterable[Hold], base: str = "fifo") -> None:
        if base not in BASES:
            raise LaunchError(f"base {base!r}: allowed are {', '.join(BASES)}")
        self.reached: set[Hold] = set()
        self._base: Schedule = BASES[base]()
        self._holds = {hold: _HoldState() for hold in holds}
        self._watched = {(hold.cta, hold.warp) for hold in self._holds}
        self._at: dict[int, int] = {}  # fragment -> the step at which it was seen
        self._issued: dict[tuple[int, int], list[int]] = {}  # CTA, line -> operations by age
        self._progress, self._idle = -1, 0
        self._stepped: Any = None  # the watched fragment that ran last
        # What it polls: the step, and the machine's progress when it was there.
        self._polls_from, self._polled_at = -1, 0

    def choose(
        self, ready: Sequence[Ready], operations: Sequence[AsyncOperation]
    ) -> tuple[Ready | AsyncOperation, int]:
        """What the base chooses of what is not held; of watched warps one step."""
        free = [fragment for fragment in ready if not self._stands(fragment)]
        able = [operation for operation in operations if not self._is_late(operation)]
        if self._has_waited(ready) or not (free or able):
            self._release()
            free, able = list(ready), list(operations)
        if self._stepped in free and not self._polls_in_vain(self._stepped):
            return self._stepped, 1  # it goes on until it waits, as it would unwatched
        chosen, steps = self._base.choose(free, able)
        self._stepped = None
        warp: Any = getattr(chosen, "warp", None)
        if warp is not None and (warp.cta.index, warp.index) in self._watched:
            self._stepped, steps = chosen, 1
            self._polls_from = -1
        return chosen, steps

    def gives_up(self, line: int) -> bool:
        """Never."""
        return False

    def _polls_in_vain(self, fragment: Any) -> bool:
        """It is back at a poll, and nothing has happened since: others have their turn."""
        warp, pc = fragment.warp, fragment.pc
        progress = warp.cta.machine.progress
        again = pc == self._polls_from and progress == self._polled_at
        instructions = warp.program.steps[pc].instructions
        if instructions and instructions[0].opcode.startswith(POLLS):
            self._polls_from, self._polled_at = pc, progress
        return again

    def _release(self) -> None:
        for state in self._holds.values():
            state.done, state.standing = state.done or state.standing, False
        self._watched = {(h.cta, h.warp) for h, state in self._holds.items() if not state.done}
        self._idle = 0

    def _has_waited(self, ready: Sequence[Any]) -> bool:
        """Whether something is held, and nothing has come of what the others did for long."""
        if not ready or not any(state.standing for state in self._holds.values()):
            return False
        progress = ready[0].warp.cta.machine.progress
        self._idle = self._idle + 1 if progress == self._progress else 0
        self._progress = progress
        return self._idle > PATIENCE

    def _stands(self, fragment: Any) -> bool:
        warp = fragment.warp
        if (warp.cta.index, warp.index) not in self._watched:
            return False
        came = self._at.get(fragment.number) != fragment.pc
        self._at[fragment.number] = fragment.pc
        stands = False
        for hold, state in self._holds.items():
            place = (hold.cta, hold.warp) == (warp.cta.index, warp.index)
            if not place or warp.program.step_of_line.get(hold.line) != fragment.pc:
                continue
            if came and not state.standing:
                state.standing = state.visits == hold.visit and not state.done
                state.visits += 1
                if state.standing:
                    self.reached.add(hold)
            stands |= state.standing
        return stands

    def _is_late(self, operation: AsyncOperation) -> bool:
        if (operation.cta, -1) not in self._watched:
            return False
        issued = self._issued.setdefault((operation.cta, operation.line), [])
        if operation.order not in issued:
            issued.append(operation.order)
        hold = Hold(operation.cta, -1, operation.line, issued.index(operation.order))
        state = self._holds.get(hold)
        if state is None or state.done:
            return False
        state.standing = True
        self.reached.add(hold)
        return True
