"""Compares what the GPU left with the definitions, and byte for byte with the emulator."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from lab.hardware.backward_hopper.make_suite import TIMED, calls, label
from lab.records import record_path, write_record
from tests.sm100.backward_prepost import FUNCTIONS, Call, errors

APPROXIMATE = ("sink_parts",)  # exponentials of MUFU, whose last bits the emulator does not know


def judged(name: str, call: Call, given: Any, changed: Any, different: int) -> dict[str, Any]:
    """One launch: tensors that are not as defined, and bytes that are not the emulator's."""
    after, emulated = given["before"] ^ changed, given["before"] ^ given["emulated"]
    other = {
        tensor: int((call.bytes_of(after, tensor) != call.bytes_of(emulated, tensor)).sum())
        for tensor in call.places
    }
    return {
        "errors": errors(name, call, given["before"], after),
        "other_bytes": {tensor: count for tensor, count in other.items() if count},
        "bytes": int((changed != 0).sum()),
        "different": different,
    }


def is_wrong(row: dict[str, Any]) -> bool:
    """Not as defined, not the emulator's where there is one right answer, or not repeatable."""
    return bool(row["errors"] or row["different"] or set(row["other_bytes"]) - set(APPROXIMATE))


def rates(seconds: Any, moved_bytes: int) -> dict[str, Any]:
    """GB/s of a kernel and of torch's copy, the median of their ratio."""
    ours, copy = (moved_bytes / seconds[:, i] / 1e9 for i in range(2))
    return {
        "gb_per_s": round(float(np.median(ours)), 1),
        "copy_gb_per_s": round(float(np.median(copy)), 1),
        "ratio": round(float(np.median(ours / copy)), 3),
        "microseconds": round(float(np.median(seconds[:, 0])) * 1e6, 2),
    }


def main() -> int:
    """Prints a line per launch and writes the result file; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path)
    arguments = parser.parse_args()
    got = np.load(arguments.results)
    rows, timed = {}, {}
    for variant, call in calls().items():
        for name in FUNCTIONS:
            case = label(variant, name)
            given = np.load(arguments.folder / f"{case}.npz")
            found = got[f"{case}/changed"], int(got[f"{case}/different"])
            rows[case] = judged(name, call, given, *found)
            print(f"{case}: {rows[case]}{' WRONG' if is_wrong(rows[case]) else ''}")
    for name in FUNCTIONS:
        case = label(TIMED, name)
        timed[name] = rates(got[f"{case}/seconds"], int(got[f"{case}/moved_bytes"]))
        print(f"{case}: {timed[name]}")
    report = {"device": str(got["device"]), "launches": rows, "timed": timed}
    packages = ("numpy", "nvidia-cutlass-dsl")
    write_record(record_path("backward_hopper"), report, packages, machine=report["device"])
    return int(any(is_wrong(row) for row in rows.values()))


if __name__ == "__main__":
    raise SystemExit(main())
