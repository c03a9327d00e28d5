"""Arithmetic of f16, f16x2, bf16 and bf16x2 (PTX ISA 9.7.4): the rules of float32, other formats.

Sources become doubles, the operation is exact up to its rounding to odd, and the result is rounded
once; so fma is fused in 16 bits too.
"""

from __future__ import annotations

from fa4.emulator.isa.floats import Emitter, emit_arithmetic, type_of
from fa4.emulator.ptx.syntax import PtxInstruction
from fa4.emulator.translate.lanes import SegmentBuilder
from fa4.emulator.translate.table import TableRows, Unsupported

ROWS = TableRows()

HALVES = ("f16", "f16x2", "bf16", "bf16x2")
SECTIONS = {"add": "9.7.4.1", "sub": "9.7.4.2", "mul": "9.7.4.3", "fma": "9.7.4.4"}


def _emitter(operation: str) -> Emitter:
    def emit(builder: SegmentBuilder, i: PtxInstruction) -> None:
        if "oob" in i.parts:
            raise Unsupported("modifier .oob: no tensor load of the emulator makes such a NaN")
        if "sat" in i.parts and "relu" in i.parts:
            raise Unsupported("modifiers .sat and .relu together")
        flags = ("ftz", "sat") if type_of(i) in ("f16", "f16x2") else ()
        emit_arithmetic(operation, builder, i, (*flags, "relu") if operation == "fma" else flags)

    return emit


def _register() -> None:
    for operation, section in SECTIONS.items():
        fused = operation == "fma"
        rounding, relu = (".rn", "{.relu}") if fused else ("{.rn}", "")
        forms = f"{rounding}{{.ftz}}{{.sat}}{relu}.{{f16 f16x2}}, {rounding}{relu}.{{bf16 bf16x2}}"
        ROWS.lane(operation, section, forms, types=HALVES)(_emitter(operation))


_register()
