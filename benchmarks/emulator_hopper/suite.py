"""All programs, by family."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.emulator_hopper import (
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
from benchmarks.emulator_hopper.programs import Program

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
