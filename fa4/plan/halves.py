"""The pieces of which a kernel is built (`fa4.sm100.halves`), of all that `pieces` can describe.

Two softmax warpgroups for each Q tile, each with half of a KV tile's keys; one product writes both
halves' scores. They rescale and finish O themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fa4.config import Exp2Split, ForwardConfig
from fa4.plan.pieces import PiecesPipeline

NAME = "halves"  # of the kernel, for users
GROUPS = 2
# What tells them from other pieces; the rest is free. Products start with half of a half's P.
TRAITS: Mapping[str, Any] = MappingProxyType({
    "element_bytes": 2, "value_bytes": 2, "q_buffers": 1, "groups": GROUPS, "buffers": 1,
    "turns": 1, "joint_scores": True, "ping_pong": True, "softmax": "serial", "maximum": "exact",
    "row_sums": "merged", "correction": "inline", "split_p": 0.5,
})  # fmt: skip


def halves_pipeline(
    *, head_dim: int, head_dim_v: int, numerics: ForwardConfig, cta_group: int, scheduler: str
) -> PiecesPipeline:
    """With the arithmetic of `numerics`; head dimensions padded."""
    chosen = {name: value for name, value in TRAITS.items() if name != "turns"}
    return PiecesPipeline(
        **chosen,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        cta_group=cta_group,
        q_tiles=numerics.q_tiles,
        tile_n=numerics.tile_n,
        piece=numerics.tile_n // GROUPS,
        exp2=numerics.exp2,
        tau=numerics.rescale_threshold_log2,
        scheduler=scheduler,
    )


def halves_numerics(dtype: str, head_dim: int, masked: bool, *, emulate: bool) -> ForwardConfig:
    """The tuned arithmetic; emulate: with the exponentials that this kernel has as polynomials."""
    tuned = ForwardConfig.tuned(dtype, head_dim, masked, NAME)
    return tuned if emulate else replace(tuned, exp2=Exp2Split())
