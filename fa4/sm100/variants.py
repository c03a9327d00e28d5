"""Which specs people ask for: the tuned choices for a head dimension, and the common variants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fa4.config import ForwardConfig
from fa4.hardware import B200, B300, Gpu
from fa4.sm100.forward.spec import ForwardSpec

GPUS = {gpu.arch: gpu for gpu in (B200, B300)}

COMMON_HEAD_DIMS = ((64, 64), (128, 128), (192, 128))


def tuned_spec(head_dim: int, head_dim_v: int, gpu: Gpu = B200, **features: Any) -> ForwardSpec:
    """The spec with FlashAttention-4's tuned arithmetic for its dims, mask and machine.

    features: further fields of ForwardSpec. B300's exponential units are twice as fast, so nothing
    is emulated there.
    """
    masked = any(features.get(name) for name in ("causal", "window_left", "window_right"))
    tuned = ForwardConfig.tuned(features.get("dtype", "bf16"), head_dim, masked)
    if gpu.arch == "sm_103a":
        tuned = ForwardConfig(rescale_threshold_log2=tuned.rescale_threshold_log2)
    features.setdefault("numerics", tuned)
    return ForwardSpec(head_dim=head_dim, head_dim_v=head_dim_v, gpu=gpu, **features)


def common_specs(gpu: Gpu = B200) -> Iterator[ForwardSpec]:
    """What most models call: the usual head dims, both element types, with and without mask."""
    for head_dim, head_dim_v in COMMON_HEAD_DIMS:
        for dtype in ("bf16", "fp16"):
            for causal in (False, True):
                yield tuned_spec(head_dim, head_dim_v, gpu, dtype=dtype, causal=causal)
