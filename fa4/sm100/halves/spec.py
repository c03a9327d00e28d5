"""What selects the generated code of a forward kernel with halves. Sizes are run-time values."""

from __future__ import annotations

from dataclasses import dataclass

from fa4.config import require
from fa4.kit.units import TILE_ROWS, padded_dim
from fa4.plan.halves import halves_pipeline
from fa4.plan.pieces import PiecesPipeline
from fa4.plan.pieces_plan import pieces_plan
from fa4.plan.schema import PipelinePlan
from fa4.sm100.forward.spec import TileSpec


@dataclass(frozen=True, kw_only=True)
class HalvesSpec(TileSpec):
    """One such kernel. Two specs that differ compile to different code and cache keys."""

    def __post_init__(self) -> None:
        """Check what the kernel itself cannot do; `fa4.compiled.support` refuses earlier."""
        self.check_features(TILE_ROWS)
        require(
            self.scheduler in ("static", "lpt", "naive"),
            "scheduler must be static, lpt or naive with halves",
            self.scheduler,
        )

    @property
    def pipeline(self) -> PiecesPipeline:
        """The pipeline of this kernel; head dimensions padded."""
        return halves_pipeline(
            head_dim=padded_dim(self.head_dim),
            head_dim_v=padded_dim(self.head_dim_v),
            numerics=self.numerics,
            cta_group=self.cta_group,
            scheduler=self.scheduler,
        )

    @property
    def plan(self) -> PipelinePlan:
        """Roles, signals and buffers. Raises ValueError if they do not fit the machine."""
        return pieces_plan(self.pipeline, self.gpu)
