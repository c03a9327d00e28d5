"""Laying out shared memory (bytes) and tensor memory (columns) as named regions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fa4.hardware import Gpu
from fa4.plan.schema import Buffer

KIB = 1024

# Bytes of a CTA's shared memory that are kept for row statistics, barriers and the TMEM pointer:
# of 227 KiB, tiles may fill 224 (flash_attn.cute's budget).
RESERVED_BYTES = 3 * KIB
MAX_STAGES = 32


@dataclass
class Layout:
    """Packs regions one behind the other in each memory space."""

    buffers: list[Buffer] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, space: str, size: int, *, stages: int = 1, align: int = 1) -> Buffer:
        """Append a region behind the last one of its space."""
        start = -(-self.ends.get(space, 0) // align) * align
        buffer = Buffer(name=name, space=space, start=start, size=size, stages=stages)
        self.ends[space] = buffer.stop
        self.buffers.append(buffer)
        return buffer

    def alias(
        self, name: str, space: str, start: int, size: int, overlaps: Mapping[str, str]
    ) -> Buffer:
        """A region on top of others; `overlaps` says what makes that safe."""
        buffer = Buffer(name=name, space=space, start=start, size=size, overlaps=overlaps)
        self.ends[space] = max(self.ends.get(space, 0), buffer.stop)
        self.buffers.append(buffer)
        return buffer


def require_fit(buffers: list[Buffer], space: str, limit: int, machine: str) -> None:
    """Raise ValueError with the sum spelled out if a memory space is over-full."""
    used = max((b.stop for b in buffers if b.space == space), default=0)
    if used <= limit:
        return
    parts = " + ".join(
        f"{b.name} {b.stages}x{b.size}" if b.stages > 1 else f"{b.name} {b.size}"
        for b in buffers
        if b.space == space and not b.overlaps
    )
    unit = "columns" if space == "tmem" else "bytes"
    kind = "TMEM" if space == "tmem" else "shared memory"
    raise ValueError(f"{kind} plan needs {used} {unit}: {parts}; {machine} has {limit}")


def tile_budget_bytes(gpu: Gpu) -> int:
    """Bytes of shared memory that a CTA's tiles may fill."""
    return gpu.smem_bytes_per_cta - RESERVED_BYTES


def ring_stages(budget_bytes: int, slot_bytes: int, asked: int | None) -> int:
    """Stages of a ring: what was asked for, or as many as fit, at most 32 and at least 2."""
    return asked or max(2, min(budget_bytes // slot_bytes, MAX_STAGES))
