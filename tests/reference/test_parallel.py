"""Work tiles on threads give the bits and the counts of work tiles one after the other."""

import numpy as np
import pytest

from fa4 import ForwardConfig
from fa4.reference import Attention, attention_forward, parallel
from tests.reference.support import arrays


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "thread_count", lambda: 3)
    monkeypatch.setattr(parallel, "LEAST_ELEMENTS", 1)


def test_threads_change_neither_bits_nor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = arrays((2, 300, 200, 4, 2, 16, 16), 0, np.float32, scale=5.0)
    spec = Attention(softmax_scale=0.3, window=(None, 0))
    config = ForwardConfig(tile_m=16, tile_n=32, num_splits=2)
    one = attention_forward(q, k, v, spec, config=config)
    monkeypatch.setattr(parallel, "thread_count", lambda: 3)
    monkeypatch.setattr(parallel, "LEAST_ELEMENTS", 1)
    three = attention_forward(q, k, v, spec, config=config)
    assert (one.out == three.out).all() and (one.lse == three.lse).all()
    assert one.counters == three.counters


@pytest.mark.usefixtures("three_threads")
def test_tiles_run_on_several_threads_in_order() -> None:
    import threading

    barrier = threading.Barrier(3, timeout=30)

    def meet(tile: int) -> tuple[int, int]:
        barrier.wait()  # passes only if three tiles are under way at once
        return tile, threading.get_ident()

    done = parallel.map_tiles(meet, range(6), elements=1)
    assert [tile for tile, _ in done] == list(range(6))
    assert len({thread for _, thread in done}) == 3


@pytest.mark.usefixtures("three_threads")
def test_user_callables_stay_on_the_calling_thread() -> None:
    import threading

    seen = set()

    def mask_mod(batch, head, q_idx, kv_idx, *_):
        seen.add(threading.get_ident())
        return q_idx >= 0

    q, k, v = arrays((1, 300, 20, 1, 1, 8, 8))
    spec = Attention(softmax_scale=1.0, mask_mod=mask_mod)
    attention_forward(q, k, v, spec, config=ForwardConfig(tile_m=16))
    assert seen == {threading.get_ident()}


@pytest.mark.usefixtures("three_threads")
def test_an_error_in_a_tile_reaches_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        parallel.map_tiles(lambda tile: 1 // tile, [1, 0, 2], elements=1)
