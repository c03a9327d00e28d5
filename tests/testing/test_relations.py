"""Relations between calls see a call that is unlike the others, in each output they compare."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fa4
from fa4.testing import verify
from fa4.testing.relations import RELATIONS

# What they judge is the output alone: values that they know, or the same call without the LSE.
OF_OUT_ALONE = {"constant_v", "convexity", "lse_requested"}


def change_every_second_call(change: Callable[..., Any]) -> Callable[..., Any]:
    """The reference, with `change` applied to (out, lse) of every second call; lse may be None."""
    calls = itertools.count()

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
            result = function(q, k, v, **options)
            if not next(calls) % 2:
                return result
            if not isinstance(result, tuple):
                return change(result, None)[0]
            return change(*result)

        attend.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return attend

    both = wrap(fa4.flash_attn_func)
    both.varlen = wrap(fa4.flash_attn_varlen_func)  # type: ignore[attr-defined]
    return both


def _scale_out(out: Any, lse: Any) -> Any:
    return (2 * out.astype(np.float32)).astype(out.dtype), lse


def _raise_lse(out: Any, lse: Any) -> Any:
    return out, None if lse is None else lse + np.float32(1)


def _status(function: Callable[..., Any], name: str) -> Any:
    (result,) = verify(function, only=[name], max_examples=10).results
    return result


@pytest.mark.parametrize("prop", RELATIONS, ids=lambda prop: prop.name)
def test_another_output_is_seen(prop: Any) -> None:
    """O twice as large in every second call."""
    assert _status(change_every_second_call(_scale_out), prop.name).status == "failed"


@pytest.mark.parametrize("prop", RELATIONS, ids=lambda prop: prop.name)
def test_another_lse_is_seen(prop: Any) -> None:
    """The LSE larger by 1 in every second call; O is right, and says nothing of it."""
    result = _status(change_every_second_call(_raise_lse), prop.name)
    assert result.status == ("passed" if prop.name in OF_OUT_ALONE else "failed")
    assert result.status == "passed" or "lse" in result.error


@pytest.mark.parametrize("prop", RELATIONS, ids=lambda prop: prop.name)
def test_an_lse_that_comes_with_some_calls_alone(prop: Any) -> None:
    """It is compared with none; whoever needs one says so in a line."""
    result = _status(change_every_second_call(lambda out, lse: (out, None)), prop.name)
    assert result.status == "passed" or "LSE" in result.error + result.reason


@pytest.mark.parametrize("prop", RELATIONS, ids=lambda prop: prop.name)
def test_without_an_lse_the_output_is_judged(prop: Any) -> None:
    """Of a function that has none: what needs it is not covered, the rest passes."""

    def attend(q: Any, k: Any, v: Any, *, causal: bool = False, softmax_scale: Any = None,
               window_size: Any = (None, None), num_splits: int = 1) -> Any:  # fmt: skip
        return fa4.flash_attn_func(
            q, k, v, causal=causal, softmax_scale=softmax_scale, window_size=window_size,
            num_splits=num_splits,
        )  # fmt: skip

    result = _status(attend, prop.name)
    assert result.status in ("passed", "not covered")
    needs_it = {"kv_concatenation", "lse_requested", "padding", "tile_invariance", "tau_invariance"}
    assert (result.status == "not covered") == (prop.name in needs_it)
