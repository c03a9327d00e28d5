"""Compares what a GPU computed with the emulator, and writes the result file.

    python -m lab.hardware.emulator_hopper.compare out/emulator_hopper/results [--family tensors]

Every program runs on the emulator again. The exit status is 1 if a value disagrees, if a program
failed on the GPU, or if it has changed since it ran there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lab.hardware.emulator_hopper.emulate import CHECKED, emulate, opcodes_of
from lab.hardware.emulator_hopper.programs import Array, Closeness, Program, Result
from lab.hardware.emulator_hopper.storage import BLOCK, block_digests, head_of, identity
from lab.hardware.emulator_hopper.suite import FAMILIES
from lab.hardware.emulator_hopper.values import FORMATS, to_double
from lab.records import record_path, write_record

COUNTS = ("programs", "forms", "values", "mismatches")
SHOWN = 4  # disagreeing values listed for a result

Kept = Callable[[str], Array | None]  # what run_there stored under a key


@dataclass
class Agreement:
    """How the values of one result compare.

    mismatches: at least so many values disagree. exact: fraction of equal bits. max_ulp: of the
    values farther apart than the absolute bound; max_absolute: of those beyond the bound in ulp.
    """

    form: str
    values: int
    mismatches: int = 0
    shown: list[str] = field(default_factory=list)
    closeness: Closeness | None = None
    max_ulp: int = 0
    max_absolute: float = 0.0
    exact: float = 1.0


def compare_bits(result: Result, own: Array, theirs: Array, kept: Kept, key: str) -> Agreement:
    """Blocks whose digests differ; in those that came back whole, the values. theirs: digests."""
    agreement = Agreement(result.form, result.count)
    for block in np.flatnonzero(block_digests(own) != theirs).tolist():
        mine, gpu = own[block * BLOCK : (block + 1) * BLOCK], kept(f"{key}/{block}")
        if gpu is None:
            agreement.mismatches += 1
            continue
        wrong = np.flatnonzero(mine != gpu)
        # Blocks come back where they differed from an older emulator, too.
        agreement.mismatches += max(len(wrong), 1)
        for k in wrong[: SHOWN - len(agreement.shown)].tolist():
            place = block * BLOCK + k
            agreement.shown.append(f"value {place}: GPU {gpu[k]:#x}, emulator {mine[k]:#x}")
    agreement.exact = float(agreement.mismatches == 0)
    return agreement


def compare_close(result: Result, own: Array, gpu: Array, closeness: Closeness) -> Agreement:
    """NaN must meet NaN; numbers differ by few ulp or by little; infinity is a step of one ulp."""
    form = FORMATS[result.kind]
    mine, theirs = to_double(own, form), to_double(gpu, form)
    numbers = ~(np.isnan(mine) | np.isnan(theirs))
    steps = np.where(numbers, np.abs(_steps(own, form.sign) - _steps(gpu, form.sign)), 0)
    with np.errstate(invalid="ignore"):
        finite = numbers & np.isfinite(mine) & np.isfinite(theirs)
        difference = np.where(finite, np.abs(mine - theirs), 0.0)
    few, small = steps <= closeness.ulp, finite & (difference <= closeness.absolute)
    near = few | small
    wrong = np.flatnonzero((np.isnan(mine) != np.isnan(theirs)) | (numbers & ~near))
    shown = [f"value {k}: GPU {gpu[k]:#x}, emulator {own[k]:#x}" for k in wrong[:SHOWN].tolist()]
    return Agreement(
        result.form,
        result.count,
        len(wrong),
        shown,
        closeness,
        int(steps[~small].max(initial=0)),
        float(difference[~few].max(initial=0.0)),
        round(float(np.mean(own == gpu)), 4),
    )


def _steps(bits: Array, sign: int) -> Array:
    """Position of each number among all of them, 0 for both zeros: differences are ulps."""
    magnitude = (bits & (sign - 1)).astype(np.int64)
    return np.where(bits.astype(np.int64) & sign, -magnitude, magnitude)


def compare_program(program: Program, arrays: Sequence[Array], kept: Kept) -> list[Agreement]:
    """All results of a program. arrays: after the launch on the emulator."""
    theirs, first, found = kept(f"digests/{program.name}"), 0, []
    if theirs is None:
        return [Agreement("the program has no results", 0, 1)]
    for number, result in enumerate(program.results):
        key, own = f"values/{program.name}/{number}", result.of(arrays)
        blocks = -(-result.count // BLOCK)
        part, first = theirs[first : first + blocks], first + blocks
        gpu = kept(f"{key}/all")
        if result.closeness is not None and gpu is not None:
            found.append(compare_close(result, own, gpu, result.closeness))
        else:
            found.append(compare_bits(result, own, part, kept, key))
    return found


def compare_family(folder: Path, family: str) -> tuple[dict[str, Any], list[str]]:
    """The report of a family, and its disagreements in words."""
    run = json.loads((folder / "run.json").read_text())
    programs, problems = FAMILIES[family](), []
    report: dict[str, Any] = dict.fromkeys(COUNTS, 0) | {"programs": len(programs)}
    replays, confirmed = {}, {}
    approximate: dict[str, Any] = {}
    with np.load(folder / "results.npz") as stored:
        known = frozenset(stored.files)
        kept: Kept = lambda key: stored[key] if key in known else None  # noqa: E731
        for program in programs:
            if run["identities"].get(program.name) != identity(program):
                problems.append(f"{program.name}: changed since it ran on the GPU")
                continue
            if run["outcomes"].get(program.name) != "ok":
                problems.append(f"{program.name}: {run['outcomes'].get(program.name)}")
                continue
            arrays = emulate(program, checks=family in CHECKED)
            agreements = compare_program(program, arrays, kept)
            report["forms"] += len(agreements)
            report["values"] += sum(a.values for a in agreements)
            report["mismatches"] += sum(a.mismatches for a in agreements)
            wrong = [a for a in agreements if a.mismatches]
            problems += [f"{program.name}: {a.form}: {a.mismatches} {a.shown}" for a in wrong]
            approximate |= {a.form: _spoken(a) for a in agreements if a.closeness}
            digests = kept(f"digests/{program.name}")
            assert digests is not None
            replays[program.name] = [identity(program), head_of(program, digests)]
            if not wrong:
                confirmed[program.name] = opcodes_of(program)
    report |= {"replays": replays, "confirmed": confirmed, "approximate": approximate}
    return report, problems


def _spoken(agreement: Agreement) -> dict[str, float]:
    bound = agreement.closeness
    assert bound is not None
    return {
        "values": agreement.values,
        "equal": agreement.exact,
        "max_ulp": agreement.max_ulp,
        "max_absolute": agreement.max_absolute,
        "bound_ulp": bound.ulp,
        "bound_absolute": bound.absolute,
    }


def merged(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The body of the result file, from the reports of families."""
    families, replays, approximate = {}, {}, {}
    confirmed: dict[str, set[str]] = {}
    for family, report in reports.items():
        replays.update(report["replays"])
        approximate.update(report["approximate"])
        families[family] = {key: report[key] for key in COUNTS}
        for opcodes in report["confirmed"].values():
            for name, spellings in opcodes.items():
                confirmed.setdefault(name, set()).update(spellings)
    return {
        "families": families,
        "approximate": approximate,
        "confirmed": {name: sorted(confirmed[name]) for name in sorted(confirmed)},
        "replays": replays,
    }


def table(body: Mapping[str, Any]) -> str:
    """Families as a Markdown table."""
    lines = ["| family | programs | results | values | mismatches |", "|---|---|---|---|---|"]
    for name, row in body["families"].items():
        lines.append(
            f"| {name} | {row['programs']} | {row['forms']} | {row['values']:,} "
            f"| {row['mismatches']} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Compares and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=FAMILIES, help="this one alone, without a result file")
    parser.add_argument("--output", type=Path, default=record_path("emulator_hopper"))
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    families = [arguments.family] if arguments.family else list(FAMILIES)
    compare = partial(compare_family, arguments.folder)
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        reports, problems = zip(*pool.imap(compare, families, chunksize=1), strict=True)
    body = merged(dict(zip(families, reports, strict=True)))
    found = [line for lines in problems for line in lines]
    print(table(body))
    print("\n".join(found) or "no disagreement")
    if not arguments.family:
        hardware = json.loads((arguments.folder / "run.json").read_text())
        keys = ("date", "gpu", "driver", "python", "numpy", "seconds")
        report = {
            "schema_version": 1,
            "hardware": {key: hardware[key] for key in keys},
            "disagreements": found,
        }
        packages = ("numpy", "llvmlite")
        write_record(arguments.output, report | body, packages, machine=hardware["gpu"])
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
