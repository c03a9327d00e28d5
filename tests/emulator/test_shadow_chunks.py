"""A shadow that keeps whole chunks in one cell finds what one with a cell per granule finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa4.emulator.checks import shadow
from fa4.emulator.checks.clocks import AsyncPool, WarpClock
from fa4.emulator.checks.conflict import Access, Conflict
from fa4.emulator.checks.memory import ShadowMemory
from fa4.emulator.checks.shadow import Shadow

ROWS, WARPS, BYTES, STEPS = 40, 2, 160, 150
POOL_ROW = 33  # its bit is in the second word of the readers
HOWS = (Access(1), Access(2, strong=True), Access(3, async_proxy=True), Access(4))


class Script:
    """Drawn accesses of all widths by two warps and by asynchronous operations, and what orders
    them; each memory is told the same."""

    def __init__(self, seed: int, memories: tuple[ShadowMemory, ...]) -> None:
        self.rng = np.random.default_rng(seed)
        self.memories = memories
        self.warps = [WarpClock(row, ROWS) for row in range(WARPS)]
        self.pool = AsyncPool(POOL_ROW, 1)
        self.whole = 0

    def one_of(self, *values: Any) -> Any:
        """One of some values."""
        return values[self.rng.integers(len(values))]

    def step(self) -> list[Conflict | None]:
        """What each memory answers to the next event."""
        warp, other = self.rng.permutation(WARPS)
        clock = self.warps[warp]
        match int(self.rng.integers(12)):
            case 0 | 1:
                clock.acquire(self.warps[other].release(self.one_of(0xFFFF_FFFF, 1, 0xF)))
            case 2:
                clock.sync_lanes()
            case 3:
                clock.fence_proxy()
            case 4:
                self._set()
            case 5 | 6:
                actor = self.pool.begin(clock.snapshot(1))
                answers = self._access(actor, actor.lane)
                if self.rng.integers(2):
                    clock.acquire(actor.completion())
                return answers
            case _:
                return self._access(clock, None)
        return []

    def _set(self) -> None:
        granule = self.memories[0].granule_bytes
        start, stop = np.sort(self.rng.integers(0, BYTES // granule + 1, 2))
        name = self.one_of("mark_initialised", "reset")
        for memory in self.memories:
            getattr(memory, name)(start, stop)

    def _access(self, actor: Any, lane: int | None) -> list[Conflict | None]:
        granule, count = self.memories[0].granule_bytes, int(self.rng.integers(1, 7))
        width = self.one_of(*(w for w in (1, 2, 4, 8, 16, 16, 16, 32) if w >= granule))
        places = self.rng.integers(0, BYTES // width, count) * width
        if self.rng.integers(2):
            places = np.sort(places)
        lanes = lane if lane is not None else self.rng.integers(0, 32, count)
        self.whole += width >= shadow.CHUNK_BYTES
        how, kind = self.one_of(*HOWS), self.one_of("read", "read", "write", "write", "atomic")
        unit = (granule, width // granule)
        return [getattr(memory, kind)(places, lanes, actor, how, unit) for memory in self.memories]


@pytest.mark.parametrize("granule", [1, 2, 4, 8, 16])
def test_chunks_change_no_finding(granule: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, whole = 0, 0
    for seed in range(40):
        chunked = Shadow(BYTES // granule, granule, ROWS)
        with monkeypatch.context() as patch:
            patch.setattr(shadow, "CHUNK_BYTES", 1)
            plain = Shadow(BYTES // granule, granule, ROWS)
        script = Script(seed, (chunked, plain))
        for step in range(STEPS):
            answers = script.step()
            assert len(set(answers)) <= 1, (seed, step, answers)
            found += bool(answers and answers[0])
            for at in range(0, BYTES // granule):
                assert chunked.written_by_async_proxy(at) == plain.written_by_async_proxy(at)
        whole += script.whole
    assert found > 500 and whole > 500


def test_many_accesses_are_listed() -> None:
    """The list of accesses grows, and what was noted before it grew is still known."""
    memory, writer, reader = Shadow(8, 4, ROWS), WarpClock(0, ROWS), WarpClock(1, ROWS)
    memory.write(np.array([0]), 5, writer, Access(7))
    for line in range(3000):
        assert memory.write(np.array([1]), 0, writer, Access(line)) is None
    conflict = memory.read(np.array([0]), 3, reader, Access(9))
    assert conflict is not None and (conflict.other_line, conflict.other_id) == (7, 5)
    conflict = memory.read(np.array([1]), 3, reader, Access(9))
    assert conflict is not None and conflict.other_line == 2999
