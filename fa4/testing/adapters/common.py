"""What the adapters share: finding a library, FlashAttention's way to write windows, refusals."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

from fa4.config import Window, normalize_window

SIXTEEN_BITS = ("float16", "bfloat16")


def need(module: str, attribute: str, name: str, install: str) -> Any:
    """The imported module; ValueError with the command if it, or what it must have, is missing."""
    try:
        found = importlib.import_module(module)
    except Exception as error:  # a broken installation may fail in any way
        if isinstance(error, ModuleNotFoundError) and error.name in (module, module.split(".")[0]):
            raise ValueError(f"{name} needs {module}: {install}") from error
        why = " ".join(str(error).split())
        raise ValueError(f"{name}: {module} is installed but cannot be used: {why}") from error
    if not hasattr(found, attribute):
        raise ValueError(f"{name} needs a {module} with {attribute}: {install}")
    return found


def flash_window(window_size: Window, causal: bool) -> tuple[int, int]:
    """(left, right) with -1 for "unbounded", as FlashAttention 2 and 3 and others write it.

    They have no way to write the window that begins or ends at another offset than the diagonal's.
    """
    left, right = normalize_window(window_size, causal)
    for side in (left, right):
        if side is not None and side < 0:
            raise NotImplementedError(f"a window side below 0 ({side}) means unbounded there")
    return (-1 if left is None else left, -1 if right is None else right)


def only_dtypes(x: Any, *allowed: str) -> None:
    """NotImplementedError for tensors of other types, by torch's names."""
    kind = str(x.dtype).removeprefix("torch.")
    if kind not in allowed:
        raise NotImplementedError(f"{kind} is none of {', '.join(allowed)}")


def one_head_dim(q: Any, v: Any) -> None:
    """NotImplementedError where V has another head dim than Q and K."""
    if q.shape[-1] != v.shape[-1]:
        raise NotImplementedError(
            f"one head dim for Q, K and V; got {q.shape[-1]} and {v.shape[-1]}"
        )


def refuses(pattern: str) -> Callable[[BaseException], bool]:
    """A predicate for `unsupported`: the errors by which a library says what it does not offer."""
    search = re.compile(pattern, re.IGNORECASE).search

    def unsupported(error: BaseException) -> bool:
        kinds = (RuntimeError, ValueError, AssertionError)
        return isinstance(error, kinds) and bool(search(str(error)))

    return unsupported


def takes(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that states the keywords of a function (q, k, v, **options)."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        kinds = inspect.Parameter
        parameters = [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in ("q", "k", "v")]
        parameters += [kinds(name, kinds.KEYWORD_ONLY) for name in names]
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return function

    return decorate
