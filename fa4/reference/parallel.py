"""Independent work tiles on as many threads as NumPy's BLAS is allowed to use.

One tile's products are too small for a multi-threaded BLAS, which then spends its time waiting for
its own threads. So tiles run side by side, each with a single-threaded BLAS: NumPy releases the
interpreter lock in its loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

from threadpoolctl import ThreadpoolController

Item = TypeVar("Item")
Result = TypeVar("Result")

# Score elements below which starting threads costs more than it gains: 2^20 elements take about
# 10 ms on one core, a pool of threads 0.2 ms.
LEAST_ELEMENTS = 1 << 20


@lru_cache(maxsize=1)
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


def thread_count() -> int:
    """Threads that NumPy's BLAS may use now (OPENBLAS_NUM_THREADS, threadpoolctl, or all cores)."""
    return max((library["num_threads"] for library in _blas().info()), default=1)


def map_tiles(
    function: Callable[[Item], Result], tiles: Iterable[Item], elements: int
) -> list[Result]:
    """[function(tile) for tile in tiles], on threads if `elements` scores are worth it.

    The results do not depend on the number of threads; `function` must not change shared state.
    """
    work = list(tiles)
    threads = min(thread_count(), len(work)) if elements >= LEAST_ELEMENTS else 1
    if threads <= 1:
        return [function(tile) for tile in work]
    with _blas().limit(limits=1), ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, work))
