"""What every shadow memory offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fa4.emulator.checks.clocks import Actor, actor_id
from fa4.emulator.checks.conflict import (
    FLAG_BITS,
    KINDS,
    MUST_BE_INITIALISED,
    STRONG,
    Access,
    Conflict,
)
from fa4.emulator.checks.records import (
    FIELDS,
    FIRST_ROW,
    FULL,
    MOST_FOUND,
    NOBODY,
    NOT_FENCED,
    OUTSIDE,
    RAW,
    SAME_INSTRUCTION,
    SHADOW,
    WAW,
    WHO,
    Mine,
    mine_of,
)
from fa4.emulator.warp_lanes import LANES

Places: TypeAlias = NDArray[np.int64]
Unit: TypeAlias = tuple[int, int]
Lanes: TypeAlias = NDArray[np.integer[Any]] | int

_ONE_LANE = np.arange(LANES).reshape(LANES, 1)
GRANULE: Unit = (1, 1)
_ROOM = 1 << 10  # accesses that are listed at first


class ShadowMemory(ABC):
    """Records of the accesses to one memory, granule by granule.

    Accesses name the places of their units in any order; `lanes` is the lane of each, or one for
    all. unit: how many places a granule has, and how many granules a unit; by default the places
    are numbers of granules, with (granule_bytes, n) byte offsets of units of n granules. The
    answer is the first conflict, or None; the whole access is recorded in either case. Raises
    IndexError if a granule is outside the memory, ValueError if there is not one lane per unit or
    the actor is not of the cluster's size.
    """

    def __init__(self, granules: int, granule_bytes: int) -> None:
        self.granules = granules
        self.granule_bytes = granule_bytes
        self._state = np.zeros(1, dtype=SHADOW)
        self._found = self._state["found"][0]
        # Where a SHADOW says where the records are; it lives as long as the shadow.
        self.state_address = int(self._state.ctypes.data)
        self._accesses = np.zeros((_ROOM, FIELDS), dtype=np.uint32)
        self._accesses[NOBODY, WHO] = NOBODY
        self._lines: dict[tuple[int, int, int], set[int]] = {}  # of the accesses that are indexed
        self._indexed = FIRST_ROW
        self._describe(granules=granules, granule_bytes=granule_bytes, listed=FIRST_ROW)
        self._describe(accesses=self._accesses.ctypes.data, room=_ROOM)

    def _describe(self, **fields: int) -> None:
        """Sets the other fields of the SHADOW."""
        for name, value in fields.items():
            self._state[name] = value

    def _make_room(self) -> None:
        """Twice as many accesses can be listed."""
        self._accesses = np.concatenate([self._accesses, np.zeros_like(self._accesses)])
        self._describe(accesses=self._accesses.ctypes.data, room=len(self._accesses))

    def read(
        self, places: Places, lanes: Lanes, actor: Actor, how: Access, unit: Unit = GRANULE
    ) -> Conflict | None:
        """A read: against the last writes, and missing fences if by the async proxy."""
        return self._access(places, lanes, actor, how.word, False, unit)

    def write(
        self, places: Places, lanes: Lanes, actor: Actor, how: Access, unit: Unit = GRANULE
    ) -> Conflict | None:
        """A write: against the last writes and the reads since.

        Two lanes of one instruction on one granule are SAME_INSTRUCTION_WRITE, which the caller
        may ignore if they write the same value.
        """
        return self._access(places, lanes, actor, how.word & ~MUST_BE_INITIALISED, True, unit)

    def atomic(
        self, places: Places, lanes: Lanes, actor: Actor, how: Access, unit: Unit = GRANULE
    ) -> Conflict | None:
        """A read-modify-write that races with plain accesses but with no strong one."""
        return self._access(places, lanes, actor, how.word | STRONG, True, unit)

    def read_range(
        self, start: int, stop: int, lane: int, actor: Actor, how: Access
    ) -> Conflict | None:
        """A read of the granules start .. stop - 1 by one lane."""
        return self.read(np.arange(start, stop), lane, actor, how)

    def write_range(
        self, start: int, stop: int, lane: int, actor: Actor, how: Access
    ) -> Conflict | None:
        """A write of the granules start .. stop - 1 by one lane."""
        return self.write(np.arange(start, stop), lane, actor, how)

    def lines_of(self, row: int, epoch: int, cluster: int) -> frozenset[int]:
        """The PTX lines of all accesses that a row of actors made in an epoch: a record of its
        reads names the last one only."""
        listed = int(self._state["listed"][0])
        for who, when, word, where in self._accesses[self._indexed : listed].tolist():
            self._lines.setdefault((who, when, where), set()).add(word >> FLAG_BITS)
        self._indexed = listed
        return frozenset(self._lines.get((row + FIRST_ROW, epoch, cluster), ()))

    @abstractmethod
    def mark_initialised(self, start: int, stop: int) -> None:
        """The granules start .. stop - 1 were written before everything."""

    @abstractmethod
    def reset(self, start: int, stop: int) -> None:
        """Forget all about the granules start .. stop - 1: they hold nothing."""

    @abstractmethod
    def _run(
        self, places: Places, lanes: NDArray[np.int64], unit: Unit, mine: Mine, is_write: bool
    ) -> int:
        """Check and record; the number of the kind of conflict, 0, OUTSIDE or FULL."""

    def _access(
        self, places: Places, lanes: Lanes, actor: Actor, word: int, is_write: bool, unit: Unit
    ) -> Conflict | None:
        places = np.asarray(places, dtype=np.int64)
        if not places.size:
            return None
        by = _ONE_LANE[lanes] if isinstance(lanes, int) else np.asarray(lanes, dtype=np.int64)
        if by.size != places.size and by.size != 1:
            raise ValueError(f"{by.size} lanes for {places.size} places")
        kind = self._run(places, by, unit, mine_of(actor, word), is_write)
        if kind == 0:
            return None
        if kind == FULL:
            self._make_room()
            return self._access(places, lanes, actor, word, is_write, unit)
        if kind == OUTSIDE:
            first, last = places.min() // unit[0], places.max() // unit[0] + unit[1] - 1
            raise IndexError(f"granules {first}..{last} of {self.granules}")
        return self._conflict(1, actor, word)

    def conflicts(self, actor: Actor, how: Access) -> tuple[list[Conflict], bool]:
        """Those of the access that was made last, by this actor; whether there are others, which
        are not listed. Alike ones at several granules are one."""
        count = int(self._found[0, 0])
        listed = range(1, 1 + min(count, MOST_FOUND))
        return [self._conflict(k, actor, how.word) for k in listed], count > MOST_FOUND

    def _conflict(self, number: int, actor: Actor, word: int) -> Conflict:
        found = self._found[number].tolist()
        kind, granule, lane, who, other_lane, epoch, other_word, cluster, mask = found
        is_access = who >= FIRST_ROW
        return Conflict(
            kind=KINDS[kind],
            granule=granule,
            granule_bytes=self.granule_bytes,
            other_id=actor_id(who - FIRST_ROW, other_lane) if is_access else -1,
            other_epoch=epoch,
            other_line=other_word >> FLAG_BITS,
            other_is_write=kind in (RAW, WAW, NOT_FENCED, SAME_INSTRUCTION),
            other_lanes=mask,
            my_id=actor_id(actor.row, lane),
            line=word >> FLAG_BITS,
            other_cluster=cluster if is_access and cluster != actor.knowledge.cluster else -1,
        )

    def _check_range(self, start: int, stop: int) -> slice:
        if not 0 <= start <= stop <= self.granules:
            raise IndexError(f"granules {start}..{stop} of {self.granules}")
        return slice(start, stop)
