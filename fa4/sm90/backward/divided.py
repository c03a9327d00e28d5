"""What a call wants of Hopper's backward kernels, beside what it wants of all."""

from __future__ import annotations

from dataclasses import dataclass

from fa4.kit.features import BackwardFeatures


@dataclass(frozen=True, kw_only=True)
class DividedFeatures(BackwardFeatures):
    """key_parts: the query heads that share keys are divided over CTAs; dK and dV are given in
    float32, with a head for each part (`fa4.sm90.backward.parts`)."""

    key_parts: bool = False
