"""Threads in turns: a fixed order, a shared buffer shows every time, a lock holds up nobody."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from threading import Lock
from typing import Any

import pytest

from fa4.testing import turns, verify
from fa4.testing.turns import ThreadTurns, count_calls


def both(function: Callable[[int], None], every: int) -> None:
    """Call it in two threads, with their numbers."""
    together = ThreadTurns(every)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(together.run, n, lambda n=n: function(n)) for n in (0, 1)]:
            done.result()


def test_two_threads_alternate() -> None:
    """After each call of a function, or after every second one."""
    order: list[int] = []

    def note(number: int) -> None:
        order.append(number)

    def work(number: int) -> None:
        for _ in range(4):
            note(number)

    both(work, 1)
    assert order == [0, 1] * 4
    order.clear()
    both(work, 2)
    assert order == [0, 1, 0, 0, 1, 1, 0, 1]  # the first call of two is that of `work`
    assert count_calls(lambda: work(0)) - count_calls(lambda: None) == 5


def test_who_waits_for_the_other_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that lets one thread in at a time is right, too."""
    monkeypatch.setattr(turns, "PATIENCE_SECONDS", 0.05)
    lock, done = Lock(), []

    def note(number: int) -> None:
        done.append(number)

    def work(number: int) -> None:
        with lock:
            for _ in range(3):
                note(number)

    both(work, 1)
    assert done == [0, 0, 0, 1, 1, 1]


def test_a_cached_property_parts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever computes one is not stopped in it, where its lock would keep the other waiting."""
    monkeypatch.setattr(turns, "PATIENCE_SECONDS", 5.0)
    order: list[int] = []

    def note(number: int) -> None:
        order.append(number)

    class Cached:
        def __init__(self, number: int) -> None:
            self.number = number

        @cached_property
        def value(self) -> int:
            note(self.number)
            note(self.number)
            return self.number

    def work(number: int) -> None:
        assert Cached(number).value == number
        for _ in range(3):
            note(number)

    waited: list[bool] = []
    wait_for = turns.Condition.wait_for

    def noted(*words: Any) -> bool:
        waited.append(wait_for(*words))
        return waited[-1]

    monkeypatch.setattr(turns.Condition, "wait_for", noted)
    both(work, 1)
    assert all(waited) and order[:4] == [0, 0, 1, 1] and order[4:] == [0, 1] * 3


@pytest.mark.parametrize("seed", range(3))
def test_a_shared_buffer_shows_every_time(seed: int) -> None:
    """By turns, not by luck."""
    report = verify("tests.testing.planted:scratch_of_module", only=["second_thread"], seed=seed)
    assert report.with_status("failed")
