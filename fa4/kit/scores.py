"""What is between a raw score and its exponential, in every kernel."""

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32

from fa4.kit.rowmath import LOG2_E


@dataclass(frozen=True)
class TracedSeqlens:
    """Lengths of the sequences of one batch entry."""

    seqlen_q: Int32
    seqlen_k: Int32


def scales(spec: Any, softmax_scale: Float32, softcap: Float32 | None) -> tuple:
    """(factor from scores to exponents of 2, factor of the raw scores or None)."""
    if softcap is not None:
        return softcap * LOG2_E, softmax_scale / softcap
    if spec.score_mod is not None:
        return Float32(LOG2_E), softmax_scale
    return softmax_scale * LOG2_E, None
