"""The memory that launches write, kept, so that they can be run again from the same state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from fa4.emulator.machine.launch_record import Allocation
from fa4.emulator.machine.memory import buffer_at


class KeptMemory:
    """What was in writable allocations when this was made."""

    def __init__(self, allocations: Sequence[Allocation]) -> None:
        self._written = [a for a in allocations if a.writable and a.size_bytes]
        self._memories = [
            buffer_at(a.name, a.address, a.size_bytes, True).data for a in self._written
        ]
        self._before = [data.copy() for data in self._memories]

    def restore(self) -> None:
        """Writes it back."""
        for data, content in zip(self._memories, self._before, strict=True):
            data[:] = content

    def differing(self) -> dict[str, int]:
        """Allocation -> the first byte that is another one now."""
        found: dict[str, int] = {}
        pairs = zip(self._memories, self._before, strict=True)
        for allocation, (data, content) in zip(self._written, pairs, strict=True):
            if not np.array_equal(data, content):
                found.setdefault(allocation.name, int(np.argmax(data != content)))
        return found


@contextmanager
def kept(allocations: Sequence[Allocation]) -> Iterator[KeptMemory]:
    """The memory is afterwards as it was, whatever happens."""
    memory = KeptMemory(allocations)
    try:
        yield memory
    finally:
        memory.restore()
