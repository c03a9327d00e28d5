"""Oracle and budget of a call, computed once for all of the faults that are judged on it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from fa4.testing import budget, metamorphic, state, statistics
from fa4.testing.inputs import Inputs

_remembered: dict[str, Any] = {}


def _feed(digest: Any, value: Any) -> None:
    """Add a value to a digest; functions, of which there are few, by name."""
    if isinstance(value, np.ndarray):
        digest.update(repr((value.shape, value.dtype)).encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, (tuple, list)):
        for part in value:
            _feed(digest, part)
    elif hasattr(value, "__dataclass_fields__"):
        _feed(digest, [getattr(value, name) for name in value.__dataclass_fields__])
    else:
        digest.update((getattr(value, "__qualname__", None) or repr(value)).encode())


def key_of(*values: Any) -> str:
    """The same for calls with the same arrays and options."""
    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        _feed(digest, value)
    return digest.hexdigest()


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    def remember(inputs: Inputs, *rest: Any, **keywords: Any) -> Any:
        key = key_of(
            function, inputs.sequences, sorted(inputs.options.items(), key=lambda x: x[0]), rest,
            sorted(keywords.items()),
        )  # fmt: skip
        if key not in _remembered:
            _remembered[key] = function(inputs, *rest, **keywords)
        return dict(_remembered[key])

    return remember


@contextmanager
def remembered_budgets() -> Iterator[None]:
    """What is expected of a call is computed the first time only; nothing else changes.

    What earlier uses remembered is forgotten.
    """
    _remembered.clear()
    forward, gradients = _once(budget.expect_forward), _once(budget.expect_gradients)
    with (
        patch.object(budget, "expect_forward", forward),
        patch.object(metamorphic, "expect_forward", forward),
        patch.object(statistics, "expect_forward", forward),
        patch.object(budget, "expect_gradients", gradients),
        patch.object(statistics, "expect_gradients", gradients),
        patch.object(state, "expect_gradients", gradients),
    ):
        yield
