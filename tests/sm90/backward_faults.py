"""Faults of the Hopper backward kernel, and what the emulator finds of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fa4.hardware import H200
from fa4.plan import warpgroup_backward
from fa4.sm90.backward import consumer, load, queue, reduce
from fa4.sm90.backward.spec import WarpgroupBackwardSpec
from fa4.testing import Case
from fa4.testing.budget import Outputs
from fa4.testing.inputs import Inputs
from tests.sm90.faults import WRONG, Launch
from tests.sm100.altered import Edit
from tests.sm100.backward_kernel import build, prepare

# Two CTAs for five work tiles.
SPEC = {"head_dim": 16, "head_dim_v": 16, "causal": True, "deterministic": True,
        "gpu": replace(H200, sm_count=2)}  # fmt: skip
CASE = Case(batch=1, seqlen_q=600, seqlen_k=600, heads_k=1, group=1, head_dim=16,
            head_dim_v=16, dtype="bf16", causal=True)  # fmt: skip
FENCE = '    cute.arch.fence_proxy("async.shared", space="cta")\n'
MEETS = '    signals.arrive_once("met")\n'
GIVES_BACK = '    signals.arrive_once("dv#_empty'
LEAVES = '    signals.arrive_once("dv#_full'
# What is caught, and by what kind of finding.
FAULTS: dict[str, tuple[Edit, str]] = {
    "no fence between dS and its product": (
        Edit(
            consumer, f'{FENCE}    signals.arrive_once("met")\n', '    signals.arrive_once("met")\n'
        ),
        "missing-proxy-fence",
    ),
    "no fence between dV and dK and their stores": (
        Edit(consumer, f"{FENCE}{LEAVES}", LEAVES),
        "missing-proxy-fence",
    ),
    "dQ's product before the warpgroups have met": (
        Edit(consumer, '    signals.wait("met", before(ring))\n    dq = work', "    dq = work"),
        "race",
    ),
    "dQ's product with dS of the tile at hand": (
        Edit(consumer, "products.queries(1 - ring.slot)", "products.queries(ring.slot)"),
        "race",
    ),
    "dQ is read while its product runs": (
        Edit(consumer, "wait_products(0, dq)", "wait_products(1, dq)"),
        "missing-wait",
    ),
    "dK over K that the other warpgroup's dQ reads": (
        Edit(consumer, '    signals.wait("left", once)\n', ""),
        "race",
    ),
    "the next work tile's K is not waited for": (
        Edit(consumer, 'signals.wait(f"k{i}_full", keys)', "pass"),
        "race",
    ),
    "dS over dV that has not left yet": (
        Edit(consumer, '    if first:\n        signals.wait("dv#_empty", once)\n', ""),
        "race",
    ),
    "dV's place given back while it is there": (
        Edit(reduce, f'    signals.wait("stored#")\n{GIVES_BACK}', GIVES_BACK),
        "race",
    ),
    "a work tile written over one that is not read yet": (
        Edit(queue, '    signals.wait("work_empty", ring)\n', ""),
        "race",
    ),
    "a work tile read before it is told": (
        Edit(queue, '    signals.wait("work_full", ring)\n', ""),
        "race",
    ),
    "Q given back while dK's product reads it": (
        Edit(
            consumer,
            """    dk = wait_products(0, state.dk)
    signals.arrive_once("q_empty", state.rows)
""",
            """    signals.arrive_once("q_empty", state.rows)
    dk = wait_products(0, state.dk)
""",
        ),
        "race",
    ),
    "one place for dS of two tiles": (
        Edit(consumer, "work.ds + ring.slot * (rows * DS_ROW_BYTES)", "work.ds"),
        WRONG,
    ),
    "-D of the other tile": (
        Edit(
            load,
            "numbers.shared + stage * numbers.step",
            "numbers.shared + (1 - stage) * numbers.step",
        ),
        WRONG,
    ),
    "a turn is not given on": (
        Edit(reduce, "        release_turn(work.turns, own)", "        pass"),
        "step-limit",
    ),
    "dQ left where the last one may not be read yet": (
        Edit(reduce, '    signals.wait("dq#_empty", turn)\n', ""),
        "race",
    ),
    "no fence between dQ and its copy": (
        Edit(reduce, FENCE, ""),
        "missing-proxy-fence",
    ),
    "columns of dK as keys": (
        Edit(consumer, "tile.first_key + work.number * WARPGROUP_ROWS", "tile.first_key"),
        WRONG,
    ),
}
# An unaltered copy: it is the edits that are caught.
SAME = Edit(warpgroup_backward, "STAGES = 2", "STAGES = 2")
FEW = ("no fence between dS and its product", "dQ is read while its product runs")


def compiled() -> tuple[WarpgroupBackwardSpec, Launch]:
    """The kernel as its code is now."""
    spec = WarpgroupBackwardSpec(**SPEC)
    run = build(spec)

    def launch(inputs: Inputs, **options: Any) -> tuple[list[Any], Outputs]:
        report, outputs = run.launch(inputs, prepare(spec, inputs), **options)
        return [report], outputs

    return spec, launch
