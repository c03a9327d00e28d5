"""The shared memories of a cluster: from an address to the CTA and the byte behind it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fa4.emulator.machine.memory import MemoryFault
from fa4.emulator.machine.state import Cta
from fa4.emulator.translate.layout import RANK_SHIFT, SHARED_BASE, SHARED_WINDOW
from fa4.emulator.warp_lanes import Array

_OFFSET_MASK = (1 << RANK_SHIFT) - 1


def locate_shared(
    cta: Cta, addresses: Array, size_bytes: int
) -> Iterator[tuple[Cta, Array, Array | None]]:
    """The CTAs behind shared addresses (n,), which may carry a CTA rank or be generic.

    Yields (CTA, int64 byte offsets into its smem, indices or None for all). Raises MemoryFault for
    a unit outside the CTA's shared memory, a rank outside the cluster, a CTA that has exited.
    """
    if not len(addresses):
        return
    values = addresses.astype(np.uint64)
    if int(values.max()) >= SHARED_WINDOW:
        values = values - np.uint64(SHARED_WINDOW)
    ranks = (values >> np.uint64(RANK_SHIFT)).astype(np.int64)
    offsets = (values & np.uint64(_OFFSET_MASK)).astype(np.int64)
    ctas = cta.cluster.ctas
    low, high = int(ranks.min()), int(ranks.max())
    if high >= len(ctas):
        raise MemoryFault(
            "out-of-bounds",
            f"shared address {int(values.max()):#x} names CTA rank {high} of a cluster of "
            f"{len(ctas)}",
        )
    for rank in range(low, high + 1):
        here = None if low == high else (ranks == rank).nonzero()[0]
        part = offsets if here is None else offsets[here]
        if len(part):
            _check_shared(cta, ctas[rank], part, size_bytes)
            yield ctas[rank], part, here


def locate_one_shared(cta: Cta, address: int, size_bytes: int) -> tuple[Cta, int]:
    """The CTA and the offset behind one shared address. Raises MemoryFault as locate_shared."""
    if address >= SHARED_WINDOW:
        address -= SHARED_WINDOW
    rank, offset = address >> RANK_SHIFT, address & _OFFSET_MASK
    ctas = cta.cluster.ctas
    if rank < len(ctas):
        target = ctas[rank]
        inside = offset >= SHARED_BASE and offset + size_bytes <= target.shared_end
        if inside and (target is cta or not target.done):
            return target, offset
    ((target, offsets, _),) = locate_shared(cta, np.array([address], np.uint64), size_bytes)
    return target, int(offsets[0])


def _check_shared(cta: Cta, target: Cta, offsets: Array, size_bytes: int) -> None:
    low, high = int(offsets.min()), int(offsets.max()) + size_bytes
    if low < SHARED_BASE or high > target.shared_end:
        wrong = low if low < SHARED_BASE else high - size_bytes
        raise MemoryFault(
            "out-of-bounds",
            f"{size_bytes} bytes at shared address {wrong:#x} of CTA {target.index}: its shared "
            f"memory is {SHARED_BASE:#x}..{target.shared_end - 1:#x}",
        )
    if target.done and target is not cta:
        raise MemoryFault("exit", f"uses the shared memory of CTA {target.index}, which has exited")
