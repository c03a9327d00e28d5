"""What selects the generated code of a Hopper forward kernel. Sizes are run-time values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fa4.config import WARPGROUP_ROWS, ForwardConfig, WarpgroupPipeline, require, require_int
from fa4.hardware import H200, Gpu
from fa4.masks import IntervalMask
from fa4.plan.schema import PipelinePlan
from fa4.plan.warpgroup import warpgroup_plan
from fa4.sm100.kit.units import AUX_DTYPES, padded_dim

# Rows of blocks that run at once with "snake", by warpgroups: of 2 to 16 those whose worst CTA, of
# causal calls on 132 CTAs with 2k to 32k tokens, has least to do beyond the average.
ROWS_AT_ONCE = {1: 4, 2: 4, 3: 2}
SCHEDULERS = ("static", "snake", "lpt", "naive")


@dataclass(frozen=True, kw_only=True)
class WarpgroupSpec:
    """One forward kernel. Two specs that differ compile to different code and cache keys.

    Features, up to aux, are those of `fa4.sm100.forward.spec.ForwardSpec`. The rest are choices of
    `WarpgroupPipeline`: consumers warpgroups of 64 rows of queries, KV tiles of tile_n keys in
    kv_stages stages; p_source, where P enters PV from ("registers" or "smem"); overlap, ping_pong.
    scheduler: "static" (a CTA per SM strides over the work tiles), "snake" (longest first, back and
    forth), "naive" (a CTA per work tile) or "lpt" (the same, longest first). numerics: tau and the
    emulated exponentials, of the pairs that a thread has in every eight columns.
    """

    head_dim: int
    head_dim_v: int
    dtype: str = "bf16"
    causal: bool = False
    window_left: bool = False
    window_right: bool = False
    lse: bool = True
    group: int = 1
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
    tile_n: int = 128
    consumers: int = 2
    kv_stages: int = 2
    p_source: str = "registers"
    overlap: bool = True
    ping_pong: bool | None = None
    scheduler: str = "static"
    numerics: ForwardConfig = field(default_factory=ForwardConfig)
    gpu: Gpu = H200

    def __post_init__(self) -> None:
        """Check what the kernel itself cannot do; the plan checks its own choices."""
        require(self.dtype in ("bf16", "fp16"), "dtype must be bf16 or fp16", self.dtype)
        for name, dim in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            require_int(name, dim, 8, 256)
            require(dim % 8 == 0, f"{name} must be a multiple of 8", dim)
        require_int("tile_n", self.tile_n, 16, 256)
        require(self.tile_n % 16 == 0, "tile_n must be a multiple of 16", self.tile_n)
        require_int("group", self.group, 1, WARPGROUP_ROWS)
        require(WARPGROUP_ROWS % self.group == 0, f"group must divide {WARPGROUP_ROWS}", self.group)
        require(
            self.scheduler in SCHEDULERS,
            f"scheduler must be one of {', '.join(SCHEDULERS)}",
            self.scheduler,
        )
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
    def takes_turns(self) -> bool:
        """Do the warpgroups take turns at the tensor core?"""
        return self.pipeline.takes_turns

    @property
    def cta_group(self) -> int:
        """CTAs that work together: one."""
        return 1

    @property
    def tile_rows(self) -> int:
        """Rows of a Q tile: a warpgroup's."""
        return WARPGROUP_ROWS

    @property
    def q_tiles(self) -> int:
        """Q tiles of a CTA: one of each warpgroup."""
        return self.consumers

    @property
    def ragged_q(self) -> bool:
        """May a sequence of queries end inside the tensor? Then O is not stored by TMA."""
        return self.packed_q or self.used_q

    @property
    def ragged_k(self) -> bool:
        """May rows of K and V beyond a sequence's end belong to somebody else?"""
        return self.packed_k or self.used_k

    @property
    def hides_last_keys(self) -> bool:
        """Do rows differ in the last key that they see?"""
        return self.causal or self.window_right or self.mask is not None

    @property
    def hides_first_keys(self) -> bool:
        """Do rows differ in the first key that they see?"""
        return self.window_left or (self.mask is not None and self.mask.has_start)

    @property
    def pipeline(self) -> WarpgroupPipeline:
        """The pipeline of this kernel; head dimensions padded."""
        return WarpgroupPipeline(
            head_dim=padded_dim(self.head_dim),
            head_dim_v=padded_dim(self.head_dim_v),
            causal=self.hides_last_keys,
            tile_n=self.tile_n,
            consumers=self.consumers,
            kv_stages=self.kv_stages,
            ping_pong=self.ping_pong,
            p_source=self.p_source,
            overlap=self.overlap,
            scheduler="lpt" if self.scheduler == "snake" else self.scheduler,
        )

    @property
    def plan(self) -> PipelinePlan:
        """Roles, signals and buffers. Raises ValueError if they do not fit the machine."""
        return warpgroup_plan(self.pipeline, self.gpu)
