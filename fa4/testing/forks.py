"""A call that comes back in two processes: the child is ended before it runs the suite again."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fa4.testing.refusals import BackendFailed

WAIT_SECONDS = 0.3  # for a child that the call started and that has not ended

_forks: list[None] = []  # one for each of this process


def _note() -> None:
    _forks.append(None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=_note)


def in_one_process(call: Callable[[], Any]) -> Any:
    """The result of `call()`; BackendFailed if a child process came back from it as well.

    Children that end by themselves, and those that run other programs, are the call's own affair.
    """
    if not hasattr(os, "fork"):
        return call()
    process, before = os.getpid(), len(_forks)
    ours, theirs = os.pipe()  # a child has copies of both ends, until it ends
    try:
        result = call()
    finally:
        if os.getpid() != process:
            with suppress(OSError):
                os.write(theirs, os.getpid().to_bytes(8, "little"))
            os._exit(0)
        os.close(theirs)
        returned = _returned(ours, WAIT_SECONDS if len(_forks) != before else 0.0)
        os.close(ours)
    if returned:
        raise BackendFailed("forked: a child process came back from the call too, and was ended")
    return result


def _returned(pipe: int, seconds: float) -> bool:
    """Did a child come back? It is waited for, so that none is left behind."""
    if not select.select([pipe], [], [], seconds)[0]:
        return False
    said = os.read(pipe, 8)
    if said:
        with suppress(ChildProcessError):
            os.waitpid(int.from_bytes(said, "little"), 0)
    return bool(said)
