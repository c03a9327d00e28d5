"""Floating-point arithmetic and the approximate functions."""

from __future__ import annotations

import numpy as np

from lab.hardware.emulator_hopper.programs import Closeness, Family, Form, Program
from lab.hardware.emulator_hopper.values import F32, Array, below, chosen, packed, sources

MODES = ("rn", "rz", "rm", "rp")
TWO, ONE = "{op} {d}, {a}, {b};", "{op} {d}, {a};"
HALVES = ("f16", "bf16", "f16x2", "bf16x2")
WIDTHS = {"f32": 32, "f64": 64, "f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32}


def float32() -> list[Program]:
    """f32: every rounding, .ftz and .sat (PTX ISA 9.7.3)."""
    family = Family("float32")
    for name, text in (("add", TWO), ("sub", TWO), ("mul", TWO), ("fma", ""), ("mad", "")):
        forms = [Form(f"{name}{flags}.f32", 32, text) for flags in ("", ".ftz", ".sat")]
        forms = [] if name in ("fma", "mad") else forms
        forms += [
            Form(f"{name}.{mode}{ftz}{sat}.f32", 32, text)
            for mode in MODES
            for ftz in ("", ".ftz")
            for sat in ("", ".sat")
        ]
        family.add(name, sources("f32", 3 if name in ("fma", "mad") else 2, 21), forms)
    for name, text in (("div", TWO), ("rcp", ONE), ("sqrt", ONE)):
        forms = [Form(f"{name}.{m}{ftz}.f32", 32, text) for m in MODES for ftz in ("", ".ftz")]
        family.add(name, sources("f32", 2 if name == "div" else 1, 22), forms)
    _signs_and_extremes(family, "f32", ("", ".ftz"), ("", ".NaN"))
    return family.programs


def float64() -> list[Program]:
    """f64, rounded to nearest."""
    family = Family("float64")
    a, b, c = sources("f64", 3, 23)
    forms = [
        Form(f"{name}{mode}.f64", 64, TWO) for name in ("add", "sub", "mul") for mode in ("", ".rn")
    ]
    forms += [Form("fma.rn.f64", 64), Form("mad.rn.f64", 64)]
    family.add("sums", (a, b, c), forms)
    a, b = sources("f64", 2, 24)
    forms = [Form("div.rn.f64", 64, TWO)]
    forms += [Form(f"{name}.rn.f64", 64, ONE) for name in ("rcp", "sqrt")]
    family.add("quotients", (a, b), forms)
    _signs_and_extremes(family, "f64", ("",), ("",))
    return family.programs


def halves() -> list[Program]:
    """f16, bf16 and their pairs (PTX ISA 9.7.4)."""
    family = Family("halves")
    for kind in HALVES:
        half = kind.startswith("f16")
        w, ftz = WIDTHS[kind], ("", ".ftz") if half else ("",)
        flags = [f + s for f in ftz for s in ("", ".sat")] if half else [""]
        forms = [
            Form(f"{name}{mode}{flag}.{kind}", w, TWO)
            for name in ("add", "sub", "mul")
            for mode in ("", ".rn")
            for flag in flags
        ]
        family.add(f"sums-{kind}", sources(kind, 2, 25), forms)
        flags += [f + ".relu" for f in ftz]
        forms = [Form(f"fma.rn{flag}.{kind}", w) for flag in flags]
        family.add(f"fma-{kind}", sources(kind, 3, 26), forms)
        _signs_and_extremes(family, kind, ftz, ("", ".NaN"))
    return family.programs


def _signs_and_extremes(
    family: Family, kind: str, ftz: tuple[str, ...], nan: tuple[str, ...]
) -> None:
    w = WIDTHS[kind]
    marks = ("", ".xorsign.abs") if kind != "f64" else ("",)
    forms = [
        Form(f"{name}{f}{n}{mark}.{kind}", w, TWO)
        for name in ("min", "max")
        for f in ftz
        for n in nan
        for mark in marks
    ]
    forms += [Form(f"{name}{f}.{kind}", w, ONE) for name in ("neg", "abs") for f in ftz]
    if kind in ("f32", "f64"):
        forms.append(Form(f"copysign.{kind}", w, TWO))
    family.add(f"extremes-{kind}", sources(kind, 2, 27), forms)


# What the manual allows the hardware, as distance from the correctly rounded value; for ex2, less,
# as measured on an H200 over all inputs; for sine and cosine 2^-20.4, since 2^-20.49 occurs.
BOUNDS = {
    "div.approx": Closeness(ulp=2),
    "div.full": Closeness(ulp=2),
    "rcp.approx": Closeness(ulp=1),
    "sqrt.approx": Closeness(ulp=2),
    "rsqrt.approx": Closeness(ulp=2),
    "ex2.approx": Closeness(ulp=2),
    "lg2.approx": Closeness(ulp=4, absolute=2.0**-22),
    "sin.approx": Closeness(absolute=2.0**-20.4),
    "cos.approx": Closeness(absolute=2.0**-20.4),
    "tanh.approx": Closeness(ulp=1 << 13),
}


def approximate() -> list[Program]:
    """The .approx and .full functions; those of angles between -2 pi and 2 pi."""
    family = Family("approximate")
    any_two = sources("f32", 2, 28)
    flags = ("", ".ftz")
    for name in ("div.approx", "div.full"):
        _add_approximations(family, name, any_two, [f"{name}{f}.f32" for f in flags])
    for name in ("rcp.approx", "sqrt.approx", "rsqrt.approx", "lg2.approx"):
        _add_approximations(family, name, any_two[:1], [f"{name}{f}.f32" for f in flags])
    angles = _angles()
    for name in ("sin.approx", "cos.approx"):
        _add_approximations(family, name, (angles,), [f"{name}{f}.f32" for f in flags])
    exponents = np.where(below(len(angles), 4, 290) == 0, any_two[0], _exponents())
    _add_approximations(family, "ex2.approx", (exponents,), [f"ex2.approx{f}.f32" for f in flags])
    _add_approximations(family, "tanh.approx", (exponents,), ["tanh.approx.f32"])
    every = np.arange(1 << 16, dtype=np.uint16)
    for kind, name in (("f16", "ex2.approx"), ("bf16", "ex2.approx.ftz")):
        for opcode in (f"{name}.{kind}", f"tanh.approx.{kind}"):
            short = ".".join(opcode.split(".")[:2])
            bound = Closeness(ulp=2)
            form = Form(opcode, 16, ONE, bound, kind)
            family.add(f"{short}-{kind}", (every,), [form])
            pair = packed(every, every[::-1].copy())
            wide = Form(f"{opcode}x2", 32, ONE, bound, kind)
            family.add(f"{short}-{kind}x2", (pair,), [wide])
    return family.programs


def _add_approximations(
    family: Family, name: str, arrays: tuple[Array, ...], opcodes: list[str]
) -> None:
    text = TWO if len(arrays) > 1 else ONE
    forms = [Form(opcode, 32, text, BOUNDS[name], "f32") for opcode in opcodes]
    family.add(name, arrays, forms)


def _angles() -> Array:
    """[-2 pi, 2 pi], dense near zero too, and special values."""
    count = len(sources("f32", 1, 28)[0])
    steps = (np.arange(count, dtype=np.float64) / count * 2 - 1) * 6.2831850
    scale = np.ldexp(1.0, -(below(count, 8, 280) * below(count, 5, 281)))
    angles = (steps * scale).astype(np.float32).view(np.uint32)
    special = chosen(F32.specials, count, 282).astype(np.uint32)
    keep = (special & 0x7FFFFFFF < 0x40C00000) | (special & 0x7FFFFFFF >= 0x7F800000)
    return np.where((below(count, 32, 283) == 0) & keep, special, angles)


def _exponents() -> Array:
    count = len(sources("f32", 1, 28)[0])
    steps = (np.arange(count, dtype=np.float64) / count * 2 - 1) * 152.0
    scale = np.ldexp(1.0, -(below(count, 8, 284) * below(count, 4, 285)))
    return (steps * scale).astype(np.float32).view(np.uint32)
