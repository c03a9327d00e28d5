"""Calls as the kernels see them: sizes and options, no tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fa4.config import BackwardConfig, ForwardConfig, Window


@dataclass(frozen=True, kw_only=True)
class ForwardCall:
    """What a call asks of the forward kernel: sizes and options, no tensors.

    rows_q, rows_k: sequence lengths, or all rows of a packed tensor, whose longest sequence has
    max_seqlen_q rows or less (None: not known). batch: sequences. packed_q, packed_k: cu_seqlens
    are given; used_q, used_k: seqused are. aux: element type and rank of each auxiliary tensor.
    numerics: None for the tuned ones.
    The fields from `dropout_p` on are options that no kernel here has.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    heads_q: int
    heads_k: int
    batch: int
    rows_q: int
    rows_k: int
    max_seqlen_q: int | None = None
    softmax_scale: float = 1.0
    window: Window = (None, None)
    lse: bool = True
    sink: bool = False
    softcap: float = 0.0
    packed_q: bool = False
    packed_k: bool = False
    used_q: bool = False
    used_k: bool = False
    pack_gqa: bool | None = None
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    aux: tuple[tuple[str, int], ...] = ()
    numerics: ForwardConfig | None = None
    dropout_p: float = 0.0
    num_splits: int = 1
    paged: bool = False
    block_sparse: bool = False
    descale: bool = False

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads_q // self.heads_k

    @property
    def longest_q(self) -> int:
        """Rows of the longest sequence of queries, or more."""
        if not self.packed_q or self.max_seqlen_q is None:
            return self.rows_q
        return min(self.rows_q, self.max_seqlen_q)

    @property
    def varlen(self) -> str:
        """Which lengths are given by tensors; empty if none are."""
        given = {"cu_seqlens_q": self.packed_q, "cu_seqlens_k": self.packed_k,
                 "seqused_q": self.used_q, "seqused_k": self.used_k}  # fmt: skip
        return ", ".join(name for name, is_given in given.items() if is_given)

    @property
    def is_empty(self) -> bool:
        """Is there no query, or no key at all: nothing to launch?"""
        return not (self.batch and self.rows_q and self.rows_k)


@dataclass(frozen=True, kw_only=True)
class BackwardCall(ForwardCall):
    """What a call asks of the backward kernels: that, and what only they look at.

    lse_gradient: is there a gradient of the LSE? out_residual: is O's rounding error given? order:
    None for the kernel's own.
    """

    max_seqlen_k: int | None = None
    lse_gradient: bool = False
    out_residual: bool = False
    deterministic: bool = True
    score_mod_bwd: Callable[..., Any] | None = None
    order: BackwardConfig | None = None

    @property
    def longest_k(self) -> int:
        """Rows of the longest sequence of keys, or more."""
        if not self.packed_k or self.max_seqlen_k is None:
            return self.rows_k
        return min(self.rows_k, self.max_seqlen_k)
