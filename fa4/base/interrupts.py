"""Ctrl-C while the `fa4` command runs: one line and exit code 130, wherever it strikes.

Python raises KeyboardInterrupt in whatever runs, which serves code that cleans up behind itself.
Where it does not (imports of compiled modules and the kernel compiler crash or swallow it) nothing
of ours is half-written, and the process ends at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

EXIT_CODE = 130  # 128 + SIGINT, as shells have it
# Code that must not be interrupted by an exception: importing, and the compiler's packages.
FRAGILE = ("importlib", "cutlass", "llvmlite", "numba", "tvm_ffi")


def end_now() -> NoReturn:
    """Say so and end, without unwinding and without what runs at exit."""
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")  # a progress bar hides the cursor
    os.write(2, b"fa4: interrupted\n")
    os._exit(EXIT_CODE)


@contextmanager
def handled() -> Iterator[None]:
    """Inside, Ctrl-C ends the process as this module says. Leaves a handler of others alone."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    hook = sys.unraisablehook
    signal.signal(signal.SIGINT, _strike)
    sys.unraisablehook = _unraisable
    try:
        yield
    except KeyboardInterrupt:
        end_now()
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _strike(number: int, frame: FrameType | None) -> None:
    """End at once in fragile code and the second time; otherwise let callers clean up."""
    signal.signal(signal.SIGINT, lambda *_: end_now())
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).lstrip("_").startswith(FRAGILE):
            end_now()
        frame = frame.f_back
    raise KeyboardInterrupt


def _unraisable(fault: Any) -> None:
    """An interrupt that struck in a destructor would otherwise be printed and forgotten."""
    if fault.exc_type is KeyboardInterrupt:
        end_now()
    sys.__unraisablehook__(fault)
