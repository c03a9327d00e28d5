"""What selects the generated code of a forward kernel. Sizes are run-time values."""

from __future__ import annotations

from dataclasses import dataclass, field

from fa4.config import ForwardConfig, ForwardPipeline
from fa4.hardware import B200, Gpu
from fa4.kit.features import ForwardFeatures
from fa4.kit.units import TILE_ROWS, padded_dim
from fa4.plan.forward import forward_plan
from fa4.plan.schema import PipelinePlan


@dataclass(frozen=True, kw_only=True)
class TileSpec(ForwardFeatures):
    """What all forward kernels that keep scores in tensor memory have: Q tiles of 128 rows."""

    cta_group: int = 1
    scheduler: str = "static"
    numerics: ForwardConfig = field(default_factory=ForwardConfig)
    gpu: Gpu = B200

    @property
    def tile_rows(self) -> int:
        """Rows of a Q tile."""
        return TILE_ROWS

    @property
    def tile_n(self) -> int:
        """Keys of a KV tile."""
        return self.numerics.tile_n

    @property
    def q_tiles(self) -> int:
        """Q tiles of a CTA."""
        return self.numerics.q_tiles


@dataclass(frozen=True, kw_only=True)
class ForwardSpec(TileSpec):
    """One forward kernel. Two specs that differ compile to different code and cache keys."""

    def __post_init__(self) -> None:
        """Check what the kernel itself cannot do; `fa4.compiled.support` refuses earlier."""
        self.check_features(TILE_ROWS)
        if self.scheduler == "clc" and self.cta_group == 2:
            raise ValueError("scheduler clc needs cta_group 1; got 2")

    @property
    def pipeline(self) -> ForwardPipeline:
        """The pipeline of this kernel; head dimensions padded."""
        return ForwardPipeline(
            head_dim=padded_dim(self.head_dim),
            head_dim_v=padded_dim(self.head_dim_v),
            causal=self.hides_last_keys,
            numerics=self.numerics,
            cta_group=self.cta_group,
            scheduler=self.scheduler,
        )

    @property
    def plan(self) -> PipelinePlan:
        """Roles, signals and buffers. Raises ValueError if they do not fit the machine."""
        return forward_plan(self.pipeline, self.gpu)
