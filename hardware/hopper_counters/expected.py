"""What a kernel must execute for its problem and tiles, and what its loops make of that.

Everything is counted as the counters do: instructions of warps, bytes of the whole launch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hardware.hopper_counters.sass import Code, Instruction, pipe_of

WARPS_PER_GROUP, MMA_ROWS, MMA_DEPTH, ELEMENT_BYTES = 4, 64, 16, 2


def up(value: int, step: int) -> int:
    """Number of steps that cover a value."""
    return -(-value // step)


@dataclass(frozen=True)
class Work:
    """A forward call of equal numbers of queries and keys, cut into tiles."""

    head_dim: int
    head_dim_v: int
    seqlen: int
    sequences: int  # batch times heads
    tile_m: int
    tile_n: int
    causal: bool

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Work:
        """Of a configuration; the fields of fa4's kernels are in its `spec`."""
        fields = {**given, **given.get("spec", {})}
        return cls(
            head_dim=fields["head_dim"],
            head_dim_v=fields.get("head_dim_v", fields["head_dim"]),
            seqlen=fields["seqlen"],
            sequences=fields["batch"] * fields["heads"],
            tile_m=fields.get("tile_m") or MMA_ROWS * fields.get("consumers", 2),
            tile_n=fields.get("tile_n", 128),
            causal=fields.get("causal", False),
        )

    @property
    def tiles(self) -> int:
        """Query tiles of the launch."""
        return self.sequences * up(self.seqlen, self.tile_m)

    @property
    def tile_steps(self) -> int:
        """Key tiles that are visited, over all query tiles."""
        if not self.causal:
            return self.tiles * up(self.seqlen, self.tile_n)
        ends = range(self.tile_m, self.seqlen + self.tile_m, self.tile_m)
        return self.sequences * sum(up(min(end, self.seqlen), self.tile_n) for end in ends)

    @property
    def warps(self) -> int:
        """Consumer warps of a CTA."""
        return self.tile_m // MMA_ROWS * WARPS_PER_GROUP

    @property
    def wgmma(self) -> int:
        """Products: of each warp, one per 16 of the head dimension and one per 16 keys."""
        per_step = up(self.head_dim, MMA_DEPTH) + up(self.tile_n, MMA_DEPTH)
        return self.tile_steps * self.warps * per_step

    @property
    def copied_bytes(self) -> int:
        """Bytes that the copy engine reads: Q once per tile, K and V per step, whole boxes."""
        q = self.tiles * self.tile_m * self.head_dim
        kv = self.tile_steps * self.tile_n * (self.head_dim + self.head_dim_v)
        return (q + kv) * ELEMENT_BYTES

    @property
    def stored_bytes(self) -> int:
        """Bytes of O."""
        return self.sequences * self.seqlen * self.head_dim_v * ELEMENT_BYTES


def is_spin(body: list[Instruction]) -> bool:
    """Whether a loop only waits: it tries a barrier or sleeps, and is short."""
    names = {item.name for item in body}
    return len(body) < 16 and bool(names & {"SYNCS", "NANOSLEEP"})


def by_loops(code: Code, work: Work, ctas: int) -> Counter[str]:
    """Instructions of each pipe from the disassembly alone: loops times their trips.

    A loop with products runs as often as one of its products (that these add up to what the tiles
    need is another check); the producer's loops as often, in one warp; what is in no such loop once
    per warp of its role and tile, the prologue once per warp. Loops that only wait are left out.
    """
    roles, loops = code.roles(), code.loops()
    bodies = [[code.instructions[i] for i in loop] for loop in loops]
    inside = {i for loop in loops for i in loop}
    consumers = work.tiles * work.warps
    trips = [max((x.executed for x in body if x.name == "HGMMA"), default=0) for body in bodies]
    steps = sum(trips) // work.warps
    runs = {
        "consumer": consumers,
        "producer": work.tiles,
        "prologue": ctas * (work.warps + WARPS_PER_GROUP),
        "all": consumers,
    }
    found: Counter[str] = Counter()
    for body, count, loop in zip(bodies, trips, loops, strict=True):
        if count or (roles[loop.start] == "producer" and not is_spin(body)):
            add(found, body, count or steps)
    for i, item in enumerate(code.instructions):
        if i not in inside:
            add(found, [item], runs[roles[i]])
    return found


def add(found: Counter[str], body: list[Instruction], times: int) -> None:
    """Count instructions of a pipe that the table knows."""
    for item in body:
        if pipe := pipe_of(item.name):
            found[pipe] += times
