"""Searches Hopper's forward designs; writes the best and as many random ones, to be measured.

    python -m lab.hardware.hopper_designs.choose PLAN.json
    python -m lab.hardware.warpgroup_forward.measure PLAN.json RESULTS.jsonl        # on the GPU
    python -m lab.hardware.hopper_designs.compare PLAN.json RESULTS.jsonl --machine NAME

Every variant of a problem is one of the search's space, as fields of `WarpgroupSpec`, with what was
predicted of it; "today" is what a call gets.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any, cast

from fa4.compiled.variants import tuned_warpgroup_spec
from fa4.config import Problem, WarpgroupPipeline
from fa4.plan.warpgroup_tuned import WarpgroupProblem
from fa4.search.judge import Judge
from fa4.search.run import Effort, Judged, Search
from fa4.search.space import find_space
from fa4.sim.machine import find_machine

BEST = RANDOM = 10
LEADERS = 60  # among which are the ten best that differ in more than stages and launches
DISTINCT = ("consumers", "tile_n", "p_source", "overlap", "ping_pong")
# Under a mask a prediction takes many times as long: two stages, longest first.
MASKED = {"kv_stages": ["2"], "scheduler": ["lpt"]}
SEED = 25
CALLS = ((128, False, 16), (64, False, 32), (128, True, 16))  # head dim, causal, heads
LENGTH = 16384
CHOICES = ("tile_n", "consumers", "kv_stages", "p_source", "overlap", "ping_pong", "ahead")


def spec_fields(pipeline: WarpgroupPipeline) -> dict[str, Any]:
    """Of the kernel that has this pipeline; drawn where it is longest first and ahead."""
    draws = pipeline.scheduler == "lpt" and pipeline.ahead
    return {name: getattr(pipeline, name) for name in CHOICES} | {
        "head_dim": pipeline.head_dim,
        "head_dim_v": pipeline.head_dim_v,
        "causal": pipeline.causal,
        "scheduler": "queue" if draws else pipeline.scheduler,
    }


def todays(problem: Problem) -> dict[str, Any]:
    """What a call of this problem gets."""
    tiles = WarpgroupProblem(
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        rows=problem.seqlen_q,
        keys=problem.seqlen_k,
        heads=problem.heads_q,
        batch=problem.batch,
        masked=problem.window_size[1] == 0,
        window=problem.window_size,
    )
    spec = tuned_warpgroup_spec(
        problem.head_dim, problem.head_dim_v, tiles, causal=problem.window_size[1] == 0
    )
    fields = {name: getattr(spec, name) for name in (*CHOICES, "scheduler", "causal")}
    return fields | {"head_dim": spec.head_dim, "head_dim_v": spec.head_dim_v}


class AllJudged(Search):
    """A search that remembers every design that can run."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.running: list[Judged] = []

    def _take(self, found: Judged) -> None:
        super()._take(found)
        if found.verdict.fits:
            self.running.append(found)


def chosen(problem: Problem, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(variants, what was predicted of each): the best and random ones of all that can run."""
    machine = find_machine("h200")
    space = find_space(problem, machine.gpu, backward=False, narrow_values=False)
    if problem.window_size[1] == 0:
        space = space.restricted(MASKED)
    judge = Judge.of(problem, machine)
    search = AllJudged(space, judge, Effort(limit=len(space), top=LEADERS))
    outcome = search.run()
    kinds: dict[tuple[object, ...], Judged] = {}
    for leader in outcome.leaders:
        kinds.setdefault(tuple(getattr(leader.pipeline, name) for name in DISTINCT), leader)
    best = list(kinds.values())[:BEST]
    others = sorted({x.number for x in search.running} - {x.number for x in best})
    numbers = random.Random(SEED).sample(others, RANDOM)
    drawn = [x for x in search.running if x.number in numbers]
    variants, predicted = {f"{name} today": todays(problem)}, {}
    for kind, found in (("best", best), ("random", drawn)):
        for place, one in enumerate(found):
            pipeline = cast("WarpgroupPipeline", one.pipeline)  # of Hopper's space
            key = f"{name} {kind} {place}"
            variants[key] = spec_fields(pipeline)
            rates = judge.rates(pipeline)
            predicted[key] = {"tflops": rates[0], "least": min(rates), "most": max(rates)}
    print(f"{name}: {outcome.judged} designs in {outcome.cpu_seconds:.0f} CPU s, "
          f"{len(search.running)} can run: {dict(outcome.counts)}")  # fmt: skip
    return variants, predicted


def main() -> None:
    """Writes the plan."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plan", type=Path)
    plan: dict[str, Any] = {"variants": {}, "problems": [], "peers": [], "predicted": {}}
    file = parser.parse_args().plan
    for dim, causal, heads in CALLS:
        problem = Problem(batch=1, seqlen_q=LENGTH, seqlen_k=LENGTH, heads_q=heads, heads_k=heads,
                          head_dim=dim, dtype="bf16", causal=causal)  # fmt: skip
        name = f"d{dim} {'causal' if causal else 'full'}"
        variants, predicted = chosen(problem, name)
        plan["variants"] |= variants
        plan["predicted"] |= predicted
        plan["problems"].append(
            {"head_dim": dim, "head_dim_v": dim, "causal": causal, "seqlen": LENGTH, "batch": 1,
             "heads": heads, "only": list(variants)}
        )  # fmt: skip
        file.write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
