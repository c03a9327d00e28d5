"""One hour on a B200: ten measurements that tell which constants, and which design, are right.

    python -m lab.hardware.b200_day predict                      # what each set of constants says
    python -m lab.hardware.b200_day measure DAY.json             # on a B200 or B300, about an hour
    python -m lab.hardware.b200_day read DAY.json [--journal FILE]

Each measurement is the ratio of two times of this package's own kernels, which the sets of
constants disagree about; what they share, such as the clock, is the same for both. `read` keeps the
sets that are near all of them, and ranks the designs of a search's journal by these alone.

It has not been run on a B200: nobody of this project had one. The kernels compile, the predictions
and the reading are tested.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fa4.config import Exp2Split, ForwardConfig, Problem
from fa4.hardware import B200, B300, Gpu
from fa4.search.judge import all_constants
from fa4.sim.machine import Machine, find_machine
from fa4.sim.predict import Simulation, call_seconds
from fa4.sm100.forward.spec import ForwardSpec

NEAR = 0.03  # relative difference up to which a set of constants agrees with a measured ratio
TOKENS, HEADS = 2**15, 16
PAUSE_S = 0.05  # before each burst: the clock recovers
ARCHES = {"sm_100a": B200, "sm_103a": B300}
SPLIT = Exp2Split(frequency=10, start_fragment=1)


@dataclass(frozen=True, kw_only=True)
class DayKernel:
    """A kernel and its call: fields of `ForwardSpec` and of its numerics, keys of a sequence."""

    seqlen: int = 16384
    head_dim: int = 128
    tile_n: int = 128
    q_tiles: int = 2
    tau: float = 8.0
    exp2: Exp2Split = SPLIT
    cta_group: int = 1
    scheduler: str = "static"
    causal: bool = False

    def spec(self, gpu: Gpu = B200) -> ForwardSpec:
        """The kernel's."""
        numerics = ForwardConfig(tile_n=self.tile_n, q_tiles=self.q_tiles, exp2=self.exp2,
                                 rescale_threshold_log2=self.tau)  # fmt: skip
        return ForwardSpec(head_dim=self.head_dim, head_dim_v=self.head_dim, causal=self.causal,
                           cta_group=self.cta_group, scheduler=self.scheduler, numerics=numerics,
                           gpu=gpu)  # fmt: skip

    @property
    def problem(self) -> Problem:
        """32k tokens, 16 heads."""
        return Problem(
            batch=TOKENS // self.seqlen, seqlen_q=self.seqlen, seqlen_k=self.seqlen, heads_q=HEADS,
            heads_k=HEADS, head_dim=self.head_dim, causal=self.causal,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DayQuestion:
    """The time of `first` over that of `second`, and what it tells."""

    name: str
    tells: str
    first: DayKernel
    second: DayKernel = field(default_factory=DayKernel)


BASE = DayKernel()
QUESTIONS: tuple[DayQuestion, ...] = (
    DayQuestion(name="narrow scores of a pair", tells="mma_floor_cycles",
                first=DayKernel(tile_n=64, cta_group=2), second=DayKernel(cta_group=2)),
    DayQuestion(name="narrow scores of one CTA", tells="products of 64 keys; fill_port_share",
                first=DayKernel(tile_n=64)),
    DayQuestion(name="a pair", tells="fill_port_share, dsmem_latency_cycles",
                first=DayKernel(cta_group=2)),
    DayQuestion(name="all exponentials by MUFU", tells="exp_issue_slots, vector_efficiency",
                first=DayKernel(exp2=Exp2Split())),
    DayQuestion(name="a third of them by polynomials", tells="exp_issue_slots, vector_efficiency",
                first=DayKernel(exp2=Exp2Split(frequency=6))),
    DayQuestion(name="one Q tile", tells="the chain of a tile: math_latency_cycles, barriers",
                first=DayKernel(q_tiles=1)),
    DayQuestion(name="rescaled in every step", tells="tmem_load_bytes_per_clk, correction",
                first=DayKernel(tau=0.0)),
    DayQuestion(name="head dim 64", tells="the softmax alone: math_latency_cycles",
                first=DayKernel(head_dim=64)),
    DayQuestion(name="short sequences", tells="hbm_queue_share, what a work tile begins with",
                first=DayKernel(seqlen=1024)),
    DayQuestion(name="a CTA for each work tile", tells="cta_start_cycles",
                first=DayKernel(seqlen=1024, scheduler="naive"), second=DayKernel(seqlen=1024)),
)  # fmt: skip


def machines(name: str = "b200") -> tuple[Machine, ...]:
    """With its own constants, then with every set."""
    own = find_machine(name)
    return (own, *all_constants(own))


@cache
def seconds(kernel: DayKernel, machine_name: str) -> tuple[float, ...]:
    """Of a call, predicted with each set of constants."""
    every = machines(machine_name)
    pipeline = kernel.spec(every[0].gpu).pipeline
    rate = None if kernel.tau else 1.0
    simulation = Simulation(rescale_rate=rate)
    return tuple(call_seconds(kernel.problem, pipeline, x, simulation) for x in every)


def predicted(question: DayQuestion, machine_name: str = "b200") -> tuple[float, ...]:
    """The ratio by the machine's own constants and by each set."""
    pairs = (seconds(kernel, machine_name) for kernel in (question.first, question.second))
    return tuple(a / b for a, b in zip(*pairs, strict=True))


def agreeing(
    measured: Mapping[str, float], machine_name: str = "b200", near: float = NEAR
) -> tuple[list[int], dict[str, list[int]]]:
    """Sets of constants (0: the machine's own) near all measured ratios; of each question, those
    that are near it."""
    by_name = {question.name: question for question in QUESTIONS}
    unknown = sorted(set(measured) - set(by_name))
    if unknown:
        raise ValueError(f"no question {unknown[0]!r}; there are {', '.join(by_name)}")
    near_each: dict[str, list[int]] = {}
    for name, ratio in measured.items():
        said = predicted(by_name[name], machine_name)
        near_each[name] = [n for n, x in enumerate(said) if abs(x / ratio - 1.0) <= near]
    every = set(range(len(machines(machine_name))))
    left = every.intersection(*map(set, near_each.values())) if near_each else every
    return sorted(left), near_each


def ranked(
    designs: Sequence[tuple[str, Callable[[Machine], float]]], sets: Sequence[Machine]
) -> list[tuple[float, str]]:
    """(least rate by these sets, name) of designs, the best first."""
    return sorted(((min(rate(x) for x in sets), name) for name, rate in designs), reverse=True)


def measure(path: Path) -> None:
    """Times all kernels in turns, one after the other; writes a JSON file after each question."""
    import torch

    from fa4.compiled.artifact import compile_artifact
    from fa4.compiled.forward import compile_forward
    from lab.hardware.warpgroup_forward.measure import Inputs, Meter, check, measured

    major, minor = torch.cuda.get_device_capability(0)
    arch = f"sm_{major}{minor}a"
    if arch not in ARCHES:
        raise ValueError(f"needs one of {', '.join(ARCHES)}; this GPU is {arch}")
    gpu, meter = ARCHES[arch], Meter()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "arch": arch,
                             "ratios": {}, "questions": {}}  # fmt: skip
    for question in QUESTIONS:
        functions, sound = {}, {}
        for which, kernel in (("first", question.first), ("second", question.second)):
            spec, problem = kernel.spec(gpu), kernel.problem
            made = compile_artifact(spec, arch, compile_forward)
            sound[which] = check(made)
            given = Inputs(spec, problem.batch, problem.seqlen_q, problem.seqlen_k, HEADS)
            functions[which] = lambda made=made, given=given: given.launch(made)
        times, state = measured(functions, meter, PAUSE_S)
        medians = {which: statistics.median(ms) for which, ms in times.items()}
        ok = all(x["ok"] for x in sound.values()) and len(medians) == 2
        found["questions"][question.name] = {
            "first": asdict(question.first), "second": asdict(question.second), "ms": times,
            "state": state, "checks": sound, "ok": ok,
        }  # fmt: skip
        if ok:
            found["ratios"][question.name] = medians["first"] / medians["second"]
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{question.name}: {found['ratios'].get(question.name)}", flush=True)


def journal_designs(path: Path, top: int = 50) -> list[tuple[str, Callable[[Machine], float]]]:
    """The best designs of a search's journal at head dim 128, and what rates them."""
    from fa4.search.judge import Judge
    from fa4.search.space import find_space

    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    rows = [row for row in rows if row["status"] == "good"]
    rows.sort(key=lambda row: -row["least"])
    space = find_space(BASE.problem, B200, backward=False, narrow_values=False)
    judge = Judge.of(BASE.problem, find_machine("b200"))

    def rated(settings: Mapping[str, Any]) -> Callable[[Machine], float]:
        pipeline = space.make(settings)
        return lambda machine: judge.rate(pipeline, machine, judge.simulation)

    return [(json.dumps(row["design"]), rated(row["design"])) for row in rows[:top]]


def read(path: Path, journal: Path | None) -> list[str]:
    """What a day's file says, in lines."""
    day = json.loads(path.read_text(encoding="utf-8"))
    left, near_each = agreeing(day["ratios"])
    lines = []
    for name, ratio in day["ratios"].items():
        said = predicted({question.name: question for question in QUESTIONS}[name])
        lines.append(
            f"{name}: measured {ratio:.3f}; {min(said):.3f} to {max(said):.3f} predicted; "
            f"{len(near_each[name])} sets agree"
        )
    lines.append(f"{len(left)} of {len(machines())} sets of constants agree with all")
    if not left:
        lines.append("the model is wrong: no set agrees, and its designs are not to be trusted")
    elif journal is not None:
        sets = [machines()[n] for n in left]
        lines += [f"{rate:.0f} TFLOP/s at least: {name}"
                  for rate, name in ranked(journal_designs(journal), sets)[:5]]  # fmt: skip
    return lines


def predictions() -> list[str]:
    """What the sets of constants say of each question, in lines."""
    found = []
    for question in QUESTIONS:
        own, *said = predicted(question)
        found.append(
            f"{question.name}: {own:.3f}, {min(said):.3f} to {max(said):.3f} ({question.tells})"
        )
    return found


def main() -> None:
    """One of the three commands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("predict")
    commands.add_parser("measure").add_argument("file", type=Path)
    reading = commands.add_parser("read")
    reading.add_argument("file", type=Path)
    reading.add_argument("--journal", type=Path)
    given = parser.parse_args()
    if given.command == "measure":
        measure(given.file)
        return
    lines = predictions() if given.command == "predict" else read(given.file, given.journal)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
