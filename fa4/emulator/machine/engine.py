"""The machine: runs the warps of the resident clusters and completes asynchronous operations."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from fa4.emulator.errors import EmulatorError, KernelFinding
from fa4.emulator.machine.calls import called, enter, leave
from fa4.emulator.machine.deadlock import explain
from fa4.emulator.machine.grid import start, start_next, warp_exited
from fa4.emulator.machine.machine_state import MachineState, Stop
from fa4.emulator.machine.memory import Memory
from fa4.emulator.machine.operations import AsyncOperation
from fa4.emulator.machine.options import Options
from fa4.emulator.machine.shadows import Shadows
from fa4.emulator.machine.state import NOT_TAKEN, TAKEN, Fragment, Grid, Join, Warp
from fa4.emulator.machine.waits import Blocked, Spin, wait_for
from fa4.emulator.machine.warpgroup_checks import note_use
from fa4.emulator.translate.program import (
    BRANCH,
    CALL,
    EXIT,
    INDEXED,
    JUMP,
    MACHINE,
    RETURN,
    RUN,
    Step,
)
from fa4.emulator.warp_lanes import lanes_of, lowest

# Polls without anything else happening anywhere before the machine is called livelocked.
SPIN_LIMIT = 20_000


class Engine(MachineState):
    """Executes grids: the launches of one group at a time, which may overlap."""

    def __init__(self, options: Options, memory: Memory, shadows: Shadows) -> None:
        super().__init__(options, memory, shadows)
        self.grids: list[Grid] = []  # all that ever ran
        self.active: list[Grid] = []
        self._latest: Fragment | None = None

    def run_group(self, grids: Sequence[Grid]) -> None:
        """Runs grids of which each may overlap the one before, until all are done.

        Raises Stop after a finding that ends the run.
        """
        self.grids.extend(grids)
        self.active = list(grids)
        if grids:
            start(grids[0])
        self.run()

    # The main loop.

    def run(self) -> None:
        """Runs until all grids are done, or a finding stops it."""
        stuck_at = -1
        spins = 0
        while True:
            if self.steps_left <= 0:
                raise self._endless()
            eligible = self.completable() if self.operations else []
            if not self.ready and not eligible:
                if any(start_next(grid) for grid in self.active):
                    continue
                if all(grid.done for grid in self.active):
                    return
                if stuck_at == self.progress or not self._time_out():
                    raise self._deadlocked()
                stuck_at = self.progress
                continue
            before = self.progress
            chosen, quantum = self.schedule.choose(self.ready, eligible)
            if isinstance(chosen, AsyncOperation):
                self.complete(chosen)
                spins = 0
                continue
            self.ready.remove(chosen)
            self._latest, begun = chosen, self.ticks
            spun = self.run_fragment(chosen, min(quantum, self.steps_left))
            self.steps_left -= self.ticks - begun
            spins = spins + 1 if spun and before == self.progress else 0
            if spins and spins % 64 == 0:
                self._after_spins(spins, eligible)

    def _after_spins(self, spins: int, eligible: list[AsyncOperation]) -> None:
        """Many polls in vain: let something else happen, or give up."""
        if eligible:
            self.complete(eligible[0])
        elif any(start_next(grid) for grid in self.active):
            return
        elif spins % 1024 == 0:
            self._time_out()
        if spins >= SPIN_LIMIT:
            raise self._deadlocked("livelock")

    def _time_out(self) -> bool:
        """Wakes every wait that the hardware would end without success."""
        woken = [
            fragment
            for fragment in self._blocked()
            if fragment.wait is not None and fragment.wait.times_out
        ]
        for fragment in woken:
            wait = fragment.wait
            if wait is not None and wait.on is not None:
                wait.on.waiters.remove(fragment)
            fragment.timed_out = True
            fragment.make_ready()
        return bool(woken)

    def _blocked(self) -> list[Fragment]:
        return [
            fragment
            for grid in self.grids
            for cluster in grid.resident
            for cta in cluster.ctas
            for warp in cta.warps
            for fragment in warp.fragments
            if fragment.wait is not None
        ]

    def _deadlocked(self, kind: str = "deadlock") -> Stop:
        message, line, cta, warp = explain(self.grids, kind)
        with suppress(Stop):
            if cta is None:
                self.report(KernelFinding(kind, message, line))
            else:
                cta.report(kind, message, line, warp)
        return Stop()

    def _endless(self) -> Stop:
        message = f"not at its end after {self.options.max_steps} steps, the limit (max_steps)"
        latest = self._latest
        with suppress(Stop):
            if latest is None:
                self.report(KernelFinding("step-limit", message))
            else:
                latest.fault("step-limit", f"{message}; the warp that ran last is here")
        return Stop()

    # Fragments.

    def run_fragment(self, fragment: Fragment, quantum: float) -> bool:
        """Executes steps until the fragment blocks, ends or used its quantum.

        Returns whether it only polled in vain.
        """
        warp = fragment.warp
        steps, counts, base = warp.program.steps, warp.counts, warp.base
        parameters = warp.cta.grid.parameter_address
        while quantum > 0:
            if fragment.joins and fragment.joins[-1].at == fragment.pc and not self._meet(fragment):
                return False
            step = steps[fragment.pc]
            if step.converges and fragment.mask != warp.alive and not self._gather(fragment, step):
                return False
            if (
                warp.tmem_loads
                and not step.touches.isdisjoint(warp.tmem_loads)
                and not self._loads_delivered(fragment, step)
            ):
                return False
            if step.held:
                note_use(warp, step)
            quantum -= 1
            self.ticks += 1
            counts[fragment.pc] += 1
            kind = step.kind
            if kind == RUN:
                if step.function is not None:
                    step.function(base, fragment.mask, parameters)
                fragment.pc += 1
            elif kind == MACHINE:
                outcome = self._execute(fragment, step)
                if outcome is not None:
                    if outcome is True:
                        return False
                    self.ready.append(fragment)
                    return True
            elif kind == JUMP:
                if step.function is not None:
                    step.function(base, fragment.mask, parameters)
                fragment.pc = step.target
            elif kind == EXIT:
                if step.function is not None:
                    step.function(base, fragment.mask, parameters)
                self.exit_lanes(fragment, fragment.mask)
                return False
            elif kind == BRANCH:
                assert step.function is not None
                self._take(fragment, step, step.function(base, fragment.mask, parameters))
            elif kind == INDEXED:
                self._branch(fragment, step, self._indexed_targets(fragment, step))
            elif kind == CALL:
                self._call(fragment, step)
            elif kind == RETURN:
                leave(fragment)
        self.ready.append(fragment)
        return False

    def _execute(self, fragment: Fragment, step: Step) -> Any:
        """One handler. Returns None to go on, True if the fragment blocked, a Spin if it polled."""
        warp = fragment.warp
        mask = fragment.mask
        if step.guard is not None:
            word, flip = step.guard
            mask &= int(warp.words[word]) ^ flip
            if not mask:
                warp.cta.grid.skipped[fragment.pc] += 1
                fragment.pc += 1
                return None
        assert step.handler is not None
        try:
            outcome = step.handler(fragment, mask)
        except EmulatorError as error:
            kind = getattr(error, "kind", "fault")
            raise fragment.fatal(kind, str(error)) from None
        if self.events is not None:
            self.events.executed(fragment, step, outcome, self.ticks)
        if outcome is None:
            fragment.timed_out = False
            fragment.pc += 1
            return None
        if isinstance(outcome, Spin):
            fragment.timed_out = False
            fragment.pc += 1
            return outcome
        assert isinstance(outcome, Blocked)
        fragment.timed_out = False
        if not outcome.retry:
            fragment.pc += 1
        fragment.wait = outcome
        if outcome.on is not None:
            outcome.on.waiters.append(fragment)
        return True

    def _loads_delivered(self, fragment: Fragment, step: Step) -> bool:
        """A step uses registers that a tcgen05.ld has not been waited for.

        The manual asks for tcgen05.wait::ld first. The hardware itself holds back the first use
        (FlashAttention-4's forward kernel has no wait::ld at all), so the use waits here too; with
        Options.strict_tmem_loads it is reported.
        """
        warp = fragment.warp
        if self.options.strict_tmem_loads and not step.reads.isdisjoint(warp.tmem_loads):
            name = sorted(step.reads & warp.tmem_loads.keys())[0]
            warp.cta.report(
                "missing-wait",
                f"{name} is used before tcgen05.wait::ld: the tcgen05.ld at PTX line "
                f"{warp.tmem_loads[name]} may not have delivered it",
                step.instructions[0].line,
                warp.index,
            )
        if warp.tmem_loading.count:
            fragment.wait = wait_for(warp.tmem_loading, "registers that a tcgen05.ld delivers")
            warp.tmem_loading.waiters.append(fragment)
            return False
        warp.settle(warp.tmem_loading)
        return True

    # Divergence.

    def _indexed_targets(self, fragment: Fragment, step: Step) -> dict[int, int]:
        warp = fragment.warp
        if step.function is not None:
            step.function(warp.base, fragment.mask, warp.cta.grid.parameter_address)
        index = step.instruction.operands[0]
        offset = warp.program.registers.offsets[getattr(index, "name", "")][0]
        values = warp.words[offset // 4 : offset // 4 + 32]
        masks: dict[int, int] = {}
        for lane in lanes_of(fragment.mask).tolist():
            value = int(values[lane])
            if value >= len(step.targets):
                raise fragment.fatal(
                    "branch", f"brx.idx with index {value} of {len(step.targets)} targets"
                )
            target = step.targets[value]
            masks[target] = masks.get(target, 0) | 1 << lane
        return masks

    def _take(self, fragment: Fragment, step: Step, taken: int) -> None:
        """A branch that the lanes in `taken` take."""
        ways = fragment.warp.cta.grid.branch_ways
        if taken == fragment.mask:
            ways[fragment.pc] |= TAKEN
            fragment.pc = step.target
        elif not taken:
            ways[fragment.pc] |= NOT_TAKEN
            fragment.pc += 1
        else:
            ways[fragment.pc] = TAKEN | NOT_TAKEN
            self._branch(fragment, step, {step.target: taken})

    def _branch(self, fragment: Fragment, step: Step, masks: dict[int, int]) -> None:
        """Continues at the targets of `masks`; lanes in none of them fall through."""
        rest = fragment.mask
        for mask in masks.values():
            rest &= ~mask
        parts = {target: mask for target, mask in masks.items() if mask}
        if rest:
            parts[step.index + 1] = parts.get(step.index + 1, 0) | rest
        if len(parts) == 1:
            fragment.pc = next(iter(parts))
            return
        if step.meet >= 0:
            self._expect(fragment, step.meet)
        (pc, mask), *others = parts.items()
        fragment.pc, fragment.mask = pc, mask
        for other_pc, other_mask in others:
            self._split(fragment, other_pc, other_mask)

    def _expect(self, fragment: Fragment, at: int) -> None:
        """The fragment's lanes, which part now, are to meet at a step of where they are."""
        joins, activation = fragment.joins, fragment.activation
        if not (joins and joins[-1].at == at and joins[-1].activation is activation):
            fragment.joins = (*joins, Join(at, fragment.mask, activation))

    def _split(self, fragment: Fragment, pc: int, mask: int) -> Fragment:
        """Lanes that go on by themselves, where the fragment is but at another step."""
        other = Fragment(fragment.warp, pc, mask, fragment.joins, fragment.activation)
        fragment.warp.fragments.append(other)
        self.ready.append(other)
        return other

    def _call(self, fragment: Fragment, step: Step) -> None:
        """Lanes that call different functions, or none, meet behind the call."""
        mask = fragment.mask
        if step.guard is not None:
            word, flip = step.guard
            mask &= int(fragment.warp.words[word]) ^ flip
        rest, behind = fragment.mask & ~mask, step.index + 1
        if not mask:
            fragment.warp.cta.grid.skipped[fragment.pc] += 1
            fragment.pc = behind
            return
        calls = called(fragment, step, mask)
        if rest or len(calls) > 1:
            self._expect(fragment, behind)
        if rest:
            self._split(fragment, behind, rest)
        (number, fragment.mask), *others = calls.items()
        for other, lanes in others:
            enter(self._split(fragment, step.index, lanes), step, other)
        enter(fragment, step, number)

    def _meet(self, fragment: Fragment) -> bool:
        """A fragment reached its meeting point. Returns whether it goes on, as the whole."""
        while fragment.joins and fragment.joins[-1].at == fragment.pc:
            join = fragment.joins[-1]
            if join.activation is not fragment.activation:  # at the step, in a deeper call
                break
            join.arrived |= fragment.mask
            if join.arrived & join.expected != join.expected:
                fragment.warp.fragments.remove(fragment)
                return False
            fragment.mask = join.expected
            fragment.joins = fragment.joins[:-1]
        return True

    def exit_lanes(self, fragment: Fragment, mask: int) -> None:
        """The fragment's lanes leave the kernel."""
        warp = fragment.warp
        warp.alive &= ~mask
        warp.fragments.remove(fragment)
        for join in fragment.joins:
            join.expected &= ~mask
        self._release_joins(warp, fragment.joins)
        self._wake_gathered(warp)
        self.progress += 1
        if not warp.alive:
            warp_exited(warp)

    def _release_joins(self, warp: Warp, joins: tuple[Join, ...]) -> None:
        """Lanes that only waited for lanes that are gone now go on."""
        for depth in range(len(joins) - 1, -1, -1):
            join = joins[depth]
            running = 0
            for other in warp.fragments:
                if join in other.joins:
                    running |= other.mask
            if join.expected and not running and join.arrived & join.expected == join.expected:
                merged = Fragment(warp, join.at, join.expected, joins[:depth], join.activation)
                warp.fragments.append(merged)
                self.ready.append(merged)
                return

    def _gather(self, fragment: Fragment, step: Step) -> bool:
        """Waits until the other lanes of the warp are here too; runs the step for all at once."""
        warp = fragment.warp
        here = [f for f in warp.fragments if f.pc == fragment.pc and f.wait is not None]
        named = warp.alive
        if step.members is not None:
            named &= step.members(warp, lowest(fragment.mask))
        union = fragment.mask
        for other in here:
            union |= other.mask
        if named & ~union:
            fragment.wait = Blocked(None, lambda: f"lanes {named & ~union:#010x} of its warp")
            return False
        own = fragment.mask
        fragment.mask = union
        if step.kind == MACHINE:
            self._execute(fragment, step)
        else:
            self._run_gathered(fragment, step)
        fragment.mask = own
        for other in here:
            other.pc = fragment.pc
            other.wait = None
            self.ready.append(other)
        self.ready.append(fragment)
        return False

    def _run_gathered(self, fragment: Fragment, step: Step) -> None:
        warp = fragment.warp
        if step.function is not None:
            step.function(warp.base, fragment.mask, warp.cta.grid.parameter_address)
        fragment.pc += 1

    def _wake_gathered(self, warp: Warp) -> None:
        for other in warp.fragments:
            if other.wait is not None and other.wait.on is None:
                other.wait = None
                self.ready.append(other)
