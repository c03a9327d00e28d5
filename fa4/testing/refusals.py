"""How a call can end other than with a result, and what is read from a signature.

A call may be refused (`NotCovered`), or end in a way that no function may end (`BackendFailed`).
"""

from __future__ import annotations

import inspect
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from fa4.call.arrays import to_numpy
from fa4.dtypes import dtype_name

Refusal = Callable[[BaseException], bool]

# After one of these the CUDA context of the process answers every call with the same error.
_POISONED = re.compile(
    r"CUDA error|CUDA driver error|CUDA_ERROR_|cudaError|illegal memory access|illegal instruction"
    r"|device-side assert|misaligned address|unspecified launch failure",
    re.IGNORECASE,
)


class NotCovered(Exception):
    """The back end does not offer `feature`; `reason` says how that is known.

    kind: the same for calls that are refused for the same reason, whatever their sizes.
    """

    def __init__(self, feature: str, reason: str, kind: str = "") -> None:
        super().__init__(f"{feature}: {reason}")
        self.feature, self.reason, self.kind = feature, reason, kind or f"{feature}: {reason}"


class Breach(AssertionError):
    """A rule that is broken whatever the errors of the outputs are; its text up to a colon is the
    same, but for numbers, for each breach of it."""


class BackendFailed(Exception):
    """A call that ended in no way that a function may end: SystemExit, a crash, a hang."""


class NoAnswer(BackendFailed):
    """A hang: another such call would cost the whole timeout again."""


def is_poison(error: BaseException) -> bool:
    """Is this an error after which CUDA cannot be used in this process any more?"""
    if type(error).__name__ == "AcceleratorError":
        return True
    return isinstance(error, (RuntimeError, BackendFailed)) and bool(_POISONED.search(str(error)))


def refuses_by(unsupported: Any) -> Refusal | None:
    """The predicate of an attribute `unsupported`; TypeError if it is none of the two things."""
    if unsupported is None:
        return None
    types = unsupported if isinstance(unsupported, tuple) else (unsupported,)
    if types and all(isinstance(kind, type) and issubclass(kind, Exception) for kind in types):
        return lambda error: isinstance(error, types)
    if callable(unsupported) and not isinstance(unsupported, type):
        return unsupported
    raise TypeError(
        f"unsupported must be exception types or a predicate on an exception; got {unsupported!r}"
    )


class _Silence:
    """No warnings while any thread is inside; warnings' own context is not made for threads."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._context = warnings.catch_warnings()

    def enter(self) -> None:
        """One more thread."""
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._context = warnings.catch_warnings()
                self._context.__enter__()
                warnings.simplefilter("ignore")

    def leave(self) -> None:
        """One less; the last restores the filters."""
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._context.__exit__(None, None, None)


_silence = _Silence()


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings, in this thread or any: results are judged, not noise on the way."""
    _silence.enter()
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        _silence.leave()


@lru_cache(maxsize=512)
def named_keywords(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """(keyword names in the signature, does it take any keyword?); (none, True) if unreadable."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset(), True
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = frozenset(p.name for p in parameters if p.kind in by_name)
    return names, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def describe_call(arrays: Any, options: dict[str, Any]) -> str:
    """A call in words: "head_dim 32 with head_dim_v 104 in bf16, lengths 1 and 7, causal"."""
    q, k, v = arrays[1:4] if len(arrays) > 3 else arrays[:3]
    dim, dim_v = q.shape[-1], v.shape[-1]
    heads, heads_k = q.shape[-2], k.shape[-2]
    words = f"head_dim {dim}" + (f" with head_dim_v {dim_v}" if dim_v != dim else "")
    parts = [f"{words} in {dtype_name(q.dtype)}", f"lengths {q.shape[-3]} and {k.shape[-3]}"]
    if heads != heads_k:
        parts.append(f"{heads} heads over {heads_k}")
    if len(arrays) > 3:
        parts.append("gradients")
    return ", ".join(parts + sorted(set(options) - {"return_lse"}))


def readable(name: str, value: Any) -> np.ndarray:
    """A result as a NumPy array; AssertionError for what is none or cannot be read."""
    try:
        return to_numpy(name, value)
    except TypeError as error:
        raise AssertionError(str(error)) from error
    except Exception as error:  # a tensor without memory, a broken __array__
        raise AssertionError(f"{name} cannot be read: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """The text of an exception on one line; its type where it has none."""
    text = " ".join(str(error).split())
    return text or f"raises {type(error).__name__}"
