"""The specs that `fa4 compile` makes of its options, and the names of their files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fa4.compiled.build import Spec

KERNELS = ("forward", "backward")
# What one kernel has and the other has not: its field, its option, its default.
OWN_OPTIONS: dict[str, tuple[tuple[str, str, Any], ...]] = {
    "forward": (
        ("group", "--group", 1), ("lse", "--no-lse", True), ("scheduler", "--scheduler", "static"),
    ),
    "backward": (
        ("deterministic", "--any-order", True), ("lse_gradient", "--lse-gradient", False),
        ("out_residual", "--out-residual", False),
    ),
}  # fmt: skip


def take_own(kernel: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `given` that are this kernel's. Raises ValueError for an option of another."""
    for other, options in OWN_OPTIONS.items():
        for name, option, default in options:
            if other != kernel and given[name] != default:
                raise ValueError(f"{option} is an option of the {other} kernel; got {kernel}")
    return {name: given[name] for name, _, _ in OWN_OPTIONS[kernel]}


def window_features(window: str, causal: bool) -> dict[str, bool]:
    """The fields of a spec that --window stands for; a causal mask is the right side itself."""
    allowed = {"": (), "left": ("left",), "right": ("right",), "both": ("left", "right")}
    if window not in allowed:
        raise ValueError(f"--window must be left, right or both; got {window!r}")
    return {f"window_{side}": True for side in allowed[window] if not (causal and side == "right")}


def find_spec(
    kernel: str, arch: str, head_dim: int, head_dim_v: int, features: dict[str, Any]
) -> Spec:
    """The (tuned) spec of the options; ValueError if they make no kernel for this machine."""
    from fa4.compiled.variants import GPUS, tuned_spec
    from fa4.config import require
    from fa4.sm100.backward.spec import BackwardSpec

    if arch not in GPUS:
        raise ValueError(f"arch must be one of {', '.join(GPUS)}; got {arch!r}")
    for name, dim in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        require(dim > 0 and dim % 8 == 0, f"{name} must be a positive multiple of 8", dim)
    gpu = GPUS[arch]
    if kernel == "backward":
        spec: Spec = BackwardSpec(head_dim=head_dim, head_dim_v=head_dim_v, gpu=gpu, **features)
    else:
        spec = tuned_spec(head_dim, head_dim_v, gpu, **features)
    _ = spec.plan  # refuses what does not fit, before anything is compiled
    return spec


def file_stem(kernel: str, spec: Spec, arch: str) -> str:
    """A name such as forward-128-bf16-causal-sm_100a."""
    from fa4.compiled.identity import describe

    skipped = {"head_dim", "head_dim_v", "dtype", "numerics", "gpu", "lse", "deterministic"}
    dims = f"{spec.head_dim}" + (f"x{spec.head_dim_v}" * (spec.head_dim_v != spec.head_dim))
    words = [
        name if value is True else f"{name}_{value}"
        for name, value in describe(spec).items()
        if name not in skipped
    ]
    words += ["no_lse"] if not getattr(spec, "lse", True) else []
    words += ["any_order"] if not getattr(spec, "deterministic", True) else []
    return "-".join([kernel, dims, spec.dtype, *words, arch])
