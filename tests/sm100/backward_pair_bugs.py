"""Bugs of the backward kernel that only a pair of CTAs can have, as those of `backward_bugs`."""

from __future__ import annotations

from typing import Any

from fa4.kit import setup, signals
from fa4.sm100.backward import (
    compute,
    kernel,
    load_pair,
    load_serial,
    mma_pair,
    mma_serial,
    reduce,
    relay,
    tiles,
)
from tests.sm100.backward_bugs import MEET, PROXY, WRONG, BackwardBug, bug, without

PAIR: dict[str, Any] = {
    "head_dim": 128,
    "head_dim_v": 128,
    "cta_group": 2,
    "causal": True,
    "deterministic": True,
}
WIDE_PAIR: dict[str, Any] = {"head_dim": 192, "head_dim_v": 128, "cta_group": 2}
RELEASED = 'sem="release",\n                      scope='
# The arrival behind the loops, which says that the last dS is stored, in front of them.
_LAST = """    if cutlass.const_expr(spec.cta_group == 2 and spec.overlaps_tiles):  # noqa: SIM102
        if tile.trips > 0:
            signals.arrive_once("s_read")  # there is no further S: the last dS is stored
"""
_LOOPS = "    for _ in cutlass.range(cutlass.select_(q_stop > q_start,"
EARLY_SIGNAL = without(compute, _LAST), (compute, _LOOPS, _LAST + _LOOPS)
PAIR_BUGS: dict[str, BackwardBug] = {
    "turns that count the CTAs of pairs": bug(
        "4", "livelock",
        (tiles, "// self.group_keys - 1 - self.group_number",
         "// TILE_ROWS - 1 - self.group_number"),
        spec=PAIR,
    ),
    "turns that count the CTAs of pairs, from the first on": bug(
        "4", "step-limit", (tiles, "return self.group_number - before",
                            "return self.block - before"),
        spec={**WIDE_PAIR, "deterministic": True},
    ),
    "both CTAs of a pair count at one place": bug(
        "6", "step-limit", (reduce, "tile.rank * (DQ_WARPS // 2) + warp", "warp"), spec=PAIR,
    ),
    "rows of dQ of the leader in both CTAs": bug(
        "20", "race", (reduce, "tile.rank * 2 + warp % 2", "warp % 2"), spec=PAIR,
    ),
    "turns that only the pair sees": bug(
        "21", "race",
        (reduce, RELEASED + '"gpu"', RELEASED + '"cluster"'), spec=PAIR,
    ),
    "bytes of one CTA expected for both": bug(
        "20", "race",
        (signals, "arrive_and_expect(full, num_bytes * ctas, ctas)",
         "arrive_and_expect(full, num_bytes, ctas)"),
        spec=PAIR,
    ),
    "rows of the leader in both CTAs": bug(
        "20", WRONG,
        (load_pair, "rows = row_tile * 2 + tile.rank", "rows = row_tile * 2"), spec=PAIR,
    ),
    "columns of the leader in both CTAs": bug(
        "20", WRONG, (kernel, "tile_shapes(spec)[name]), tile.rank", "tile_shapes(spec)[name]), 0"),
        spec=PAIR,
    ),
    "a commit that only the leader hears": bug(
        "20", "deadlock",
        (signals, "slot_of(at)), BOTH,",
         'slot_of(at)), 0b01 if name == "ds_empty" else BOTH,'),
        spec=PAIR,
    ),
    "arrivals that stay in their CTA": bug(
        "21", "deadlock",
        (signals, "LEADER if signal.remote else None", "None"), spec=PAIR,
    ),
    "dS stored in the CTA itself, not in its peer": bug(
        "21", "uninitialised", (kernel, "peer = rank ^ 1", "peer = rank"), spec=PAIR,
    ),
    "the peer's dS multiplied before it is there": bug(
        "21", "race",
        without(mma_pair, '    signals.wait("ds_relayed", turn)\n'), spec=PAIR,
    ),
    "the peer's dS handed on before it is there": bug(
        "21", "mbarrier", without(relay, '        signals.wait("ds_peer", turn)\n'), spec=PAIR,
    ),
    "no fence behind the peer's dS": bug(
        "22d", "missing-proxy-fence", without(relay, "        " + PROXY), spec=PAIR,
    ),
    "CTAs that do not meet at the start": bug(
        "21", "missing-proxy-fence",
        (setup, "two_ctas)\n    meet(signals.plan.cta_group)", "two_ctas)\n    meet(1)"),
        spec=PAIR,
    ),
    "tensor memory given back before the pair has met": bug(
        "22", "tmem",
        without(setup, MEET, behind="    if has_role"),
        (setup, "cta_group == 2)\n\n\ndef take", "cta_group == 2)\n" + MEET + "\n\ndef take"),
        spec=PAIR,
    ),
    "CTAs that do not meet at the end": bug(
        "23", "exit", (setup, MEET + "    if has_role", "    meet(1)\n    if has_role"), spec=PAIR,
    ),
    "CTAs that do not meet at the end, one tile after the other": bug(
        "23", "exit", (setup, MEET + "    if has_role", "    meet(1)\n    if has_role"),
        spec=WIDE_PAIR,
    ),
    "no fence behind dS, of which a later signal tells": bug(
        "2", "missing-proxy-fence", without(compute, "    " + PROXY), spec=PAIR,
    ),
    "dS written again before dQ has read it": bug(
        "22c", "race",
        without(compute, '        signals.wait("ds_empty", progress.turn)\n'), spec=PAIR,
    ),
    "no signal that the last dS is stored": bug(
        "22c", "deadlock",
        (compute, 'signals.arrive_once("s_read")  # there', "pass  # there"), spec=PAIR,
    ),
    "the signal that dS is stored comes a query tile early": bug(
        "2", "mbarrier", *EARLY_SIGNAL, spec=PAIR,
    ),
    "dQ over S that is not read": bug(
        "24", "race", without(mma_pair, '    signals.wait("s_read", turn.next())\n'), spec=PAIR,
    ),
    "dQ waits for the S before the one that it is to lie over": bug(
        "24", "deadlock",
        (mma_pair, 'signals.wait("s_read", turn.next())', 'signals.wait("s_read", turn)'),
        spec=PAIR,
    ),
    "S over dQ that is not drained": bug(
        "24", "race",
        without(mma_pair, '            signals.wait("dq_empty", turn)\n'), spec=PAIR,
    ),
    "dP over S that is not read": bug(
        "24", "race", without(mma_serial, '    signals.wait("s_read", turn)\n'), spec=WIDE_PAIR,
    ),
    "S over dQ that is not drained, one tile after the other": bug(
        "24", "race", without(mma_serial, '    signals.wait("dq_empty", turn)\n'), spec=WIDE_PAIR,
    ),
    "Q by columns where the rows are still read": bug(
        "24", "race",
        (load_serial, "sources.q_t, (tile, head, row_tile), columns_turn",
         "sources.q_t, (tile, head, row_tile), rows_turn"),
        spec=WIDE_PAIR,
    ),
}  # fmt: skip
