"""Bugs that backward kernels of attention had, by class: put back here, or why they cannot be.

A bug is an edit of the kernel's source, or of its plan. `caught_by` runs the edited kernel in the
emulator and tells which checks notice: kinds of findings of the emulator, `REFUSED` by a rule of
the plan, `WRONG` against the oracle. Those of pairs of CTAs are in `backward_pair_bugs`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fa4.kit import setup, signals
from fa4.plan import backward_single
from fa4.sm100.backward import compute, epilogue, load, mma, mods, reduce, tiles
from fa4.sm100.backward.spec import BackwardSpec
from fa4.testing import Case, assert_within_budget
from fa4.testing.case import MASK_MODS
from tests.sm100.altered import Edit, put_in_place
from tests.sm100.backward_kernel import build, prepare
from tests.sm100.forward_kernel import make_inputs

REFUSED, WRONG = "refused by the plan", "wrong result"
STEPS_LIMIT = 60_000  # three times what the longest right run here takes
SMALL = {"head_dim": 16, "head_dim_v": 16}
CAUSAL = {**SMALL, "causal": True, "deterministic": True}
RUNS: tuple[dict[str, Any], ...] = (
    {"resident_clusters": 1, "clusters_limit": 1},
    {"schedule": "random", "resident_clusters": 3},
    {"schedule": "adversarial", "seed": 1, "resident_clusters": 3},
)


CLASSES = {
    "1": "pre-process reads dO before it is written (programmatic launch)",
    "2": "no fence or barrier before a slot is given on",
    "3": "P or dS over S or dP that another warp still loads",
    "4": "turns count CTAs, not pairs",
    "5": "turns count KV tiles that do not take part",
    "6": "two tiles with one turn; the lowest turn is launched last",
    "7": "turn given on when the sums are read, not added",
    "8": "slices of dV taken from d",
    "9": "kernels disagree on the padded head dim",
    "10": "kernels disagree on where a packed sequence begins",
    "11": "kernels disagree on the order inside of dQ",
    "12": "wrong only from the second batch entry on",
    "13": "block lists made for another tile",
    "14": "mask_mod or another option forgotten in the backward pass",
    "15": "LSE of -inf reaches an exponential",
    "16": "keys beyond the end reach an exponential",
    "17": "rows without keys; wrong dsink",
    "18": "more stages than places",
    "19": "a compiler whose code never returns",
    "20": "bytes expected are not those copied",
    "21": "a signal in too narrow a scope, or that does not reach the other CTA",
    "22": "tensor memory freed before the peer's allocation",
    "22b": "tensor memory used after it is freed",
    "22c": "slot filled again, or given on, too early or never; uneven registers",
    "22d": "no fence between ordinary accesses and copies",
    "23": "a CTA exits while its peer still signals it",
    "24": "memory with a second use, written too early",
    "25": "products of sizes in 32 bits",
}


@dataclass(frozen=True)
class BackwardBug:
    """A bug of a class. caught: the check that must notice.

    spec: fields of the kernel in which it is. case: fields of the problem.
    """

    number: str
    edits: tuple[Edit, ...]
    caught: str
    spec: dict[str, Any] = field(default_factory=lambda: CAUSAL)
    case: dict[str, Any] = field(default_factory=dict)


def bug(
    number: str, caught: str, *edits: tuple[ModuleType, str, str], **choices: Any
) -> BackwardBug:
    """Edits as (module, old, new)."""
    return BackwardBug(number, tuple(Edit(*edit) for edit in edits), caught, **choices)


def without(module: ModuleType, text: str, before: str = "", behind: str = "") -> tuple[Any, ...]:
    """An edit that takes a text away, which stands between two others."""
    return module, before + text + behind, before + behind


MEET = "    meet(signals.plan.cta_group)\n"
TMEM_STORED = "    cute.arch.fence_view_async_tmem_store()\n"
PROXY = 'cute.arch.fence_proxy("async.shared", space="cta")\n'
ALL_COMPUTE = "cute.arch.barrier(barrier_id=COMPUTE_BARRIER, number_of_threads=COMPUTE_THREADS)\n"
ACQUIRE, RELAXED = (f'Int32, sem="{x}", scope="gpu")\n' for x in ("acquire", "relaxed"))
BUGS = {
    "no fence behind P in tensor memory": bug(
        "2", "race", without(compute, TMEM_STORED, behind='    signals.arrive_once("p_full")')
    ),
    "no fence behind dS in tensor memory": bug(
        "2", "race", without(compute, TMEM_STORED, behind="    early:")
    ),
    "no fence behind dS in shared memory": bug(
        "2", "missing-proxy-fence", without(compute, "    " + PROXY)
    ),
    "a warp that arrives before its lanes are there": bug(
        "2", "race",
        without(signals, "        cute.arch.sync_warp()\n",
                behind="        with cute.arch.elect_one():\n            self.arrive(name, at)"),
    ),
    "P over S of the other warpgroup": bug(
        "3", "race",
        (compute, "return group * self.group_step + self.word",
         "return group * self.group_step // 2 + self.word"),
        (compute, "(columns.s + columns.word(fragment))",
         "(columns.s - columns.first_query // 2 + columns.split.word(fragment))"),
    ),
    "KV tiles before the window have turns": bug(
        "5", "step-limit",
        (tiles, "before = Int32(0) if start is None else cutlass.max(start, 0) // self.group_keys",
         "before = Int32(0)"),
        spec={**SMALL, "window_left": True, "deterministic": True},
        case={"window_size": (100, None)},
    ),
    "KV tiles behind the diagonal have turns": bug(
        "5", "step-limit",
        (tiles, "self.seqlen_k if stop is None else cutlass.min(stop, self.seqlen_k)",
         "self.seqlen_k"),
    ),
    "a KV tile that nobody sees waits for a turn": bug(
        "5", "livelock",
        (tiles, "seen = exists & (self.first_row(self.group_first_key) < reach)", "seen = exists"),
        spec={**SMALL, "window_right": True, "deterministic": True},
        case={"window_size": (None, -50), "lengths": ((300, 270),)},
    ),
    "two KV tiles with one turn": bug(
        "6", "step-limit",
        (tiles, "// self.group_keys - 1 - self.group_number",
         "// self.group_keys // 2 - self.group_number // 2"),
    ),
    "the first turn is that of the CTA launched last": bug(
        "6", "step-limit",
        (tiles, "if spec.deterministic and spec.hides_first_rows:", "if spec.hides_last_rows:"),
    ),
    "the next turn when the sums are read, not added": bug(
        "7", "race", (reduce, "wait_group(0, read=False)", "wait_group(0, read=True)")
    ),
    "the next turn without waiting": bug(
        "7", "race", without(reduce, "    cute.arch.cp_async_bulk_wait_group(0, read=False)\n")
    ),
    "dV stored in slices of dK": bug(
        "8", "race",
        (epilogue, "half = cute.size(gradient.shared.shape[1]) // 2\n    step",
         "half = tile.spec.head_dim // 2\n    step"),
        spec={"head_dim": 64, "head_dim_v": 32},
    ),
    "head dim padded to 32 in one of the kernels": bug(
        "9", "out-of-bounds",
        (reduce, "padded_dim(spec.head_dim)", "(spec.head_dim + 31) // 32 * 32"),
        spec={"head_dim": 72, "head_dim_v": 16},
    ),
    "a packed sequence's first tile, by another tile size": bug(
        "10", "out-of-bounds",
        (tiles, "first_tile(batch, start_q,", "first_tile(batch, start_q * 2,"),
        spec={**SMALL, "packed_q": True, "packed_k": True},
        case={"lengths": ((100, 100), (30, 60), (200, 40))},
    ),
    "dQ's elements in another order": bug(
        "11", WRONG,
        (reduce, "staged + lane * 16)", "staged + lane * (cols * FLOAT_BYTES))"),
        (reduce, "number * WARP * FLOAT_BYTES}]", "number * FLOAT_BYTES}]"),
    ),
    "statistics of the first batch entry": bug(
        "12", WRONG, (load, "tile.row_tile + row_tile, ring.slot", "row_tile, ring.slot"),
        case={"lengths": ((100, 100), (100, 100))},
    ),
    "mask_mod forgotten": bug(
        "14", WRONG,
        (mods, "        if self.spec.mask_mod is None:\n", "        if len(scores):\n"),
        spec={**SMALL, "mask_mod": MASK_MODS["stripes"]},
    ),
    "keys beyond the end are not masked": bug(
        "16", WRONG, (compute, "exists = key < tile.seqlen_k", "exists = key >= 0"),
        spec=SMALL, case={"lengths": ((40, 40),), "values": "low"},
    ),
    "both stages of the statistics are the first": bug(
        "18", "race", without(compute, " + progress.ring.slot * STATS_BYTES")
    ),
    "dK reads the first stage of Q": bug(
        "18", WRONG,
        (mma, "issue(products, products.dk, ring.slot,", "issue(products, products.dk, 0,"),
    ),
    "half of the bytes expected": bug(
        "20", "deadlock",
        (load, '"do_full", sources.dout.num_bytes', '"do_full", sources.dout.num_bytes // 2'),
    ),
    "turns that only the CTA sees": bug(
        "21", "race", (reduce, 'sem="release",\n                      scope="gpu"',
                       'sem="release",\n                      scope="cta"'),
    ),
    "turns that order nothing": bug(
        "21", "race", (reduce, ACQUIRE + "    while", RELAXED + "    while"),
        (reduce, ACQUIRE + "    cute", RELAXED + "    cute"),
    ),
    "tensor memory given back before all have read it": bug(
        "22b", "tmem",
        without(setup, MEET, behind="    if has_role"),
    ),
    "dO's slot filled again at once": bug(
        "22c", "race",
        without(load, '        signals.wait("do_empty", turn)\n', behind="        full"),
    ),
    "dQ's columns given on before they are loaded": bug(
        "22c", "race", without(reduce, "        cute.arch.fence_view_async_tmem_load()\n")
    ),
    "two counts of registers in a warpgroup": bug(
        "22c", REFUSED,
        (backward_single, "(LOAD_WARP,),\n        registers=OTHER_REGISTERS",
         "(LOAD_WARP,),\n        registers=24"),
    ),
    "no fence behind dQ in shared memory": bug(
        "22d", "missing-proxy-fence", without(reduce, "            " + PROXY)
    ),
    "no fence behind dV in shared memory": bug(
        "22d", "missing-proxy-fence", without(epilogue, "        " + PROXY)
    ),
    "dV over dO while products read it": bug(
        "24", "race", without(epilogue, '        signals.wait("dv_full")\n')
    ),
    "dK over Q while products read it": bug(
        "24", "race", without(epilogue, '        signals.wait("dk_full")\n')
    ),
    "dK stored before all have staged it": bug(
        "24", "race", without(epilogue, "        " + ALL_COMPUTE, behind="        if cute")
    ),
    "dK's rows stored before all have staged them": bug(
        "24", "race", without(epilogue, "        " + ALL_COMPUTE, behind="        store_rows"),
        spec={**SMALL, "used_k": True},
    ),
    "dQ staged where the last slice is still read": bug(
        "24", "race", without(reduce, '            signals.wait("dq_slot_empty")\n'),
        spec={"head_dim": 128, "head_dim_v": 16},
    ),
}  # fmt: skip

_PREPOST = "tests/sm100/test_backward_prepost.py"
ELSEWHERE = {
    "9": f"and in the kernels around it: {_PREPOST}, padded columns not zeroed",
    "10": f"and in the kernels around it: {_PREPOST}, tile of another sequence",
    "11": f"and in the kernels around it: {_PREPOST}, dQ's columns",
    "15": f"{_PREPOST}, LSE of -inf as any other",
    "17": f"{_PREPOST}, sink's share of rows without keys",
    "25": "tests/sm100/test_backward_edges.py, test_offsets_in_32_bits_are_seen",
}
IMPOSSIBLE = {
    "1": "no kernel starts before the one ahead of it has ended: none is launched programmatically",
    "13": "there are no block lists in the backward pass: a call that has them is refused",
    "19": "not in the kernel's code but in the compiler's version, which every cache key holds; a "
    "kernel that does not end is ended by `max_steps`",
}


def caught_by(one: BackwardBug, folder: Path) -> set[str]:
    """Which checks notice it, under the first of RUNS that shows anything."""
    with pytest.MonkeyPatch.context() as patch:
        put_in_place(one.edits, folder, patch)
        try:
            run = build(BackwardSpec(**one.spec))
        except ValueError:
            return {REFUSED}
        spec = run.spec
        fields: dict[str, Any] = {
            "layout": "packed", "lengths": ((300, 300),), "heads_k": 1, "group": 2, "seed": 4,
            "head_dim": spec.head_dim, "head_dim_v": spec.head_dim_v, "dtype": spec.dtype,
            "causal": spec.causal,
        }  # fmt: skip
        inputs = make_inputs(spec, Case(**{**fields, **one.case}))
        for how in RUNS:
            space = prepare(spec, inputs)
            report, outputs = run.launch(
                inputs, space, collect=True, max_steps=STEPS_LIMIT,
                ordered_sums=spec.deterministic, **how,
            )  # fmt: skip
            if report.findings:
                return {finding.kind for finding in report.findings}
            try:
                assert_within_budget(inputs, outputs, gradients_alone=True)
            except AssertionError:
                return {WRONG}
        return set()
