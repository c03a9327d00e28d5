"""Runs the probes on the GPU of this machine; needs NumPy and the CUDA driver.

    python3 -m lab.hardware.wgmma_sums.run_there FOLDER

Writes FOLDER/run.json (the machine, and how many outputs differ between forms that must agree) and
the outputs of wgmma for each combination of types, FOLDER/NAME.npy.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from lab.hardware.driver import CudaError, Gpu
from lab.hardware.emulator_hopper.programs import Program, run_program
from lab.hardware.there import describe_driver
from lab.hardware.wgmma_sums import operands
from lab.hardware.wgmma_sums.kernels import Kernel
from lab.hardware.wgmma_sums.operands import COMBINATIONS, Combination, Draws, Tiles

Array = np.ndarray[Any, np.dtype[Any]]
LIMIT_S = 10.0
MMA_TILES = 10  # of each case, of which mma.sync's outputs are kept


def execute(gpu: Gpu, kernel: Kernel, a: Array, b: Array, d: Array) -> Array:
    """Registers of D after the instruction; a, b: bytes of rows, d: registers before."""
    arrays = operands.image_of(a), operands.image_of(b), d.copy()
    program = Program("sum", "sums", kernel.text(), arrays, (), (len(a), 1, 1), (128, 1, 1))
    return run_program(gpu, program, program.text.encode() + b"\0", LIMIT_S)[2]


def run_combination(gpu: Gpu, types: Combination) -> tuple[Array, Tiles, Array, Array, Array]:
    """(codes of D, the operands, and bytes and registers that they were)."""
    given = operands.all_tiles(types)
    a, b = operands.operand_bytes(types.a, given.a), operands.operand_bytes(types.b, given.b)
    d = operands.to_registers(types.d, given.d)
    words = execute(gpu, Kernel(types.d, types.a, types.b), a, b, d)
    return operands.from_registers(types.d, words), given, a, b, d


def variants(gpu: Gpu, types: Combination, found: Array, given: Tiles, a: Array, b: Array, d: Array
             ) -> dict[str, int]:  # fmt: skip
    """How many outputs of other forms differ from those of the plain one."""

    def codes(kernel: Kernel, a: Array, b: Array, d: Array) -> Array:
        return operands.from_registers(types.d, execute(gpu, kernel, a, b, d))

    plain = types.d, types.a, types.b
    sign = 1 << operands.TYPES[types.a].sign_bit
    negated = operands.operand_bytes(types.a, given.a ^ sign)
    minus = codes(Kernel(*plain), negated, b, d)
    wide_d = np.concatenate([d] * 4, axis=1)
    wide = codes(Kernel(*plain, n=256), a, np.concatenate([b] * 4, axis=1), wide_d)
    narrow = codes(Kernel(*plain, n=8), a, b[:, :8], d[:, : d.shape[1] // 8])
    none = codes(Kernel(*plain, scale_d=0), a, b, d)
    return {
        "A in registers": int((codes(Kernel(*plain, a_from="registers"), a, b, d) != found).sum()),
        "n256": int((wide.reshape(*found.shape[:2], 4, -1) != found[:, :, None]).sum()),
        "n8": int((narrow != found[:, :, :8]).sum()),
        "scale-a": int((codes(Kernel(*plain, negate_a=True), a, b, d) != minus).sum()),
        "no D, +0": int((codes(Kernel(*plain), a, b, np.zeros_like(d)) != none).sum()),
        "again": int((codes(Kernel(*plain), a, b, d) != found).sum()),
    }


def integers(gpu: Gpu) -> dict[str, int]:
    """How many outputs of the integer forms are not the exact ones."""
    wrong = {}
    kinds = {"s8": np.int8, "u8": np.uint8}
    for a_kind in kinds:
        for b_kind in kinds:
            for saturate in (False, True):
                draws = Draws(f"{a_kind} {b_kind} {saturate}")
                a, b = draws.below(256, 64, 64, 32), draws.below(256, 64, 64, 32)
                near = draws.between(-(1 << 20), 1 << 20, 64, 64, 64)
                end = near % (1 << 19)
                ends = np.stack([near, (1 << 31) + end, (1 << 31) - 1 - end])
                d = np.choose(draws.below(3, 64, 64, 64), ends)
                raw_a, raw_b = a.astype(np.uint8), b.astype(np.uint8)
                left = raw_a.view(kinds[a_kind]).astype(np.int64)
                right = raw_b.view(kinds[b_kind]).astype(np.int64)
                before = d.astype(np.uint32).view(np.int32).astype(np.int64)
                exact = left @ right.transpose(0, 2, 1) + before
                if saturate:
                    exact = exact.clip(-(1 << 31), (1 << 31) - 1)
                kernel = Kernel("s32", a_kind, b_kind, saturate=saturate)
                words = execute(gpu, kernel, raw_a, raw_b, operands.to_registers("s32", d))
                got = operands.from_registers("s32", words)
                name = f"{a_kind}.{b_kind}" + (".satfinite" if saturate else "")
                wrong[name] = int((got != (exact & 0xFFFFFFFF)).sum())
    return wrong


def main() -> None:
    """Runs all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    began, gpu = time.perf_counter(), Gpu()
    report: dict[str, Any] = {"differ": {}, "mma.sync differs": {}, "failed": {}}
    outputs: dict[str, list[Array]] = {"f32": [], "f16": [], "mma": []}
    names: dict[str, list[str]] = {"f32": [], "f16": [], "mma": []}
    for types in COMBINATIONS:
        found, given, a, b, d = run_combination(gpu, types)
        outputs[types.d].append(found.astype(np.uint16 if types.d == "f16" else np.uint32))
        names[types.d].append(types.name)
        report["differ"][types.name] = variants(gpu, types, found, given, a, b, d)
        if types.a == types.b:
            try:
                words = execute(gpu, Kernel(types.d, types.a, types.b, core="mma"), a, b, d)
            except CudaError as error:
                report["failed"][types.name] = str(error)
                continue
            mma = operands.from_registers(types.d, words)
            report["mma.sync differs"][types.name] = int((mma != found).sum())
            by_case = mma.reshape(len(operands.CASES), -1, *mma.shape[1:])[:, :MMA_TILES]
            outputs["mma"].append(by_case.astype(np.uint32))
            names["mma"].append(types.name)
        print(types.name, report["differ"][types.name], flush=True)
    report["integers wrong"] = integers(gpu)
    report |= describe_driver() | {
        "seconds": round(time.perf_counter() - began, 1),
    }
    (folder / "run.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    for kind, arrays in outputs.items():
        half = (len(arrays) + 1) // 2
        for number, part in enumerate((slice(0, half), slice(half, None))):
            if not names[kind][part]:
                continue
            with (folder / f"{kind}{number}.npz").open("wb") as stream:
                np.savez_compressed(
                    stream, **dict(zip(names[kind][part], arrays[part], strict=True))
                )


if __name__ == "__main__":
    main()
