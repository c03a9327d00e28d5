"""Tensor memory of a CTA, and the tensor pipe of the CTAs that work together on it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from fa4.emulator.checks.clocks import actor_id
from fa4.emulator.checks.conflict import Access
from fa4.emulator.machine.checks import TMEM_GROUP_LANES, TMEM_GROUPS, WRITE, Touch
from fa4.emulator.machine.issuers import Issuers
from fa4.emulator.machine.waits import Waitable
from fa4.emulator.masks import Array
from fa4.emulator.tcgen05.descriptors import Swizzle
from fa4.emulator.tcgen05.errors import TmemError
from fa4.emulator.tcgen05.tmem import COLUMNS, LANES
from fa4.emulator.tcgen05.tmem_allocator import TmemAllocator

if TYPE_CHECKING:
    from fa4.emulator.machine.state import AsyncOperation, Cta, Warp

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

    def __init__(self, cta: Cta, group: TensorGroup, line: int) -> None:
        self.data: Array = np.full((LANES, COLUMNS), POISON, np.uint32)
        self.shadow = cta.machine.checks.tmem_shadow(cta)
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

    queue: operations of their tensor pipe, which runs them in order. Allocations are made by all
    CTAs of the group together: each requests, and when all have, each is granted the same address.
    """

    def __init__(self, ctas: tuple[Cta, ...]) -> None:
        super().__init__()
        self.ctas = ctas
        self.queue: deque[AsyncOperation] = deque()
        self.pipe = ctas[0].pipe_actor
        leader = ctas[0]
        self.issuers = Issuers(leader.rank, actor_id(leader.cluster.pipe_row(leader.rank)))
        self._requests: dict[int, tuple[int, int]] = {}  # CTA rank -> warp, columns
        self._grants: dict[int, int] = {}  # CTA rank -> address

    def allocate(self, warp: Warp, columns: int) -> int | None:
        """The address for a warp's tcgen05.alloc; None: it has to wait for this group.

        May be called again until it succeeds. Raises TmemError if the requests are invalid or
        differ.
        """
        rank = warp.cta.rank
        requester, _ = self._requests.setdefault(rank, (warp.index, columns))
        if requester != warp.index:
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
        made = [(cta.tensor, cta.tensor.allocate(columns)) for cta in self.ctas]
        if len({address for _, address in made}) > 1 or made[0][1] is None:
            for tensor, address in made:
                if address is not None:
                    tensor.free(address, columns)
            return False
        for cta, (tensor, address) in zip(self.ctas, made, strict=True):
            tensor.clear(address, columns)
            self._grants[cta.rank] = address
        return True

    def waits_for(self, columns: int) -> str:
        """Why an allocation waits, for reports."""
        absent = [cta.index for cta in self.ctas if cta.rank not in self._requests]
        if absent:
            return f"tcgen05.alloc of its peer, CTA {absent[0]}"
        return f"{columns} free columns of tensor memory (tcgen05.alloc)"


def group_of(cta: Cta, size: int) -> TensorGroup:
    """The group that a CTA belongs to under .cta_group::size. Raises TmemError if there is none."""
    ranks = (cta.rank,) if size == 1 else (cta.rank & ~1, cta.rank | 1)
    if ranks[-1] >= cta.cluster.size:
        raise TmemError(
            f"cta_group::2 in CTA rank {cta.rank} of a cluster of {cta.cluster.size}: there is no "
            "peer CTA"
        )
    ctas = tuple(cta.cluster.ctas[rank] for rank in ranks)
    group = ctas[0].unit.get(("tensor group", size))
    if group is None:
        group = ctas[0].unit["tensor group", size] = TensorGroup(ctas)
    return group


def tensor_memory(cta: Cta, cta_group: int | None = None) -> TensorMemory:
    """The tensor memory of a CTA that has allocated some.

    Raises TmemError if it has not, or if it allocated with another cta_group.
    """
    tensor: TensorMemory | None = cta.tensor
    if tensor is None:
        raise TmemError(f"uses tensor memory of CTA {cta.index}, which has allocated none")
    if cta_group is not None and cta_group != len(tensor.group.ctas):
        raise TmemError(
            f"cta_group::{cta_group} after tcgen05.alloc with cta_group::{len(tensor.group.ctas)}: "
            "all tcgen05 instructions of a kernel must have the same"
        )
    return tensor


def record_free(warp: Warp, lane: int, first: int, columns: int, how: Access) -> None:
    """Deallocation counts as a write: whatever still uses the columns must be ordered before."""
    granules = granules_of(np.arange(LANES), np.arange(first, first + columns))
    warp.cta.machine.checks.tensor(warp.cta, granules, Touch(warp.clock, how, WRITE, lane))


# Swizzles of shared memory: a tensor copy and the MMA that reads its bytes must agree.


def note_swizzle(
    cta: Cta, start: int, stop: int, span_bytes: int | None, atom_bytes: int = 16
) -> None:
    """Notes how a TMA load has laid out the shared bytes start .. stop - 1 of a CTA.

    span_bytes: of the swizzle, 0 (none), 32, 64 or 128; atom_bytes: what it keeps together, 16, 32
    or 64; as in TensorMap. None: the bytes have no layout of a tensor (bulk copies without a map).
    """
    notes = cta.unit.setdefault("swizzles", {})
    for page in range(start // PAGE_BYTES, -(-stop // PAGE_BYTES)):
        if span_bytes is None:
            notes.pop(page, None)
        else:
            notes[page] = (span_bytes, atom_bytes)


def swizzle_at(cta: Cta, address: int) -> tuple[int, int] | None:
    """(span, atom) in bytes of the last TMA load into the page of an address, None: no note."""
    note: tuple[int, int] | None = cta.unit.get("swizzles", {}).get(address // PAGE_BYTES)
    return note


def swizzle_of(swizzle: Swizzle) -> tuple[int, int]:
    """(span, atom) in bytes of a descriptor's swizzle, as `note_swizzle` counts them."""
    if swizzle is Swizzle.NONE:
        return 0, 16
    return swizzle.row_bytes, 32 if swizzle is Swizzle.B128_BASE32 else 16
