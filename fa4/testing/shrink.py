"""From a failing case to a small one: what can be left out, is left out.

One field at a time is set to something simpler, as long as the case still fails; features first,
then layout, element type, sizes and values. What is left is needed: `needed_features` names it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

from fa4.testing.backends import DTYPES, FP8
from fa4.testing.case import LAYOUTS, Case
from fa4.testing.walk import Walk

DEFAULTS = {field.name: field.default for field in fields(Case)}
FEATURES = ("dlse", "slack", "shared_prefix", "strides", "sparse_lists", "sparse_block",
            "mask_mod", "score_mod", "sink", "softcap", "dropout_p", "descale", "num_splits",
            "tiles", "tau", "strided", "softmax_scale", "window_size", "causal",
            "group")  # fmt: skip
SIZES = frozenset({"batch", "heads_k", "group", "head_dim", "head_dim_v", "dtype", "seed"})
EVERYTHING = frozenset(DEFAULTS)
DTYPE_NAMES = DTYPES + FP8

# Sizes, which are features only where one of them is needed.
SIZE_FIELDS = ("seed", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "batch", "heads_k",
                "lengths", "page_size")  # fmt: skip
_USUAL_DIM, _USUAL_LENGTH = 128, 64
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
    if isinstance(case, Walk):
        yield from case.simpler()  # type: ignore[misc]
        return
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
        yield "layout", dense | {"page_size": 16, "slack": "", "shared_prefix": False}
    if case.layout == "paged":
        yield "layout", {"layout": "packed", "page_size": 16, "shared_prefix": False}
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
    patience: float = 1.0,
) -> Case:
    """The smallest case found that still fails, within `seconds` (the case itself at least)."""
    return shrink_in_time(case, fails, allowed=allowed, seconds=seconds, patience=patience)[0]


def shrink_in_time(
    case: Case,
    fails: Callable[[Case], bool],
    *,
    allowed: frozenset[str] = EVERYTHING,
    seconds: float,
    patience: float,
) -> tuple[Case, bool]:
    """As `shrink`, and whether there was time to try every step from there.

    patience: how many times as long a busy machine may take, where calls run in this thread; 1
    where they do not, since the seconds are then those of a clock and not this thread's.
    """
    deadline, latest = time.thread_time() + seconds, time.monotonic() + patience * seconds
    tried = {case}
    progress = True
    while progress:
        progress = False
        for candidate in simpler(case, allowed):
            if time.monotonic() > latest or time.thread_time() > deadline:
                return case, False
            if candidate in tried:
                continue
            tried.add(candidate)
            if fails(candidate):
                case, progress = candidate, True
                break
    return case, True


def drop_features(
    case: Case,
    fails: Callable[[Case], bool],
    *,
    seconds: float,
    tries: int = 3,
) -> Case:
    """The case with every feature left out that it fails without, at its own sizes.

    tries: seeds for each, since a wrong output is not beyond its budget for all values.
    """
    deadline = time.thread_time() + seconds
    steps = _features_left_out(case)
    while (step := next(steps, None)) is not None and time.thread_time() < deadline:
        seeds = (case.seed, *(n for n in range(tries) if n != case.seed))[:tries]
        found = next((x for n in seeds if fails(x := replace(step, seed=n))), None)
        if found is not None:
            case, steps = found, _features_left_out(found)
    return case


def _features_left_out(case: Case) -> Iterator[Case]:
    """Cases with one feature less."""
    if case.dtype != "fp32":
        yield replace(case, dtype="fp32")
    for need in ("values", "layout", *FEATURES):
        now = getattr(case, need)
        if now == DEFAULTS[need]:
            continue
        others = {*FEATURES, "values", case.layout if need != "layout" else ""} - {need}
        fewer = keep_only(case, others)
        if fewer is not None and fewer != case:
            yield fewer


def plainest(case: Case, allowed: frozenset[str] = EVERYTHING) -> Case:
    """The case with nothing left of what may be taken away; the case itself where that has no
    meaning."""
    if isinstance(case, Walk):
        return case
    kept = {field.name: getattr(case, field.name) for field in fields(case)}
    try:
        return Case(**{name: kept[name] for name in kept.keys() - allowed})
    except (TypeError, ValueError):
        return case


def needed_features(case: Case) -> tuple[str, ...]:
    """What a shrunk case still has that the plainest one has not: the features at fault."""
    if isinstance(case, Walk):
        return case.needs
    found = []
    for field in fields(Case):
        value = getattr(case, field.name)
        if field.name not in SIZE_FIELDS and value != field.default:
            found.append(value if field.name in ("dtype", "layout") else field.name)
    if case.head_dim != case.head_dim_v:
        found.append("head_dim unlike head_dim_v")
    for name, count in (("batch", case.batch), ("heads_k", case.heads_k),
                        ("sequences", len(case.lengths))):  # fmt: skip
        found += [name] * (count > 1)
    for name, size, usual in (("head_dim", max(case.head_dim, case.head_dim_v), _USUAL_DIM),
                              ("length", longest(case), _USUAL_LENGTH)):  # fmt: skip
        found += [f"{name} {size}"] * (size > usual)
    return tuple(found)


def longest(case: Case) -> int:
    """The largest number of rows or keys of a sequence."""
    return max((max(lengths) for lengths in case.sequences), default=0)


def field_of(need: str) -> str:
    """The field of a `Case` that a feature of `needed_features` stands for."""
    name = need.partition(" ")[0]
    if name in DTYPE_NAMES:
        return "dtype"
    if name in LAYOUTS:
        return "layout"
    return {"length": "seqlen_k", "sequences": "lengths"}.get(name, name)


def one_longer(case: Case) -> Case:
    """The case with a row and a key more in every sequence."""
    lengths = tuple((rows + 1, keys + 1) for rows, keys in case.lengths)
    return replace(case, lengths=lengths, seqlen_q=case.seqlen_q + 1, seqlen_k=case.seqlen_k + 1)


def keep_only(case: Case, needs: Iterable[str]) -> Case | None:
    """The case with these features of `needed_features` alone, at its own sizes; None where it has
    not all of them or that has no meaning.

    A dense problem in place of several sequences is that of the longest.
    """
    kept = {need.partition(" ")[0] for need in needs}
    if kept & {*DTYPE_NAMES} - {case.dtype} or kept & {*LAYOUTS} - {case.layout}:
        return None
    changes: dict[str, Any] = {
        name: DEFAULTS[name]
        for name in (*FEATURES, "values")
        if name not in kept and getattr(case, name) != DEFAULTS[name]
    }
    if case.is_varlen and case.layout not in kept:
        rows, keys = max(case.lengths, key=lambda lengths: (min(lengths), max(lengths)))
        changes |= {"layout": "dense", "lengths": (), "seqlen_q": rows, "seqlen_k": keys,
                    "page_size": 16, "slack": "", "shared_prefix": False}  # fmt: skip
    try:
        return replace(case, **changes)
    except (TypeError, ValueError):
        return None
