"""What all warps of a run share: who is ready, what is under way, what was found, the time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fa4.emulator.errors import KernelFinding
from fa4.emulator.machine.events import RunEvents
from fa4.emulator.machine.memory import Memory
from fa4.emulator.machine.operations import AsyncOperation
from fa4.emulator.machine.options import Options
from fa4.emulator.machine.schedule import make_schedule
from fa4.emulator.machine.shadows import Shadows


class Stop(Exception):
    """Ends the run: a finding after which going on makes no sense."""


class MachineState:
    """The state of a machine, apart from its grids.

    ready: fragments that can run, oldest first. ticks counts executed steps; progress counts
    events that others can wait for (arrivals, ends of copies, memory flags, exits): when it stands
    still and nothing can run, that is a deadlock. accepted: findings that fail nothing, and why.
    stopped: a finding has ended the run. judgements: findings that wait for
    the end of it, one for each pair of instructions and threads.
    """

    def __init__(self, options: Options, memory: Memory, shadows: Shadows) -> None:
        self.options = options
        self.memory = memory
        self.shadows = shadows
        name = options.schedule
        self.schedule = make_schedule(name, options.seed) if isinstance(name, str) else name
        self.ready: deque[Any] = deque()
        self.operations: list[AsyncOperation] = []
        self.findings: list[KernelFinding] = []
        self.accepted: list[tuple[KernelFinding, str]] = []
        self.output: list[str] = []
        self.events: RunEvents | None = options.events
        self.stopped = False
        self.judgements: dict[Any, Callable[[], None]] = {}
        self.told_equal_stores: set[tuple[int, int]] = set()
        self.ticks = 0
        self.progress = 0
        self.steps_left: float = options.max_steps or math.inf
        self._numbers = 0
        self._seen_findings: set[tuple[str, int, str, str]] = set()

    def next_number(self) -> int:
        """A number that no fragment or operation of this machine has had."""
        self._numbers += 1
        return self._numbers

    def report(self, finding: KernelFinding) -> None:
        """Records a finding, once per kind and instruction; stops the run when there are many."""
        line = finding.line
        text = finding.instruction if line else finding.message
        key = (finding.kind, line, text, finding.excuse)
        if key in self._seen_findings:
            return
        self._seen_findings.add(key)
        accepted = self.options.accepted
        if accepted is not None and (reason := accepted.reason(finding)):
            self.accepted.append((finding, reason))
            return
        self.findings.append(finding)
        graver = sum(known.severity != "style" for known in self.findings)
        if graver >= self.options.max_findings:
            raise Stop

    def judge(self) -> None:
        """The run is over: what was left to judge is reported."""
        with suppress(Stop):
            for report in self.judgements.values():
                report()

    def submit(
        self,
        cta: tuple[int, int],
        what: str,
        line: int,
        complete: Callable[[], None],
        queue: deque[AsyncOperation] | None = None,
    ) -> AsyncOperation:
        """Hands an operation to a unit; `complete` runs at some later time.

        cta: its cluster's number, and its index in the grid.
        """
        operation = AsyncOperation(what, line, *cta, complete, queue, self.next_number())
        if queue is not None:
            queue.append(operation)
        self.operations.append(operation)
        self.progress += 1
        if self.events is not None:
            self.events.issued(operation, self.ticks)
        return operation

    def complete(self, operation: AsyncOperation) -> None:
        """An operation is done now."""
        self.operations.remove(operation)
        if operation.queue is not None:
            operation.queue.popleft()
        self.progress += 1
        self.ticks += 1
        operation.complete()
        if self.events is not None:
            self.events.completed(operation, self.ticks)

    def completable(self) -> list[AsyncOperation]:
        """The operations that may complete now: of each queue the first."""
        return [o for o in self.operations if o.queue is None or o.queue[0] is o]
