"""What torch chooses by the kind of a device, for tensors that only say that they are on a GPU.

The dispatcher and autocast look at the memory itself, which is the CPU's. So what a program
registers for CUDA is registered for the CPU, too, and `autocast("cuda")` is the CPU's.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

from fa4.emulator.host.patches import Replacements, replaced

_KEYS = {"CUDA": "CPU", "AutogradCUDA": "AutogradCPU", "AutocastCUDA": "AutocastCPU"}


def _here(device_type: Any) -> Any:
    return "cpu" if device_type == "cuda" else device_type


def autocasts(torch: Any) -> Replacements:
    """Of `torch.autocast` and the questions that `custom_fwd` asks."""
    owner = torch.amp.autocast_mode.autocast
    begin, enabled, dtype_of = owner.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    @functools.wraps(begin)
    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda" and dtype is None:
            dtype = dtype_of("cuda")
        begin(self, _here(device_type), dtype, *args, **kwargs)

    yield owner, "__init__", init
    yield torch, "is_autocast_enabled", lambda device_type="cuda": enabled(_here(device_type))
    yield torch, "get_autocast_dtype", lambda device_type: dtype_of(_here(device_type))


def _within(mode: Any, fn: Any) -> Any:
    if not callable(fn):
        return fn

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return fn(*args, **kwargs)

    return called


@contextlib.contextmanager
def registrations(torch: Any, mode: Any) -> Iterator[None]:
    """Inside, `Library.impl(op, function, "CUDA")` counts for CPU tensors, as long as the library
    lives and at most to the end. mode: in which the functions run, as torch leaves it to call them.
    """
    owner = torch.library.Library
    original = owner.impl
    mirrors: list[weakref.ref[Any]] = []

    @functools.wraps(original)
    def impl(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **kwargs: Any) -> Any:
        done = original(self, op_name, fn, dispatch_key, **kwargs)
        key = _KEYS.get(dispatch_key or self.dispatch_key)
        if key is not None:
            mirror = vars(self).get("_fa4_mirror")
            if mirror is None:
                mirror = self._fa4_mirror = owner(self.ns, "IMPL")
                mirrors.append(weakref.ref(mirror))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that it replaces the CPU's
                original(mirror, op_name, _within(mode, fn), key, **kwargs)
        return done

    try:
        with replaced(owner, "impl", impl):
            yield
    finally:
        for known in mirrors:
            if (mirror := known()) is not None:
                mirror._destroy()
