"""On a Hopper GPU: what the forward kernel does alike on every one, as masks and exponentials.

    python -m lab.hardware.forward_hopper.neutral make FOLDER
    python3 -m lab.hardware.suite FOLDER RESULTS.npz                                  # GPU
    python -m lab.hardware.forward_hopper.neutral compare FOLDER RESULTS.npz

The test kernels are compiled for sm_90a; what they give is compared with the definitions, and bit
for bit with the emulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lab.hardware.launches import ARCH, Made, Suite, capture, emulate, lay_out, stored, view_of
from lab.hardware.suite import Outcome
from tests.sm100.neutral import COLUMNS, ROWS, SIZES, TILE_FIELDS, compile_neutral
from tests.sm100.neutral_expected import row_errors, sizes_array, tile_errors
from tests.sm100.test_neutral import ROW_SPECS, TILE_SPECS, rows_case

SPECS = {"tiles": TILE_SPECS, "rows": ROW_SPECS}
COUNTS = {"tiles": 60, "rows": 40}  # launches of a kernel
IMAGE = "compiled"
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


def draw_tiles(rng: np.random.Generator) -> Sequence[Any]:
    """Arguments of a launch of a work-tile kernel."""
    return sizes_array(draw_sizes(rng)), np.full((ROWS, len(TILE_FIELDS)), -1, np.int32)


def draw_rows(rng: np.random.Generator) -> Sequence[Any]:
    """Arguments of a launch of a row kernel."""
    spread = float(rng.choice([0.01, 1.0, 30.0, 1e4]))
    case = rows_case(rng, spread, float(rng.choice([0.01, 0.1275, 1.0, 3.0])))
    stats = np.zeros((ROWS, 4), np.float32)
    stats[:, 0] = case["reference"]
    return (
        case["s"], case["bounds"], np.array([case["scale"]], np.float32),
        np.zeros((ROWS, COLUMNS), np.float32), np.zeros((ROWS, COLUMNS // 2), np.uint32), stats,
    )  # fmt: skip


def tiles_wrong(spec: Any, given: list[Any], got: list[Any]) -> list[str]:
    """Work tiles that are not as defined."""
    return tile_errors(spec, dict(zip(SIZES, map(int, given[0]), strict=True)), got[1])


def rows_wrong(spec: Any, given: list[Any], got: list[Any]) -> list[str]:
    """Parts of a row's softmax that are not as defined."""
    case = {"s": given[0], "bounds": given[1], "scale": given[2][0], "reference": given[5][:, 0]}
    return row_errors(spec, case, {"p": got[3], "words": got[4], "stats": got[5]})


def make(ptxas: str, count: int | None = None) -> Iterator[Made]:
    """A case for each kernel, with all its launches. count: of them, if not all."""
    import torch

    rng = np.random.default_rng(SEED)
    for kind, draw in (("tiles", draw_tiles), ("rows", draw_rows)):
        for number, spec in enumerate(SPECS[kind]):
            kernel = compile_neutral(kind, spec, ARCH)
            drawn = [draw(rng) for _ in range(count or COUNTS[kind])]
            arena = lay_out({f"{i}/{j}": torch.from_numpy(array) for i, call in enumerate(drawn)
                             for j, array in enumerate(call)})  # fmt: skip
            launches = [
                capture(kernel, [arena.tensors[f"{i}/{j}"].numpy() for j in range(len(call))])[0]
                for i, call in enumerate(drawn)
            ]
            emulated, _ = emulate(launches, arena.memory, arena.places)
            arrays = {f"emulated/{name}": array for name, array in emulated.items()}
            case = stored(f"{kind}{number}", launches, arena.memory, places=arena.places)
            images = {IMAGE: kernel.artifacts.CUBIN}
            yield Made(case, images, {"memory": arena.memory} | arrays)


def judge(outcome: Outcome) -> dict[str, Any]:
    """One kernel: launches, values, what differs from the definition and from the emulator."""
    case = outcome.case
    kind, number = case.name[:-1], int(case.name[-1])
    wrong = {"tiles": tiles_wrong, "rows": rows_wrong}[kind]
    row: dict[str, Any] = {"launches": len(case.parameters), "values": 0, "errors": [], "differ": 0}
    for launch in range(len(case.parameters)):
        names = [name for name in case.places if name.startswith(f"{launch}/")]
        before, after = [], []
        for name in names:
            place, got = case.places[name], outcome.after(IMAGE, name)
            before.append(view_of(case.part(outcome.given["memory"], name), place))
            after.append(view_of(got, place))
            row["values"] += after[-1].size
            emulated = view_of(outcome.given[f"emulated/{name}"], place)
            row["differ"] += int((emulated.view(np.uint32) != after[-1].view(np.uint32)).sum())
        row["errors"] += wrong(SPECS[kind][number], before, after)
    return row


SUITE = Suite(
    "forward_hopper", make, judge, lambda name, row: bool(row["errors"]),
    lambda device, rows, wrong: {
        "kernels": {name: row | {"device": device} for name, row in rows.items()}
    },
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(SUITE.main(__doc__))
