"""Records what happened: every handled instruction, every wait, every asynchronous operation.

Time is logical: the machine counts one tick for each step it executes. The order of events is
real, their distances are not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fa4.emulator.machine.events import RunEvents
from fa4.emulator.machine.operations import AsyncOperation
from fa4.emulator.machine.state import Cluster, Fragment
from fa4.emulator.machine.waits import Blocked
from fa4.emulator.translate.program import Program, Step
from fa4.emulator.warp_lanes import Array

SCHEMA = "fa4-emulator-trace-1"
INSTRUCTION, WAIT, ASYNCHRONOUS = "instruction", "wait", "asynchronous"


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """start, end: ticks. track: "warp 3", or the unit of an asynchronous operation."""

    start: int
    end: int
    cta: int
    track: str
    kind: str
    name: str
    line: int


class Recorder(RunEvents):
    """Pass it as `events` to a run; then read `events`, or write a Perfetto file.

    Example:
        recorder = Recorder()
        launch(compiled, q, k, v, o, events=recorder)
        recorder.write("trace.json")  # open it in ui.perfetto.dev
    """

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []
        self._waits: dict[int, tuple[int, str, int]] = {}
        self._issued: dict[int, int] = {}
        self._programs: dict[int, Program] = {}  # by number of the cluster

    # Called by the machine.

    def executed(self, fragment: Fragment, step: Step, outcome: Any, tick: int) -> None:
        """A handler ran; `outcome` says whether the fragment goes on."""
        instruction = step.instruction
        warp = fragment.warp
        track = f"warp {warp.index}"
        begun = self._waits.pop(fragment.number, None)
        if begun is not None:
            start, name, line = begun
            line = self._written(warp.cta.cluster.number, line)
            self.events.append(TraceEvent(start, tick, warp.cta.index, track, WAIT, name, line))
        if isinstance(outcome, Blocked):
            start = begun[0] if begun is not None and begun[2] == instruction.line else tick
            if begun is not None and start == begun[0]:
                self.events.pop()
            self._waits[fragment.number] = (start, instruction.opcode, instruction.line)
        elif begun is None or begun[2] != instruction.line:
            self.events.append(
                TraceEvent(
                    tick - 1,
                    tick,
                    warp.cta.index,
                    track,
                    INSTRUCTION,
                    instruction.opcode,
                    instruction.written_line,
                )
            )

    def _written(self, cluster: int, line: int) -> int:
        """The line of the text of a `PtxInstruction.line` of a cluster's program."""
        program = self._programs.get(cluster)
        instruction = program.instruction_at(line) if program is not None else None
        return instruction.written_line if instruction is not None else line

    def issued(self, operation: AsyncOperation, tick: int) -> None:
        """An asynchronous operation was handed to its unit."""
        self._issued[operation.order] = tick

    def completed(self, operation: AsyncOperation, tick: int) -> None:
        """An asynchronous operation is done."""
        start = self._issued.pop(operation.order, tick)
        self.events.append(
            TraceEvent(
                start,
                tick,
                operation.cta,
                unit_of(operation.what),
                ASYNCHRONOUS,
                operation.what,
                self._written(operation.cluster, operation.line),
            )
        )

    def cluster_started(self, cluster: Cluster, tick: int) -> None:
        """The CTAs of a cluster began."""
        self._programs[cluster.number] = cluster.grid.program
        for cta in cluster.ctas:
            self.events.append(TraceEvent(tick, tick, cta.index, "CTA", INSTRUCTION, "start", 0))

    # Read by users.

    def arrays(self) -> dict[str, Array]:
        """The events as columns: start, end, cta, line (int64); track, kind, name (str)."""
        columns: dict[str, Array] = {}
        for name in ("start", "end", "cta", "line"):
            columns[name] = np.array([getattr(e, name) for e in self.events], np.int64)
        for name in ("track", "kind", "name"):
            columns[name] = np.array([getattr(e, name) for e in self.events], np.str_)
        return columns

    def perfetto(self) -> dict[str, Any]:
        """The trace in the Chrome/Perfetto JSON format: pid = CTA, tid = warp or unit.

        Overlapping operations of one unit get rows of their own.
        """
        rows: dict[tuple[int, str], int] = {}
        free: dict[tuple[int, str], list[int]] = {}
        listed: list[dict[str, Any]] = []
        for event in sorted(self.events, key=lambda e: (e.start, e.end)):
            track = event.track
            if event.kind == ASYNCHRONOUS:
                ends = free.setdefault((event.cta, track), [])
                lane = next((i for i, end in enumerate(ends) if end <= event.start), len(ends))
                ends[lane : lane + 1] = [event.end]
                track = f"{track} {lane}" if lane else track
            tid = rows.setdefault((event.cta, track), len(rows) + 1)
            listed.append(
                {
                    "name": event.name,
                    "cat": event.kind,
                    "ph": "X",
                    "ts": event.start,
                    "dur": event.end - event.start,
                    "pid": event.cta,
                    "tid": tid,
                    "args": {"ptx_line": event.line},
                }
            )
        listed += [
            {"name": "thread_name", "ph": "M", "pid": cta, "tid": tid, "args": {"name": track}}
            for (cta, track), tid in rows.items()
        ]
        listed += [
            {"name": "process_name", "ph": "M", "pid": cta, "args": {"name": f"CTA {cta}"}}
            for cta in sorted({cta for cta, _ in rows})
        ]
        return {
            "schema": SCHEMA,
            "displayTimeUnit": "ns",
            "traceEvents": listed,
            "otherData": {"time": "logical ticks, one for each executed step"},
        }

    def write(self, path: str | Path) -> None:
        """Writes the Perfetto JSON, whole or not at all. Raises OSError if it cannot."""
        target, text = Path(path), json.dumps(self.perfetto())
        if target.exists() and not target.is_file():  # a pipe or a device
            target.write_text(text, encoding="utf-8")
            return
        partial = target.with_name(target.name + ".partial")
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def unit_of(what: str) -> str:
    """The unit that does an operation, from its description."""
    if what.startswith("tcgen05.ld") or what.startswith("tcgen05.st"):
        return "TMEM load/store"
    if what.startswith("tcgen05"):
        return "tensor pipe"
    if "bulk" in what or "TMA" in what:
        return "TMA"
    return "asynchronous copies"
