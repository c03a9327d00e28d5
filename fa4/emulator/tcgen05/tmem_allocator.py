"""Allocation of tensor memory columns: tcgen05.alloc and tcgen05.dealloc (PTX ISA 9.7.16.7)."""

from __future__ import annotations

from fa4.emulator.tcgen05.errors import TmemError
from fa4.emulator.tcgen05.tmem import COLUMNS, TmemAddress

_MIN_COLUMNS = 32


class TmemAllocator:
    """The columns of one CTA's tensor memory; an allocation has all 128 lanes."""

    def __init__(self) -> None:
        # First column of each allocation -> its columns.
        self._allocated: dict[int, int] = {}

    @property
    def allocations(self) -> dict[int, int]:
        """Address -> columns of what is allocated now."""
        return dict(self._allocated)

    @staticmethod
    def check(columns: int) -> None:
        """Raises TmemError unless columns is a power of two from 32 to 512."""
        if not _MIN_COLUMNS <= columns <= COLUMNS or columns & (columns - 1):
            raise TmemError(
                f"tcgen05.alloc of {columns} columns: must be a power of two from "
                f"{_MIN_COLUMNS} to {COLUMNS}"
            )

    def allocate(self, columns: int) -> int | None:
        """Address of the first free run of that many columns; None: it has to wait.

        Raises TmemError as `check` does.
        """
        self.check(columns)
        first = 0
        for start, taken in sorted(self._allocated.items()):
            if first + columns <= start:
                break
            first = start + taken
        if first + columns > COLUMNS:
            return None
        self._allocated[first] = columns
        return TmemAddress(0, first).encode()

    def free(self, address: int, columns: int) -> None:
        """Frees a whole allocation. Raises TmemError if there is none there, or of another size."""
        if address not in self._allocated:
            raise TmemError(
                f"tcgen05.dealloc of {address:#010x}: nothing was allocated there, {self._listed()}"
            )
        if self._allocated[address] != columns:
            raise TmemError(
                f"tcgen05.dealloc of {columns} columns at {address:#010x}: "
                f"{self._allocated[address]} were allocated"
            )
        del self._allocated[address]

    def owner_of(self, column: int) -> int | None:
        """Address of the allocation that a column belongs to; None: not allocated."""
        for start, taken in self._allocated.items():
            if start <= column < start + taken:
                return start
        return None

    def _listed(self) -> str:
        held = [f"{start:#010x} (+{taken})" for start, taken in sorted(self._allocated.items())]
        return f"allocated: {', '.join(held) or 'nothing'}"
