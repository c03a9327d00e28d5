"""What selects the generated code of the wide backward kernels. Sizes are run-time values."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fa4.config import WARPGROUP_ROWS, require, require_int
from fa4.hardware import H200, Gpu
from fa4.plan.schema import PipelinePlan
from fa4.plan.warpgroup_wide import CONSUMERS, WideBackwardPipeline
from fa4.plan.warpgroup_wide_keys import deepest_rings, wide_keys_plan
from fa4.plan.warpgroup_wide_queries import wide_queries_plan, widest_tile
from fa4.sm90.backward.divided import DividedFeatures

MOST_DIM = 256


@dataclass(frozen=True, kw_only=True)
class WideBackwardSpec(DividedFeatures):
    """A kernel of dK and dV and one of dQ, with the small ones before and behind them.

    No sum leaves its CTA, so that the order of sums is always the same: `deterministic` makes no
    other kernel and must be False. query_parts: the keys of the dQ kernel are divided over CTAs; dQ
    is given in float32, with a head for each part (`fa4.sm90.backward.parts`).
    """

    query_parts: bool = False
    gpu: Gpu = H200

    def __post_init__(self) -> None:
        """Check what the kernels cannot do; `fa4.compiled.support` refuses earlier."""
        self.check_backward()
        for name, dim in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            require_int(name, dim, 8, MOST_DIM)
            require(dim % 8 == 0, f"{name} must be a multiple of 8", dim)
        require(not self.deterministic, "deterministic must be False: sums have one order anyway",
                self.deterministic)  # fmt: skip

    @property
    def adds_up_dq(self) -> bool:
        """Is dQ a sum in global memory?"""
        return False

    @property
    def cta_group(self) -> int:
        """CTAs that work together: one."""
        return 1

    @property
    def tile_rows(self) -> int:
        """Queries of a tile: of those that pass in one kernel, of a warpgroup in the other."""
        return WARPGROUP_ROWS

    @property
    def q_tiles(self) -> int:
        """Such tiles of a CTA of the dQ kernel."""
        return CONSUMERS

    @property
    def group(self) -> int:
        """Query heads that share the rows of a tile: one."""
        return 1

    @property
    def tile_n(self) -> int:
        """Keys of a tile of the dQ kernel."""
        return self.pipeline.tile_n

    @property
    def scheduler(self) -> str:
        """Order of the dQ kernel's work tiles: longest first, where they differ."""
        return "lpt" if self.hides_first_rows or self.hides_last_rows else "naive"

    @property
    def pipeline(self) -> WideBackwardPipeline:
        """The pipeline of the kernels; head dimensions padded."""
        tile = widest_tile(self.head_dim, self.head_dim_v, self.gpu)
        found = deepest_rings(tile, self.gpu)
        causal = self.hides_first_rows or self.hides_last_rows
        return replace(found, causal=causal)

    @property
    def plan(self) -> PipelinePlan:
        """Of the two plans, that with more shared memory, which reports show."""
        plans = (self.keys_plan, self.queries_plan)
        return max(plans, key=lambda plan: plan.bytes_used("smem"))

    @property
    def keys_plan(self) -> PipelinePlan:
        """Roles, signals and buffers of the kernel of dK and dV. Raises ValueError if they do not
        fit the machine."""
        return wide_keys_plan(self.pipeline, self.gpu)

    @property
    def queries_plan(self) -> PipelinePlan:
        """Those of the dQ kernel, likewise."""
        return wide_queries_plan(self.pipeline, self.gpu)
