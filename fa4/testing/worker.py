"""The process that runs a back end apart from the kit; `fa4.testing.isolation` starts it.

Frames are pickles, in on what was standard input, out on what was standard output. File
descriptor 1 is then standard error, so that whatever a kernel prints cannot be taken for a frame.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from fa4.call.arrays import to_numpy
from fa4.testing.guard import KeptGuard, guarded_call
from fa4.testing.numerics import Numerics
from fa4.testing.refusals import is_poison, named_keywords, quiet, readable, reason_of

PART_NAMES = ("function", "varlen", "backward")
_PR_SET_PDEATHSIG = 1  # Linux, prctl(2)


class Facts(NamedTuple):
    """What the kit asks of a back end without calling it; `parts`: part to named_keywords."""

    parts: dict[str, tuple[frozenset[str], bool]]
    fa4_dropout: bool
    not_covered: dict[str, str]
    claims: frozenset[str]
    uses_cuda: bool
    numerics: Numerics


class Reply(NamedTuple):
    """The end of a call. kind: "result", "refused" (not offered), "error" or "bad name".

    poisoned: the process must not be called again. name: type of the exception.
    """

    kind: str
    value: Any = None
    name: str = ""
    poisoned: bool = False


class View(NamedTuple):
    """A view of a wider buffer, which pickle alone would make contiguous; offset in bytes."""

    base: np.ndarray
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def pack(value: Any) -> Any:
    """An array that is a view as a `View`; views of one buffer go on sharing it."""
    base = getattr(value, "base", None)
    if (
        not isinstance(value, np.ndarray)
        or not isinstance(base, np.ndarray)
        or value.flags.c_contiguous
        or base.dtype != value.dtype
        or not base.flags.c_contiguous
    ):
        return value
    offset = value.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return View(base, value.shape, value.strides, offset)


def unpack(value: Any) -> Any:
    """The array of a `View`, of the same strides; other values as they are."""
    if not isinstance(value, View):
        return value
    return np.ndarray(value.shape, value.base.dtype, value.base, value.offset, value.strides)


def main() -> None:
    """Serve until the parent closes the pipe or ends."""
    inward, outward = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    parent, name = pickle.load(inward)
    _end_with(parent)
    threading.excepthook = lambda _: None
    try:
        backend = _load(name)
    except ValueError as error:
        _send(outward, Reply("bad name", str(error)))
        return
    functions = {part: getattr(backend, part) for part in PART_NAMES}
    functions = {part: function for part, function in functions.items() if function is not None}
    facts = Facts(
        {part: named_keywords(function) for part, function in functions.items()},
        backend.fa4_dropout,
        backend.not_covered,
        backend.claims,
        backend.uses_cuda,
        backend.numerics,
    )
    _send(outward, Reply("result", facts))
    latest, guard = None, None
    while True:
        try:
            part, arrays, options, session = pickle.load(inward)
        except EOFError:
            return
        if session != latest:
            latest, guard = session, None if session is None else KeptGuard()
        arrays = [unpack(x) for x in arrays]
        _send(outward, _run(functions[part], backend.refuses, (arrays, options), guard))


def _load(name: str) -> Any:
    """The back end, with CUDA ready where it uses it, so that no call is charged for that."""
    from fa4.testing.backends import load_backend

    backend = load_backend(name)
    if backend.uses_cuda and "torch" in sys.modules:
        sys.modules["torch"].zeros(1, device="cuda")
    return backend


def _run(
    function: Callable[..., Any],
    refuses: Callable[[BaseException], bool],
    call: tuple[list[Any], dict[str, Any]],
    guard: KeptGuard | None,
) -> Reply:
    arrays, options = call
    try:
        with quiet():
            return Reply("result", _plain(guarded_call(function, tuple(arrays), options, guard)))
    except Exception as error:
        poisoned = is_poison(error) or (isinstance(error, RuntimeError) and "CUDA" in str(error))
        kind = "refused" if refuses(error) else "error"
        return Reply(kind, reason_of(error), type(error).__name__, poisoned and kind == "error")
    except BaseException as error:
        return Reply("error", f"raised {error!r}", "BackendFailed", poisoned=True)


def _plain(result: Any) -> Any:
    """Results as NumPy arrays, in tuples; what is no array as it is."""
    if isinstance(result, tuple):
        return tuple(_plain(item) for item in result)
    try:
        return np.asarray(to_numpy("a result", result))
    except TypeError:
        return result
    except Exception:  # a tensor without memory: the same sentence as in the kit's own process
        return readable("out", result)


def _send(outward: BinaryIO, reply: Reply) -> None:
    try:
        frame = pickle.dumps(reply, protocol=5)
    except Exception:  # a result that is neither an array nor plain data
        kind = type(reply.value).__name__
        frame = pickle.dumps(
            Reply("error", f"out must be a NumPy array or a torch tensor; got {kind}",
                  "AssertionError")
        )  # fmt: skip
    outward.write(frame)
    outward.flush()


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, even inside a call that hangs."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)
