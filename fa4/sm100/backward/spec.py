"""What selects the generated code of a backward kernel. Sizes are run-time values."""

from __future__ import annotations

from dataclasses import dataclass

from fa4.config import BackwardConfig, BackwardPipeline, require_int
from fa4.hardware import B200, Gpu
from fa4.kit.features import BackwardFeatures
from fa4.kit.units import TILE_ROWS, padded_dim
from fa4.plan.backward import backward_plan
from fa4.plan.backward_serial import SERIAL_DIMS
from fa4.plan.schema import PipelinePlan
from fa4.sm100.backward.workspace import DQ_WARPS


@dataclass(frozen=True, kw_only=True)
class BackwardSpec(BackwardFeatures):
    """One backward kernel, with the two small ones before and behind it."""

    cta_group: int = 1
    gpu: Gpu = B200

    def __post_init__(self) -> None:
        """Check what the kernel itself cannot do; `fa4.compiled.support` refuses earlier."""
        self.check_backward()
        require_int("cta_group", self.cta_group, 1, 2)

    @property
    def tile_rows(self) -> int:
        """Queries of a tile."""
        return TILE_ROWS

    @property
    def dq_counters(self) -> int:
        """Of 128 queries: each warp's part of their dQ is counted by itself."""
        return DQ_WARPS

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
