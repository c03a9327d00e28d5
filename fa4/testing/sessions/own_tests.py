"""Stateful properties as tests of one's own suite.

TestCache = session_test("cache_fork", "mypackage.module:attention")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import settings

from fa4.testing.backends import Backend, NotCovered, load_backend
from fa4.testing.properties import find_properties


def session_test(name: str, backend: str | Callable[..., Any] | Backend, **how: Any) -> type[Any]:
    """The TestCase of a stateful property of `fa4 verify`, for pytest or unittest.

    how: settings of Hypothesis, such as max_examples and stateful_step_count. Raises ValueError for
    a property that has no steps, and NotCovered for what the back end does not offer.
    """
    (prop,) = find_properties([name])
    if prop.machine is None:
        raise ValueError(
            f"{name!r} is no property with steps; those are cache_*, replay_* and so on"
        )
    loaded = load_backend(backend)
    for feature in sorted(prop.needs):
        reason = loaded.reason_missing(feature)
        if reason is not None:
            raise NotCovered(feature, reason)
    offered = tuple(dtype for dtype in prop.dtypes if loaded.reason_missing(dtype) is None)
    machine = prop.machine(loaded, offered)
    test = machine.TestCase
    test.settings = settings(**({"deadline": None, "max_examples": 20} | how))
    return test
