"""atom and red in global and shared memory (PTX ISA 9.7.13.5 and 9.7.13.7)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lab.hardware.emulator_hopper.accesses import START
from lab.hardware.emulator_hopper.programs import (
    Array,
    Program,
    Result,
    bits_of,
    module_text,
    register,
)
from lab.hardware.emulator_hopper.values import FORMATS, floats, integers, packed

THREADS, CTAS = 256, 16
COUNT = THREADS * CTAS
HALVES = ("f16", "bf16", "f16x2", "bf16x2")
VECTORS = (
    ("v2", "f32"), ("v4", "f32"), ("v2", "f16"), ("v4", "f16"), ("v8", "f16"), ("v2", "bf16"),
    ("v4", "bf16"), ("v8", "bf16"), ("v2", "f16x2"), ("v4", "f16x2"), ("v2", "bf16x2"),
    ("v4", "bf16x2"),
)  # fmt: skip


def operations() -> list[tuple[str, str]]:
    """(operation with its type behind it, type)."""
    found = [("add", kind) for kind in ("u32", "s32", "u64", "f32", "f64")]
    found += [("add.noftz", kind) for kind in HALVES]
    found += [(op, kind) for op in ("min", "max") for kind in ("u32", "s32", "u64", "s64")]
    found += [("inc", "u32"), ("dec", "u32")]
    found += [(op, f"b{w}") for op in ("and", "or", "xor", "exch") for w in (32, 64)]
    return [*found, ("cas", "b16"), ("cas", "b32"), ("cas", "b64")]


def width_of(kind: str) -> int:
    """Bits of a type, packed ones too."""
    return 32 if kind.endswith("x2") else bits_of(kind)


def _values(kind: str, seed: int, number: int = 3) -> list[Array]:
    """Old values, operands, and third operands."""
    if kind.endswith("x2"):
        parts = [floats(FORMATS[kind[:-2]], number, s, COUNT) for s in (seed, seed + 1)]
        return [packed(low, high) for low, high in zip(*parts, strict=True)]
    if kind in FORMATS:
        # add: as fma's last source, the second operand often nearly cancels the first.
        two = floats(FORMATS[kind], 2, seed, COUNT)
        return [*two, two[1]]
    made = [integers(bits_of(kind), seed + k, COUNT) for k in range(number)]
    made[1] = np.where(np.arange(COUNT) % 3 == 0, made[0], made[1])  # cas that succeeds
    return made


def atomics() -> list[Program]:
    """Every operation with an address of its own for each thread; contended ones; a lock."""
    programs = [
        _separate(f"atomics-{space.replace('::', '-') or 'generic'}-{k}", space, part)
        for space in ("global", "shared", "")
        for k, part in enumerate((operations()[:9], operations()[9:]))
    ]
    return [*programs, _vectors(), _wide(), _contended("global"), _contended("shared"), _locked()]


def _separate(name: str, space: str, listed: Sequence[tuple[str, str]]) -> Program:
    """The old value, then memory after atom, then after red with the same operand."""
    body = START + "  cvta.shared.u64 %rd40, 0;\n  cvt.u64.u32 %rd41, %r20;\n"
    body += "  add.u64 %rd40, %rd40, %rd41;\n"
    arrays: list[Array] = []
    results, at = [], 0
    dotted = f".{space}" if space else ""
    for number, (operation, kind) in enumerate(listed):
        w = width_of(kind)
        size = w // 8
        pointer = len(arrays)
        arrays += _values(kind, 600 + 7 * number)
        r, rb, rc, old = (register(w, n) for n in (30, 31, 32, 33))
        operands = f"{rb}, {rc}" if operation == "cas" else rb
        body += f"  mul.wide.u32 %rd50, %r4, {size};\n"
        for k, value in enumerate((r, rb, rc)):
            body += f"  ld.param.b64 %rd51, [pointer{pointer + k}];\n"
            body += f"  add.u64 %rd51, %rd51, %rd50;\n  ld.global.b{w} {value}, [%rd51];\n"
        body += f"  ld.param.b64 %rd51, [pointer{pointer}];\n  add.u64 %rd51, %rd51, %rd50;\n"
        place = "[%rd51]"
        if space == "shared":
            body += f"  mad.lo.u32 %r21, %r3, 8, %r20;\n  st.shared.b{w} [%r21], {r};\n"
            place = "[%r21]"
        elif not space and number % 2:
            body += f"  mad.wide.u32 %rd51, %r3, 8, %rd40;\n  st.b{w} [%rd51], {r};\n"
        op, _, noftz = operation.partition(".")
        suffix = f"{op}{'.' + noftz if noftz else ''}.{kind}"
        body += f"  atom{dotted}.{suffix} {old}, {place}, {operands};\n"
        parts = [(f"atom{dotted}.{suffix}", old)]
        if op not in ("exch", "cas"):
            body += f"  ld{dotted}.b{w} {r}, {place};\n  red{dotted}.{suffix} {place}, {rb};\n"
            parts.append((f"atom{dotted}.{suffix} memory", r))
        body += f"  ld{dotted}.b{w} {rc}, {place};\n"
        parts.append((f"{'red' if len(parts) > 1 else 'atom'}{dotted}.{suffix} memory", rc))
        for label, value in parts:
            body += f"  ld.param.b64 %rd52, [pointer{3 * len(listed)}];\n"
            body += f"  add.u64 %rd52, %rd52, %rd50;\n  st.global.b{w} [%rd52+{at}], {value};\n"
            results.append(Result(label, 3 * len(listed), at // size, COUNT, f"b{w}"))
            at += COUNT * size
    arrays.append(np.zeros(at // 8, np.uint64))
    return _program(name, body, arrays, results, THREADS * 8)


def _vectors() -> Program:
    """Vectors in global memory."""
    body, arrays, results, at = START, [], [], 0
    total = 3 * len(VECTORS)
    for number, (vector, kind) in enumerate(VECTORS):
        n, w = int(vector[1:]), width_of(kind)
        size = n * w // 8
        olds, b, _ = _values(kind, 700 + 7 * number)
        olds, b = (np.concatenate([np.roll(v, 5 * k) for k in range(n)]) for v in (olds, b))
        pointer = 3 * number
        arrays += [olds, b, np.zeros(1, np.uint64)]
        old, new = ([register(w, 30 + 10 * j + k) for k in range(n)] for j in (0, 1))
        body += f"""
  mul.wide.u32 %rd50, %r4, {size};
  ld.param.b64 %rd51, [pointer{pointer}];
  add.u64 %rd51, %rd51, %rd50;
  ld.param.b64 %rd52, [pointer{pointer + 1}];
  add.u64 %rd52, %rd52, %rd50;
  ld.param.b64 %rd53, [pointer{total}];
  add.u64 %rd53, %rd53, %rd50;
"""
        body += "".join(f"  ld.global.b{w} {r}, [%rd52+{w // 8 * k}];\n" for k, r in enumerate(new))
        ops = ("add",) if kind == "f32" else ("add", "min", "max")
        for op in ops:
            noftz = "" if kind == "f32" else ".noftz"
            suffix = f"global.{op}{noftz}.{vector}.{kind}"
            body += f"  atom.{suffix} {{{', '.join(old)}}}, [%rd51], {{{', '.join(new)}}};\n"
            for k, r in enumerate(old):
                body += f"  st.global.b{w} [%rd53+{at + w // 8 * k}], {r};\n"
            body += f"  red.{suffix} [%rd51], {{{', '.join(new)}}};\n"
            results.append(Result(f"atom.{suffix}", total, 8 * at // w, COUNT * n, f"b{w}"))
            at += COUNT * size
        results.append(Result(f"red {vector} {kind}", pointer, 0, COUNT * n, f"b{w}"))
    arrays.append(np.zeros(at // 8, np.uint64))
    return _program("atomics-vectors", body, arrays, results, 0)


def _wide() -> Program:
    """atom.exch and atom.cas of 128 bits."""
    body = (
        START
        + """
  mul.wide.u32 %rd50, %r4, 16;
  add.u64 %rd51, %rd1, %rd50;
  add.u64 %rd52, %rd2, %rd50;
  add.u64 %rd53, %rd3, %rd50;
  ld.global.b128 %q1, [%rd52];
  atom.global.exch.b128 %q2, [%rd51], %q1;
  st.global.b128 [%rd53], %q2;
  ld.global.b128 %q3, [%rd52+16];
  and.b32 %r5, %r3, 1;
  setp.eq.b32 %p1, %r5, 0;
  mov.b128 {%rd54, %rd55}, %q1;
  selp.b64 %rd55, %rd55, %rd54, %p1;
  mov.b128 %q4, {%rd54, %rd55};
  atom.global.cas.b128 %q2, [%rd51], %q4, %q3;
"""
    )
    body += f"  st.global.b128 [%rd53+{16 * COUNT}], %q2;\n"
    words = [integers(64, 800 + k, 2 * COUNT + 2) for k in range(2)]
    arrays = [words[0], words[1], np.zeros(4 * COUNT, np.uint64)]
    results = [
        Result("atom.global.exch.b128", 2, 0, 2 * COUNT, "b64"),
        Result("atom.global.cas.b128", 2, 2 * COUNT, 2 * COUNT, "b64"),
        Result("atom.global.cas.b128 memory", 0, 0, 2 * COUNT, "b64"),
    ]
    return _program("atomics-wide", body, arrays, results, 0)


def _contended(space: str) -> Program:
    """Many threads, few places, operations whose order does not matter."""
    body = (
        START
        + """
  mul.wide.u32 %rd50, %r4, 4;
  add.u64 %rd51, %rd1, %rd50;
  ld.global.b32 %r10, [%rd51];
  and.b32 %r11, %r10, 7;
  cvt.u64.u32 %rd60, %r10;
  cvt.rn.f32.u32 %r12, %r11;
  cvt.rn.f64.u32 %rd61, %r11;
"""
    )
    rows = [
        ("add.u32", "%r10"), ("min.s32", "%r10"), ("max.u32", "%r10"), ("and.b32", "%r10"),
        ("or.b32", "%r10"), ("xor.b32", "%r10"), ("inc.u32", "1000"), ("dec.u32", "1000"),
        ("add.u64", "%rd60"), ("max.s64", "%rd60"), ("add.f32", "%r12"), ("add.f64", "%rd61"),
    ]  # fmt: skip
    if space == "shared":
        body += "  mad.lo.u32 %r21, %r3, 8, %r20;\n  mov.u64 %rd62, 0;\n"
        body += "  st.shared.b64 [%r21], %rd62;\n  bar.sync 0;\n"
    results = []
    for k, (operation, operand) in enumerate(rows):
        if space == "shared":
            place = f"[%r22+{64 * k}]"
            body += "  mad.lo.u32 %r22, %r11, 8, %r20;\n"
        else:
            place = f"[%rd63+{64 * k}]"
            body += "  mad.wide.u32 %rd63, %r11, 8, %rd2;\n"
        body += f"  red.{space}.{operation} {place}, {operand};\n"
    if space == "shared":
        body += """
  bar.sync 0;
  ld.shared.b64 %rd62, [%r21];
  mul.wide.u32 %rd50, %r4, 8;
  add.u64 %rd51, %rd2, %rd50;
  st.global.b64 [%rd51], %rd62;
"""
    size = COUNT if space == "shared" else 8 * len(rows)
    arrays = [integers(32, 810, COUNT), np.zeros(size, np.uint64)]
    results = [Result(f"red.{space} contended", 1, 0, size, "b64")]
    return _program(f"atomics-contended-{space}", body, arrays, results, THREADS * 8)


def _locked() -> Program:
    """A ticket from a counter, and a sum under a lock taken with atom.cas by one thread of each
    CTA: the result is the same in every order."""
    body = (
        START
        + """
  setp.ne.u32 %p2, %r3, 0;
  @%p2 bra END;
AGAIN:
  atom.acquire.gpu.global.cas.b32 %r10, [%rd1], 0, 1;
  setp.ne.b32 %p1, %r10, 0;
  @%p1 bra AGAIN;
  ld.volatile.global.b32 %r11, [%rd1+8];
  mad.lo.u32 %r12, %r4, 77, 5;
  add.u32 %r11, %r11, %r12;
  st.volatile.global.b32 [%rd1+8], %r11;
  atom.release.gpu.global.exch.b32 %r13, [%rd1], 0;
  atom.global.add.u32 %r14, [%rd1+16], 1;
  mul.wide.u32 %rd50, %r14, 4;
  add.u64 %rd51, %rd2, %rd50;
  st.global.b32 [%rd51], %r14;
END:
"""
    )
    arrays = [np.zeros(8, np.uint32), np.full(64, 7, np.uint32)]
    results = [Result("atom.cas lock", 0, 0, 8), Result("atom.add ticket", 1, 0, 64)]
    text = module_text(body, 2)
    return Program(
        "atomics-locked", "atomics", text, tuple(arrays), tuple(results), (64, 1, 1), (32, 1, 1)
    )


def _program(
    name: str, body: str, arrays: Sequence[Array], results: Sequence[Result], smem_bytes: int
) -> Program:
    text = module_text(body, len(arrays))
    shape = (CTAS, 1, 1), (THREADS, 1, 1)
    return Program(
        name, "atomics", text, tuple(arrays), tuple(results), *shape, smem_bytes=smem_bytes
    )
