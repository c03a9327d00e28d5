"""What a call wants of a kernel, whatever machine it is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from fa4.config import DTYPE_BITS, require, require_int
from fa4.kit.units import AUX_DTYPES, TILE_ROWS, padded_dim
from fa4.masks import IntervalMask


@dataclass(frozen=True, kw_only=True)
class CallFeatures:
    """The part of a kernel's spec that says what it computes, not how, whatever the pass.

    dtype: one of DTYPES. window_left, window_right: bounds are given at run time. packed_q,
    packed_k: cu_seqlens are given; used_q, used_k: seqused are given. sink, softcap: given at run
    time. score_mod, mask_mod: CuTe-DSL callables (`fa4.sm100.forward.mods`). mask: of `fa4.masks`,
    in place of mask_mod. aux: element type ("fp32", "bf16", "fp16" or "int32") and rank of each
    auxiliary tensor that they are given.
    """

    DTYPES: ClassVar[tuple[str, ...]] = ("bf16", "fp16")

    head_dim: int
    head_dim_v: int
    dtype: str = "bf16"
    causal: bool = False
    window_left: bool = False
    window_right: bool = False
    packed_q: bool = False
    packed_k: bool = False
    used_q: bool = False
    used_k: bool = False
    sink: bool = False
    softcap: bool = False
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    mask: IntervalMask | None = None
    aux: tuple[tuple[str, int], ...] = ()

    def check_call(self) -> None:
        """Raises ValueError for what excludes itself."""
        names = f"{', '.join(self.DTYPES[:-1])} or {self.DTYPES[-1]}"
        require(self.dtype in self.DTYPES, f"dtype must be {names}", self.dtype)
        if self.causal and self.window_right:
            raise ValueError("causal has its own right bound; got window_right=True")
        masks = (self.causal or self.window_left or self.window_right, self.mask, self.mask_mod)
        if sum(bool(one) for one in masks) > 1:
            raise ValueError("mask_mod replaces causal and windows; got both")
        if self.score_mod is not None and self.softcap:
            raise ValueError("softcap is a score_mod of its own; got both")
        for dtype, rank in self.aux:
            require(dtype in AUX_DTYPES, f"an aux dtype must be one of {AUX_DTYPES}", dtype)
            require_int("the rank of an aux tensor", rank, 1, 5)

    @property
    def ragged_q(self) -> bool:
        """May a sequence of queries end inside the tensor? Then its rows are not stored by TMA."""
        return self.packed_q or self.used_q

    @property
    def ragged_k(self) -> bool:
        """May a sequence of keys end inside the tensor? Then rows beyond it are somebody else's."""
        return self.packed_k or self.used_k


@dataclass(frozen=True, kw_only=True)
class BackwardFeatures(CallFeatures):
    """What a call wants of the backward kernels.

    dtype: of inputs and gradients. sink: the gradient of a sink is computed. lse_gradient: a
    gradient of the LSE is given. out_residual: what rounding took from O is given, in its type.
    score_mod_bwd: a CuTe-DSL callable, as score_mod. deterministic: CTAs add to a dQ tile one after
    the other.
    """

    lse_gradient: bool = False
    out_residual: bool = False
    score_mod_bwd: Callable[..., Any] | None = None
    deterministic: bool = False

    def check_backward(self) -> None:
        """Raises ValueError for what excludes itself."""
        self.check_call()
        if (self.score_mod is None) != (self.score_mod_bwd is None):
            raise ValueError("score_mod and score_mod_bwd belong together; got one of them")

    @property
    def block_rows(self) -> int:
        """Queries of a block of the workspace, and threads of a CTA that works on one."""
        return TILE_ROWS

    @property
    def dq_dim(self) -> int:
        """Columns of dQ in the workspace, padded."""
        return padded_dim(self.head_dim)

    @property
    def adds_up_dq(self) -> bool:
        """Do CTAs add up dQ in global memory, in float32?"""
        return True

    @property
    def hides_first_rows(self) -> bool:
        """Do keys differ in the first query that sees them?"""
        return self.causal or self.window_right or self.mask is not None

    @property
    def hides_last_rows(self) -> bool:
        """Do keys differ in the last query that sees them?"""
        return self.window_left or (self.mask is not None and self.mask.has_start)

    @property
    def modifies_scores(self) -> bool:
        """Is there something between the raw score and the exponential?"""
        return self.softcap or self.score_mod is not None


@dataclass(frozen=True, kw_only=True)
class ForwardFeatures(CallFeatures):
    """What a call wants of a forward kernel.

    lse: LSE is written. group: query heads that share the rows of a tile (packed GQA), 1 for none.
    """

    lse: bool = True
    group: int = 1

    @property
    def element_bytes(self) -> int:
        """Of an element of q, k and v."""
        return DTYPE_BITS[self.dtype] // 8

    @property
    def out_dtype(self) -> str:
        """Of O: bf16 for 8-bit types."""
        return "bf16" if self.element_bytes == 1 else self.dtype

    def check_features(self, rows: int) -> None:
        """Raises ValueError for what excludes itself; rows: of a tile, which the group divides."""
        self.check_call()
        require_int("group", self.group, 1, rows)
        require(rows % self.group == 0, f"group must divide {rows}", self.group)

    @property
    def hides_last_keys(self) -> bool:
        """Do rows differ in the last key that they see?"""
        return self.causal or self.window_right or self.mask is not None

    @property
    def hides_first_keys(self) -> bool:
        """Do rows differ in the first key that they see?"""
        return self.window_left or (self.mask is not None and self.mask.has_start)
