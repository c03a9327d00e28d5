"""What selects the generated code of a backward kernel. Sizes are run-time values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fa4.config import BackwardConfig, BackwardPipeline, require, require_int
from fa4.hardware import B200, Gpu
from fa4.masks import IntervalMask
from fa4.plan.backward import backward_plan
from fa4.plan.backward_serial import SERIAL_DIMS
from fa4.plan.schema import PipelinePlan
from fa4.sm100.kit.units import AUX_DTYPES, padded_dim


@dataclass(frozen=True, kw_only=True)
class BackwardSpec:
    """One backward kernel, with the two small ones before and behind it.

    dtype: "bf16" or "fp16", of inputs and gradients. window_left, window_right: bounds are given at
    run time. packed_q, packed_k: cu_seqlens are given; used_q, used_k: seqused are given. sink: the
    gradient of a sink is computed. lse_gradient: a gradient of the LSE is given. out_residual: what
    rounding took from O is given, in its type. softcap: given at run time. score_mod,
    score_mod_bwd, mask_mod: CuTe-DSL callables, as the forward kernel's. mask: of `fa4.masks`, in
    place of mask_mod. aux: element type and rank of each auxiliary tensor. deterministic: CTAs add
    to a dQ tile one after the other.
    """

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
    lse_gradient: bool = False
    out_residual: bool = False
    softcap: bool = False
    score_mod: Callable[..., Any] | None = None
    score_mod_bwd: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    mask: IntervalMask | None = None
    aux: tuple[tuple[str, int], ...] = ()
    deterministic: bool = False
    cta_group: int = 1
    gpu: Gpu = B200

    def __post_init__(self) -> None:
        """Check what the kernel itself cannot do; `fa4.compiled.support` refuses earlier."""
        require(self.dtype in ("bf16", "fp16"), "dtype must be bf16 or fp16", self.dtype)
        require_int("cta_group", self.cta_group, 1, 2)
        if self.causal and self.window_right:
            raise ValueError("causal has its own right bound; got window_right=True")
        masks = (self.causal or self.window_left or self.window_right, self.mask, self.mask_mod)
        if sum(bool(one) for one in masks) > 1:
            raise ValueError("mask_mod replaces causal and windows; got both")
        if self.score_mod is not None and self.softcap:
            raise ValueError("softcap is a score_mod of its own; got both")
        if (self.score_mod is None) != (self.score_mod_bwd is None):
            raise ValueError("score_mod and score_mod_bwd belong together; got one of them")
        for dtype, rank in self.aux:
            require(dtype in AUX_DTYPES, f"an aux dtype must be one of {AUX_DTYPES}", dtype)
            require_int("the rank of an aux tensor", rank, 1, 5)

    @property
    def ragged_q(self) -> bool:
        """May a sequence of queries end inside the tensor?"""
        return self.packed_q or self.used_q

    @property
    def ragged_k(self) -> bool:
        """May a sequence of keys end inside the tensor? Then dK and dV are not stored by TMA."""
        return self.packed_k or self.used_k

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

    @property
    def overlaps_tiles(self) -> bool:
        """Do products of one query tile run between those of the next? (`fa4.plan.backward`)"""
        return (self.head_dim, self.head_dim_v) != SERIAL_DIMS

    @property
    def pipeline(self) -> BackwardPipeline:
        """The pipeline of this kernel; head dimensions padded.

        In a fixed order of sums the last keys come first where they are hidden from the first rows.
        """
        last_first = self.deterministic and self.hides_first_rows
        order = "descending" if last_first else "ascending"
        return BackwardPipeline(
            head_dim=padded_dim(self.head_dim),
            head_dim_v=padded_dim(self.head_dim_v),
            causal=self.hides_first_rows or self.hides_last_rows,
            numerics=BackwardConfig(cta_group=self.cta_group, dq_order=order),
            deterministic=self.deterministic,
            scheduler="spt" if last_first else "naive",
        )

    @property
    def plan(self) -> PipelinePlan:
        """Roles, signals and buffers. Raises ValueError if they do not fit the machine."""
        return backward_plan(self.pipeline, self.gpu)
