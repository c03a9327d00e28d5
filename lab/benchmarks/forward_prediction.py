"""What the simulator predicts for the compiled forward kernel, by its own instruction counts.

The emulator counts what each role executes for a KV tile (`fa4.compiled.prediction`), the plan's
amounts are scaled to that, and the simulator, with the constants calibrated on published figures of
FlashAttention-4, runs the paper's shapes: 32k tokens, 16 heads, head dim 128. Shares of emulated
exponentials and CTA pairs are varied. Kernels are compiled once (`fa4 cache`); compiling all takes
minutes. Nothing here ran on a B200, and predictions that differ by less than 3% are equal
(docs/simulator.md).
Usage: python -m lab.benchmarks.forward_prediction [--output FILE]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from fa4.compiled.prediction import tile_amounts
from fa4.compiled.toolchain import find_toolchain
from fa4.compiled.variants import tuned_spec
from fa4.config import Exp2Split, Problem
from fa4.plan.counted_math import PIPES, loop_math, with_measured_math
from fa4.plan.schema import Math
from fa4.sim.machine import find_machine
from fa4.sim.predict import predict
from fa4.sm100.forward.spec import ForwardSpec
from lab.benchmarks.common import parse_output, write_record

TOKENS, HEADS, HEAD_DIM = 32768, 16, 128
SPLITS = (
    Exp2Split(),
    Exp2Split(frequency=32, start_fragment=1),
    Exp2Split(frequency=16, start_fragment=1),
    Exp2Split(frequency=10, start_fragment=1),
    Exp2Split(frequency=8, start_fragment=1),
    Exp2Split(frequency=6, start_fragment=1),
)


@dataclass(frozen=True)
class Call:
    """A call of the paper's figures. cta_group: what this project's front chooses for it."""

    name: str
    seqlen: int
    causal: bool
    cta_group: int
    scheduler: str
    target_tflops: float
    published_tflops: float

    @property
    def problem(self) -> Problem:
        """Its sizes: as many sequences as make 32k tokens."""
        return Problem(
            batch=TOKENS // self.seqlen, seqlen_q=self.seqlen, seqlen_k=self.seqlen,
            heads_q=HEADS, heads_k=HEADS, head_dim=HEAD_DIM, causal=self.causal,
        )  # fmt: skip

    def spec(self, cta_group: int, split: Exp2Split | None = None) -> ForwardSpec:
        """The tuned kernel, or the one with another split of the exponentials."""
        spec = tuned_spec(HEAD_DIM, HEAD_DIM, causal=self.causal, cta_group=cta_group,
                          scheduler=self.scheduler)  # fmt: skip
        return spec if split is None else replace(spec, numerics=replace(spec.numerics, exp2=split))


CALLS = (
    Call("no mask, 32k", 32768, False, 2, "static", 1600.0, 1613.0),
    Call("causal, 16k", 16384, True, 1, "lpt", 1500.0, 1526.0),
)


def pipes(amount: Any) -> dict[str, float]:
    """Instructions per thread and KV tile by pipe, and their sum: a packed one counts once."""
    found = {name: value for name, value in asdict(amount).items() if name != "chain"}
    return found | {"instructions": sum(found.values()) - found["fma"] / 2}


def amounts_of(row: Mapping[str, Any]) -> dict[str, Math]:
    """A row's counts, by role, as `tile_amounts` gave them."""
    roles = row["instructions_per_tile"].items()
    return {name: Math(**{pipe: kinds["counted"][pipe] for pipe in PIPES}) for name, kinds in roles}


def planned(spec: ForwardSpec, role: str) -> dict[str, float]:
    """The plan's own estimate of the same."""
    parts = [pipes(part) for part in loop_math(spec.plan.role(role)).values()]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def measure(call: Call, cta_group: int, split: Exp2Split | None) -> dict[str, Any]:
    """One kernel: its counts, and what is predicted with them and with the plan's estimates."""
    spec = call.spec(cta_group, split)
    row = describe(call, spec, tile_amounts(spec))
    words = f"cta_group {cta_group}  emulated {row['emulated_columns']:3} of {spec.numerics.tile_n}"
    mark = "shipped" if row["shipped"] else ""
    print(f"{call.name:14} {words}  {row['tflops']:6.0f} TFLOP/s  {mark}", flush=True)
    return row


def describe(call: Call, spec: ForwardSpec, amounts: Mapping[str, Math]) -> dict[str, Any]:
    """A kernel's row, from the instructions that its roles execute for a KV tile."""
    machine = find_machine("b200")
    measured = with_measured_math(spec.plan, amounts)
    found = predict(call.problem, spec.pipeline, machine, plan=measured)
    estimate = predict(call.problem, spec.pipeline, machine)
    return {
        "call": call.name,
        "cta_group": spec.cta_group,
        "scheduler": spec.scheduler,
        "emulated_columns": sum(spec.numerics.exp2.emulated_columns(spec.numerics.tile_n)),
        "exp2": asdict(spec.numerics.exp2),
        "shipped": spec == call.spec(call.cta_group),
        "tflops": found.tflops,
        "tflops_by_the_plans_estimates": estimate.tflops,
        "milliseconds": found.seconds * 1e3,
        "peak_share": found.peak_share,
        "bottleneck": found.bottleneck,
        "unit_busy": dict(found.unit_busy),
        "instructions_per_tile": {
            role: {"counted": pipes(amount), "planned": planned(spec, role)}
            for role, amount in amounts.items()
        },
    }


def judge(call: Call, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The shipped kernel of a call against its target and the best other choice."""
    mine = [row for row in rows if row["call"] == call.name]
    (shipped,) = (row for row in mine if row["shipped"])
    best = max(mine, key=lambda row: row["tflops"])
    return {
        "call": call.name,
        "target_tflops": call.target_tflops,
        "published_tflops_of_flash_attention_4": call.published_tflops,
        "tflops": shipped["tflops"],
        "reached": shipped["tflops"] >= call.target_tflops,
        "best": {name: best[name] for name in ("cta_group", "emulated_columns", "exp2", "tflops")},
        "best_over_shipped": best["tflops"] / shipped["tflops"],
    }


def main() -> None:
    """Predict every choice, print the verdicts, write the result file."""
    options = parse_output((__doc__ or "").splitlines()[0], "forward_prediction")
    rows = [
        measure(call, cta_group, split)
        for call in CALLS
        for cta_group in (1, 2)
        for split in (None, *SPLITS)
        if split != call.spec(cta_group).numerics.exp2
    ]
    verdicts = [judge(call, rows) for call in CALLS]
    for found in verdicts:
        word = "reached" if found["reached"] else "NOT reached"
        best = found["best"]
        print(f"{found['call']}: {found['tflops']:.0f} TFLOP/s, target {found['target_tflops']:.0f}"
              f" {word}; best cta_group {best['cta_group']}, {best['emulated_columns']} emulated: "
              f"{best['tflops']:.0f} ({found['best_over_shipped'] - 1:+.1%})")  # fmt: skip
    report = {
        "schema_version": 1,
        "compiler": find_toolchain().label,
        "machine": "b200",
        "verdicts": verdicts,
        "predictions": rows,
    }
    write_record(options.output, report, ("numpy", "numba", "nvidia-cutlass-dsl"))


if __name__ == "__main__":
    main()
