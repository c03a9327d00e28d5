"""The tables of docs/backward.md, made of the plans, what was counted and what is predicted.

`python -m lab.pages.backward_tables` writes them between their markers in that file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fa4.designs import plan_of
from fa4.plan.counted_math import with_measured_math
from fa4.plan.render import draw_memory, markdown_table, span
from fa4.plan.schema import Math, Signal
from fa4.sim.options import build
from fa4.sim.predict import predict
from fa4.sm100.backward.spec import BackwardSpec
from lab.pages import DOCS
from lab.pages.backward_bugs import render_bugs
from lab.pages.forward_tables import render_order
from lab.pages.marked_tables import MarkedTables
from lab.records import read_record

PAGE = DOCS / "backward.md"
COMMAND = "python -m lab.pages.backward_tables"
PLANS = {
    "d 128, 1 CTA": BackwardSpec(head_dim=128, head_dim_v=128).plan,
    "d 128, pair": BackwardSpec(head_dim=128, head_dim_v=128, cta_group=2).plan,
    "(192, 128), pair": BackwardSpec(head_dim=192, head_dim_v=128, cta_group=2).plan,
}
TRIPS = {"q_tiles": 3, "masked_tiles": 1, "plain_tiles": 2}  # of the KV tile that is unrolled
PORT_BYTES = 128  # of shared memory in a cycle
STATISTICS_LOADS = 32  # of 16 bytes: -LSE and -D of 64 queries
LENGTHS = ("4k", "16k")
CALLS: dict[str, dict[str, str]] = {
    "d 128, 1 CTA": {"cta_group": "1"},
    "d 128, pair": {"cta_group": "2"},
    "d 128, pair, deterministic": {"cta_group": "2", "deterministic": "yes"},
    "d 128, pair, causal": {"cta_group": "2", "causal": "yes"},
    "d 128, pair, causal, deterministic": {
        "cta_group": "2", "causal": "yes", "deterministic": "yes"
    },
    "(192, 128), pair": {"head_dim": "192", "head_dim_v": "128", "cta_group": "2"},
    "d 64, 1 CTA": {"head_dim": "64", "cta_group": "1"},
}  # fmt: skip


def render_roles() -> str:
    """Warps and registers of each role, plan beside plan."""
    names = list(dict.fromkeys(role.name for plan in PLANS.values() for role in plan.roles))
    rows = []
    for name in names:
        found = [next((r for r in plan.roles if r.name == name), None) for plan in PLANS.values()]
        warps = next(span(role.warps) for role in found if role)
        rows.append((name, warps, *(role.registers if role else "-" for role in found)))
    return markdown_table(("role", "warps", *(f"registers: {name}" for name in PLANS)), rows)


def render_signals() -> str:
    """Who arrives at and who waits for each signal, plan beside plan."""
    names = list(dict.fromkeys(one.name for plan in PLANS.values() for one in plan.signals))
    rows = []
    for name in names:
        found = [
            next((one for one in plan.signals if one.name == name), None) for plan in PLANS.values()
        ]
        first = next(one for one in found if one)
        arrivers, waiters = ", ".join(first.arrivals), ", ".join(first.waiters)
        rows.append((name, arrivers, waiters, *(_signal(one) for one in found)))
    return markdown_table(("signal", "arrives", "waits", *PLANS), rows)


def _signal(signal: Signal | None) -> str:
    """Arrivals of a phase, stages, bytes."""
    if signal is None:
        return "-"
    parts = [str(signal.arrive_count)]
    parts += [f"{signal.tx_bytes} B"] if signal.tx_bytes else []
    parts += [f"{signal.stages} stages"] if signal.stages > 1 else []
    parts += ["both CTAs"] if signal.remote else []
    return ", ".join(parts)


def render_memory(space: str) -> str:
    """A memory of each plan, drawn."""
    drawn = (f"{name}\n{draw_memory(plan, space)}" for name, plan in PLANS.items())
    return "```text\n" + "\n\n".join(drawn) + "\n```"


def render_products() -> str:
    """What the MMA warp waits for, issues and commits, of three query tiles."""
    return "\n\n".join(
        f"{name}:\n\n{render_order(plan, TRIPS, only='mma')}" for name, plan in PLANS.items()
    )


def render_traffic(results: Path | None = None) -> str:
    """Shared-memory bytes of a query tile: as planned, as counted in the emulator."""
    report = read_record("backward_traffic", results)
    kinds = ("products", "stores", "stores from a peer", "bulk reductions")
    rows = []
    for name, row in report.items():
        planned, counted = row["planned"], row["counted"]
        cells = [_both(planned.get(kind, 0), [one.get(kind, 0) for one in counted])
                 for kind in kinds]  # fmt: skip
        total = sum(planned.get(kind, 0) for kind in kinds)
        totals = [sum(one.get(kind, 0) for kind in kinds) for one in counted]
        limit = row["limit_bytes"]
        rows.append((
            name, *cells, _both(total, totals), f"{total / PORT_BYTES:.0f}",
            f"{limit / PORT_BYTES:.0f}" if limit else "-",
            _both(planned["copies"], [one["copies"] for one in counted]),
            " / ".join(str(one["loads"]) for one in counted[:1]),
            " / ".join(map(str, dict.fromkeys(row["reduced_bytes"]))),
        ))  # fmt: skip
    titles = ("kernel", "operands of products", "stores (dS, dQ staging)", "dS from the peer",
              "dQ read for the addition", "sum", "cycles", "limit", "loads by TMA",
              "row statistics", "dQ added by a CTA")  # fmt: skip
    return markdown_table(titles, rows)


def _both(planned: int, counted: list[int]) -> str:
    """One number where plan and every CTA's count agree."""
    differ = [number for number in counted if number != planned]
    return f"{planned}, counted {differ}" if differ else str(planned)


def render_code(results: Path | None = None) -> str:
    """Instructions of the loops beside the peers'."""
    report = read_record("codegen", results)
    rows = [
        _code_row(case, one)
        for case in report["backward"]
        for one in case["kernels"]
        if "figures" in one
    ]
    titles = ("head dims, mask", "kernel", "compute", "masked", "MMA", "reduce", "barriers",
              "LDL + STL", "frame B", "compile s")  # fmt: skip
    missed = [
        f"- {_case(case)}, {name}: {', '.join(names)}"
        for case in report["backward"]
        for name, names in case["goals_missed"].items()
        if names
    ]
    return "\n\n".join((markdown_table(titles, rows), "Goals missed:", "\n".join(missed) or "none"))


def _case(case: Mapping[str, Any]) -> str:
    return f"({case['head_dim']}, {case['head_dim_v']}) {case['mask']}"


def _code_row(case: Mapping[str, Any], one: Mapping[str, Any]) -> tuple[object, ...]:
    found = one["figures"]
    return (
        _case(case),
        one["name"],
        f"{found['compute_slots']} ({found['compute_shortest_slots']})",
        f"{found['masked_slots']} ({found['masked_shortest_slots']})",
        found["mma_slots"],
        found["reduce_slots"],
        found["barriers"],
        found["spill_instructions"],
        found["frame_bytes"],
        f"{found['compile_cpu_seconds']:.2f}",
    )


def render_prediction(results: Path | None = None) -> str:
    """Predicted TFLOP/s with the counted instructions; where `fa4 predict`, which has the plan's
    estimate of them, says otherwise, that in parentheses."""
    cases = read_record("codegen", results)["backward"]
    rows = []
    for name, settings in CALLS.items():
        cells = []
        for length in LENGTHS:
            request = build({"pass": "bwd", "seqlen": length, **settings})
            plan = plan_of(request.pipeline, request.machine.gpu)
            columns = _columns(cases, request.problem, request.pipeline)
            measured = with_measured_math(plan, {"compute": counted_math(columns)})
            found = predict(
                request.problem, request.pipeline, request.machine, request.simulation, measured
            )
            both = f"{found.tflops:.0f}", f"({request.predict().tflops:.0f})"
            cells.append(both[0] if both[1] == f"({both[0]})" else " ".join(both))
        rows.append((name, *cells, found.bottleneck))
    return markdown_table(("call", *LENGTHS, "busiest unit"), rows)


def _columns(cases: Iterable[Mapping[str, Any]], problem: Any, pipeline: Any) -> dict[str, int]:
    """What the compute loop of a call's kernel consists of."""
    name = "ours" + " 2 CTA" * (pipeline.numerics.cta_group == 2)
    name += " deterministic" * pipeline.deterministic
    key = (problem.head_dim, problem.head_dim_v, "causal" if problem.causal else "full")
    for case in cases:
        if (case["head_dim"], case["head_dim_v"], case["mask"]) == key:
            kernels = {one["name"]: one for one in case["kernels"]}
            found: dict[str, int] = kernels[name]["columns"]["gradients"]
            return found
    raise ValueError(f"the record codegen has no backward kernel for {key}")


def counted_math(columns: Mapping[str, int]) -> Math:
    """Machine code of a compute loop by pipe. What a plan has besides is left out: tensor memory,
    stores and signals."""
    packed = sum(columns.get(name, 0) for name in ("FFMA2", "FADD2", "FMUL2"))
    alu = sum(columns.get(name, 0) for name in ("F2FP", "integer", "scalar FP"))
    moves = sum(columns.get(name, 0) for name in ("MOV", "uniform", "branch", "constant", "other"))
    return Math(mufu=columns["MUFU.EX2"], fma=2 * packed, alu=alu, other=moves + STATISTICS_LOADS)


SECTIONS: dict[str, Callable[[], str]] = {
    "roles": render_roles,
    "tensor memory": lambda: render_memory("tmem"),
    "shared memory": lambda: render_memory("smem"),
    "signals": render_signals,
    "products": render_products,
    "traffic": render_traffic,
    "code": render_code,
    "prediction": render_prediction,
    "bugs": render_bugs,
}
TABLES = MarkedTables(COMMAND, SECTIONS)


def main() -> None:
    """Writes the present tables into the page."""
    TABLES.write(PAGE)


if __name__ == "__main__":
    main()
