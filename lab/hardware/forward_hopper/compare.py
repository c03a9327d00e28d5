"""Compares what the GPU gave with the definitions, and bit for bit with the emulator."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from fa4.emulator import launch
from lab.hardware.forward_hopper.make_suite import ARCH
from lab.records import record_path, write_record
from tests.sm100.neutral import SIZES, compile_neutral
from tests.sm100.neutral_expected import row_errors, tile_errors
from tests.sm100.test_neutral import ROW_SPECS, TILE_SPECS


def tiles_wrong(spec: Any, given: list[Any], got: list[Any]) -> list[str]:
    """Work tiles that are not as defined."""
    return tile_errors(spec, dict(zip(SIZES, map(int, given[0]), strict=True)), got[1])


def rows_wrong(spec: Any, given: list[Any], got: list[Any]) -> list[str]:
    """Parts of a row's softmax that are not as defined."""
    case = {"s": given[0], "bounds": given[1], "scale": given[2][0], "reference": given[5][:, 0]}
    return row_errors(spec, case, {"p": got[3], "words": got[4], "stats": got[5]})


def compare(path: Path, results: Path) -> dict[str, Any]:
    """One kernel: launches, values, what differs from the definition and from the emulator."""
    name, number = path.stem[:-1], int(path.stem[-1])
    spec = (TILE_SPECS if name == "tiles" else ROW_SPECS)[number]
    wrong = tiles_wrong if name == "tiles" else rows_wrong
    given, got = np.load(path), np.load(results / path.name)
    kernel = compile_neutral(name, spec, ARCH)
    launches = sorted({key.split("/")[0] for key in given.files if "/" in key}, key=int)
    row: dict[str, Any] = {"launches": len(launches), "values": 0, "errors": [], "differ": 0}
    for number_of_launch in launches:
        keys = sorted(key for key in given.files if key.startswith(f"{number_of_launch}/"))
        before, after = [given[key] for key in keys], [got[key] for key in keys]
        row["errors"] += wrong(spec, before, after)
        emulated = [array.copy() for array in before]
        launch(kernel, *emulated)
        for mine, theirs in zip(emulated, after, strict=True):
            row["values"] += mine.size
            row["differ"] += int((mine.view(np.uint32) != theirs.view(np.uint32)).sum())
    return row | {"device": str(got["device"])}


def main() -> int:
    """Prints a line per kernel and writes the result file; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path)
    arguments = parser.parse_args()
    rows = {}
    for path in sorted(arguments.folder.glob("*.npz")):
        rows[path.stem] = row = compare(path, arguments.results)
        print(
            f"{path.stem}: {row['launches']} launches, {row['values']} values, "
            f"{len(row['errors'])} against the definition, {row['differ']} not the emulator's bits"
        )
    devices = {row["device"] for row in rows.values()}
    write_record(
        record_path("forward_hopper"), {"kernels": rows}, ("numpy", "nvidia-cutlass-dsl"),
        machine=", ".join(sorted(devices)),
    )  # fmt: skip
    return int(any(row["errors"] for row in rows.values()))


if __name__ == "__main__":
    raise SystemExit(main())
