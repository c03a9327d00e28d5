"""NumPy reference: the float64 oracle and FlashAttention-4 step by step.

`attention_forward` and `attention_backward` run a batch in any layout; `exact=True` selects the
oracle. The algorithms themselves work on one sequence each: `naive`, `forward`, `backward`, and
`generations` for FlashAttention 1 to 4 side by side.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from fa4.config import BackwardConfig, ForwardConfig
from fa4.reference import backward, forward, naive
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
    *,
    packing: Packing | None = None,
    config: ForwardConfig | None = None,
) -> ForwardResult:
    """Attention of a batch: FA4 mode with a `config`, the float64 oracle without one.

    q (B, Sq, Hq, d) or (total, Hq, d); k, v alike with Hk heads, or pages. The oracle's results
    stay float64; FA4's have the input type (bf16 for FP8) and a float32 LSE, natural log.
    """
    packing = packing or Packing()
    if config is None:
        return run_forward(partial(naive.forward_sequence, spec=spec), q, k, v, packing, exact=True)
    kernel = partial(forward.forward_sequence, spec=spec, config=config)
    return run_forward(kernel, q, k, v, packing)


def attention_backward(
    inputs: tuple[np.ndarray, np.ndarray, np.ndarray],
    saved: SavedForward,
    spec: Attention,
    *,
    packing: Packing | None = None,
    config: BackwardConfig | None = None,
) -> BackwardResult:
    """Gradients of (q, k, v) and the sink: FA4 mode with a `config`, the oracle without one.

    The oracle recomputes out and lse itself and uses only dout and dlse of `saved`.
    """
    packing = packing or Packing()
    if config is None:
        oracle = partial(naive.backward_sequence, spec=spec)
        return run_backward(oracle, inputs, saved, packing, exact=True)
    kernel = partial(backward.backward_sequence, spec=spec, config=config)
    return run_backward(kernel, inputs, saved, packing)
