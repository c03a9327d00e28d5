"""What the emulator says when one wait, arrival or fence is taken out of our kernels, as data.

`fa4 explore` shows it beside the plan: fa4/explore/verdicts.json holds, for each PTX instruction
whose removal forward_faults.py, backward_faults.py and
warpgroup_faults.py try, the plan's steps that it carries out, the verdict, both sides of
a race or who waits for whom in a deadlock. How a fault is judged is said in faults.py.
Usage: python -m lab.benchmarks.record_verdicts [--output FILE] [--only NAME]
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fa4.base.files import read_text
from fa4.emulator import BarrierUse, Options, RunEvents
from fa4.emulator.tools.faults import Fault, plant
from fa4.kit.signals import CTA_BARRIER, mbarrier_numbers, named_numbers
from fa4.plan.schema import PipelinePlan
from fa4.sm90.forward.spec import WarpgroupSpec
from fa4.sm100.backward.spec import BackwardSpec
from fa4.sm100.forward.spec import ForwardSpec
from lab import ROOT
from lab.benchmarks import backward_faults as backward
from lab.benchmarks import faults
from lab.benchmarks import forward_faults as forward
from lab.benchmarks import warpgroup_faults as warpgroups
from lab.benchmarks.common import write_record
from lab.benchmarks.emulated_kernels import Kernel

OUTPUT = ROOT / "fa4" / "explore" / "verdicts.json"
SCHEMA_VERSION = 1
MBARRIER_BYTES = 8
OWN_WARPS = "its own warps"  # a barrier within a role, which no plan names
THREADS = 32  # of a warp
MOST_MESSAGE = 600  # characters of a message that are kept
FORWARD, PAIR = "dense causal d128", "backward, d128 pair"
SINGLE = "backward, dense d128"
NAMES = (FORWARD, SINGLE, PAIR, *warpgroups.SPECS)
VERBS = {BarrierUse.WAIT: "wait", BarrierUse.ARRIVE: "arrive", BarrierUse.COMMIT: "arrive"}

_WARP = re.compile(r"CTA (\d+) warp (\d+)")
_SIDE = re.compile(r"(?:warp (\d+)(?: lane \d+)? )?\(PTX line (\d+): (\S+)\)")
_WAITER = re.compile(
    r"CTA (?P<cta>\d+) warp (?P<warp>\d+): (?:parity \d of mbarrier (?P<address>0x[0-9a-f]+) of "
    r"CTA (?P<owner>\d+) \(.*?phase (?P<phase>\d+), (?P<missing>.*?)\)|barrier (?P<number>\d+), "
    r"(?P<arrived>.*? arrived)) \(PTX line (?P<line>\d+)\)"
)


@dataclass(frozen=True)
class NamedPlan:
    """A kernel's plan, and how its barriers are found in what the emulator says."""

    plan: PipelinePlan
    first_barrier: int = 0  # shared address of the plan's first mbarrier

    def role(self, warp: int) -> str:
        """The role of a warp; "idle" for one without."""
        return next((role.name for role in self.plan.roles if warp in role.warps), "idle")

    def mbarrier(self, number: int) -> str:
        """The signal of the plan's mbarrier with a number."""
        starts = {name: at for name, at in mbarrier_numbers(self.plan).items() if at <= number}
        return max(starts, key=lambda name: starts[name])

    def barrier(self, number: int) -> str:
        """The signal of a named barrier."""
        if number == CTA_BARRIER:
            return "all warps"
        names = {at: name for name, at in named_numbers(self.plan).items()}
        return names.get(number, OWN_WARPS)

    def arrivers(self, signal: str) -> list[str]:
        """The roles that complete a signal's phases; none for what is within a role."""
        return next((list(s.arrivals) for s in self.plan.signals if s.name == signal), [])


@dataclass
class Uses(RunEvents):
    """Per PTX line of a run: (verb, mbarrier number) of what it did, and the warps that ran it."""

    barriers: dict[int, set[tuple[str, int, int]]] = field(default_factory=lambda: defaultdict(set))
    warps: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    first_barrier: int = 0
    _pending: dict[int, list[tuple[str, int]]] = field(default_factory=lambda: defaultdict(list))

    def barrier_used(self, fragment: Any, cta: Any, offset: int, use: BarrierUse) -> None:
        """An instruction used an mbarrier; `executed` tells its line."""
        self.first_barrier = min(cta.mbarriers)
        if use in VERBS:
            number = (offset - self.first_barrier) // MBARRIER_BYTES
            self._pending[id(fragment)].append((VERBS[use], number))

    def executed(self, fragment: Any, step: Any, outcome: Any, tick: int) -> None:
        """A handler ran."""
        line, warp = step.instruction.line, fragment.warp.index
        self.warps[line].add(warp)
        for verb, number in self._pending.pop(id(fragment), ()):
            self.barriers[line].add((verb, number, warp))


def steps_of(fault: Fault, uses: Uses, named: NamedPlan) -> list[list[str]]:
    """[role, verb, signal] of the plan's steps that an instruction carries out.

    The verb is wait, arrive, or fence, whose "signal" is its opcode.
    """
    found: dict[tuple[str, str, str], None] = {}
    for verb, number, warp in sorted(uses.barriers.get(fault.line, ())):
        found[named.role(warp), verb, named.mbarrier(number)] = None
    roles = dict.fromkeys(named.role(warp) for warp in sorted(uses.warps[fault.line]))
    roles.pop("idle", None)
    if fault.instruction.startswith(("bar.sync", "bar.arrive")):
        verb = "wait" if fault.instruction.startswith("bar.sync") else "arrive"
        number, _, threads = fault.instruction.partition(" ")[2].partition(", ")
        for role in roles:
            own = threads == str(THREADS * len(named.plan.role(role).warps))
            signal = OWN_WARPS if own else named_signal(role, verb, number, named)
            found[role, verb, signal] = None
    if not found:
        opcode = fault.instruction.split()[0]
        found = {(role, "fence", opcode): None for role in roles}
    return [list(step) for step in found]


def named_signal(role: str, verb: str, number: str, named: NamedPlan) -> str:
    """The signal of a named barrier; where its number is in a register, the role's only one."""
    if number.isdigit():
        return named.barrier(int(number))
    (signal,) = [
        signal.name
        for signal in named.plan.signals
        if signal.kind == "named"
        and role in (signal.waiters if verb == "wait" else signal.arrivals)
    ]
    return signal


def sides_of(message: str, uses: Uses, named: NamedPlan) -> list[dict[str, Any]]:
    """Both sides of a race: the role whose instruction it is, its PTX line and its opcode."""
    found = []
    for warp, line, opcode in _SIDE.findall(message.split("\n")[0]):
        warps = {int(warp)} if warp else uses.warps.get(int(line), set())
        roles = {named.role(one) for one in warps}
        found.append(
            {"roles": sorted(roles), "ptx_line": int(line), "instruction": opcode.rstrip(";")}
        )
    return found


def waits_of(message: str, named: NamedPlan) -> list[dict[str, Any]]:
    """Who waits for what in a deadlock, once per role and CTA."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for match in _WAITER.finditer(message):
        if match["address"]:
            number = (int(match["address"], 16) - named.first_barrier) // MBARRIER_BYTES
            signal, missing = named.mbarrier(number), match["missing"]
            phase: int | None = int(match["phase"])
        else:
            signal, missing = named.barrier(int(match["number"])), match["arrived"]
            phase = None
        role = named.role(int(match["warp"]))
        if role == "idle" or signal == "all warps":
            continue  # it is done with its work
        found.setdefault((match["cta"], role, signal), {
            "cta": int(match["cta"]), "role": role, "signal": signal, "phase": phase,
            "by": named.arrivers(signal), "missing": missing, "ptx_line": int(match["line"]),
        })  # fmt: skip
    return list(found.values())


def with_roles(message: str, named: NamedPlan) -> str:
    """The first line of a message, with roles beside warps."""
    line = message.split("\n")[0]
    said = _WARP.sub(lambda m: f"{m[0]} ({named.role(int(m[2]))})", line)
    return said if len(said) <= MOST_MESSAGE else said[:MOST_MESSAGE] + " ..."


def record(kernel: Kernel, plan: PipelinePlan) -> list[dict[str, Any]]:
    """Every removal in a kernel, judged."""
    uses, ptx = Uses(), kernel.launch.ptx
    kernel.run(Options(events=uses))
    expected = kernel.contents()
    before = faults.orderings(kernel, ptx, faults.SCHEDULES[0])
    named = NamedPlan(plan, uses.first_barrier)
    rows = []
    for fault in plant(ptx, kernel.launch.kernel):
        if not fault.kind.endswith("removed") or fault.line not in uses.warps:
            continue
        how, schedule, message = faults.judge(kernel, fault.text, expected)
        why = ""
        if how == faults.SURVIVED:
            if faults.is_equivalent(kernel, fault.text, before):
                how, why = faults.EQUIVALENT, faults.DOES_THE_SAME.get(fault.kind, "")
            else:
                why = faults.WHY.get((fault.kind, fault.instruction), "")
        rows.append({
            "ptx_line": fault.line, "kind": fault.kind, "instruction": fault.instruction,
            "steps": steps_of(fault, uses, named), "verdict": how, "schedule": schedule,
            "message": with_roles(message, named) if message else why,
            "sides": sides_of(message, uses, named) if how != "deadlock" else [],
            "waits": waits_of(message, named) if how == "deadlock" else [],
        })  # fmt: skip
        print(f"  {fault.line:5} {fault.kind:24} {how}", flush=True)
    return rows


def kernel_of(name: str) -> tuple[Kernel, PipelinePlan, dict[str, Any]]:
    """A kernel of the benchmarks, its plan, and where the explorer shows it."""
    if name == FORWARD:
        forward_spec = ForwardSpec(**forward.SPECS[name])
        about = {"machine": "b200", "pass": "fwd", "cta_group": forward_spec.cta_group,
                 "causal": True}  # fmt: skip
        return forward.forward_kernel(name), forward_spec.plan, about
    if name in warpgroups.SPECS:
        hopper = WarpgroupSpec(**warpgroups.SPECS[name])
        about = {"machine": "h200", "pass": "fwd", "cta_group": 1, "causal": True,
                 "tile_m": hopper.pipeline.block_rows, "tile_n": hopper.tile_n,
                 "ping_pong": "yes" if hopper.takes_turns else "no"}  # fmt: skip
        return warpgroups.warpgroup_kernel(name), hopper.plan, about
    spec = BackwardSpec(head_dim=128, head_dim_v=128, **backward.SPECS[name])
    about = {"machine": "b200", "pass": "bwd", "cta_group": spec.cta_group, "causal": False}
    return backward.backward_kernel(name), spec.plan, about


def text_of(report: dict[str, Any]) -> str:
    """One line per verdict, so that a change can be read."""
    kernels = []
    for one in report["kernels"]:
        rows = ",\n    ".join(json.dumps(row) for row in one["removals"])
        head = json.dumps({key: one[key] for key in one if key != "removals"})[:-1]
        kernels.append(f'  {head}, "removals": [\n    {rows}\n  ]}}')
    head = json.dumps({key: report[key] for key in report if key != "kernels"})[:-1]
    return f'{head}, "kernels": [\n' + ",\n".join(kernels) + "\n]}\n"


def main() -> None:
    """Record all kernels, or one of them; the file keeps the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--only", choices=NAMES, help="record this one; keep the file's others")
    options = parser.parse_args()
    kept: dict[str, Any] = {}
    if options.output.exists():
        kept = {one["kernel"]: one for one in json.loads(read_text(options.output))["kernels"]}
    for name in [options.only] if options.only else NAMES:
        print(name, flush=True)
        kernel, plan, about = kernel_of(name)
        kept[name] = {
            "kernel": name, "plan": plan.name, **about, "roles": len(plan.roles),
            "issues": next(role.name for role in plan.roles if role.name in ("mma", "consumer0")),
            "ptx_lines": kernel.launch.ptx.count("\n") + 1,
            "removals": record(kernel, plan),
        }  # fmt: skip
    report = {
        "schema_version": SCHEMA_VERSION,
        "schedules": [f"{schedule} {seed}" for schedule, seed in faults.SCHEDULES],
        "kernels": [kept[name] for name in NAMES if name in kept],
    }
    write_record(
        options.output, report, faults.PACKAGES, whole=not options.only, render=text_of
    )  # fmt: skip


if __name__ == "__main__":
    main()
