"""All programs, by family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lab.hardware.emulator_hopper import (
    accesses,
    atomics,
    barriers,
    clusters,
    conversions,
    floating,
    integer,
    tensors,
    warps,
)
from lab.hardware.emulator_hopper.programs import THREADS, Program
from lab.hardware.emulator_hopper.storage import BLOCK

FAMILIES: dict[str, Callable[[], list[Program]]] = {
    "integer": integer.integer,
    "logic": integer.logic,
    "compare": integer.compare,
    "moves": integer.moves,
    "float32": floating.float32,
    "float64": floating.float64,
    "halves": floating.halves,
    "approximate": floating.approximate,
    "conversions": conversions.conversions,
    "exchanges": warps.exchanges,
    "control": warps.control,
    "accesses": accesses.accesses,
    "atomics": atomics.atomics,
    "barriers": barriers.barriers,
    "clusters": clusters.clusters,
    "tensors": tensors.tensors,
}

# Every thread works on one element, so that a part of the grid gives a part of the results.
ELEMENTWISE = ("integer", "logic", "compare", "moves", "float32", "float64", "halves",
               "approximate", "conversions", "exchanges")  # fmt: skip


def shortened(program: Program) -> Program:
    """The program with so many CTAs as the first block of its results needs."""
    if program.family not in ELEMENTWISE:
        return program
    return replace(program, grid=(BLOCK // THREADS, 1, 1))
