"""Calls for guarded memory: forms in which each two choices meet, and tensors of any strides.

A form is a choice of every level: of 16-bit types any pass, of 8-bit types the forward pass. Each
form is called with several sets of sequences, empty ones among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np

from fa4.compiled.support import BackwardCall, ForwardCall
from lab.hardware.warpgroup_forward.random_launches import Drawn, describe, element_type

FORWARD, PARTS, GRADIENTS, FIXED = "forward", "parts", "gradients", "gradients in order"
WORKS = (FORWARD, PARTS, GRADIENTS, FIXED)
WINDOWS = ((None, None), (None, 0), (40, 0), (100, 30), (None, 25), (0, 0))
HEADS = ((4, 4), (8, 2), (6, 2), (5, 1), (7, 7))
STRIDES = ("contiguous", "wide rows", "fused", "expanded heads")
Levels = Mapping[str, tuple[Any, ...]]
LEVELS: Levels = {
    "dims": (
        (64, 64), (128, 128), (96, 96), (80, 80), (192, 128), (256, 256), (72, 40), (64, 256),
        (216, 216),
    ),
    "heads": HEADS,
    "window": WINDOWS,
    "packed": (False, True),
    "used": (False, True),
    "sink": (False, True),
    "softcap": (0.0, 20.0),
    "dtype": ("bf16", "fp16"),
    "strides": STRIDES,
    "work": WORKS,
}  # fmt: skip
NARROW_LEVELS: Levels = {
    **LEVELS,
    "dims": ((64, 64), (128, 128), (96, 96), (192, 128), (208, 208), (256, 256)),
    "dtype": ("e4m3", "e5m2"),
    "work": (FORWARD,),
    "descale": ("", "qkv", "v"),
}
CANDIDATES = 24
PART_COUNTS = (2, 3, 7)
EMPTY_SHARE = 0.25  # of a packed call's sequences have no queries; as many have no keys


class GuardedCall(NamedTuple):
    """A call, how its tensors lie in memory, and what is asked of it.

    parts: of the keys; 0 for the kernel's choice. descale: the letters of the tensors with factors.
    """

    call: Drawn
    strides: str
    work: str = FORWARD
    parts: int = 0
    descale: str = ""

    @property
    def differentiates(self) -> bool:
        """Are gradients asked for?"""
        return self.work in (GRADIENTS, FIXED)

    def kernels(self) -> list[ForwardCall]:
        """The passes, as the choice of kernels sees them; none of a call without rows."""
        forward = replace(describe(self.call), num_splits=self.parts, descale=self.descale)
        if forward.is_empty:
            return []
        if not self.differentiates:
            return [forward]
        fixed = self.work == FIXED
        return [forward, BackwardCall(**vars(forward), deterministic=fixed, lse_gradient=True)]


def pairs_of(form: dict[str, Any]) -> set[tuple[Any, ...]]:
    """Each two choices of a form."""
    return set(combinations(sorted(form.items()), 2))


def all_pairs(levels: Levels = LEVELS) -> set[tuple[Any, ...]]:
    """Each two choices that can be made."""
    return {
        ((a, x), (b, y))
        for a, b in combinations(sorted(levels), 2)
        for x, y in product(levels[a], levels[b])
    }


def draw_forms(rng: np.random.Generator, levels: Levels = LEVELS) -> list[dict[str, Any]]:
    """Forms in which each two choices meet: of some random ones, always the one with most new."""
    missing, forms = all_pairs(levels), []
    while missing:
        listed = sorted(missing, key=repr)
        candidates = [_meet(rng, levels, listed) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda form: len(pairs_of(form) & missing))
        missing -= pairs_of(best)
        forms.append(best)
    return forms


def _meet(
    rng: np.random.Generator, levels: Levels, missing: list[tuple[Any, ...]]
) -> dict[str, Any]:
    """A random form with one of the missing pairs."""
    form = {name: found[rng.integers(len(found))] for name, found in levels.items()}
    return form | dict(missing[rng.integers(len(missing))])


def draw_calls(seed: int, count: int, longest: int) -> list[GuardedCall]:
    """Every form in turn, each time with other sequences."""
    rng = np.random.default_rng(seed)
    forms = draw_forms(rng) + draw_forms(rng, NARROW_LEVELS)
    calls = []
    for number in range(count):
        form = dict(forms[number % len(forms)])
        strides, work = form.pop("strides"), form.pop("work")
        descale = form.pop("descale", "")
        parts = int(rng.choice(PART_COUNTS)) if work == PARTS else 0
        drawn = Drawn(lengths=_lengths(rng, form, longest), **form)
        if drawn.dtype in NARROW_LEVELS["dtype"]:  # their keys are not divided
            parts = 1
        calls.append(GuardedCall(drawn, strides, work, parts, descale))
    return calls


def _lengths(
    rng: np.random.Generator, form: dict[str, Any], longest: int
) -> tuple[tuple[int, int], ...]:
    most = int(rng.choice([4, 70, 300, 1100]))
    most, count = min(most, longest), int(rng.integers(1, 6))
    if not form["packed"]:
        return ((int(rng.integers(1, most)), int(rng.integers(1, most))),) * count
    sizes = rng.integers(1, most, (count, 2)) * (rng.random((count, 2)) >= EMPTY_SHARE)
    if not sizes[:, 0].any():
        sizes[int(rng.integers(count)), 0] = 1
    if not sizes[:, 1].any():
        sizes[int(rng.integers(count)), 1] = 1
    return tuple((int(rows), int(keys)) for rows, keys in sizes)


def make_tensors(strides: str, drawn: Drawn, call: ForwardCall, place: str) -> tuple[Any, Any, Any]:
    """Q, K and V as `strides` says; K first, so that it may begin a segment of an allocator.

    What lies beside views of wide rows is NaN.
    """
    import torch

    kind = element_type(drawn.dtype)
    dim, dim_v = drawn.dims

    def tensor(rows: int, heads: int, dim: int) -> torch.Tensor:
        shape = (rows, heads, dim) if drawn.packed else (call.batch, rows, heads, dim)
        if strides != "wide rows":
            return torch.randn(shape, device=place).to(kind)
        wide = (*shape[:-2], heads + 1, dim + 16)
        values = torch.full(wide, torch.nan, device=place).to(kind)[..., :heads, :dim]
        return values.copy_(torch.randn(shape, device=place).to(kind))

    if strides == "expanded heads":
        k, v = (
            tensor(call.rows_k, 1, width).expand(
                *(-1,) * (1 if drawn.packed else 2), call.heads_k, -1
            )
            for width in (dim, dim_v)
        )
    elif strides == "fused":
        k, v = tensor(call.rows_k, call.heads_k, dim + dim_v).split((dim, dim_v), -1)
    else:
        k, v = (tensor(call.rows_k, call.heads_k, width) for width in (dim, dim_v))
    return tensor(call.rows_q, call.heads_q, dim), k, v
