"""Which memory a piece of work means by the names in its `reads` and `writes`.

`s` is a buffer, `p1` the second stage of one with stages. `s[0:32,64:96]` are columns (bytes) of a
buffer, counted from its start. Of a ring that several loads fill, `kv:K` are the tiles of those
that write `kv:K`, one after the other. A buffer of several stages is used stage by stage: each kind
of work (its role and what it is called) begins with the first. `q@[0:8192]` are bytes of the stage
that the role has last waited for (`q_full`, or `q1_full` of a part; who fills it, `q_empty`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from fa4.plan.schema import Buffer, PipelinePlan, Work

_NAME = re.compile(
    r"(?P<base>[^\[:@]+)(?P<waited>@)?"
    r"(?::(?P<label>\w+)|\[(?P<spans>\d+:\d+(?:,\d+:\d+)*)\])?"
)
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class MemoryRegion:
    """Runs [start, stop) of columns or bytes of a memory space of one CTA."""

    name: str
    space: str
    spans: Spans

    def meets(self, other: MemoryRegion) -> bool:
        """Do the two have memory in common?"""
        return self.space == other.space and any(
            a < stop and start < b for a, b in self.spans for start, stop in other.spans
        )


@dataclass(frozen=True)
class Place:
    """A name, read: the buffer, one stage of it, a label, runs from the start of what is named.

    waited: of the stage that the role has last waited for.
    """

    name: str
    buffer: Buffer
    stage: int | None
    label: str | None
    spans: Spans
    waited: bool = False

    def region(self, turn: int = 0) -> MemoryRegion:
        """Its memory, in the stage `turn` where the name leaves that open."""
        size, open_stage = self.buffer.size, self.waited or (self.stage is None and not self.spans)
        at = self.buffer.start + size * (turn if open_stage else self.stage or 0)
        spans = self.spans or ((0, size),)
        return MemoryRegion(self.name, self.buffer.space, tuple((at + a, at + b) for a, b in spans))


def find_place(plan: PipelinePlan, name: str) -> Place | None:
    """What work means by a name; None if the plan has no such buffer, stage, column or byte."""
    match = _NAME.fullmatch(name)
    buffer, stage = _with_stage(plan, match["base"]) if match else (None, None)
    if match is None or buffer is None:
        return None
    runs = (run.split(":") for run in (match["spans"] or "").split(",") if run)
    spans = tuple((int(start), int(stop)) for start, stop in runs)
    waited = bool(match["waited"])
    room = buffer.size * (buffer.stages if stage is None and not waited else 1)
    if not all(start < stop <= room for start, stop in spans):
        return None
    return Place(name, buffer, stage, match["label"], spans, waited)


def find_buffer(plan: PipelinePlan, name: str) -> Buffer | None:
    """The buffer that work means by a name, if there is one."""
    place = find_place(plan, name)
    return place.buffer if place is not None else None


def _with_stage(plan: PipelinePlan, base: str) -> tuple[Buffer | None, int | None]:
    for buffer in plan.buffers:
        if base == buffer.name:
            return buffer, None
    for buffer in plan.buffers:
        stage = base.removeprefix(buffer.name)
        if stage != base and stage.isdigit() and int(stage) < buffer.stages:
            return buffer, int(stage)
    return None, None


@dataclass
class Resolver:
    """The regions of every use of a plan's names, in the order in which each role has them.

    Roles that fill rings must be resolved before those that read them by label.
    """

    plan: PipelinePlan
    places: dict[str, Place] = field(default_factory=dict)
    uses: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    fills: Counter[str] = field(default_factory=Counter)
    filled: dict[str, list[int]] = field(default_factory=dict)
    regions: dict[tuple[str, int], MemoryRegion] = field(default_factory=dict)
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)

    def wait(self, role: str, signal: str) -> None:
        """The role has waited for the next phase of a signal."""
        self.waits[role, signal] += 1

    def _waited(self, role: str, ring: str) -> int:
        """How often the role has waited for a slot to be full, or else to be empty."""
        for pattern in (rf"{ring}\d*_full", f"{ring}_empty"):
            found = [n for (who, what), n in self.waits.items()
                     if who == role and re.fullmatch(pattern, what)]  # fmt: skip
            if found:
                return max(found)
        return 0

    def resolve(self, role: str, work: Work, names: Iterable[str]) -> list[MemoryRegion]:
        """The next use by this work of each name. Raises IndexError for a tile nobody loads."""
        return [self._next(role, work, name) for name in names]

    def _next(self, role: str, work: Work, name: str) -> MemoryRegion:
        place = self.places.get(name) or find_place(self.plan, name)
        assert place is not None  # the rule on names comes first
        self.places[name] = place
        turn, stages = 0, place.buffer.stages
        if place.waited:
            turn = (self._waited(role, place.buffer.name) - 1) % stages
        elif stages > 1 and place.stage is None and not place.spans:
            use = self.uses[role, work.what, name]
            self.uses[role, work.what, name] += 1
            if place.label is None:
                turn = use % stages
            else:
                tiles = self.filled.setdefault(name, [])
                if name in work.writes:
                    tiles.append(self.fills[place.buffer.name] % stages)
                    self.fills[place.buffer.name] += 1
                turn = tiles[use]
        if (name, turn) not in self.regions:
            self.regions[name, turn] = place.region(turn)
        return self.regions[name, turn]
