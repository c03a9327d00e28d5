"""Which planted synchronisation faults the emulator notices, and why it misses the others.

Every wait, arrival, fence, commit, count of bytes and of threads in three GEMMs and an attention
kernel is removed or altered, one at a time (`fa4.emulator.faults`). A fault counts as caught if a
check fires or the outputs differ, under fifo or one of two seeds of the other schedules. Faults in
instructions that the problem never executes are left out. A fault may survive because it changes
nothing: another instruction does the same. That is shown by removing all survivors of a kind
together, and explained by kind in WHY.
Usage: python benchmarks/benchmark_faults.py [--output FILE]    (`make conformance` first)
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import emulated_kernels
from common import describe_run, parse_output, write_result
from emulated_kernels import Kernel

from fa4.emulator import EmulatorError, Options
from fa4.emulator.faults import Fault, plant

SCHEDULES = (("fifo", 0), ("random", 0), ("random", 1), ("adversarial", 0), ("adversarial", 1))
SURVIVED, NOT_EXECUTED, WRONG = "survived", "not executed", "wrong result"

# Kind of fault -> why one may change nothing in these kernels.
WHY = {
    "init fence removed": "another fence.mbarrier_init of the same threads stands between the "
    "initialisation and its first use, or no copy signals the mbarriers before it",
    "barrier removed": "another barrier of the same threads follows before anything that this one "
    "orders (each pipeline is created with one of its own; bar.sync 0 before bar.sync 1, 512), or "
    "the instruction before it, tcgen05.alloc, is of the whole warp, which is all that waits here",
    "wait removed": "another wait implies it: copies are waited for where their slot is used, "
    "commits of the tensor pipe complete in order, so that a later one stands for the earlier, and "
    "the waits of the attention kernel's warps form cycles. Waits at the end of a producer drain "
    "the ring before an exit; the CTA lives on until its epilogue has the last accumulator",
    "TMEM wait removed": "the next instruction reads a register of the load, which waits for it as "
    "the hardware's scoreboard does (Options.strict_tmem_loads reports it)",
    "init count - 1": "the arrival that is left over follows a barrier of the warps that arrive, "
    "so that the arrivals that count vouch for it",
    "init count + 1": "nothing waits for the phase",
    "cluster arrival removed": "a second cluster barrier follows at once",
    "cluster wait removed": "a second cluster barrier precedes it, and nothing needs the second",
    "arrive twice": "nothing waits for the phase",
    "parity flipped": "both phases are over",
}


@dataclass(frozen=True)
class Outcome:
    """how: kind of the first finding, or one of the three above. schedule: where it showed."""

    line: int
    kind: str
    instruction: str
    how: str
    schedule: str = ""
    message: str = ""

    @property
    def caught(self) -> bool:
        """Whether anything showed."""
        return self.how not in (SURVIVED, NOT_EXECUTED)


class Lines:
    """PTX lines of the instructions with handlers that a run executes: given as `events`."""

    def __init__(self) -> None:
        self.executed_lines: set[int] = set()

    def executed(self, fragment: Any, step: Any, outcome: Any, tick: int) -> None:
        """A handler ran."""
        self.executed_lines.add(step.instruction.line)

    def issued(self, *_: Any) -> None:
        """Nothing to note."""

    completed = cluster_started = issued


def judge(kernel: Kernel, ptx: str, expected: bytes) -> tuple[str, str, str]:
    """(how, schedule, message) for altered PTX."""
    for schedule, seed in SCHEDULES:
        options = Options(schedule=schedule, seed=seed, collect=True, max_findings=1)
        name = f"{schedule} {seed}"
        try:
            report = kernel.run(options, ptx)
        except EmulatorError as error:
            return "refused", name, str(error)
        if report.findings:
            return report.findings[0].kind, name, report.findings[0].message.split("\n")[0]
        if kernel.contents() != expected:
            return WRONG, name, ""
    return SURVIVED, "", ""


def together(ptx: str, faults: list[Fault]) -> str:
    """The PTX with several faults in different lines."""
    original, lines = ptx.split("\n"), ptx.split("\n")
    for fault in faults:
        for at, line in enumerate(fault.text.split("\n")):
            if line != original[at]:
                lines[at] = line
    return "\n".join(lines)


def campaign(kernel: Kernel) -> dict[str, Any]:
    """All faults of a kernel."""
    lines = Lines()
    began = time.perf_counter()
    report = kernel.run(Options(events=lines))
    expected = kernel.contents()
    ptx = kernel.launch.ptx
    faults = plant(ptx, kernel.launch.kernel)
    outcomes = []
    for fault in faults:
        executed = fault.line in lines.executed_lines
        verdict = judge(kernel, fault.text, expected) if executed else (NOT_EXECUTED, "", "")
        outcomes.append(Outcome(fault.line, fault.kind, fault.instruction, *verdict))
    survivors = [o for o in outcomes if o.how == SURVIVED]
    groups = {}
    for kind in sorted({o.kind for o in survivors}):
        members = {o.line for o in survivors if o.kind == kind}
        chosen = [f for f in faults if f.kind == kind and f.line in members]
        how, schedule, message = judge(kernel, together(ptx, chosen), expected)
        groups[kind] = {
            "survivors": len(chosen), "why": WHY.get(kind, ""), "all_removed_together": how,
            "schedule": schedule, "message": message,
        }  # fmt: skip
    executed_count = sum(o.how != NOT_EXECUTED for o in outcomes)
    caught = sum(o.caught for o in outcomes)
    redundant = sum(
        g["survivors"] for g in groups.values() if g["all_removed_together"] != SURVIVED
    )
    return {
        "kernel": kernel.name,
        "thread_instructions": report.instructions.total(),
        "faults": len(faults),
        "executed": executed_count,
        "caught": caught,
        "share_caught": caught / executed_count,
        "caught_only_together": redundant,
        "share_caught_alone_or_together": (caught + redundant) / executed_count,
        "seconds": round(time.perf_counter() - began, 1),
        "by_schedule": dict(Counter(o.schedule for o in outcomes if o.caught)),
        "table": table(outcomes),
        "groups_of_survivors": groups,
        "survivors": [
            {name: value for name, value in asdict(o).items() if value} for o in survivors
        ],
    }


def table(outcomes: list[Outcome]) -> dict[str, dict[str, int]]:
    """Kind of fault -> how it was caught -> how often."""
    rows: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        rows.setdefault(outcome.kind, Counter())[outcome.how] += 1
    return {kind: dict(rows[kind].most_common()) for kind in sorted(rows)}


def show(result: dict[str, Any]) -> None:
    """One kernel's results on the terminal."""
    print(
        f"\n{result['kernel']}: {result['caught']} of {result['executed']} caught "
        f"({result['share_caught']:.1%}), {result['caught_only_together']} more only together with "
        f"others of their kind, {result['seconds']:.0f} s"
    )
    for kind, counts in result["table"].items():
        print(f"  {kind:28} " + ", ".join(f"{how} {count}" for how, count in counts.items()))
    for kind, group in result["groups_of_survivors"].items():
        print(f"  {group['survivors']} x {kind}, all together: {group['all_removed_together']}")


def main() -> None:
    """Run everything, print it, write the result file."""
    options = parse_output(__doc__ or "", "emulator_faults")
    warnings.simplefilter("ignore")  # those of other people's code
    makers = [emulated_kernels.example_gemm]
    why = emulated_kernels.missing()
    if why:
        print(f"only the example: {why}")
    else:
        makers += [
            emulated_kernels.persistent_gemm,
            emulated_kernels.pair_gemm,
            lambda: emulated_kernels.fmha(256, 384, heads=3, persistent=True),
        ]
    results = []
    for make in makers:
        results.append(campaign(make()))
        show(results[-1])
    executed, caught = (sum(r[name] for r in results) for name in ("executed", "caught"))
    redundant = sum(r["caught_only_together"] for r in results)
    print(f"\n{caught} of {executed} caught ({caught / executed:.1%}), with those caught together "
          f"{(caught + redundant) / executed:.1%}")  # fmt: skip
    report = {
        "run": describe_run(("numpy", "numba", "nvidia-cutlass-dsl")),
        "schedules": [f"{schedule} {seed}" for schedule, seed in SCHEDULES],
        "executed": executed,
        "caught": caught,
        "share_caught": caught / executed,
        "share_caught_alone_or_together": (caught + redundant) / executed,
        "kernels": results,
    }
    write_result(options.output, report)


if __name__ == "__main__":
    main()
