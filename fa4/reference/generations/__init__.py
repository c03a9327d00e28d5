"""Standard attention and FlashAttention 1 to 4 side by side, with the same counters.

    GENERATIONS              name -> Generation, oldest first
    run_generation           forward pass of a batch, in any layout of `fa4.reference`
    run_generation_backward  gradients from the saved out and lse, where the generation has them

Each generation is one file: the paper's loops over tiles, with the paper's own HBM traffic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fa4.config import BackwardConfig, ForwardConfig, require_int
from fa4.dtypes import dtype_name
from fa4.reference import backward, forward
from fa4.reference.generations import flash1, flash2, flash3, flash3_fp8, standard
from fa4.reference.generations.flash1 import A100_SRAM_BYTES, Flash1Config
from fa4.reference.generations.flash2 import Flash2Config
from fa4.reference.generations.flash3 import Flash3Config
from fa4.reference.generations.flash3_fp8 import Flash3Fp8Config
from fa4.reference.generations.standard import StandardConfig
from fa4.reference.sequences import (
    BackwardResult,
    ForwardResult,
    Packing,
    SavedForward,
    SequenceGradients,
    SequenceOutput,
    run_backward,
    run_forward,
)
from fa4.reference.spec import Attention

__all__ = [
    "A100_SRAM_BYTES",
    "GENERATIONS",
    "Flash1Config",
    "Flash2Config",
    "Flash3Config",
    "Flash3Fp8Config",
    "Generation",
    "StandardConfig",
    "run_generation",
    "run_generation_backward",
]


class Setting(NamedTuple):
    """What default configs depend on: element type, d, dv, mask, on-chip memory."""

    dtype: str
    itemsize: int
    head_dim: int
    head_dim_v: int
    causal: bool
    sram_bytes: int


# (sequence, spec, config) -> output, and (sequence, upstream, spec, config) -> gradients. Each
# kernel takes its own config type.
ForwardFunction = Callable[..., SequenceOutput]
BackwardFunction = Callable[..., SequenceGradients]
Configure = Callable[[Setting], Any]


@dataclass(frozen=True)
class Generation:
    """One algorithm: its kernels on a single sequence, their config types and default choices."""

    name: str
    title: str
    forward: ForwardFunction
    config_type: type
    configure: Configure
    backward: BackwardFunction | None
    backward_config_type: type
    configure_backward: Configure


def _flash1_config(setting: Setting) -> Flash1Config:
    return Flash1Config(sram_bytes=setting.sram_bytes)


def _flash2_config(setting: Setting) -> Flash2Config:
    head_dims = setting.head_dim + setting.head_dim_v
    return Flash2Config.for_sram(setting.sram_bytes, head_dims, setting.itemsize)


def _flash4_config(setting: Setting) -> ForwardConfig:
    return ForwardConfig.tuned(setting.dtype, setting.head_dim, setting.causal)


def _same_config(
    name: str,
    title: str,
    kernels: tuple[ForwardFunction, BackwardFunction | None],
    config_type: type,
    configure: Configure,
) -> Generation:
    """A generation whose backward pass takes the config of its forward pass."""
    return Generation(
        name, title, kernels[0], config_type, configure, kernels[1], config_type, configure
    )


GENERATIONS: dict[str, Generation] = {
    generation.name: generation
    for generation in (
        _same_config(
            "standard", "standard attention",
            (standard.forward_sequence, standard.backward_sequence),
            StandardConfig, lambda _: StandardConfig(),
        ),
        _same_config(
            "fa1", "FlashAttention (2022)",
            (flash1.forward_sequence, flash1.backward_sequence),
            Flash1Config, _flash1_config,
        ),
        _same_config(
            "fa2", "FlashAttention-2 (2023)",
            (flash2.forward_sequence, flash2.backward_sequence),
            Flash2Config, _flash2_config,
        ),
        _same_config(
            "fa3", "FlashAttention-3 (2024)",
            (flash3.forward_sequence, flash3.backward_sequence),
            Flash3Config, lambda _: Flash3Config(),
        ),
        _same_config(
            "fa3-fp8", "FlashAttention-3, FP8",
            (flash3_fp8.forward_sequence, None),
            Flash3Fp8Config, lambda _: Flash3Fp8Config(),
        ),
        Generation(
            "fa4", "FlashAttention-4 (2026)",
            forward.forward_sequence, ForwardConfig, _flash4_config,
            backward.backward_sequence, BackwardConfig, lambda _: BackwardConfig(),
        ),
    )
}  # fmt: skip


def _generation(name: str) -> Generation:
    if name not in GENERATIONS:
        raise ValueError(f"generation must be one of {', '.join(GENERATIONS)}; got {name!r}")
    return GENERATIONS[name]


def _check_config(name: str, config: Any, wanted: type) -> None:
    if not isinstance(config, wanted):
        raise TypeError(f"config of {name} must be a {wanted.__name__}; got {config!r}")


def _setting(q: np.ndarray, v: np.ndarray, spec: Attention, sram_bytes: int) -> Setting:
    require_int("sram_bytes", sram_bytes, 1)
    return Setting(
        dtype=dtype_name(q.dtype),
        itemsize=q.dtype.itemsize,
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        causal=spec.window[1] == 0,
        sram_bytes=sram_bytes,
    )


def run_generation(
    name: str,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    spec: Attention,
    *,
    sram_bytes: int = A100_SRAM_BYTES,
    packing: Packing | None = None,
    config: Any = None,
) -> ForwardResult:
    """Forward pass of a batch by one generation.

    q (B, Sq, Hq, d) or (total, Hq, d), k and v alike with Hk heads. sram_bytes sizes the tiles of
    fa1 and fa2; the others' are fixed. `config` replaces the generation's own choice and must be of
    its config type (else TypeError). Raises ValueError for an unknown name and for what the
    generation cannot do.
    """
    generation = _generation(name)
    if config is None:
        config = generation.configure(_setting(q, v, spec, sram_bytes))
    _check_config(name, config, generation.config_type)
    kernel = partial(generation.forward, spec=spec, config=config)
    return run_forward(kernel, q, k, v, packing or Packing())


def run_generation_backward(
    name: str,
    inputs: tuple[np.ndarray, np.ndarray, np.ndarray],
    saved: SavedForward,
    spec: Attention,
    *,
    sram_bytes: int = A100_SRAM_BYTES,
    packing: Packing | None = None,
    config: Any = None,
) -> BackwardResult:
    """Gradients of (q, k, v) and the sink by one generation, from its out and lse.

    Raises ValueError for fa3-fp8, which has no backward pass, and as `run_generation` does.
    """
    generation = _generation(name)
    if generation.backward is None:
        raise ValueError(f"{name} has no backward pass: the paper gives none; use fa3")
    q, _, v = inputs
    if config is None:
        config = generation.configure_backward(_setting(q, v, spec, sram_bytes))
    _check_config(name, config, generation.backward_config_type)
    kernel = partial(generation.backward, spec=spec, config=config)
    return run_backward(kernel, inputs, saved, packing or Packing(), spec.sink)
