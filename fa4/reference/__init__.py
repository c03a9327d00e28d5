"""NumPy reference: FlashAttention-4 step by step. What is right says `fa4.oracle`.

`attention_forward` and `attention_backward` run a batch in any layout. The algorithms themselves
work on one sequence each: `forward`, `backward`, and `generations` for FlashAttention 1 to 4 side
by side.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from fa4.config import BackwardConfig, ForwardConfig
from fa4.reference import backward, forward
from fa4.reference.counters import Counters
from fa4.reference.sequences import (
    BackwardResult,
    ForwardResult,
    Packing,
    SavedForward,
    run_backward,
    run_forward,
)
from fa4.reference.spec import Attention, BlockSparseTensors, Descale, Dropout, SeqlenInfo

__all__ = [
    "Attention",
    "BackwardResult",
    "BlockSparseTensors",
    "Counters",
    "Descale",
    "Dropout",
    "ForwardResult",
    "Packing",
    "SavedForward",
    "SeqlenInfo",
    "attention_backward",
    "attention_forward",
]


def attention_forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    spec: Attention,
    config: ForwardConfig,
    *,
    packing: Packing | None = None,
) -> ForwardResult:
    """FlashAttention-4's forward pass of a batch.

    q (B, Sq, Hq, d) or (total, Hq, d); k, v alike with Hk heads, or pages. Results have the input
    type (bf16 for FP8) and a float32 LSE, natural log.
    """
    kernel = partial(forward.forward_sequence, spec=spec, config=config)
    return run_forward(kernel, q, k, v, packing or Packing())


def attention_backward(
    inputs: tuple[np.ndarray, np.ndarray, np.ndarray],
    saved: SavedForward,
    spec: Attention,
    config: BackwardConfig,
    *,
    packing: Packing | None = None,
) -> BackwardResult:
    """Gradients of (q, k, v) and the sink, by FlashAttention-4's backward pass."""
    kernel = partial(backward.backward_sequence, spec=spec, config=config)
    return run_backward(kernel, inputs, saved, packing or Packing(), spec.sink)
