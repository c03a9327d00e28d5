"""cvt between all types that sm_90 converts (PTX ISA 9.7.9.21)."""

from __future__ import annotations

import numpy as np

from lab.hardware.emulator_hopper.programs import Family, Form, Program, bits_of
from lab.hardware.emulator_hopper.values import FORMATS, Array, convertible, packed, sources

INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
INTEGRAL = ("rni", "rzi", "rmi", "rpi")
ROUNDINGS = ("rn", "rz", "rm", "rp")
ONE, TWO = "{op} {d}, {a};", "{op} {d}, {a}, {b};"


def conversions() -> list[Program]:
    """Every pair of scalar types, then packed and narrow formats."""
    family = Family("conversions")
    for source in INTEGERS:
        # An 8-bit source lies in a 16-bit register whose other bits must not matter.
        (values,) = sources(f"b{max(bits_of(source), 16)}", 1, 31)
        forms = [
            Form(f"cvt{sat}.{to}.{source}", _register_bits(to), ONE)
            for to in INTEGERS
            for sat in (("", ".sat") if _can_overflow(to, source) else ("",))
        ]
        family.add(f"{source}-integers", (values,), forms)
        forms = [Form(opcode, bits_of(to), ONE) for to, opcode in _from_integer(source)]
        family.add(f"{source}-floats", (values,), forms)
    for source, form in FORMATS.items():
        values = convertible(form)
        forms = [Form(opcode, _register_bits(to), ONE) for to, opcode in _to_integer(source)]
        family.add(f"{source}-integers", (values,), forms)
        forms = [Form(opcode, bits_of(to), ONE) for to, opcode in _between_floats(source)]
        family.add(f"{source}-floats", (values,), forms)
    _packed(family)
    return family.programs


def _register_bits(kind: str) -> int:
    """8-bit results in wide registers show how they are extended."""
    return 32 if bits_of(kind) == 8 else bits_of(kind)


def _can_overflow(to: str, source: str) -> bool:
    if to[0] == source[0]:
        return bits_of(to) < bits_of(source)
    return to[0] == "u" or bits_of(to) <= bits_of(source)


def _from_integer(source: str) -> list[tuple[str, str]]:
    found = []
    for to in FORMATS:
        if to == "bf16" and bits_of(source) == 8:
            continue
        modes = ("rn",) if to == "f64" and bits_of(source) == 64 else ROUNDINGS
        sats = ("",) if to == "bf16" else ("", ".sat")
        found += [(to, f"cvt.{mode}{sat}.{to}.{source}") for mode in modes for sat in sats]
    return found


def _to_integer(source: str) -> list[tuple[str, str]]:
    found = []
    for to in INTEGERS:
        if source == "bf16" and bits_of(to) == 8:
            continue
        flags = ["", ".sat"] if source != "bf16" else [""]
        flags += [".ftz", ".ftz.sat"] if source == "f32" else []
        found += [(to, f"cvt.{mode}{flag}.{to}.{source}") for mode in INTEGRAL for flag in flags]
    return found


def _between_floats(source: str) -> list[tuple[str, str]]:
    found = []
    for to in FORMATS:
        narrower = bits_of(to) < bits_of(source)
        other = to != source and "bf16" in (to, source)
        modes = ROUNDINGS if narrower or other else (*INTEGRAL, "") if to == source else ("",)
        if to == source == "bf16":
            modes = INTEGRAL
        flags = [""] if "bf16" in (to, source) else ["", ".sat"]
        if "f32" in (to, source) and "bf16" not in (to, source):
            flags += [".ftz", ".ftz.sat"]
        if (to, source) == ("bf16", "f32"):
            flags.append(".ftz")
        found += [
            (to, f"cvt.{mode}{flag}.{to}.{source}".replace("cvt..", "cvt."))
            for mode in modes
            for flag in flags
        ]
        if source == "f32" and to in ("f16", "bf16"):
            flags = [".relu", ".satfinite", ".relu.satfinite"]
            found += [(to, f"cvt.{m}{f}.{to}.f32") for m in ("rn", "rz") for f in flags]
    return found


def _packed(family: Family) -> None:
    a, b = convertible(FORMATS["f32"], 3), convertible(FORMATS["f32"], 4)
    flags = ("", ".relu", ".satfinite", ".relu.satfinite")
    forms = [
        Form(f"cvt.{mode}{flag}.{to}.f32", 32, TWO)
        for to in ("f16x2", "bf16x2")
        for mode in ("rn", "rz")
        for flag in flags
    ]
    family.add("pairs", (a, b), forms)
    forms = [Form(f"cvt.{m}{f}.tf32.f32", 32, ONE) for m in ("rn", "rz") for f in ("", ".relu")]
    forms += [Form(f"cvt.rna{flag}.tf32.f32", 32, ONE) for flag in ("", ".satfinite")]
    family.add("tf32", (a,), forms)
    for to in ("e4m3x2", "e5m2x2"):
        relu = ("", ".relu")
        forms = [Form(f"cvt.rn.satfinite{flag}.{to}.f32", 16, TWO) for flag in relu]
        family.add(f"{to}-f32", (_narrow_floats(a, to), _narrow_floats(b, to)), forms)
        every = np.arange(1 << 16, dtype=np.uint16)
        pair = packed(every, (every * np.uint16(40503)).astype(np.uint16))
        forms = [Form(f"cvt.rn.satfinite{flag}.{to}.f16x2", 16, ONE) for flag in relu]
        family.add(f"{to}-f16x2", (pair,), forms)
        forms = [Form(f"cvt.rn{flag}.f16x2.{to}", 32, ONE) for flag in relu]
        family.add(f"f16x2-{to}", (every,), forms)


def _narrow_floats(values: Array, to: str) -> Array:
    """Half of the values brought into the range of an 8-bit format, with few significant bits."""
    count = len(values)
    lowest, exponents = {"e4m3x2": (-11, 21), "e5m2x2": (-18, 35)}[to]
    field = (values >> np.uint32(23)) % np.uint32(exponents) + np.uint32(127 + lowest)
    mantissa = (values << np.uint32(17)) & np.uint32(0x7E0000)
    mantissa |= np.where(values & np.uint32(0x300) == 0, 1, 0).astype(np.uint32)
    small = (values & np.uint32(1 << 31)) | field << np.uint32(23) | mantissa
    return np.where(np.arange(count) % 2 == 0, values, small).astype(np.uint32)
