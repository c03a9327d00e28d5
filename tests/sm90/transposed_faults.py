"""Faults of the Hopper backward kernel with tiles of 80 queries, whose products give dQ^T."""

from __future__ import annotations

from typing import Any

from fa4.plan import warpgroup_backward
from fa4.sm90.backward import kernel, load, products, spec
from fa4.testing import Case
from fa4.testing.budget import Outputs
from fa4.testing.inputs import Inputs
from tests.sm90.faults import WRONG, Launch
from tests.sm100.altered import Edit
from tests.sm100.backward_kernel import build, prepare

SPEC = {"head_dim": 72, "head_dim_v": 72, "deterministic": True}
CASE = Case(batch=1, seqlen_q=330, seqlen_k=70, heads_k=1, group=1, head_dim=72, head_dim_v=72,
            dtype="bf16")  # fmt: skip
# What is caught, and by what kind of finding.
FAULTS: dict[str, tuple[Edit, str]] = {
    "K as it is for K^T": (Edit(products, "a_transposed=True", "a_transposed=False"), WRONG),
    "both warpgroups have the first columns of dQ": (
        Edit(kernel, "columns = number * column", "columns = Int32(0) * column"),
        WRONG,
    ),
    "numbers of a stage one behind the other": (
        Edit(load, "numbers.shared + stage * numbers.step", "numbers.shared + stage * rows"),
        WRONG,
    ),
    "numbers of the block's first tile": (
        Edit(load, "tile.spec.block_rows + inside", "tile.spec.block_rows"),
        WRONG,
    ),
    "a counter for every tile of 128 rows": (
        Edit(spec, "CONSUMERS * (self.block_rows // self.tile_rows)", "CONSUMERS"),
        "step-limit",
    ),
}  # fmt: skip
# An unaltered copy: it is the edits that are caught.
SAME = Edit(warpgroup_backward, "STAGES = 2", "STAGES = 2")
FEW = ("K as it is for K^T",)


def compiled() -> tuple[spec.WarpgroupBackwardSpec, Launch]:
    """The kernel as its code is now."""
    made = spec.WarpgroupBackwardSpec(**SPEC)
    run = build(made)

    def launch(inputs: Inputs, **options: Any) -> tuple[list[Any], Outputs]:
        report, outputs = run.launch(inputs, prepare(made, inputs), **options)
        return [report], outputs

    return made, launch
