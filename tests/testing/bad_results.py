"""Back ends whose results are none: wrong shapes, types, devices; and what a call may not do.

Each stands for a mistake that an author can make; `SAID` has what the kit says of it, in a line.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from tests.testing.planted import honest


def no_result(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """A function without a return."""
    honest(q, k, v)


def other_layout(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """Heads before rows."""
    return honest(q, k, v).swapaxes(1, 2)


def one_batch(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """Without the batch axis."""
    return honest(q, k, v)[0]


def lse_rows_first(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, return_lse: bool = True) -> Any:
    """The LSE as (B, S, H)."""
    out, lse = honest(q, k, v, return_lse=True)
    return out, np.ascontiguousarray(lse.swapaxes(1, 2))


def three_results(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """As FlashAttention's return_attn_probs gives it."""
    out, lse = honest(q, k, v, return_lse=True)
    return out, lse, None


def as_list(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """Nested lists of numbers."""
    return honest(q, k, v).tolist()


def integers(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """An output of an integer type."""
    return honest(q, k, v).astype(np.int32)


def complex_numbers(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """A complex output."""
    return honest(q, k, v).astype(np.complex64)


def on_another_device(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """A tensor without memory."""
    import torch

    return torch.empty((*q.shape[:-1], v.shape[-1]), device="meta")


def result_is_an_input(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """O in the memory of q."""
    q[...] = honest(q, k, v[..., : q.shape[-1]])[..., : q.shape[-1]]
    return q


def view_of_an_input(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """V itself, which is right for one key."""
    if k.shape[1] == 1 and q.shape[2] == k.shape[2]:
        return np.broadcast_to(v, (*q.shape[:-1], v.shape[-1]))
    return honest(q, k, v)


def prints(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """To standard output, by Python and past it."""
    print("loading kernel")
    os.write(1, b"compiled in 3 s\n")
    return honest(q, k, v)


def forks(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """Two processes come back from the call."""
    if q.dtype == np.float32:
        os.fork()
    return honest(q, k, v)


def forks_and_waits(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """A child that ends by itself is the function's own affair."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return honest(q, k, v)


def leaves(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """sys.exit in a call."""
    sys.exit("no kernel for this machine")


def raises_without_words(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """An assertion of its own, without a message."""
    raise AssertionError


def raises_lines(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """An error of many lines."""
    raise RuntimeError("cannot launch\n  grid too large\n" + "  at frame\n" * 200)


def recursive(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """Calls itself for ever."""
    return recursive(q, k, v)


def two_gradients(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """A backward pass that forgets dV."""
    return honest(q, k, v)


def _dq_and_dk(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> Any:
    return np.zeros_like(q), np.zeros_like(k)


two_gradients.backward = _dq_and_dk

_SHAPE = r"out must have shape \(.*\); got \("
# What the kit says of each, as a regular expression of its whole message.
SAID = {
    "no_result": "out must be a NumPy array, a torch tensor or have __dlpack__; got NoneType",
    "other_layout": _SHAPE,
    "one_batch": _SHAPE,
    "lse_rows_first": r"lse must have shape \(.*\); got \(",
    "three_results": r"the function must return out or \(out, lse\); got 3 results",
    "as_list": "out must be a NumPy array, a torch tensor or have __dlpack__; got list",
    "integers": "out must hold floating-point numbers; got dtype int32",
    "complex_numbers": "out must hold floating-point numbers; got dtype complex64",
    "on_another_device": "(out|a result) cannot be read: Cannot copy out of meta tensor; no data!",
    "result_is_an_input": "q was changed in place by the call",
    "view_of_an_input": "result 0 lies in the memory of v, not in its own",
    "forks": "BackendFailed: forked: a child process came back from the call too, and was ended",
    "leaves": r"BackendFailed: raised SystemExit\('no kernel for this machine'\)",
    "raises_without_words": "raises AssertionError",
    "raises_lines": "RuntimeError: cannot launch grid too large",
    "recursive": "RecursionError: maximum recursion depth exceeded",
    "two_gradients": r"backward must return \(dq, dk, dv\[, dsink\]\); got 2 results",
}
