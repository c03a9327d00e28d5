"""FlashAttention-4 made checkable, predictable and runnable.

Importing this package loads neither torch nor cutlass; what a part needs is loaded when it is used.
"""

from fa4.api import (
    AttentionGradients,
    AttentionOutput,
    flash_attn_backward,
    flash_attn_func,
    flash_attn_varlen_backward,
    flash_attn_varlen_func,
)
from fa4.config import BackwardConfig, Exp2Split, ForwardConfig, Problem
from fa4.version import __version__

__all__ = [
    "AttentionGradients",
    "AttentionOutput",
    "BackwardConfig",
    "Exp2Split",
    "ForwardConfig",
    "Problem",
    "__version__",
    "flash_attn_backward",
    "flash_attn_func",
    "flash_attn_varlen_backward",
    "flash_attn_varlen_func",
]
