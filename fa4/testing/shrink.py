"""From a failing case to a small one: what can be left out, is left out.

One field at a time is set to something simpler, as long as the case still fails; features first,
then layout, element type, sizes and values. What is left is needed: `needed_features` names it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from fa4.testing.case import Case

DEFAULTS = {field.name: field.default for field in fields(Case)}
FEATURES = ("sparse_block", "mask_mod", "score_mod", "sink", "softcap", "dropout_p", "descale",
            "num_splits", "tiles", "tau", "strided", "softmax_scale", "window_size", "causal",
            "group")  # fmt: skip
SIZES = frozenset({"batch", "heads_k", "group", "head_dim", "head_dim_v", "dtype", "seed"})
EVERYTHING = frozenset(DEFAULTS)

_LENGTHS = (1, 2, 3, 4, 5, 8, 17, 33, 64, 65, 129, 257, 513)
_DIMS = (8, 16, 24, 32, 64, 128)
_SIMPLER: dict[str, tuple[Any, ...]] = {
    "dtype": ("fp32", "bf16", "fp16"),
    "values": ("normal",),
    "batch": (1, 2),
    "heads_k": (1, 2),
    "group": (1, 2, 3, 4),
    "head_dim": _DIMS,
    "head_dim_v": _DIMS,
    "page_size": (16, 4, 1),
    "seed": (0, 1),
    "seqlen_q": _LENGTHS,
    "seqlen_k": _LENGTHS,
    "num_splits": (2,),
    "softcap": (1.0,),
    "sink": (0.0, 1.0),
    "dropout_p": (0.5,),
    "score_mod": ("alibi",),
    "mask_mod": ("stripes",),
}


def simpler(case: Case, allowed: frozenset[str] = EVERYTHING) -> Iterator[Case]:
    """Cases with one thing less, the largest steps first. Invalid ones are left out."""
    for name, changes in _changes(case):
        if name not in allowed:
            continue
        try:
            yield replace(case, **changes)
        except (TypeError, ValueError):  # a combination without a meaning
            continue


def _changes(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """(field, new values) of every step."""
    if case.is_varlen:
        yield from _layout_changes(case)
    for name in FEATURES:
        if getattr(case, name) != DEFAULTS[name]:
            yield name, {name: DEFAULTS[name]}
    left, right = case.window_size
    for window in ((None, right), (left, None), (0, right), (left, 0), (None, 0)):
        if case.window_size not in (window, (None, None)) and window != (None, None):
            yield "window_size", {"window_size": window}
    if case.head_dim != case.head_dim_v:
        yield "head_dim", {"head_dim": case.head_dim_v}
        yield "head_dim_v", {"head_dim_v": case.head_dim}
    for name, values in _SIMPLER.items():
        now = getattr(case, name)
        if now == DEFAULTS[name]:
            continue
        if now == 0:
            yield name, {name: DEFAULTS[name]}
        for value in values:
            if value == now:
                break
            if not isinstance(now, int) or isinstance(value, str) or value < now:
                yield name, {name: value}
        if name in ("seqlen_q", "seqlen_k", "seed") and now > 1:
            yield name, {name: now - 1}


def _layout_changes(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """Dense in place of sequences; fewer and shorter sequences; packed in place of pages."""
    for rows, keys in case.lengths:
        dense = {"layout": "dense", "lengths": (), "seqlen_q": rows, "seqlen_k": keys}
        yield "layout", dense | {"page_size": 16}
    if case.layout == "paged":
        yield "layout", {"layout": "packed", "page_size": 16}
    for at in range(len(case.lengths)):
        rest = case.lengths[:at] + case.lengths[at + 1 :]
        if rest:
            yield "lengths", {"lengths": rest}
        for side in (0, 1):
            now = case.lengths[at][side]
            for length in (0, *_LENGTHS):
                if length < now:
                    pair = list(case.lengths[at])
                    pair[side] = length
                    changed = (*case.lengths[:at], tuple(pair), *case.lengths[at + 1 :])
                    yield "lengths", {"lengths": changed}


def shrink(
    case: Case,
    fails: Callable[[Case], bool],
    *,
    allowed: frozenset[str] = EVERYTHING,
    seconds: float = 10.0,
) -> Case:
    """The smallest case found that still fails, within `seconds` (the case itself at least)."""
    deadline = time.monotonic() + seconds
    tried = {case}
    progress = True
    while progress:
        progress = False
        for candidate in simpler(case, allowed):
            if time.monotonic() > deadline:
                return case
            if candidate in tried:
                continue
            tried.add(candidate)
            if fails(candidate):
                case, progress = candidate, True
                break
    return case


def needed_features(case: Case) -> tuple[str, ...]:
    """What a shrunk case still has that the plainest one has not: the features at fault."""
    plain = ("seed", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "batch", "heads_k",
             "lengths", "page_size")  # fmt: skip
    found = []
    for field in fields(Case):
        value = getattr(case, field.name)
        if field.name not in plain and value != field.default:
            found.append(value if field.name in ("dtype", "layout") else field.name)
    if case.head_dim != case.head_dim_v:
        found.append("head_dim unlike head_dim_v")
    longest = max((max(lengths) for lengths in case.sequences), default=0)
    if longest > 64:
        found.append(f"length {longest}")
    return tuple(found)
