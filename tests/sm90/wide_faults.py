"""Faults of the Hopper backward kernels of wide heads, and what the emulator finds of them."""

from __future__ import annotations

from typing import Any

from fa4.plan import warpgroup_wide
from fa4.sm90.wide import keys_consumer, output, queries_consumer, queries_kernel
from fa4.sm90.wide.spec import WideBackwardSpec
from fa4.testing import Case
from fa4.testing.budget import Outputs
from fa4.testing.inputs import Inputs
from tests.sm90.faults import WRONG, Launch
from tests.sm90.wide_kernel import build
from tests.sm100.altered import Edit
from tests.sm100.backward_kernel import prepare_stats

SPEC = {"head_dim": 16, "head_dim_v": 144, "causal": True}
CASE = Case(batch=1, seqlen_q=300, seqlen_k=300, heads_k=1, group=1, head_dim=16,
            head_dim_v=144, dtype="bf16", causal=True)  # fmt: skip
# What is caught, and by what kind of finding.
FAULTS: dict[str, tuple[Edit, str]] = {
    "P is read before it is handed over": (
        Edit(keys_consumer, '    signals.wait("p_full", queries)\n', ""),
        "race",
    ),
    "P is announced before it is written": (
        Edit(
            keys_consumer,
            """    hand_over(s if spec.modifies_scores else p, work.handed + queries.slot * P_BYTES)
    signals.arrive_once("p_full", queries)
""",
            """    signals.arrive_once("p_full", queries)
    hand_over(s if spec.modifies_scores else p, work.handed + queries.slot * P_BYTES)
""",
        ),
        "race",
    ),
    "one place for P of two tiles": (
        Edit(
            keys_consumer,
            "hand_over(s if spec.modifies_scores else p, work.handed + queries.slot * P_BYTES)",
            "hand_over(s if spec.modifies_scores else p, work.handed)",
        ),
        WRONG,
    ),
    "dV over V that the other warpgroup reads": (
        Edit(keys_consumer, '    signals.wait(f"{other}_read")\n', ""),
        "race",
    ),
    "dO is given back while dV's product reads it": (
        Edit(
            keys_consumer,
            """    found, state = add_up(signals, tile, work, own, words, state, ahead)
    signals.arrive_once("do_empty", grads)
""",
            """    signals.arrive_once("do_empty", grads)
    found, state = add_up(signals, tile, work, own, words, state, ahead)
""",
        ),
        "race",
    ),
    "P is computed while S's product runs": (
        Edit(keys_consumer, "    s = wait_products(0, s)\n", ""),
        "missing-wait",
    ),
    "dP is read while its product runs": (
        Edit(queries_consumer, "    dp = wait_products(behind, dp)\n", ""),
        "missing-wait",
    ),
    "K is given back while dQ's product reads it": (
        Edit(
            queries_consumer,
            """    dq = wait_products(behind, dq)
    signals.arrive_once("k_empty", before(state.keys))
""",
            """    signals.arrive_once("k_empty", before(state.keys))
    dq = wait_products(behind, dq)
""",
        ),
        "race",
    ),
    "dQ of a tile with K of the next one": (
        Edit(queries_consumer, "place = before(state.keys).slot", "place = state.keys.slot"),
        WRONG,
    ),
    "no fence between a gradient and its store": (
        Edit(output, '    cute.arch.fence_proxy("async.shared", space="cta")\n', ""),
        "missing-proxy-fence",
    ),
    "Q's bytes are not counted": (
        Edit(queries_kernel, "CONSUMERS * source.num_bytes", "source.num_bytes"),
        "race",
    ),
    "-D of the rows 64 later": (
        Edit(queries_consumer, "inside = [work.number * tile.spec.tile_rows + row",
             "inside = [(1 - work.number) * tile.spec.tile_rows + row"),
        WRONG,
    ),
    "LSE of the first tile": (
        Edit(keys_consumer, "offset = state.queries.slot * rows + column", "offset = column"),
        WRONG,
    ),
}  # fmt: skip
# An unaltered copy: it is the edits that are caught.
SAME = Edit(warpgroup_wide, "CONSUMERS = 2", "CONSUMERS = 2")
FEW = ("P is read before it is handed over", "dP is read while its product runs")


def compiled() -> tuple[WideBackwardSpec, Launch]:
    """The kernels as their code is now."""
    spec = WideBackwardSpec(**SPEC)
    run = build(spec)

    def launch(inputs: Inputs, **options: Any) -> tuple[list[Any], Outputs]:
        stats, _ = prepare_stats(spec, inputs)
        return run.launch(inputs, stats, **options)

    return spec, launch
