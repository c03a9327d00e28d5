"""Runs one opcode over arrays of encoded numbers, 32 at a time, compiled once per opcode."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from fa4.emulator.isa import approx, convert, extremes, floats, halves
from fa4.emulator.isa.instruction_set import TABLE
from fa4.emulator.ptx.syntax import Operand, PtxInstruction, Register, Vector
from fa4.emulator.translate.lanes import SegmentBuilder, width_of
from fa4.emulator.translate.native import SegmentFunction, compile_functions, function_text
from fa4.emulator.translate.table import find
from fa4.emulator.warp_lanes import LANES

REGISTERING = (approx, convert, extremes, floats, halves)
INTEGERS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
FULL = 0xFFFFFFFF
STRIDE = 512


def instruction(opcode: str, *operands: Operand) -> PtxInstruction:
    """An unguarded PtxInstruction."""
    return PtxInstruction(opcode, tuple(opcode.split(".")), operands, None, 1, opcode)


def build(opcode: str, kinds: tuple[str, ...], vector: int = 0) -> SegmentFunction:
    """The compiled opcode: register k of type kinds[k] at byte k * STRIDE, destination first.

    vector: so many sources, the first ones, are one {...} operand.
    """
    names = [f"%r{k}" for k in range(len(kinds))]
    layout = {
        name: (k * STRIDE, width_of(kind))
        for k, (name, kind) in enumerate(zip(names, kinds, strict=True))
    }
    operands: list[Operand] = [Register(name) for name in names]
    if vector:
        operands[1 : 1 + vector] = [Vector(tuple(operands[1 : 1 + vector]))]
    builder = SegmentBuilder(layout, lambda symbol: 0)
    item = instruction(opcode, *operands)
    find(item, TABLE).function(builder, item)
    builder.store_back({names[0]})
    return compile_functions({"f": function_text(builder)})["f"]


_build_once: Callable[..., SegmentFunction] = cache(build)


def evaluate(
    opcode: str,
    kinds: tuple[str, ...],
    *sources: np.ndarray,
    function: SegmentFunction | None = None,
) -> np.ndarray:
    """The destination's bits for each element of the sources (bit patterns, a multiple of 32).

    kinds: types of the registers, destination first; the destination may be "pred" (0 or 1).
    """
    run = function or _build_once(opcode, kinds)
    memory = np.zeros(STRIDE * (len(kinds) + 1), np.uint8)
    memory = memory[-memory.ctypes.data % 64 :]
    arrays = [
        np.ascontiguousarray(source).astype(INTEGERS[width_of(kind)])
        for source, kind in zip(sources, kinds[1:], strict=True)
    ]
    results = []
    for start in range(0, len(arrays[0]), LANES):
        for k, array in enumerate(arrays, 1):
            piece = array[start : start + LANES].view(np.uint8)
            memory[k * STRIDE : k * STRIDE + len(piece)] = piece
        run(memory.ctypes.data, FULL, 0)
        if kinds[0] == "pred":
            word = int(memory[:4].view(np.uint32)[0])
            results.append(np.array([word >> lane & 1 for lane in range(LANES)], np.uint8))
        else:
            bits = width_of(kinds[0])
            results.append(memory[: LANES * bits // 8].view(INTEGERS[bits]).copy())
    return np.concatenate(results)


def check(
    opcode: str, kinds: tuple[str, ...], rows: list[tuple[int, ...]], want: list[int]
) -> None:
    """Runs the opcode on rows of source bits and fails with the lanes that differ from `want`."""
    arrays = [np.array(column, np.uint64) for column in zip(*rows, strict=True)]
    got = evaluate(opcode, kinds, *arrays).tolist()
    wrong = [
        f"{opcode} {[hex(bits) for bits in row]}: got {have:#x}, want {need:#x}"
        for row, have, need in zip(rows, got, want, strict=True)
        if have != need
    ]
    assert not wrong, wrong[:3]
