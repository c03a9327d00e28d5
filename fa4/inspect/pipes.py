"""Which execution pipe of an SM the instructions of a kernel's PTX keep busy.

PTX is not machine code: ptxas joins some instructions, drops others and adds moves of its own. The
rules here are those of a `PipelinePlan`'s amounts (`fa4.plan.schema.Math`), each for what ptxas is
known to do on sm_100.
"""

from __future__ import annotations

from collections.abc import Mapping

from fa4.plan.schema import Math

# Packing registers into pairs, copies and constants: no instruction, or an operand of another one.
_FREE = frozenset({"mov", "neg", "cvta"})
_MUFU = frozenset({"ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"})
_FLOATING = frozenset({"fma", "add", "sub", "mul"})
_ALU = frozenset(
    {"add", "sub", "mul", "mad", "min", "max", "shl", "shr", "shf", "and", "or", "xor", "not",
     "lop3", "prmt", "bfe", "bfi", "cvt", "selp", "set", "setp", "slct"}
)  # fmt: skip


def pipe_amounts(counts: Mapping[str, float], lone_maxima: float = 0.0) -> Math:
    """Instructions by opcode as instructions by pipe; whatever uses no pipe here is `other`.

    A packed f32x2 instruction counts 2. Two maxima of float32 are one 3-input maximum, except
    `lone_maxima` of them, which stand alone. A shift and the addition of its result are one
    instruction (LEA).
    """
    used = {"mufu": 0.0, "fma": 0.0, "alu": 0.0, "other": 0.0}
    maxima = shifts = additions = 0.0
    for opcode, count in counts.items():
        parts = opcode.split(".")
        name, kind = parts[0], parts[-1]
        if name in _FREE or opcode.startswith("ld.param"):
            continue
        if name in _MUFU:
            used["mufu"] += count
        elif name in _FLOATING and kind in ("f32", "f32x2"):
            used["fma"] += 2 * count if kind == "f32x2" else count
        elif name in ("max", "min") and kind == "f32":
            maxima += count
        else:
            used["alu" if name in _ALU else "other"] += count
            shifts += count if name == "shl" else 0
            additions += count if name == "add" else 0
    lone = min(lone_maxima, maxima)
    used["alu"] += lone + (maxima - lone) / 2 - min(shifts, additions)
    return Math(mufu=used["mufu"], fma=used["fma"], alu=used["alu"], other=used["other"])
