"""Kernels of every design that compiles: features of the forward pass, and what is beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fa4.compiled.variants import (
    COMMON_HEAD_DIMS,
    tuned_halves_spec,
    tuned_warpgroup_spec,
)
from fa4.masks import Chunked
from fa4.sm90.backward.spec import WarpgroupBackwardSpec
from fa4.sm90.wide.spec import WideBackwardSpec
from fa4.sm100.backward.spec import BackwardSpec
from lab.benchmarks import feature_kernels

D64, D128, D192 = COMMON_HEAD_DIMS
D256 = (256, 256)
PACKED, WINDOW = feature_kernels.PACKED, feature_kernels.WINDOW
USED = {"used_q": True, "used_k": True}
# What a gradient may have beside a mask, each by itself.
GRADIENTS: dict[str, dict[str, Any]] = {
    "window": WINDOW,
    "chunks": {"mask": Chunked(1024)},
    "packed": PACKED,
    "used": USED,
    "softcap": {"softcap": True},
    "sink, gradient of LSE": {"sink": True, "lse_gradient": True},
    "residual": {"out_residual": True},
    "fp16": {"dtype": "fp16"},
}


def specs() -> Iterator[tuple[str, Any]]:
    """(name, spec) of each; names are unique."""
    yield from feature_kernels.specs()
    yield from _halves()
    yield from _blackwell_gradients()
    yield from _hopper()
    yield from _hopper_gradients()


def _halves() -> Iterator[tuple[str, Any]]:
    for causal in (False, True):
        for pair in (1, 2):
            name = f"halves, {'causal' if causal else 'full'}, {pair} CTA"
            yield name, tuned_halves_spec(*D128, causal=causal, cta_group=pair)
    yield "halves, packed, window", tuned_halves_spec(*D128, **PACKED, **WINDOW)
    yield "halves, softcap, sink", tuned_halves_spec(*D128, softcap=True, sink=True)


def _blackwell_gradients() -> Iterator[tuple[str, Any]]:
    for dims, groups in ((D64, (1,)), (D128, (1, 2)), (D192, (2,))):
        for group in groups:
            plain = BackwardSpec(head_dim=dims[0], head_dim_v=dims[1], cta_group=group)
            for causal in (False, True):
                for ordered in (False, True):
                    name = f"gradients, {dims}, {group} CTA, causal {causal}, ordered {ordered}"
                    yield name, replace(plain, causal=causal, deterministic=ordered)
    plain = BackwardSpec(head_dim=128, head_dim_v=128)
    for name, features in GRADIENTS.items():
        yield f"gradients, {name}", replace(plain, **features)


def _hopper() -> Iterator[tuple[str, Any]]:
    for dims in (D64, D128, D192, D256):
        for causal in (False, True):
            name = f"hopper, {dims}, causal {causal}"
            yield name, tuned_warpgroup_spec(*dims, causal=causal)
    for name, features in {
        "window": WINDOW, "packed, causal": {**PACKED, "causal": True}, "used": USED,
        "8 heads packed, sink": {"group": 8, "sink": True}, "softcap": {"softcap": True},
        "split": {"split": True, "scheduler": "naive"}, "queue": {"scheduler": "queue"},
        "e4m3": {"dtype": "e4m3", "descale": "qkv"},
        "chunks": {"mask": Chunked(1024)},
    }.items():  # fmt: skip
        yield f"hopper, {name}", tuned_warpgroup_spec(*D128, **features)


def _hopper_gradients() -> Iterator[tuple[str, Any]]:
    for dims in (D64, D128):
        plain = WarpgroupBackwardSpec(head_dim=dims[0], head_dim_v=dims[1])
        for causal in (False, True):
            for ordered in (False, True):
                name = f"hopper gradients, {dims}, causal {causal}, ordered {ordered}"
                yield name, replace(plain, causal=causal, deterministic=ordered)
    for dims in (D192, D256):
        for causal in (False, True):
            name = f"wide gradients, {dims}, causal {causal}"
            yield name, WideBackwardSpec(head_dim=dims[0], head_dim_v=dims[1], causal=causal)
    narrow = WarpgroupBackwardSpec(head_dim=128, head_dim_v=128)
    wide = WideBackwardSpec(head_dim=256, head_dim_v=256)
    for name, features in GRADIENTS.items():
        yield f"hopper gradients, {name}", replace(narrow, **features)
        yield f"wide gradients, {name}", replace(wide, **features)
