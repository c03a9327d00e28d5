"""Compares the sums of a GPU with the package's model, and writes the result file.

    python -m lab.hardware.wgmma_sums.compare FOLDER [--output FILE]

FOLDER: what run_there wrote. The exit status is 1 if an output disagrees, or if forms disagree that
must not. The result file holds digests of the operands and of the GPU's outputs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fa4.emulator.tcgen05.formats import Format
from fa4.emulator.wgmma.forms import ProductForm
from fa4.emulator.wgmma.sums import multiply
from lab.hardware.wgmma_sums import operands
from lab.hardware.wgmma_sums.kernels import Kernel
from lab.hardware.wgmma_sums.operands import CASES, COLUMNS, COMBINATIONS, Codes, Combination, Tiles
from lab.records import record_path, write_record

HEAD = 3  # tiles of a case that the tests repeat
_FORMATS = {str(element): element for element in Format}
_OTHERS = ("wgmma.fence.sync.aligned", "wgmma.commit_group.sync.aligned")


def modelled(types: Combination, given: Tiles) -> Codes:
    """Codes of D as the package computes them."""
    form = ProductForm(COLUMNS, *(_FORMATS[name] for name in (types.a, types.b, types.d)))
    a, b = operands.operand_bytes(types.a, given.a), operands.operand_bytes(types.b, given.b)
    parts = zip(a, b, given.d.astype(np.uint32), strict=True)
    return np.stack([multiply(form, *part) for part in parts]).astype(np.int64)


def head(given: Tiles) -> Tiles:
    """The first tiles."""
    return Tiles(given.a[:HEAD], given.b[:HEAD], given.d[:HEAD])


def digest(*codes: Codes) -> str:
    """Of arrays of codes."""
    found = hashlib.blake2b(digest_size=8)
    for each in codes:
        found.update(np.ascontiguousarray(each, np.int64).tobytes())
    return found.hexdigest()


def compare(types: Combination, outputs: Codes) -> dict[str, Any]:
    """The row of a combination of types. outputs: of all cases, one behind the other."""
    by_case = outputs.reshape(len(CASES), -1, *outputs.shape[1:]).astype(np.int64)
    mismatches, replays = {}, {}
    for case, found in zip(CASES, by_case, strict=True):
        given = operands.tiles(types, case)
        mismatches[case] = int((modelled(types, given) != found).sum())
        first = head(given)
        replays[case] = [digest(first.a, first.b, first.d), digest(found[:HEAD])]
    return {
        "outputs": outputs.size,
        "mismatches": sum(mismatches.values()),
        "by_case": mismatches,
        "replays": replays,
    }


def confirmed() -> dict[str, list[str]]:
    """The opcodes whose outputs were compared."""
    found = []
    for types in COMBINATIONS:
        found += [_opcode(Kernel(types.d, types.a, types.b, n=n)) for n in (8, COLUMNS, 256)]
    for a in ("s8", "u8"):
        for b in ("s8", "u8"):
            found += [_opcode(Kernel("s32", a, b, saturate=s)) for s in (False, True)]
    rows = {"wgmma.mma_async": found, "wgmma.wait_group": ["wgmma.wait_group.sync.aligned"]}
    rows |= {opcode.removesuffix(".sync.aligned"): [opcode] for opcode in _OTHERS}
    mma = [t for t in COMBINATIONS if t.a == t.b and t.a in ("bf16", "f16")]
    rows["mma.sync"] = [_opcode(Kernel(t.d, t.a, t.b, core="mma")) for t in mma]
    return rows


def _opcode(kernel: Kernel) -> str:
    words = kernel.text().split()
    return next(word for word in words if word.startswith(("wgmma.mma_async", "mma.sync")))


def main() -> int:
    """Compares and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, default=record_path("wgmma_sums"))
    arguments = parser.parse_args()
    there = json.loads((arguments.folder / "run.json").read_text())
    outputs: dict[str, Codes] = {}
    for path in sorted(arguments.folder.glob("f*.npz")):
        with np.load(path) as stored:
            outputs |= {name: stored[name] for name in stored.files}
    rows = {types.name: compare(types, outputs[types.name]) for types in COMBINATIONS}
    for name, row in rows.items():
        print(f"{name}: {row['mismatches']} of {row['outputs']} differ")
    body = {
        "schema_version": 1,
        "hardware": {key: there[key] for key in ("date", "gpu", "driver", "python", "numpy")},
        "sums": rows,
        "forms_that_differ": there["differ"],
        "mma_sync_differs": there["mma.sync differs"],
        "integers_wrong": there["integers wrong"],
        "confirmed": confirmed(),
    }
    write_record(arguments.output, body, ("numpy", "numba"), machine=there["gpu"])
    wrong = [row["mismatches"] for row in rows.values()] + list(there["integers wrong"].values())
    wrong += [count for forms in there["differ"].values() for count in forms.values()]
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(main())
