"""Which planted synchronisation faults the emulator notices, and why it misses the others.

Every wait, arrival, fence, commit, count of bytes and of threads in three GEMMs and an attention
kernel is removed or altered, one at a time (`fa4.emulator.tools.faults`). A fault counts as caught
if a check fires or the outputs differ, under fifo or one of two seeds of the other schedules.
Faults in instructions that the problem never executes are left out.

What was removed may have been redundant: then the kernel is the same as before, and there is
nothing to notice. That is decided by comparing what happened before what in both kernels
(`fa4.emulator.tools.redundancy`), under all schedules: `equivalent`. A survivor is a fault that is
neither caught nor equivalent; each is explained in WHY. The equivalent ones of a kind are also
removed all together, which shows whether they stand for one another.
Usage: python -m lab.benchmarks.faults [--output FILE]    (`make conformance` first)
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fa4.emulator import EmulatorError, Options, RunEvents
from fa4.emulator.tools.faults import Fault, plant
from fa4.emulator.tools.redundancy import Orderings
from lab.benchmarks import emulated_kernels
from lab.benchmarks.common import parse_output, write_record
from lab.benchmarks.emulated_kernels import Kernel

SCHEDULES = (("fifo", 0), ("random", 0), ("random", 1), ("adversarial", 0), ("adversarial", 1))
PACKAGES = ("numpy", "numba", "nvidia-cutlass-dsl")
SURVIVED, NOT_EXECUTED, WRONG = "survived", "not executed", "wrong result"
EQUIVALENT = "equivalent"
NO_HANDLER = ("another CTA of the pair",)  # arithmetic, of which events do not tell

# What a removed instruction may leave to another one. Kind of fault -> what does the same.
DOES_THE_SAME = {
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
    "bulk commit removed": "a later commit of the thread closes a group of both copies, and who "
    "waits for one of them waits for both",
    "bulk wait removed": "the same thread has waited for the same copies, or for more, just before",
    "warp barrier removed": "another barrier of the warp, or of more, follows before anything that "
    "this one orders",
    "wgmma wait removed": "an earlier wait has waited for the same products, or for more",
    "wgmma fence removed": "the fence of the product issued just before it stands behind what was "
    "last written to the operands and to the accumulator",
    "cluster wait removed": "a second cluster barrier precedes it, and nothing needs the second",
}
# Survivors, one by one: kind and instruction -> why the kernel is right all the same, or why the
# emulator does not see that it is not.
_STATS = (
    "the load warp waits for the slot of the row statistics after the one of the same tile's Q: "
    "dK has read that, so dS was stored, for which the statistics had been read"
)
_PAIR_STATS = (
    "the load warp of a pair has waited for the slot of Q by columns before: dK of the tile whose "
    "statistics lie here has read that, so dS was stored, for which they had been read"
)
_FIRST_S_READ = (
    "the MMA warp of a pair waits for p_full of the same tile before it looks at s_read again, and "
    "the same warps arrive there later: without this wait dP may start earlier, and nothing else"
)
_LAST_DS_EMPTY = "nobody waits for the last phase of ds_empty: there is no further dS"
_SOME_BYTES = (
    "not seen: a store of a warp to the other CTA is one operation, and who knows of 16 of its 512 "
    "bytes knows all"
)
_COMMIT = (
    "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
    "[%r64+231592], %rs30"
)
_WAIT = "mbarrier.try_wait.parity.shared.b64 P1, [{}], {}, 10000000"
WHY: dict[tuple[str, str], str] = {
    ("wait removed", _WAIT.format("%r89", "%r90")): _STATS,
    ("wait removed", _WAIT.format("%r129", "%r130")): _STATS,
    ("wait removed", _WAIT.format("%r131", "%r132")): _PAIR_STATS,
    ("wait removed", _WAIT.format("%r242", "0")): _FIRST_S_READ,
    ("commit removed", _COMMIT): _LAST_DS_EMPTY,
    ("commit to one CTA alone", _COMMIT): _LAST_DS_EMPTY,
    (
        "16 bytes fewer expected",
        "mbarrier.arrive.expect_tx.shared.b64 %rd65, [%r265], %r264",
    ): _SOME_BYTES,
    ("another CTA of the pair", "mapa.shared::cluster.u32 %r141, %r35, %r25"): "the pair's CTAs "
    "copy the same row statistics, each the other's; a copy counts its bytes where it goes to",
    (
        "barrier removed",
        "bar.sync %r29, 256",
    ): "a turn at the tensor core orders nothing in memory: "
    "without it the warpgroups' products come in another order, which costs time",
    (
        "warp barrier removed",
        "bar.warp.sync -1",
    ): "behind tcgen05.wait, wgmma.wait_group, a shuffle or stmatrix, which are of the whole warp, "
    "before one lane arrives for all: nobody races for what it orders besides. Behind the wait for "
    "a turn, in which each lane waits for itself. Behind reads of rows that leave by threads: the "
    "warp passes another barrier before the load warp may reuse their place. Behind a wait for "
    "bulk copies, which one lane has issued: not seen, as what one lane has waited for counts as "
    "known to its warp. Behind the wait and the fence of a pair's "
    "relay, which all lanes pass.",
}


@dataclass(frozen=True)
class Outcome:
    """how: kind of the first finding, or one of the four above. schedule: where it showed."""

    line: int
    kind: str
    instruction: str
    how: str
    schedule: str = ""
    message: str = ""

    @property
    def caught(self) -> bool:
        """Whether anything showed."""
        return self.how not in (SURVIVED, NOT_EXECUTED, EQUIVALENT)


class Lines(RunEvents):
    """PTX lines of the instructions with handlers that a run executes: given as `events`."""

    def __init__(self) -> None:
        self.executed_lines: set[int] = set()

    def executed(self, fragment: Any, step: Any, outcome: Any, tick: int) -> None:
        """A handler ran."""
        self.executed_lines.add(step.instruction.line)


def judge(kernel: Kernel, ptx: str, expected: bytes) -> tuple[str, str, str]:
    """(how, schedule, message) for altered PTX."""
    for schedule, seed in SCHEDULES:
        options = Options(
            schedule=schedule, seed=seed, collect=True, max_findings=1 + kernel.formal
        )
        name = f"{schedule} {seed}"
        try:
            report = kernel.run(options, ptx)
        except EmulatorError as error:
            return "refused", name, str(error)
        found = [finding for finding in report.findings if finding.severity != "formal"]
        if found or len(report.findings) > kernel.formal:
            first = (found or report.findings)[0]
            return first.kind, name, first.message
        if kernel.contents() != expected:
            return WRONG, name, ""
    return SURVIVED, "", ""


def orderings(kernel: Kernel, ptx: str, schedule: tuple[str, int]) -> Orderings:
    """What happened before what in a run."""
    found = Orderings()
    kernel.run(Options(schedule=schedule[0], seed=schedule[1], events=found), ptx)
    return found


def is_equivalent(kernel: Kernel, ptx: str, before: Orderings) -> bool:
    """Whether what was removed in this PTX orders nothing. before: of the whole kernel."""
    return all(before.same_as(orderings(kernel, ptx, schedule)) for schedule in SCHEDULES)


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
    before = orderings(kernel, ptx, SCHEDULES[0])
    faults = plant(ptx, kernel.launch.kernel)
    outcomes = []
    for fault in faults:
        executed = fault.line in lines.executed_lines or fault.kind in NO_HANDLER
        verdict = judge(kernel, fault.text, expected) if executed else (NOT_EXECUTED, "", "")
        removed = verdict[0] == SURVIVED and fault.kind.endswith("removed")
        if removed and is_equivalent(kernel, fault.text, before):
            verdict = EQUIVALENT, "", ""
        outcomes.append(Outcome(fault.line, fault.kind, fault.instruction, *verdict))
    return {
        "kernel": kernel.name,
        "thread_instructions": report.instructions.total(),
        "faults": len(faults),
        **shares(Counter(how_of(o) for o in outcomes)),
        "seconds": round(time.perf_counter() - began, 1),
        "by_schedule": dict(Counter(o.schedule for o in outcomes if o.caught)),
        "table": table(outcomes),
        "equivalent_by_kind": groups(kernel, before, expected, faults, outcomes),
        "survivors": [
            {
                "line": o.line,
                "kind": o.kind,
                "instruction": o.instruction,
                "why": why_of(o, kernel.why),
            }
            for o in outcomes
            if o.how == SURVIVED
        ],
    }


def how_of(outcome: Outcome) -> str:
    """An outcome in one word."""
    return "caught" if outcome.caught else outcome.how


def why_of(outcome: Outcome, known: Mapping[tuple[str, int], str] | None = None) -> str:
    """Why a survivor survives; known: the kernel's own reasons."""
    general = WHY.get((outcome.kind, outcome.instruction), "not explained")
    return (known or {}).get((outcome.kind, outcome.line), general)


def shares(counts: Counter[str]) -> dict[str, Any]:
    """Numbers of faults, and the shares that were caught, of all and of those that change order."""
    executed = sum(counts.values()) - counts[NOT_EXECUTED]
    return {
        "executed": executed,
        "caught": counts["caught"],
        "equivalent": counts[EQUIVALENT],
        "survived": counts[SURVIVED],
        "share_caught": counts["caught"] / executed,
        "share_caught_without_equivalent": counts["caught"] / (executed - counts[EQUIVALENT]),
    }


def groups(
    kernel: Kernel,
    before: Orderings,
    expected: bytes,
    faults: list[Fault],
    outcomes: list[Outcome],
) -> dict[str, dict[str, Any]]:
    """The equivalent faults by kind, and what happens if all of a kind are planted together."""
    found = {}
    for kind in sorted({o.kind for o in outcomes if o.how == EQUIVALENT}):
        lines = {o.line for o in outcomes if o.how == EQUIVALENT and o.kind == kind}
        chosen = [fault for fault in faults if fault.kind == kind and fault.line in lines]
        text = together(kernel.launch.ptx, chosen)
        how, schedule, message = judge(kernel, text, expected)
        if how == SURVIVED and is_equivalent(kernel, text, before):
            how = EQUIVALENT
        found[kind] = {
            "count": len(chosen), "lines": sorted(lines),
            "does_the_same": DOES_THE_SAME.get(kind, "not explained"),
            "all_removed_together": how, "schedule": schedule, "message": message.split("\n")[0],
        }  # fmt: skip
    return found


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
        f"({result['share_caught']:.1%}), {result['equivalent']} equivalent "
        f"({result['share_caught_without_equivalent']:.1%} of the others), "
        f"{result['survived']} survived, {result['seconds']:.0f} s"
    )
    for kind, counts in result["table"].items():
        print(f"  {kind:28} " + ", ".join(f"{how} {count}" for how, count in counts.items()))
    for kind, group in result["equivalent_by_kind"].items():
        print(f"  {group['count']} x {kind}, all together: {group['all_removed_together']}")
    for survivor in result["survivors"]:
        print(f"  survived: {survivor['kind']}, line {survivor['line']}: {survivor['instruction']}")


def report_on(kernels: list[Kernel]) -> dict[str, Any]:
    """Campaigns on all kernels, printed, and what the result file says of them."""
    results = []
    for kernel in kernels:
        results.append(campaign(kernel))
        show(results[-1])
    return summary(results)


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """What the result file says of these campaigns, printed."""
    names = ("caught", EQUIVALENT, SURVIVED)
    total = shares(Counter({name: sum(r[name] for r in results) for name in names}))
    print(f"\n{total['caught']} of {total['executed']} caught ({total['share_caught']:.1%}), "
          f"{total['share_caught_without_equivalent']:.1%} without the equivalent")  # fmt: skip
    return {
        "schedules": [f"{schedule} {seed}" for schedule, seed in SCHEDULES],
        **total,
        "kernels": results,
    }


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
    write_record(options.output, report_on([make() for make in makers]), PACKAGES)


if __name__ == "__main__":
    main()
