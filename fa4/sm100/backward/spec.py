"""What selects the generated code of a backward kernel. Sizes are run-time values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fa4.config import BackwardConfig, BackwardPipeline, require_int
from fa4.hardware import B200, Gpu
from fa4.plan.backward import backward_plan
from fa4.plan.backward_serial import SERIAL_DIMS
from fa4.plan.schema import PipelinePlan
from fa4.sm100.kit.features import CallFeatures
from fa4.sm100.kit.units import padded_dim


@dataclass(frozen=True, kw_only=True)
class BackwardSpec(CallFeatures):
    """One backward kernel, with the two small ones before and behind it.

    dtype: of inputs and gradients. sink: the gradient of a sink is computed. lse_gradient: a
    gradient of the LSE is given. out_residual: what rounding took from O is given, in its type.
    score_mod_bwd: a CuTe-DSL callable, as score_mod. deterministic: CTAs add to a dQ tile one after
    the other.
    """

    lse_gradient: bool = False
    out_residual: bool = False
    score_mod_bwd: Callable[..., Any] | None = None
    deterministic: bool = False
    cta_group: int = 1
    gpu: Gpu = B200

    def __post_init__(self) -> None:
        """Check what the kernel itself cannot do; `fa4.compiled.support` refuses earlier."""
        self.check_call()
        require_int("cta_group", self.cta_group, 1, 2)
        if (self.score_mod is None) != (self.score_mod_bwd is None):
            raise ValueError("score_mod and score_mod_bwd belong together; got one of them")

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
