"""Tensor memory of a CTA, and the tensor pipe of the CTAs that work together on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from fa4.emulator.checks.clocks import PipeActor
from fa4.emulator.checks.memory import ShadowMemory
from fa4.emulator.machine.issuers import Issuers
from fa4.emulator.machine.operations import AsyncOperation
from fa4.emulator.machine.shadows import TMEM_GROUP_LANES, TMEM_GROUPS
from fa4.emulator.machine.waits import Waitable
from fa4.emulator.tcgen05.descriptors import Swizzle
from fa4.emulator.tcgen05.errors import TmemError
from fa4.emulator.tcgen05.tmem import COLUMNS, LANES
from fa4.emulator.tcgen05.tmem_allocator import TmemAllocator
from fa4.emulator.warp_lanes import Array

# What columns hold before anything is written: a NaN in f32, f16 and bf16.
POISON = 0xFFFFFFFF
PAGE_BYTES = 1024


def granules_of(lanes: Array, columns: Array) -> Array:
    """The granules of the checks that hold any of these lanes in these columns, int64 (n,)."""
    groups = np.unique(lanes // TMEM_GROUP_LANES)
    return (groups[:, None] * COLUMNS + np.unique(columns)).reshape(-1)


class TensorMemory:
    """128 lanes x 512 columns of 32-bit words, and who owns the columns.

    data: uint32 (128, 512). shadow: of the checks, for granules as `granules_of` counts them, None
    without checks. line: PTX line of the first tcgen05.alloc. group: the CTAs that allocate
    together. relinquished: tcgen05.relinquish_alloc_permit was executed. latest_columns: of the
    last alloc.
    """

    def __init__(self, shadow: ShadowMemory | None, group: TensorGroup, line: int) -> None:
        self.data: Array = np.full((LANES, COLUMNS), POISON, np.uint32)
        self.shadow = shadow
        self.group = group
        self.line = line
        self.allocator = TmemAllocator()
        self.relinquished = False
        self.latest_columns = COLUMNS
        self._allocated = np.zeros(COLUMNS, bool)

    @property
    def allocated_columns(self) -> int:
        """How many columns are allocated now."""
        return int(self._allocated.sum())

    def allocate(self, columns: int) -> int | None:
        """Address of newly allocated columns, None if they do not fit now. Raises TmemError."""
        address = self.allocator.allocate(columns)
        if address is not None:
            self._allocated[address : address + columns] = True
        return address

    def clear(self, first: int, columns: int) -> None:
        """Columns of a new allocation hold nothing."""
        self.data[:, first : first + columns] = POISON
        if self.shadow is not None:
            for start in range(first, TMEM_GROUPS * COLUMNS, COLUMNS):
                self.shadow.reset(start, start + columns)

    def free(self, address: int, columns: int) -> None:
        """Ends an allocation. Raises TmemError unless it has this address and size."""
        self.allocator.free(address, columns)
        self._allocated[address : address + columns] = False

    def require(self, first: int, columns: int) -> None:
        """Raises TmemError unless all these columns are allocated."""
        wanted = self._allocated[first : first + columns]
        if not wanted.all():
            column = first + int(np.argmin(wanted))
            raise TmemError(
                f"uses tensor memory columns {first}..{first + columns - 1}: column {column} is "
                f"not allocated (allocated: {self._listed()})"
            )

    def _listed(self) -> str:
        held = sorted(self.allocator.allocations.items())
        return ", ".join(f"{start}..{start + count - 1}" for start, count in held) or "nothing"


class TensorGroup(Waitable):
    """The CTAs whose tensor cores work together: one, or with cta_group::2 a pair.

    ctas: rank in the cluster -> index in the grid. pipe: of the first of them, which runs the
    operations of `queue` in order. memories: by rank, of those that have allocated. Allocations are
    made by all CTAs of the group together: each requests, and when all have, each is granted the
    same address.
    """

    def __init__(self, ctas: Mapping[int, int], pipe: PipeActor, issuers: Issuers) -> None:
        super().__init__()
        self.ctas = ctas
        self.queue: deque[AsyncOperation] = deque()
        self.pipe = pipe
        self.issuers = issuers
        self.memories: dict[int, TensorMemory] = {}
        self._requests: dict[int, tuple[int, int]] = {}  # CTA rank -> warp, columns
        self._grants: dict[int, int] = {}  # CTA rank -> address

    def allocate(self, rank: int, warp: int, columns: int) -> int | None:
        """The address for a tcgen05.alloc of a CTA's warp; None: it has to wait for this group.

        May be called again until it succeeds. Raises TmemError if the requests are invalid or
        differ.
        """
        requester, _ = self._requests.setdefault(rank, (warp, columns))
        if requester != warp:
            return None
        if rank not in self._grants and not self._grant():
            return None
        del self._requests[rank]
        self.wake()
        return self._grants.pop(rank)

    def _grant(self) -> bool:
        """Allocates in all CTAs of the group, if all have requested and it fits at one address."""
        if self._grants or len(self._requests) < len(self.ctas):
            return False
        sizes = {columns for _, columns in self._requests.values()}
        if len(sizes) > 1:
            raise TmemError(f"tcgen05.alloc of {sorted(sizes)} columns by the two CTAs of a pair")
        columns = sizes.pop()
        made = {rank: self.memories[rank].allocate(columns) for rank in self.ctas}
        granted = {rank: address for rank, address in made.items() if address is not None}
        if len(set(made.values())) > 1 or not granted:
            for rank, address in granted.items():
                self.memories[rank].free(address, columns)
            return False
        for rank, address in granted.items():
            self.memories[rank].clear(address, columns)
            self._grants[rank] = address
        return True

    def waits_for(self, columns: int) -> str:
        """Why an allocation waits, for reports."""
        absent = [index for rank, index in self.ctas.items() if rank not in self._requests]
        if absent:
            return f"tcgen05.alloc of its peer, CTA {absent[0]}"
        return f"{columns} free columns of tensor memory (tcgen05.alloc)"


class SwizzleNotes:
    """How tensor copies have laid out the shared memory of a CTA, by pages of 1 KiB.

    A tensor copy and the MMA that reads its bytes must agree.
    """

    def __init__(self) -> None:
        self._notes: dict[int, tuple[int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._notes)

    def note(self, start: int, stop: int, span_bytes: int | None, atom_bytes: int = 16) -> None:
        """Notes how a TMA load has laid out the shared bytes start .. stop - 1.

        span_bytes: of the swizzle, 0 (none), 32, 64 or 128; atom_bytes: what it keeps together, 16,
        32 or 64; as in TensorMap. None: the bytes have no layout of a tensor (bulk copies without a
        map).
        """
        for page in range(start // PAGE_BYTES, -(-stop // PAGE_BYTES)):
            if span_bytes is None:
                self._notes.pop(page, None)
            else:
                self._notes[page] = (span_bytes, atom_bytes)

    def at(self, address: int) -> tuple[int, int] | None:
        """(span, atom) in bytes of the last TMA load into the page of an address, None: no note."""
        return self._notes.get(address // PAGE_BYTES)


def swizzle_of(swizzle: Swizzle) -> tuple[int, int]:
    """(span, atom) in bytes of a descriptor's swizzle, as `SwizzleNotes` counts them."""
    if swizzle is Swizzle.NONE:
        return 0, 16
    return swizzle.row_bytes, 32 if swizzle is Swizzle.B128_BASE32 else 16
