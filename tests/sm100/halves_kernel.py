"""The compiled kernel with halves, with the features of the forward kernel's tests."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest

from fa4.compiled.build import build as build_cached
from fa4.compiled.forward import compile_halves
from fa4.emulator.host.session import Session
from fa4.plan.halves import halves_numerics
from fa4.sm100.halves.spec import HalvesSpec
from tests.sm100.forward_kernel import KERNELS, SPECS, Kernel, spec_of

ALONE = ("window", "decode", "packed_window", "padded", "causal_mod")  # the others are pairs


def halves_spec(name: str) -> HalvesSpec:
    """One of `SPECS` with halves, of a pair or of one CTA."""
    other = spec_of(name)
    given = {item.name: getattr(other, item.name) for item in fields(other)}
    tuned = halves_numerics(other.dtype, other.head_dim, other.hides_last_keys, emulate=True)
    given |= {
        "numerics": replace(tuned, q_tiles=other.q_tiles),
        "cta_group": 1 if name in ALONE else 2,
    }
    return HalvesSpec(**given)


def build(trace: list[Any] | None = None, **features: Any) -> Kernel:
    """A kernel of a pair at head dim 128 that is not kept, with the steps that are traced."""
    dims = {"head_dim": 128, "head_dim_v": features.get("head_dim", 128)}
    numerics = halves_numerics("bf16", 128, False, emulate=True)
    spec = HalvesSpec(**{**dims, "numerics": numerics, "cta_group": 2, **features})
    return Kernel(spec, compile_halves(spec, trace=trace), Session(None, (), {}))


@cache
def kernel(name: str) -> Kernel:
    """One of `SPECS`, compiled once on this machine as long as no source changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FA4_CACHE", "1")
        patch.setenv("FA4_CACHE_DIR", str(KERNELS))
        return Kernel(halves_spec(name), build_cached(halves_spec(name)), Session(None, (), {}))


__all__ = ["ALONE", "SPECS", "build", "halves_spec", "kernel"]
