"""Forward kernels on Blackwell whose scores come in pieces: searched through."""

from __future__ import annotations

from dataclasses import replace

from fa4.designs import forward
from fa4.designs.design import late

DESIGN = replace(
    forward.DESIGN,
    name="pieces",
    kernel="pieces",
    about="scores in pieces, which a search chooses",
    pipeline="fa4.plan.pieces:PiecesPipeline",
    traits={},
    choose=None,
    plan=late("fa4.plan.pieces_plan:pieces_plan"),
    work=replace(forward.WORK, rescale_tau=lambda pipeline: pipeline.tau),
    ideas=(),
    compiled=None,
    explored=None,
    measured_as=None,
)
