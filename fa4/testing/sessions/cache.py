"""A cache of keys and values in pages, which sequences share: what a server does between its calls.

Every step ends with a call of all sequences at once, a few query rows each, causal, on the same
pools, page table and lengths. Pages that are given back are filled with garbage; keys behind the
end of a sequence, after `truncate`, stay as they were, as they do in a server.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fa4.testing.backends import Backend
from fa4.testing.case import Case
from fa4.testing.sessions.session import (
    GARBAGE,
    CallSession,
    ImpossibleStep,
    SequenceRows,
    inputs_of,
)

SLOTS = 4  # sequences at a time
PAGES = 28  # of the pool
MOST_PAGES = 6  # of a sequence
MOST_ROWS = 3  # query rows of a sequence and call
NOBODY = 0  # the page that entries of evicted pages point to


class CachedSequence(NamedTuple):
    """Its pages in order, and its keys and values as they must be; `gone`: keys that were evicted
    from behind a window, whose entries point to NOBODY."""

    pages: list[int]
    keys: list[np.ndarray]
    values: list[np.ndarray]
    gone: int = 0

    @property
    def length(self) -> int:
        """Keys, those that are gone included."""
        return len(self.keys)


class CacheSession(CallSession):
    """Sequences by slot, 0 to SLOTS - 1; pages are shared until they are written."""

    name = "cache"
    STEPS = ("add", "append", "truncate", "evict", "move", "fork", "share", "free")

    def __init__(self, backend: Backend, case: Case) -> None:
        super().__init__(backend, case)
        self.size = case.page_size
        shape = (PAGES, self.size, case.heads_k)
        self.k = self.buffer(*shape, case.head_dim)
        self.v = self.buffer(*shape, case.head_dim_v)
        self.q = self.buffer(SLOTS * MOST_ROWS, case.heads_q, case.head_dim)
        self.table = np.full((SLOTS, MOST_PAGES), NOBODY, np.int32)
        self.used = np.zeros(SLOTS, np.int32)
        self.offsets = np.zeros(SLOTS + 1, np.int32)
        self.sequences: dict[int, CachedSequence] = {}
        self.free_pages = list(range(PAGES - 1, NOBODY, -1))  # the lowest first

    @property
    def capacity(self) -> int:
        """Keys that a sequence may have."""
        return MOST_PAGES * self.size

    def add(self, count: int) -> None:
        """A new sequence of `count` keys in the lowest free slot."""
        slot = self._free_slot()
        self.sequences[slot] = CachedSequence([], [], [])
        self._extend(slot, count)
        self._attend()

    def append(self, slot: int, count: int) -> None:
        """`count` keys more."""
        self._extend(slot, count)
        self._attend()

    def truncate(self, slot: int, count: int) -> None:
        """The last `count` keys are taken back, as rejected drafts are."""
        found = self._at(slot)
        if not 0 < count < found.length or self.case.window_size[0] is not None:
            raise ImpossibleStep(f"{count} keys of {found.length}")
        del found.keys[-count:], found.values[-count:]
        self._keep_pages(found, -(-found.length // self.size))
        self._attend()

    def evict(self, slot: int) -> None:
        """The first page of a sequence leaves it; the rest is attended to as before."""
        found = self._at(slot)
        if found.length <= self.size or found.gone:
            raise ImpossibleStep("only one page")
        self._give_back(found.pages.pop(0))
        del found.keys[: self.size], found.values[: self.size]
        self._attend()

    def move(self, slot: int, number: int) -> None:
        """A page of a sequence goes to another place in the pool."""
        found = self._at(slot)
        if number >= len(found.pages) or found.pages[number] == NOBODY:
            raise ImpossibleStep("no such page")
        found.pages[number] = self._copied(found.pages[number])
        self._attend()

    def fork(self, slot: int) -> None:
        """A second sequence with the same pages, the last of which may be partly filled."""
        source, other = self._at(slot), self._free_slot()
        self.sequences[other] = CachedSequence(
            list(source.pages), list(source.keys), list(source.values), source.gone
        )
        self._attend()

    def share(self, slot: int, pages: int, count: int) -> None:
        """A new sequence whose first full pages are those of another, and `count` keys more."""
        source, other = self._at(slot), self._free_slot()
        if not 0 < pages <= source.length // self.size or source.gone:
            raise ImpossibleStep("not so many full pages")
        cut = pages * self.size
        self.sequences[other] = CachedSequence(
            source.pages[:pages], source.keys[:cut], source.values[:cut]
        )
        self._extend(other, count)
        self._attend()

    def free(self, slot: int) -> None:
        """A sequence ends; its pages are given back."""
        self._keep_pages(self._at(slot), 0)
        del self.sequences[slot]
        self._attend()

    def _at(self, slot: int) -> CachedSequence:
        if slot not in self.sequences:
            raise ImpossibleStep(f"no sequence {slot}")
        return self.sequences[slot]

    def _free_slot(self) -> int:
        found = [slot for slot in range(SLOTS) if slot not in self.sequences]
        if not found:
            raise ImpossibleStep("no free slot")
        return found[0]

    def _extend(self, slot: int, count: int) -> None:
        """Write keys behind the last; a page that others have too is copied first."""
        found = self._at(slot)
        if not 0 < count <= self.capacity - found.length:
            raise ImpossibleStep(f"{count} keys more than {found.length} of {self.capacity}")
        keys, values = self.draw_keys(count)
        for key, value in zip(keys, values, strict=True):
            at, place = found.length // self.size, found.length % self.size
            if at == len(found.pages):
                found.pages.append(self._take())
            elif self._shared(found.pages[at]):
                found.pages[at] = self._copied(found.pages[at])
            self.k[found.pages[at], place], self.v[found.pages[at], place] = key, value
            found.keys.append(key)
            found.values.append(value)

    def _shared(self, page: int) -> bool:
        return sum(page in x.pages for x in self.sequences.values()) > 1

    def _take(self) -> int:
        if not self.free_pages:
            raise ImpossibleStep("no free page")
        return self.free_pages.pop()

    def _copied(self, page: int) -> int:
        """A copy of a page in another place; the page is given back if nobody else has it."""
        other, shared = self._take(), self._shared(page)
        self.k[other], self.v[other] = self.k[page], self.v[page]
        if not shared:
            self._fill(page)
        return other

    def _give_back(self, page: int) -> None:
        """To the pool, unless a sequence still has it."""
        if page != NOBODY and not any(page in x.pages for x in self.sequences.values()):
            self._fill(page)

    def _fill(self, page: int) -> None:
        self.k[page] = self.v[page] = GARBAGE
        self.free_pages.append(page)

    def _keep_pages(self, found: CachedSequence, count: int) -> None:
        while len(found.pages) > count:
            self._give_back(found.pages.pop())

    def _retire(self, slot: int) -> None:
        """Behind a window, pages that no row of this or a later call sees are given back."""
        left, found = self.case.window_size[0], self.sequences[slot]
        if left is None:
            return
        whole = max(0, found.length - MOST_ROWS - left) // self.size
        for at in range(found.gone // self.size, whole):
            page, found.pages[at] = found.pages[at], NOBODY
            self._give_back(page)
        self.sequences[slot] = found._replace(gone=max(found.gone, whole * self.size))

    def _attend(self) -> None:
        """One call of all sequences: one row, or a few, of each."""
        self.table[...] = NOBODY
        parts, rows_at, keys_at, start = [], [], [], 0
        for slot in range(SLOTS):
            self.offsets[slot] = start
            count = 0
            if slot in self.sequences:
                count = 1 + (slot + self.calls) % MOST_ROWS
                self._retire(slot)
            parts.append(self._rows(slot, start, count))
            rows_at.append(slice(start, start + count))
            keys = np.arange(self.used[slot])
            keys_at.append((self.table[slot][keys // self.size], keys % self.size))
            start += count
        self.offsets[SLOTS] = start
        options: dict[str, Any] = {
            "causal": True, "cu_seqlens_q": self.offsets, "page_table": self.table,
            "seqused_k": self.used,
        }  # fmt: skip
        if self.case.window_size != (None, None):
            options["window_size"] = self.case.window_size
        buffers, longest = (self.q, self.k, self.v), (MOST_ROWS, self.capacity)
        self.call(inputs_of(buffers, parts, (rows_at, keys_at), options, longest))

    def _rows(self, slot: int, start: int, count: int) -> SequenceRows:
        """Query rows, page table and length of a slot in the buffers; what the call must see."""
        case, found = self.case, self.sequences.get(slot, CachedSequence([], [], []))
        self.q[start : start + count] = self.draw_rows(count, slot)
        self.table[slot, : len(found.pages)] = found.pages
        self.used[slot] = found.length
        empty = np.zeros((0, case.heads_k, case.head_dim), self.dtype)
        empty_v = np.zeros((0, case.heads_k, case.head_dim_v), self.dtype)
        keys = np.stack(found.keys) if found.keys else empty
        values = np.stack(found.values) if found.keys else empty_v
        return SequenceRows(self.q[start : start + count].copy(), keys, values)
