"""A plan as plain data for the page: roles and their program lines, signals, buffers, memory.

Every step of a program is a line; `unrolled` says which line each event of a timeline comes from,
and `touched` which memory its work reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fa4.hardware import Gpu
from fa4.plan.places import Resolver
from fa4.plan.render import describe_amount, span
from fa4.plan.schema import FOLLOWING, Arrive, Loop, PipelinePlan, Program, Role, Step, Wait, Work

Json = dict[str, Any]
# Kinds of lines, by number in the packed data.
KINDS = ("heading", "loop", "wait", "arrive", "work")


@dataclass(frozen=True)
class Line:
    """One line of a role's program: indentation, kind, text, signal, and its step if it has one."""

    depth: int
    kind: str
    text: str
    signal: str = ""
    detail: str = ""


def lines_of(role: Role) -> list[Line]:
    """The lines of a role's program, with a heading for each part."""
    found: list[Line] = []
    parts = (("once per CTA", role.prologue), ("per work tile", role.program),
             ("at the end", role.closing))  # fmt: skip
    for title, program in parts:
        if program:
            found.append(Line(0, "heading", title))
            found += _lines(program, 1)
    return found


def _lines(program: Program, depth: int) -> Iterator[Line]:
    for step in program:
        if isinstance(step, Loop):
            offset = f" {'-' if step.offset < 0 else '+'} {abs(step.offset)}" if step.offset else ""
            repeated = f"repeat {step.trip}{offset}"
            begins = step.trip == FOLLOWING
            yield Line(depth, "loop", "if a work tile follows" if begins else repeated)
            yield from _lines(step.body, depth + 1)
        elif isinstance(step, Wait):
            yield Line(depth, "wait", f"wait {step.signal}", step.signal)
        elif isinstance(step, Arrive):
            after = f"after {step.after}" if step.after else ""
            yield Line(depth, "arrive", f"arrive {step.signal}", step.signal, after)
        else:
            detail = describe_amount(step.amount) + (f", x {step.share}" if step.share else "")
            yield Line(depth, "work", step.what, "", detail)


def unrolled(role: Role, trips: Mapping[str, int]) -> Iterator[tuple[int, Step]]:
    """(line, step) of what a role executes for its only work tile, its prologue first."""
    number = 0
    for program, runs in ((role.prologue, True), (role.program, True), (role.closing, False)):
        if program:
            if runs:
                yield from _unroll(program, number + 1, trips)
            number += 1 + _size(program)


def _size(program: Program) -> int:
    return sum(1 + (_size(step.body) if isinstance(step, Loop) else 0) for step in program)


def _unroll(program: Program, line: int, trips: Mapping[str, int]) -> Iterator[tuple[int, Step]]:
    for step in program:
        if isinstance(step, Loop):
            count = 0 if step.trip == FOLLOWING else trips[step.trip]
            for _ in range(max(0, count + step.offset)):
                yield from _unroll(step.body, line + 1, trips)
            line += _size(step.body)
        else:
            yield line, step
        line += 1


@dataclass
class Touches:
    """Numbers for the different (reads, writes) of a plan's work; 0 is neither."""

    regions: dict[tuple[Any, ...], int] = field(default_factory=dict)
    pairs: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = field(
        default_factory=lambda: {((), ()): 0}
    )

    def number(self, resolver: Resolver, role: str, work: Work) -> int:
        """The number of what this use of a piece of work touches; all uses must come in order."""
        pair = tuple(
            tuple(self._region(region) for region in resolver.resolve(role, work, names))
            for names in (work.reads, work.writes)
        )
        return self.pairs.setdefault((pair[0], pair[1]), len(self.pairs))

    def _region(self, region: Any) -> int:
        key = (region.name, region.space, region.spans)
        return self.regions.setdefault(key, len(self.regions))

    def as_data(self) -> Json:
        """Regions ([name, space, spans]) and the (reads, writes) that events name by number."""
        return {
            "regions": [[name, space, [list(x) for x in spans]]
                        for name, space, spans in self.regions],
            "touches": [[list(reads), list(writes)] for reads, writes in self.pairs],
        }  # fmt: skip


def fillers_first(plan: PipelinePlan) -> list[Role]:
    """The roles in an order in which rings are filled before they are read, as Resolver needs."""
    return sorted(plan.roles, key=lambda role: role.name != "load")


def plan_data(plan: PipelinePlan, gpu: Gpu, touches: Touches) -> Json:
    """The plan for the page; keys name their units."""
    return {
        "name": plan.name,
        "cta_group": plan.cta_group,
        "warps": plan.warps,
        "smem_bytes": plan.bytes_used("smem"),
        "smem_limit_bytes": gpu.smem_bytes_per_cta,
        "tmem_cols": plan.bytes_used("tmem"),
        "tmem_limit_cols": gpu.tmem_cols,
        "roles": [
            {
                "name": role.name,
                "warps": span(role.warps),
                "registers": role.registers,
                "lines": [
                    [line.depth, KINDS.index(line.kind), line.text, line.signal, line.detail]
                    for line in lines_of(role)
                ],
            }
            for role in plan.roles
        ],
        "signals": [
            {
                "name": signal.name, "kind": signal.kind, "stages": signal.stages,
                "free": signal.free, "arrivals": dict(signal.arrivals),
                "waiters": list(signal.waiters), "tx_bytes": signal.tx_bytes,
                "remote": signal.remote,
            }
            for signal in plan.signals
        ],
        "buffers": [
            {
                "name": buffer.name, "space": buffer.space, "start": buffer.start,
                "size": buffer.size, "stages": buffer.stages,
                "overlaps": dict(buffer.overlaps),
            }
            for buffer in plan.buffers
        ],
        **touches.as_data(),
    }  # fmt: skip
