"""Compiles the test kernels for sm_90a and draws their inputs: one .npz per case."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from tests.sm100.neutral import COLUMNS, ROWS, TILE_FIELDS, compile_neutral
from tests.sm100.neutral_expected import sizes_array
from tests.sm100.test_neutral import ROW_SPECS, TILE_SPECS, rows_case

ARCH = "sm_90a"
TILE_CASES, ROW_CASES = 60, 40  # launches per kernel
SEED = 2026


def draw_sizes(rng: np.random.Generator) -> dict[str, int]:
    """Sizes of one call, small and large."""
    left = int(rng.integers(-40, 300))
    return {
        "seqlen_q": int(rng.integers(1, 1200)),
        "seqlen_k": int(rng.choice([1, 127, 128, 129, 513, 1100, 300_000])),
        "heads": int(rng.integers(1, 6)),
        "group": 1,
        "batch": int(rng.integers(1, 4)),
        "left": left,
        "right": max(int(rng.integers(-40, 300)), -left),
    }


def tile_cases(number: int, rng: np.random.Generator) -> dict[str, Any]:
    """Inputs of every launch of a work-tile kernel."""
    cases: dict[str, Any] = {}
    for launch in range(TILE_CASES):
        cases[f"{launch}/0"] = sizes_array(draw_sizes(rng))
        cases[f"{launch}/1"] = np.full((ROWS, len(TILE_FIELDS)), -1, np.int32)
    return cases


def row_cases(number: int, rng: np.random.Generator) -> dict[str, Any]:
    """Inputs of every launch of a row kernel."""
    cases: dict[str, Any] = {}
    for launch in range(ROW_CASES):
        spread = float(rng.choice([0.01, 1.0, 30.0, 1e4]))
        case = rows_case(rng, spread, float(rng.choice([0.01, 0.1275, 1.0, 3.0])))
        stats = np.zeros((ROWS, 4), np.float32)
        stats[:, 0] = case["reference"]
        arrays = (
            case["s"],
            case["bounds"],
            np.array([case["scale"]], np.float32),
            np.zeros((ROWS, COLUMNS), np.float32),
            np.zeros((ROWS, COLUMNS // 2), np.uint32),
            stats,
        )
        cases.update({f"{launch}/{i}": array for i, array in enumerate(arrays)})
    return cases


def main() -> int:
    """Writes the suite."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(SEED)
    for name, specs, draw in (("tiles", TILE_SPECS, tile_cases), ("rows", ROW_SPECS, row_cases)):
        for number, spec in enumerate(specs):
            compiled = compile_neutral(name, spec, ARCH)
            (folder / f"{name}{number}.ptx").write_text(compiled.artifacts.PTX)
            cubin = np.frombuffer(compiled.artifacts.CUBIN, np.uint8)
            np.savez(folder / f"{name}{number}.npz", cubin=cubin, **draw(number, rng))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
