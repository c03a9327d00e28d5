"""Compare counters with the code's loops, the emulator's counts and the simulator's shares.

    python -m lab.hardware.hopper_counters.compare CONFIGURATIONS.json FOLDER OUTPUT.json \\
        [--emulated COUNTS.json] [--simulated SHARES.json]

FOLDER is what `measure` wrote. COUNTS.json and SHARES.json are lists with an entry, or null, per
configuration: counts {wgmma, exponentials, copied_bytes} that must be equal; shares in percent of
the counters' names ({"tensor_percent": 75.1, "issue_percent": ...}) that must be within 5 points.
The exit status is 1 if a comparison fails.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.hardware.hopper_counters.expected import Work, by_loops
from lab.hardware.hopper_counters.metrics import METRICS
from lab.hardware.hopper_counters.sass import PIPES, Code, Instruction, by_name, kernels, pipe_of
from lab.records import write_record

CODE_SHARE = 0.02  # loops times trips against the counters
POINTS = 5.0  # the simulator's shares against the counters, in percent
# What the emulator counts -> the counter, in the same unit; instructions are those of warps.
EMULATED = {
    "wgmma": "pipe_tensor_op_gmma",
    "exponentials": "exponentials",
    "copied_bytes": "tma_read_bytes",
}
EXPONENTIAL = "MUFU.EX2"
WAITS = 8  # reasons shown per role
# A warp that must rescale O has exponentials more: under a mask, where a row may begin with few
# keys, that is a matter of the values, of which the emulator sees those of one head.
VALUES_SHARE = 1e-5


def counters(raw: str) -> Iterator[dict[str, float]]:
    """{key of METRICS: number} per kernel of ncu's raw page. ValueError for a missing one."""
    rows = list(csv.DictReader(io.StringIO(raw)))[1:]  # the first row holds units
    for row in rows:
        missing = [name for name in METRICS.values() if row.get(name) in (None, "", "n/a")]
        if missing:
            raise ValueError(f"ncu gave no {', '.join(missing)}")
        yield {key: float(row[name].replace(",", "")) for key, name in METRICS.items()}


def check(name: str, counted: float, expected: float, share: float) -> dict[str, Any]:
    """A comparison; `share` is the largest relative difference allowed."""
    difference = counted / expected - 1 if expected else float(counted != 0)
    return {
        "check": name,
        "counted": counted,
        "expected": expected,
        "difference": round(difference, 5),
        "passed": abs(difference) <= share,
    }


def by_role(code: Code) -> dict[str, Any]:
    """Of each role: share of all samples, and what its warps waited for, in percent of its own."""
    samples: dict[str, Counter[str]] = {}
    for item, role in zip(code.instructions, code.roles(), strict=True):
        samples.setdefault(role, Counter()).update(item.stalls)
    everything = sum(sum(found.values()) for found in samples.values())
    return {
        role: {
            "samples_percent": round(100 * sum(found.values()) / everything, 2),
            "waits_percent": {
                reason: round(100 * count / sum(found.values()), 1)
                for reason, count in found.most_common(WAITS)
            },
        }
        for role, found in samples.items()
        if found
    }


def executed_by_pipe(instructions: Sequence[Instruction]) -> Counter[str]:
    """What the source page says was executed, by the pipe of its opcode."""
    found: Counter[str] = Counter()
    for name, count in by_name(instructions).items():
        if pipe := pipe_of(name):
            found[pipe] += count
    return found


def compare(
    given: Mapping[str, Any],
    counted: Mapping[str, float],
    instructions: Sequence[Instruction],
    emulated: Mapping[str, float] | None = None,
    simulated: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """One kernel: its counters, waits by role, and every comparison that can be made."""
    code, work = Code(instructions), Work.of(given)
    exponentials = sum(item.executed for item in instructions if item.opcode == EXPONENTIAL)
    counted = {**counted, "exponentials": exponentials}
    executed = executed_by_pipe(instructions)
    predicted, looped = by_loops(code)
    checks = [
        check("products of the tiles", counted["pipe_tensor_op_gmma"], work.wgmma, 0.0),
        check("bytes of the tiles", counted["tma_read_bytes"], work.copied_bytes, 0.0),
        check("bytes of O", counted["tma_write_bytes"], work.stored_bytes, 0.0),
    ]
    for pipe in PIPES:
        counter = counted[f"pipe_{pipe}"]
        checks.append(check(f"{pipe}: executed opcodes", counter, executed[pipe], CODE_SHARE))
        checks.append(check(f"{pipe}: loops times trips", counter, predicted[pipe], CODE_SHARE))
    for name, number in (emulated or {}).items():
        share = VALUES_SHARE if name == "exponentials" and work.causal else 0.0
        checks.append(check(f"emulator: {name}", counted[EMULATED[name]], number, share))
    for name, number in (simulated or {}).items():
        found = check(f"simulator: {name}", counted[name], number, 0.0)
        found["passed"] = abs(counted[name] - number) <= POINTS
        checks.append(found)
    return {
        "configuration": dict(given),
        "counters": dict(counted),
        "roles": by_role(code),
        "loops_percent": round(100 * looped, 1),
        "checks": checks,
        "passed": all(found["passed"] for found in checks),
    }


def per_kernel(path: Path | None, count: int) -> list[Mapping[str, float] | None]:
    """The entries of an optional file. Raises ValueError for another number of them."""
    entries = json.loads(path.read_text(encoding="utf-8")) if path else [None] * count
    if len(entries) != count:
        raise ValueError(f"{path}: {count} entries are needed, one per kernel; got {len(entries)}")
    return list(entries)


def main() -> int:
    """Compare, write, say what failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("configurations", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--emulated", type=Path)
    parser.add_argument("--simulated", type=Path)
    given = parser.parse_args()
    there = json.loads((given.folder / "machine.json").read_text(encoding="utf-8"))
    run = [item["number"] for item in there["launches"] if not item["failed"]]
    listed = json.loads(given.configurations.read_text(encoding="utf-8"))
    configurations = [listed[number] for number in run]
    counted = list(counters((given.folder / "raw.csv").read_text(encoding="utf-8")))
    code = list(kernels((given.folder / "source.csv").read_text(encoding="utf-8")))
    parts = [per_kernel(path, len(run)) for path in (given.emulated, given.simulated)]
    found = [compare(*item) for item in zip(configurations, counted, code, *parts, strict=True)]
    result = {"schema_version": 1, "machine": there["machine"], "kernels": found}
    write_record(given.output, result, machine=there["machine"]["name"])
    for kernel in found:
        name = {key: value for key, value in kernel["configuration"].items() if key != "spec"}
        failed = [item for item in kernel["checks"] if not item["passed"]]
        print(name, "as expected" if not failed else "", *failed, sep="\n  ")
    return int(not all(kernel["passed"] for kernel in found))


if __name__ == "__main__":
    sys.exit(main())
