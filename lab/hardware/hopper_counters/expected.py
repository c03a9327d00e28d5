"""What a kernel must execute for its problem and tiles, and what its loops make of that.

Everything is counted as the counters do: instructions of warps, bytes of the whole launch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lab.hardware.hopper_counters.sass import Code, pipe_of

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


def by_loops(code: Code) -> tuple[Counter[str], float]:
    """Instructions of each pipe, and the share of them that is loops times their trips.

    A loop runs as often as a product in it (that these add up to what the tiles need is another
    check). Its instructions count once per trip; those that a branch may pass over, as a rescaling
    that is not needed, and those of no such loop count as they were executed.
    """
    regular: Counter[str] = Counter()
    other: Counter[str] = Counter()
    every_trip = set()
    for loop in code.loops():
        body = [code.instructions[i] for i in loop]
        trips = max((item.executed for item in body if item.name == "HGMMA"), default=0)
        if not trips:
            continue
        passed = code.passed_over(loop)
        every_trip |= set(loop) - passed
        for i in set(loop) - passed:
            if pipe := pipe_of(code.instructions[i].name):
                regular[pipe] += trips
    for i, item in enumerate(code.instructions):
        if i not in every_trip and (pipe := pipe_of(item.name)):
            other[pipe] += item.executed
    return regular + other, sum(regular.values()) / sum((regular + other).values())
