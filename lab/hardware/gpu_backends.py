"""Back ends of `verify_gpu.py` that leave out what is known to fail, to see what lies behind it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fa4.testing import load_backend


def equal_head_dims(function: Callable[..., Any], values_at: int, keys_at: int) -> Any:
    """The function for head_dim_v equal to head_dim; other shapes are not offered."""

    @functools.wraps(function)
    def attend(*arrays: Any, **options: Any) -> Any:
        if arrays[values_at].shape[-1] != arrays[keys_at].shape[-1]:
            raise NotImplementedError("left out: head_dim_v unlike head_dim")
        return function(*arrays, **options)

    return attend


def _flash_attn_4() -> Any:
    backend = load_backend("flash-attn-4")
    attend = equal_head_dims(backend.function, 2, 1)
    attend.varlen = equal_head_dims(backend.varlen, 2, 1)
    attend.backward = equal_head_dims(backend.backward, 3, 2)
    attend.not_covered, attend.unsupported = backend.not_covered, backend.unsupported
    attend.uses_cuda = True
    return attend


def __getattr__(name: str) -> Any:
    """`flash_attn_4`, made when it is asked for: importing this file needs no GPU."""
    if name != "flash_attn_4":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _flash_attn_4()
