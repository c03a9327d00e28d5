"""The searches for designs that docs/design.md speaks of.

    python -m lab.benchmarks.design

A record for each call: leaders, the best of other shapes, what was pruned, why the first leads,
what would decide, and the CPU seconds that it took. Some five minutes.
"""

from __future__ import annotations

from typing import Any

from fa4.config import Problem
from fa4.search.judge import Judge
from fa4.search.report import Today, build_report
from fa4.search.run import Effort, Search
from fa4.search.space import find_space
from fa4.sim.machine import find_machine
from fa4.sim.options import default_pipeline
from lab.records import record_path, write_record

TOKENS, HEADS, KEYS, TOP = 2**15, 16, 16384, 10
# Name: head dim, is it causal?, designs.
CALLS = {"d128": (128, False, 4000), "d64": (64, False, 1000), "d128 causal": (128, True, 4000)}


def search(head_dim: int, causal: bool, limit: int) -> dict[str, Any]:
    """The report of one search."""
    machine = find_machine("b200")
    problem = Problem(batch=TOKENS // KEYS, seqlen_q=KEYS, seqlen_k=KEYS, heads_q=HEADS,
                      heads_k=HEADS, head_dim=head_dim, dtype="bf16", causal=causal)  # fmt: skip
    judge = Judge.of(problem, machine)
    pipeline = default_pipeline(problem, machine)
    space = find_space(problem, machine.gpu, backward=False, narrow_values=False)
    today = Today(pipeline=pipeline, rates=judge.rates(pipeline))
    effort = Effort(limit=limit, top=TOP, jobs=2, floor=today.floor)
    outcome = Search(space, judge, effort).run()
    return build_report(outcome, judge, today)


def main() -> None:
    """Writes the record."""
    found = {}
    for name, call in CALLS.items():
        found[name] = report = search(*call)
        first = report["leaders"][0]
        rates = f"{first['least_tflops']:.0f} to {first['most_tflops']:.0f} TFLOP/s"
        print(f"{name}: {report['judged']} designs, {rates}", flush=True)
    write_record(record_path("design"), {"calls": found})


if __name__ == "__main__":
    main()
