"""Small calls on a GPU of few SMs: its kernels are those that an H200 has for large calls.

More work tiles than SMs are drawn from a queue, by other tiles and warpgroups than few are. The
calls are those of `lab.hardware.guarded`: every two features meet.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("cutlass")

import fa4.backends.kernel as kernels
from fa4.backends import emulated
from fa4.hardware import H200
from lab.hardware.guarded.drawing import GuardedCall, draw_calls
from lab.hardware.guarded.random_calls import make_call

SMS = emulated.EMULATED_SMS
MOST_WORK = 1e7  # scores times the wider head dim


def small_calls(seed: int) -> Iterator[tuple[int, GuardedCall]]:
    """Drawn calls with little to do, in any order."""
    drawn = list(enumerate(draw_calls(seed, 1000, 300)))
    random.Random(seed).shuffle(drawn)
    for number, one in drawn:
        scores = sum(rows * keys for rows, keys in one.call.lengths) * one.call.heads[0]
        if scores * max(one.call.dims) < MOST_WORK:
            yield number, one


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Kernels are chosen for few SMs; how often each way of handing out work tiles was."""
    found: Counter[str] = Counter()
    few = replace(H200, sm_count=SMS)
    choose = kernels.choose_spec

    def count(sizes: Any, gpu: Any) -> Any:
        spec = choose(sizes, few)
        found[f"{spec.scheduler}, {8 * spec.element_bytes} bits"] += 1
        return spec

    monkeypatch.setattr(kernels, "choose_spec", count)
    monkeypatch.setattr(kernels, "remembered", lambda call, key, find, *rest: find(call, *rest))
    return found


@pytest.mark.parametrize("calls", [4, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_drawn_calls_are_right(calls: int, chosen: Counter[str]) -> None:
    """Within their bands, with no finding; some are drawn from a queue, of both sizes of types."""
    seed = random.SystemRandom().randrange(2**32) if calls > 100 else 7
    print(f"seed {seed}")
    for (number, one), _ in zip(small_calls(seed), range(calls), strict=False):
        make_call(one, number, "emulator_sm90")
    assert calls < 100 or {"queue, 8 bits", "queue, 16 bits"} <= set(chosen)
