"""This package's own compiled kernels, on the GPU that each is for.

Modifiers are CuTe-DSL code compiled into the kernel, the kit's are Python on arrays, so that they
are not covered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import fa4
from fa4.call.choose import find_gpu

_COMPILED = "modifiers are compiled into the kernel, the kit's are Python on arrays"
_REASONS = dict.fromkeys(("score_mod", "mask_mod", "aux_tensors"), _COMPILED)
# As Hopper's tensor cores add (lab/hardware/wgmma_sums).
_NUMERICS = {"sm90": {"fp8_sums": "limited"}}


def make(name: str, device: str | None) -> Callable[..., Any]:
    """The back end's function on tensors; `name` is "fa4-" and the implementation's name."""
    impl = name.removeprefix("fa4-")
    found = find_gpu(impl)
    if not found.device:
        raise ValueError(f"{name} needs a CUDA device that it is for: {found.why}")
    attend, varlen = (
        _of_implementation(function, impl)
        for function in (fa4.flash_attn_func, fa4.flash_attn_varlen_func)
    )
    attend.__name__ = name
    attend.device = device or found.device  # type: ignore[attr-defined]
    attend.varlen = varlen  # type: ignore[attr-defined]
    attend.not_covered = _REASONS  # type: ignore[attr-defined]
    attend.numerics = _NUMERICS.get(impl.removeprefix("emulator_"), {})  # type: ignore[attr-defined]
    attend.unsupported = NotImplementedError  # type: ignore[attr-defined]
    return attend


def _of_implementation(function: Callable[..., Any], impl: str) -> Callable[..., Any]:
    """The function with `impl` chosen, and its signature without the options not covered."""

    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return function(q, k, v, impl=impl, **options)

    signature = inspect.signature(function)
    left_out = {"impl", "score_mod_bwd", *_REASONS}
    kept = [value for key, value in signature.parameters.items() if key not in left_out]
    attend.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return attend
