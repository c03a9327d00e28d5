"""What selects the generated code of a Hopper backward kernel. Sizes are run-time values."""

from __future__ import annotations

from dataclasses import dataclass

from fa4.config import require, require_int
from fa4.hardware import H200, Gpu
from fa4.kit.units import TILE_ROWS, padded_dim
from fa4.plan.memory_rules import whole_runs
from fa4.plan.schema import PipelinePlan
from fa4.plan.warpgroup_backward import (
    CONSUMERS,
    NARROW,
    WarpgroupBackwardPipeline,
    fastest_tile,
    fewest_dq_cols,
    warpgroup_backward_plan,
)
from fa4.sm90.backward.divided import DividedFeatures

MOST_DIM = 128


@dataclass(frozen=True, kw_only=True)
class WarpgroupBackwardSpec(DividedFeatures):
    """One backward kernel of two warpgroups, with the two small ones before and behind it.

    tile_m: queries of a tile, None for as many as are fastest.
    """

    gpu: Gpu = H200
    tile_m: int | None = None

    def __post_init__(self) -> None:
        """Check what the kernel itself cannot do; `fa4.compiled.support` refuses earlier."""
        self.check_backward()
        for name, dim in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            require_int(name, dim, 8, MOST_DIM)
            require(dim % 8 == 0, f"{name} must be a multiple of 8", dim)

    @property
    def cta_group(self) -> int:
        """CTAs that work together: one."""
        return 1

    @property
    def tile_rows(self) -> int:
        """Queries of a tile."""
        return self.pipeline.tile_m

    @property
    def block_rows(self) -> int:
        """Queries of a block of the workspace: one or two tiles."""
        return TILE_ROWS

    @property
    def dq_counters(self) -> int:
        """Of a block: each warpgroup's part of the dQ of a tile is counted by itself."""
        return CONSUMERS * (self.block_rows // self.tile_rows)

    @property
    def dq_dim(self) -> int:
        """Columns of dQ in the workspace."""
        return self.pipeline.dq_dim

    @property
    def draws_work(self) -> bool:
        """Does a counter in global memory say which work tile is next?"""
        return True

    @property
    def pipeline(self) -> WarpgroupBackwardPipeline:
        """The pipeline of this kernel.

        Head dimensions are padded to whole runs of 128 bytes in shared memory, 64 or 128 columns;
        products take those up to the next multiple of 16.
        """
        dims = self.head_dim, self.head_dim_v
        d, dv = map(whole_runs, dims)
        tallest = NARROW if self.modifies_scores else fastest_tile(d, dv)
        tile_m = self.tile_m or tallest
        last_first = self.deterministic and self.hides_first_rows
        return WarpgroupBackwardPipeline(
            head_dim=d,
            head_dim_v=dv,
            cols=padded_dim(self.head_dim),
            cols_v=padded_dim(self.head_dim_v),
            causal=self.hides_first_rows or self.hides_last_rows,
            dq_cols=fewest_dq_cols(self.head_dim, tile_m, ragged=self.ragged_k),
            tile_m=tile_m,
            deterministic=self.deterministic,
            scheduler="spt" if last_first else "naive",
        )

    @property
    def plan(self) -> PipelinePlan:
        """Roles, signals and buffers. Raises ValueError if they do not fit the machine."""
        return warpgroup_backward_plan(self.pipeline, self.gpu)
