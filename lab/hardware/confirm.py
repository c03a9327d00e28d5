"""Makes the records that want a Hopper GPU anew, as many as fit into the time that one is there.

    python -m lab.hardware.confirm list                                # which there are, how old
    python -m lab.hardware.confirm run FOLDER [NAME ...] --seconds 540 # on the machine with the GPU
    python -m lab.hardware.confirm take FOLDER                         # back in the repository

`run` goes from what may be wrong to what may be slow; one program at a time, so that times are
undisturbed. What ends is in FOLDER at once, as NAME.json and NAME.log, with summary.json; a program
that runs out of time is stopped and leaves what it had written. Give names to begin with those that
`list` calls older than the code. FA4_COMMIT names the commit where there is no git. `take` puts the
results of programs that ended with 0 into lab/hardware/results and notes in the ledger which commit
made them; the tree there must have that commit.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import ROOT
from lab.hardware.there import query
from lab.machine import describe_run
from lab.records import making_at, note, record_path, state_of, tree_at
from lab.sources import SourceTree

RESERVE_S = 8.0  # for stopping a program and packing what is there
STOP_S = 5.0  # between being asked to end and being killed
LATE_S = 20.0  # a program's imports and its last call, of which what it is told knows nothing


@dataclass(frozen=True, kw_only=True)
class Step:
    """One record and the program that makes it.

    name: the record's, with {gpu} for h100 or h200, or {on} for _h100 or nothing. words: behind
    `python -m`, with {out} for the result file, {rows} for one of what is there so far, {left} for
    the seconds that are left, {seed} for one drawn then, {jobs} for the processes that the
    machine's cores bear; without {out} it is what the program prints. usual_s: what it takes on 16
    cores, by earlier runs; not begun with less than half.
    """

    name: str
    words: str
    usual_s: float

    def named(self, gpu: str) -> str:
        """The record's name on a GPU, "h100" or "h200"."""
        return self.name.format(gpu=gpu, on="" if gpu == "h200" else f"_{gpu}")


STEPS = (
    Step(name="guarded_calls_{gpu}", usual_s=160,
         words="lab.hardware.guarded.random_calls {out} --workers 6 --seconds {left}"),
    Step(name="first_tensor_{gpu}", words="lab.hardware.guarded.first_tensor {out}", usual_s=100),
    Step(name="outside_boxes_{gpu}", words="lab.hardware.guarded.outside_boxes {out}", usual_s=30),
    Step(name="repeated_launches", words="lab.hardware.repeated_launches {out}", usual_s=60),
    Step(name="sanitized", words="lab.hardware.sanitized {out}", usual_s=180),
    Step(name="small_transformer", words="lab.hardware.small_transformer {out}", usual_s=160),
    Step(name="hopper_launches", usual_s=90,
         words="lab.hardware.warpgroup_forward.random_launches {out}"),
    Step(name="verify_gpu", usual_s=530,
         words="lab.hardware.verify_gpu --out {out} --jobs {jobs} --seconds 240 fa4-sm90 "
         "torch-sdpa-cudnn flash-attn-4"),
    Step(name="warpgroup_backward{on}", words="lab.hardware.warpgroup_backward.measure {out}",
         usual_s=60),
    Step(name="warpgroup_backward_wide", usual_s=60,
         words="lab.hardware.warpgroup_backward.measure {out} --wide"),
    Step(name="hopper_splits", usual_s=60,
         words="lab.hardware.warpgroup_forward.splits {out} --seconds {left}"),
    Step(name="hopper_random", usual_s=200,
         words="fa4 bench --random 200 --seed {seed} --timing graph --seconds {left} "
         "--rows {rows} --json"),
    Step(name="hopper_random_gradients{on}", usual_s=360,
         words="fa4 bench --random 200 --backward --seed {seed} --timing graph --repeats 6 "
         "--seconds {left} --rows {rows} --json"),
    Step(name="hopper_bench", usual_s=150, words="fa4 bench --json"),
    Step(name="sanitizer_zoo", usual_s=200,
         words="lab.hardware.sanitizer_zoo {out} --seconds {left}"),
    Step(name="findings", words="lab.hardware.run_findings {out}", usual_s=60),
)  # fmt: skip


def short_name(device: str) -> str:
    """ "h100" or "h200" of what the driver calls a GPU. Raises ValueError for any other."""
    found = [name for name in ("h100", "h200") if name.upper() in device]
    if not found:
        raise ValueError(f"these records are of an H100 or an H200; the GPU here is {device!r}")
    return found[0]


def choose(names: Sequence[str], gpu: str, steps: Sequence[Step] = STEPS) -> list[Step]:
    """The steps of these records in the order given, all for none. Raises ValueError."""
    known = {step.named(gpu): step for step in steps}
    for name in names:
        if name not in known:
            raise ValueError(f"no program for {name!r} on an {gpu}; there are {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names or known)]


def run_step(step: Step, gpu: str, folder: Path, left_s: float) -> dict[str, Any]:
    """Runs a program for at most so long; what is written of it in the summary."""
    name = step.named(gpu)
    out, log = folder / f"{name}.json", folder / f"{name}.log"
    values = {"out": out, "rows": folder / f"{name}.rows.jsonl", "seed": secrets.randbits(32),
              "left": max(1, int(left_s - LATE_S)), "jobs": _jobs()}  # fmt: skip
    words = [word.format(**values) for word in step.words.split()]
    prints = "{out}" not in step.words
    start = time.monotonic()
    with (
        log.open("wb") as told,
        (out.open("wb") if prints else nullcontext(told)) as printed,
        subprocess.Popen(
            [sys.executable, "-m", *words], cwd=ROOT, stdout=printed, stderr=told,
            start_new_session=True,
        ) as process,
    ):  # fmt: skip
        code: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=left_s)
        finally:  # also when this program is interrupted
            if code is None:
                _stop(process)
    seconds = round(time.monotonic() - start, 1)
    return {"ended": code, "seconds": seconds, "wrote": out.exists() and out.stat().st_size > 0}


def _jobs() -> int:
    """As many as one GPU's memory bears, and two of the cores that this may use are left free."""
    return max(1, min(40, len(os.sched_getaffinity(0)) - 2))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a program and all that it started: asked first, as by Ctrl-C."""
    for how, wait_s in ((signal.SIGINT, STOP_S), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=wait_s)


def pack(folder: Path) -> Path:
    """FOLDER.tar.gz of everything in it, whole or as it was before."""
    place, new = folder.with_suffix(".tar.gz"), folder.with_suffix(".tar.gz.new")
    with tarfile.open(new, "w:gz") as archive:
        archive.add(folder, folder.name)
    return new.replace(place)


def run(folder: Path, steps: Sequence[Step], device: str, seconds: float) -> dict[str, Any]:
    """Runs the steps that fit into the time, in order; the summary, which is in FOLDER, too."""
    gpu, end = short_name(device), time.monotonic() + seconds
    commit = os.environ.get("FA4_COMMIT") or describe_run(())["commit"]
    summary: dict[str, Any] = {"commit": commit, "gpu": device, "steps": {}, "not_begun": []}
    summary["date"] = describe_run(())["date"]
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        left = end - time.monotonic() - RESERVE_S
        name = step.named(gpu)
        if left < step.usual_s / 2:
            summary["not_begun"].append(name)
            print(f"{name}: not begun, {left:.0f} s are left and it takes {step.usual_s:.0f}")
        else:
            print(f"{name}: {step.words}, {left:.0f} s are left", flush=True)
            found = summary["steps"][name] = run_step(step, gpu, folder, left)
            ended = "stopped" if found["ended"] is None else f"exit code {found['ended']}"
            print(f"{name}: {ended} after {found['seconds']} s", flush=True)
        (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        pack(folder)
    return summary


def take(folder: Path) -> list[str]:
    """Copies the results of programs that ended with 0, and notes their making; their names.

    Raises ValueError for a folder without a summary, for a summary without a commit, for a commit
    that the history does not have; then nothing was copied.
    """
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder} has no summary of `confirm run`: {error}") from None
    good = {
        name: json.loads((folder / f"{name}.json").read_text())
        for name, step in summary["steps"].items()
        if step["ended"] == 0 and step["wrote"]
    }
    if not summary["commit"]:
        raise ValueError(f"{folder}: nobody noted the commit; set FA4_COMMIT in `confirm run`")
    with tree_at(summary["commit"]) as tree:
        for name in good:
            shutil.copyfile(folder / f"{name}.json", record_path(name))
            known = {key: summary[key] for key in ("commit", "date")}
            note(name, making_at(name, tree, machine=summary["gpu"], **known))
    return list(good)


def rows(steps: Sequence[Step] = STEPS) -> list[tuple[str, str, str]]:
    """(record, how old, program) of each, for both GPUs."""
    tree = SourceTree(ROOT)
    names: Mapping[str, Step] = {
        step.named(gpu): step for gpu in ("h100", "h200") for step in steps
    }
    return [(name, state_of(name, tree), step.words) for name, step in names.items()]


def main() -> int:
    """Lists, runs or takes; exit code 1 if a program of `run` did not end with 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("list", help="the records, how old they are, and their programs")
    runs = parts.add_parser("run", help="on the machine with the GPU")
    runs.add_argument("folder", type=Path)
    runs.add_argument("names", nargs="*", metavar="NAME", help="records, in this order")
    runs.add_argument("--seconds", type=float, default=540.0, help="nothing runs longer")
    taken = parts.add_parser("take", help="what `run` brought home becomes the records")
    taken.add_argument("folder", type=Path)
    options = parser.parse_args()
    try:
        if options.part == "list":
            for name, state, words in rows():
                print(f"{name:26} {state:24} python -m {words}")
        elif options.part == "take":
            print("\n".join(take(options.folder)))
        else:
            device = query("name")["name"]
            chosen = choose(options.names, short_name(device))
            done = run(options.folder, chosen, device, options.seconds)["steps"]
            return int(any(step["ended"] != 0 for step in done.values()))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
