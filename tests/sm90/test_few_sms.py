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
from fa4.compiled.support import NARROW
from fa4.hardware import H200
from fa4.plan import warpgroup_tuned
from fa4.plan.warpgroup_narrow_rates import NARROW_RATES
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
        if spec.element_bytes == 1 and spec.stores_directly:
            found["promoted in O's rows" if spec.promote else "to O's rows"] += 1
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


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of 8-bit types, head dims above 128 have tiles of 128 keys; sums of 130 keys are promoted."""
    direct = {
        one: tuple(tile._replace(promote=1) for tile in tiles if tile.direct) or tiles
        for one, tiles in NARROW_RATES.items()
    }
    monkeypatch.setattr(warpgroup_tuned, "NARROW_RATES", direct)
    monkeypatch.setattr(warpgroup_tuned, "PROMOTED_FROM", 130)
    warpgroup_tuned.tuned_warpgroups.cache_clear()
    yield
    warpgroup_tuned.tuned_warpgroups.cache_clear()


@pytest.mark.parametrize("calls", [2, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_drawn_calls_of_wide_8_bit_heads_are_right(
    calls: int, wide: None, chosen: Counter[str]
) -> None:
    """O and its sums in its own rows, of any mask, heads and sequences."""
    seed = random.SystemRandom().randrange(2**32) if calls > 10 else 7
    print(f"seed {seed}")
    narrow = (
        (number, one)
        for number, one in small_calls(seed)
        if one.call.dtype in NARROW and max(one.call.dims) > 128
    )
    for (number, one), _ in zip(narrow, range(calls), strict=False):
        make_call(one, number, "emulator_sm90")
    assert chosen["to O's rows"] + chosen["promoted in O's rows"] == calls
    assert calls < 10 or {"queue, 8 bits", "to O's rows", "promoted in O's rows"} <= set(chosen)
