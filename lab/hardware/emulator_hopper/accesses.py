"""Loads, stores, matrix fragments in shared memory, and cp.async (PTX ISA 9.7.9, 9.7.14)."""

from __future__ import annotations

import numpy as np

from lab.hardware.emulator_hopper.programs import (
    Array,
    Program,
    Result,
    bits_of,
    module_text,
    register,
)
from lab.hardware.emulator_hopper.values import below, integers, random_words

THREADS, CTAS = 128, 8
COUNT = THREADS * CTAS
TYPES = ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "f64")
LARGEST_BYTES = 16

# %r3: thread, %r4: thread of the grid, %r20: shared memory. {scale}: bytes of an element.
START = """
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mad.lo.u32 %r4, %r1, %r2, %r3;
  mov.u32 %r20, smem;
"""


def noise(size_bytes: int, seed: int) -> Array:
    """(size_bytes,) uint8."""
    return random_words(-(-size_bytes // 8), seed).view(np.uint8)[:size_bytes]


def accesses() -> list[Program]:
    """One program for each group of instructions."""
    programs = [_copies(f"global-{k}", m) for k, m in enumerate(MODIFIERS)]
    programs += [
        _shared_copies(space) for space in ("shared", "shared::cta", "shared::cluster", "")
    ]
    programs += [_variables(), _matrices(), _thread_copies()]
    return programs


MODIFIERS = (
    ".global", "", ".volatile.global", ".relaxed.gpu.global", ".global.nc", ".weak.global",
    ".acquire.sys.global", ".global.ca", ".global.L1::no_allocate.L2::128B",
)  # fmt: skip


def _forms() -> list[tuple[str, str]]:
    """(vector, type) with at most 16 bytes a lane."""
    return [
        (vector, kind)
        for vector, n in (("", 1), (".v2", 2), (".v4", 4))
        for kind in TYPES
        if n * bits_of(kind) <= 8 * LARGEST_BYTES
    ]


def _registers(vector: str, kind: str) -> str:
    """8-bit elements lie in 32-bit registers, so that their extension shows."""
    width = bits_of(kind) if bits_of(kind) > 8 else 32
    n = int(vector[2:] or 1)
    names = [register(width, 30 + k) for k in range(n)]
    return "{" + ", ".join(names) + "}" if vector else names[0]


def _copies(name: str, load: str) -> Program:
    """Each thread loads and stores one element of every form; narrow ones are stored extended."""
    space = "" if not load else ".global"
    store = {".acquire.sys.global": ".release.sys.global"}.get(load, space)
    store = load if load.startswith((".volatile", ".relaxed", ".weak")) else store
    body, at = START, 0
    results: list[Result] = []
    for vector, kind in _forms():
        registers, size = _registers(vector, kind), int(vector[2:] or 1) * bits_of(kind) // 8
        out_kind = "b32" if bits_of(kind) == 8 and not vector else kind
        out_size = 4 if out_kind != kind else size
        at = -(-at // 16) * 16
        body += f"""
  mul.wide.u32 %rd50, %r4, {size};
  add.u64 %rd50, %rd1, %rd50;
  ld{load}{vector}.{kind} {registers}, [%rd50+{16 * len(results)}];
  mul.wide.u32 %rd51, %r4, {out_size};
  add.u64 %rd51, %rd2, %rd51;
  st{store}{vector}.{out_kind} [%rd51+{at}], {registers};
"""
        unit = bits_of(out_kind) // 8
        count = COUNT * out_size // unit
        results.append(Result(f"ld{load}{vector}.{kind}", 1, at // unit, count, f"b{8 * unit}"))
        at += COUNT * out_size
    if load in (".global", ".relaxed.gpu.global"):
        at = -(-at // 16) * 16
        body += f"""
  mul.wide.u32 %rd50, %r4, 16;
  add.u64 %rd51, %rd2, %rd50;
  add.u64 %rd50, %rd1, %rd50;
  ld{load}.b128 %q1, [%rd50+32];
  st{load}.b128 [%rd51+{at}], %q1;
"""
        results.append(Result(f"ld{load}.b128", 1, at // 8, 2 * COUNT, "b64"))
        at += 16 * COUNT
    source = noise(COUNT * 16 + 16 * len(results) + 64, 501)
    arrays = (source[: source.size // 16 * 16].view(np.uint32), np.zeros(at // 4, np.uint32))
    return _program(f"accesses-{name}", body, arrays, results)


def _shared_copies(space: str) -> Program:
    """Thread t stores, and loads what thread t ^ 37 stored."""
    dotted = f".{space}" if space else ""
    results: list[Result] = []
    body = START + "  xor.b32 %r5, %r3, 37;\n  cvta.shared.u64 %rd40, 0;\n"
    body += "  cvt.u64.u32 %rd41, %r20;\n  add.u64 %rd40, %rd40, %rd41;\n"
    for vector, kind in _forms():
        registers, size = _registers(vector, kind), int(vector[2:] or 1) * bits_of(kind) // 8
        at = COUNT * 16 * len(results)
        if space:
            mine, other = "[%r21]", "[%r22+4096]"
            address = f"  mad.lo.u32 %r21, %r3, {size}, %r20;\n  add.u32 %r21, %r21, 4096;\n"
            address += f"  mad.lo.u32 %r22, %r5, {size}, %r20;\n"
        else:
            mine, other = "[%rd42]", "[%rd43+4096]"
            address = f"  mad.wide.u32 %rd42, %r3, {size}, %rd40;\n  add.u64 %rd42, %rd42, 4096;\n"
            address += f"  mad.wide.u32 %rd43, %r5, {size}, %rd40;\n"
        body += f"""
  mul.wide.u32 %rd50, %r4, {size};
  add.u64 %rd51, %rd1, %rd50;
  add.u64 %rd52, %rd2, %rd50;
  ld.global{vector}.b{bits_of(kind)} {registers}, [%rd51];
  bar.sync 0;
{address}
  st{dotted}{vector}.{kind} {mine}, {registers};
  bar.sync 0;
  ld{dotted}{vector}.{kind} {registers}, {other};
  st.global{vector}.b{bits_of(kind)} [%rd52+{at}], {registers};
"""
        unit = bits_of(kind) // 8
        count = COUNT * size // unit
        results.append(Result(f"ld{dotted}{vector}.{kind}", 1, at // unit, count, f"b{8 * unit}"))
    out = np.zeros(4 * COUNT * len(results), np.uint32)
    arrays = (noise(COUNT * 16, 502).view(np.uint32), out)
    name = space.replace("::", "-") or "generic"
    return _program(f"accesses-{name}", body, arrays, results, smem_bytes=8192)


def _variables() -> Program:
    """Constant, global, local and static shared variables, and parameters."""
    declarations = """
  .local .align 8 .b8 mine[64];
  .shared .align 16 .b8 fixed[512];
"""
    body = (
        START
        + """
  and.b32 %r5, %r3, 7;
  mov.u64 %rd40, table;
  mad.wide.u32 %rd40, %r5, 4, %rd40;
  ld.const.u32 %r30, [%rd40];
  mov.u64 %rd41, counters;
  mad.wide.u32 %rd41, %r5, 4, %rd41;
  ld.global.u32 %r31, [%rd41];
  mov.u64 %rd42, mine;
  mad.wide.u32 %rd43, %r5, 8, %rd42;
  mov.u64 %rd44, 0;
  st.local.u64 [%rd42], %rd44;
  st.local.u64 [%rd42+56], %rd44;
  st.local.v2.u32 [%rd43], {%r4, %r30};
  ld.local.u16 %h30, [%rd43+4];
  cvt.u32.u16 %r32, %h30;
  mov.u32 %r6, fixed;
  mad.lo.u32 %r7, %r3, 4, %r6;
  st.shared.u32 [%r7], %r31;
  bar.sync 0;
  xor.b32 %r8, %r3, 21;
  mad.lo.u32 %r7, %r8, 4, %r6;
  ld.shared.u32 %r33, [%r7];
  sub.u32 %r34, %r20, %r6;
  ld.param.u32 %r35, [pointer1];
  cvt.u32.u64 %r36, %rd2;
  sub.u32 %r35, %r35, %r36;
  ldu.global.u32 %r37, [%rd1];
"""
    )
    body += "  mul.wide.u32 %rd50, %r4, 4;\n  add.u64 %rd50, %rd2, %rd50;\n"
    names = ("ld.const", "ld.global", "ld.local", "ld.shared", "mov smem", "ld.param", "ldu.global")
    results = []
    for k, (name, source) in enumerate(zip(names, (30, 31, 32, 33, 34, 35, 37), strict=True)):
        body += f"  st.global.b32 [%rd50+{4 * COUNT * k}], %r{source};\n"
        results.append(Result(name, 1, COUNT * k, COUNT))
    text = module_text(body, 2, declarations=declarations)
    variables = ".const .align 4 .u32 table[8] = {3, 1, 4, 1, 5, 9, 2, 6};\n"
    variables += ".global .align 4 .u32 counters[8] = {7, 6, 5, 4, 3, 2, 1, 0x89ABCDEF};\n"
    text = text.replace(".visible .entry", variables + ".visible .entry")
    arrays = (integers(32, 503, 64), np.zeros(COUNT * len(names), np.uint32))
    return Program(
        "accesses-variables", "accesses", text, arrays, tuple(results), (CTAS, 1, 1),
        (THREADS, 1, 1), smem_bytes=1024,
    )  # fmt: skip


def _program(
    name: str, body: str, arrays: tuple[Array, ...], results: list[Result], smem_bytes: int = 0
) -> Program:
    return Program(
        name, "accesses", module_text(body, len(arrays)), arrays, tuple(results), (CTAS, 1, 1),
        (THREADS, 1, 1), smem_bytes=smem_bytes,
    )  # fmt: skip


# Each warp fills 512 bytes of its own; lane t's row is the one that the second array names.
FILL = """
  shr.u32 %r5, %r3, 5;
  mad.lo.u32 %r20, %r5, 512, %r20;
  and.b32 %r6, %r3, 31;
  mad.lo.u32 %r21, %r6, 16, %r20;
  mul.wide.u32 %rd50, %r4, 16;
  add.u64 %rd51, %rd1, %rd50;
  ld.global.v4.b32 {%r30, %r31, %r32, %r33}, [%rd51];
  st.shared.v4.b32 [%r21], {%r30, %r31, %r32, %r33};
  mul.wide.u32 %rd52, %r4, 4;
  add.u64 %rd53, %rd2, %rd52;
  ld.global.b32 %r7, [%rd53];
  mad.lo.u32 %r22, %r7, 16, %r20;
  bar.warp.sync -1;
"""


def _matrices() -> Program:
    body = START + FILL
    results: list[Result] = []
    for count in (1, 2, 4):
        registers = [f"%r{40 + k}" for k in range(count)]
        listed = "{" + ", ".join(registers) + "}"
        for trans in ("", ".trans"):
            at = COUNT * 16 * len(results)
            body += f"  ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {listed}, [%r22];\n"
            body += f"  mad.wide.u32 %rd54, %r4, {4 * count}, %rd3;\n"
            for k, name in enumerate(registers):
                body += f"  st.global.b32 [%rd54+{at + 4 * k}], {name};\n"
            form = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
            results.append(Result(form, 2, at // 4, COUNT * count))
    for count in (1, 2, 4):
        for trans in ("", ".trans"):
            at = COUNT * 16 * len(results)
            form = f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
            listed = "{" + ", ".join(f"%r{30 + k}" for k in range(count)) + "}"
            body += f"""
  bar.warp.sync -1;
  {form} [%r22], {listed};
  bar.warp.sync -1;
  ld.shared.v4.b32 {{%r50, %r51, %r52, %r53}}, [%r21];
  add.u64 %rd55, %rd3, %rd50;
  st.global.v4.b32 [%rd55+{at}], {{%r50, %r51, %r52, %r53}};
"""
            results.append(Result(form, 2, at // 4, COUNT * 4))
    rows = np.concatenate([np.argsort(random_words(32, 510 + k)) for k in range(COUNT // 32)])
    out = np.zeros(COUNT * 4 * len(results), np.uint32)
    arrays = (noise(COUNT * 16, 511).view(np.uint32), rows.astype(np.uint32), out)
    return _program("accesses-matrices", body, arrays, results, smem_bytes=512 * THREADS // 32)


def _thread_copies() -> Program:
    """cp.async: sizes, partial sources, groups, and arrival at an mbarrier."""
    body = (
        START
        + """
  mul.wide.u32 %rd50, %r4, 4;
  add.u64 %rd51, %rd2, %rd50;
  ld.global.b32 %r6, [%rd51];
  setp.ne.b32 %p2, %r3, 0;
  @!%p2 mbarrier.init.shared.b64 [%r20+8192], 128;
  and.b32 %r7, %r6, 3;
  setp.eq.b32 %p1, %r7, 0;
  mul.wide.u32 %rd52, %r4, 16;
  add.u64 %rd53, %rd1, %rd52;
  mad.lo.u32 %r21, %r3, 16, %r20;
  mov.b32 %r30, -1;
  st.shared.v4.b32 [%r21], {%r30, %r30, %r30, %r30};
  add.u64 %rd54, %rd3, %rd52;
  bar.sync 0;
"""
    )
    copies = [
        ("cp.async.ca.shared.global [%r21], [%rd53], 16;", "wait_all"),
        ("cp.async.cg.shared.global [%r21], [%rd53+16], 16;", "wait_group 0"),
        ("cp.async.ca.shared.global [%r21], [%rd53+4], 4;", "wait_group 0"),
        ("cp.async.ca.shared.global [%r21+8], [%rd53+24], 8;", "wait_all"),
        ("cp.async.ca.shared.global [%r21], [%rd53], 16, %r8;", "wait_group 0"),
        ("cp.async.cg.shared.global [%r21], [%rd53], 16, %r8;", "wait_group 0"),
        ("cp.async.ca.shared.global [%r21], [%rd53], 16, %p1;", "mbarrier"),
        ("cp.async.cg.shared::cta.global.L2::128B [%r21], [%rd53], 16;", "mbarrier"),
    ]
    waits, results, phase = ("wait_all", "wait_group 0"), [], 0
    for k, (copy, wait) in enumerate(copies):
        body += f"  add.u32 %r8, %r6, {5 * k};\n  rem.u32 %r8, %r8, 17;\n  {copy}\n"
        if wait in waits:
            body += f"  cp.async.commit_group;\n  cp.async.{wait};\n"
        else:
            body += f"  cp.async.mbarrier.arrive.noinc.shared.b64 [%r20+8192];\nWAIT{k}:\n"
            body += f"  mbarrier.try_wait.parity.shared.b64 %p3, [%r20+8192], {phase};\n"
            body += f"  @!%p3 bra WAIT{k};\n"
            phase += 1
        at = COUNT * 16 * k
        body += "  ld.shared.v4.b32 {%r31, %r32, %r33, %r34}, [%r21];\n"
        body += f"  st.global.v4.b32 [%rd54+{at}], {{%r31, %r32, %r33, %r34}};\n"
        results.append(Result(copy.partition(" ")[0] + f" ({k})", 2, at // 4, COUNT * 4))
    out = np.zeros(COUNT * 4 * len(copies), np.uint32)
    sizes = below(COUNT, 1 << 16, 512).astype(np.uint32)
    arrays = (noise(COUNT * 16 + 64, 513).view(np.uint32), sizes, out)
    return _program("accesses-cp-async", body, arrays, results, smem_bytes=8704)
