"""Back ends that end a call in every way that a function may not, each for one head dim.

Head dim 8 is answered rightly, so that the rest of the kit goes on.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import MappingProxyType
from typing import Any

import numpy as np

from fa4.dtypes import numpy_dtype
from tests.testing.planted import honest

BAD = 16
_poisoned = False


def killed(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """As a stray write ends."""
    if q.shape[-1] == BAD:
        os.kill(os.getpid(), signal.SIGSEGV)
    return honest(q, k, v)


def exits(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """As a C library that calls exit; with last words."""
    if q.shape[-1] == BAD:
        print("the kernel says good-bye", flush=True)
        print("to standard error too", file=sys.stderr, flush=True)
        os._exit(3)
    return honest(q, k, v)


def talks(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """As a library that tells all of its troubles before it gives up."""
    if q.shape[-1] == BAD:
        print(*(f"word {number}" for number in range(1, 8)), sep="\n", flush=True)
        os._exit(4)
    return honest(q, k, v)


def aborts(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """As a failed assertion in C."""
    if q.shape[-1] == BAD:
        os.abort()
    return honest(q, k, v)


def hangs(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """As a barrier that nobody completes."""
    if q.shape[-1] == BAD:
        time.sleep(1000)
    return honest(q, k, v)


def hangs_always(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """Whatever it is given."""
    time.sleep(1000)


def hangs_in_bf16(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """With one element type, whatever the shape."""
    if q.dtype == numpy_dtype("bf16"):
        time.sleep(1000)
    return honest(q, k, v)


def leaves(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """SystemExit in a call."""
    if q.shape[-1] == BAD:
        sys.exit(3)
    return honest(q, k, v)


def poisons(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """As CUDA: after one illegal access, every call of the process fails with it."""
    global _poisoned
    _poisoned |= q.shape[-1] == BAD
    if _poisoned:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return honest(q, k, v)


def noisy(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """Writes to both streams, past Python too."""
    print("noise")
    os.write(1, b"\x80\x05noise below Python\n")
    os.write(2, b"more noise\n")
    return honest(q, k, v)


def writes(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """A result that is no array, and cannot be sent either."""
    return lambda: q


def pid(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """Its process, as every element of the output."""
    return np.full((*q.shape[:-1], v.shape[-1]), os.getpid(), np.float64)


def strides(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """1 where q, k and v arrived as the views that they were, K and V of one buffer."""
    kept = not (q.flags.c_contiguous or k.flags.c_contiguous or v.flags.c_contiguous)
    shared = kept and np.shares_memory(k.base, v.base)
    return np.full((*q.shape[:-1], v.shape[-1]), float(kept and shared))


def shape_refused(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False) -> Any:
    """Refuses one head dim with an error of its own."""
    if q.shape[-1] != v.shape[-1]:
        raise RuntimeError("no kernel for this shape")
    return honest(q, k, v, causal=causal)


shape_refused.unsupported = (RuntimeError,)


class complete:
    """Everything that a back end may have, to be found again on the other side."""

    def __call__(
        self, q: Any, k: Any, v: Any, *, causal: bool = False, return_lse: bool = False
    ) -> Any:
        """Attention."""
        return honest(q, k, v, causal=causal, return_lse=return_lse)

    varlen = staticmethod(honest.varlen)
    backward = staticmethod(honest.backward)
    fa4_dropout = True
    not_covered = MappingProxyType({"softcap": "for a reason"})
    claims = ("robustness",)


complete_backend = complete()
