"""PTX whose approximate instructions are replaced by sequences with one right result each.

What MUFU gives in the last bits is known to the hardware alone. `without_approximations` takes it
out of a kernel: everything that is left has its bits defined, and must agree in all of them.
Products and sums without a rounding mode get one, since ptxas may fuse those into one instruction.
"""

from __future__ import annotations

import re

import numpy as np

APPROXIMATE = re.compile(
    r"(@!?%\w+ )?((?:ex2|lg2|rcp)\.approx\.ftz|tanh\.approx)\.f32\s+(\S+), (\S+);"
)
FUSIBLE = re.compile(r"\b(mul|add|sub)((?:\.ftz)?\.f32)\b")
_MAGIC = 12582912.0  # 1.5 * 2^23: adding it leaves an integer in the low bits
_EXP2 = (1.0, 0.6951, 0.2276, 0.0777)  # near 2^x on [0, 1]; which one does not matter
_LOG2 = (0.0, 1.4387, -0.6778, 0.3218, -0.0827)  # near log2(1 + x) on [0, 1]


def _f32(value: float) -> str:
    return f"0f{np.float32(value).view(np.uint32):08X}"


def _horner(result: str, x: str, coefficients: tuple[float, ...]) -> str:
    lines = [f"mov.f32 {result}, {_f32(coefficients[-1])};"]
    lines += [f"fma.rn.f32 {result}, {result}, {x}, {_f32(c)};" for c in coefficients[-2::-1]]
    return " ".join(lines)


def _exp2(target: str, source: str) -> str:
    return (
        f"max.f32 hf0, {source}, {_f32(-127.0)}; min.f32 hf0, hf0, {_f32(127.0)}; "
        f"add.rm.f32 hf1, hf0, {_f32(_MAGIC)}; sub.rn.f32 hf2, hf1, {_f32(_MAGIC)}; "
        f"sub.rn.f32 hf2, hf0, hf2; {_horner('hf3', 'hf2', _EXP2)} "
        "mov.b32 hr0, hf1; shl.b32 hr0, hr0, 23; mov.b32 hr1, hf3; add.s32 hr0, hr0, hr1; "
        f"mov.b32 {target}, hr0;"
    )


def _log2(target: str, source: str) -> str:
    return (
        f"mov.b32 hr0, {source}; shr.u32 hr1, hr0, 23; cvt.rn.f32.u32 hf0, hr1; "
        f"sub.rn.f32 hf0, hf0, {_f32(127.0)}; "
        "and.b32 hr0, hr0, 0x7fffff; or.b32 hr0, hr0, 0x3f800000; mov.b32 hf1, hr0; "
        f"sub.rn.f32 hf1, hf1, {_f32(1.0)}; {_horner('hf2', 'hf1', _LOG2)} "
        f"add.rn.f32 {target}, hf0, hf2;"
    )


def _tanh(target: str, source: str) -> str:
    """x (27 + x^2) / (27 + 9 x^2), of x within 3."""
    return (
        f"max.f32 hf0, {source}, {_f32(-3.0)}; min.f32 hf0, hf0, {_f32(3.0)}; "
        f"mul.rn.f32 hf1, hf0, hf0; add.rn.f32 hf2, hf1, {_f32(27.0)}; mul.rn.f32 hf2, hf2, hf0; "
        f"fma.rn.f32 hf3, hf1, {_f32(9.0)}, {_f32(27.0)}; div.rn.f32 {target}, hf2, hf3;"
    )


def _replacement(found: re.Match[str]) -> str:
    predicate, name, target, source = found[1] or "", found[2], found[3], found[4]
    if name.startswith("rcp"):
        return f"{predicate}rcp.rn.f32 {target}, {source};"
    body = {"ex2": _exp2, "lg2": _log2, "tanh": _tanh}[name.partition(".")[0]]("hf3", source)
    return f"{{ .reg .f32 hf<4>; .reg .b32 hr<2>; {body} {predicate}mov.f32 {target}, hf3; }}"


def without_approximations(ptx: str) -> str:
    """The module with exact sequences. Raises ValueError if an approximate instruction is left."""
    text = FUSIBLE.sub(r"\1.rn\2", APPROXIMATE.sub(_replacement, ptx))
    if left := re.search(r"^.*\.(approx|full)\b.*$", text, re.MULTILINE):
        raise ValueError(f"no exact sequence for: {left[0].strip()}")
    return text
