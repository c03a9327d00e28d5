"""Clusters: addresses of other CTAs, remote accesses and arrivals; bulk copies and reductions."""

from __future__ import annotations

import numpy as np

from lab.hardware.emulator_hopper.barriers import wait
from lab.hardware.emulator_hopper.programs import Array, Program, Result, bits_of, module_text
from lab.hardware.emulator_hopper.values import FORMATS, floats, integers

CTAS, THREADS = 4, 128
ROW_BYTES = 4 * 2 * CTAS * THREADS  # one word for each thread of two clusters
COMPLETE = "mbarrier::complete_tx::bytes"

# %r3: thread, %r4: thread of the grid, %r5: rank, %r20: shared memory, %r6: that of the next CTA.
START = """
  mov.u32 %r19, 0;
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r3, %tid.x;
  mad.lo.u32 %r4, %r1, 128, %r3;
  mov.u32 %r5, %cluster_ctarank;
  mov.u32 %r20, smem;
  add.u32 %r7, %r5, 1;
  and.b32 %r7, %r7, 3;
  mapa.shared::cluster.u32 %r6, %r20, %r7;
  setp.eq.u32 %p1, %r3, 0;
  mul.wide.u32 %rd10, %r4, 4;
  add.u64 %rd11, %rd1, %rd10;
  add.u64 %rd12, %rd2, %rd10;
  ld.global.b32 %r10, [%rd11];
  shl.b32 %r21, %r3, 2;
  add.u32 %r22, %r21, %r6;
  add.u32 %r21, %r21, %r20;
"""
MEET = "  barrier.cluster.arrive;\n  barrier.cluster.wait;\n"


def clusters() -> list[Program]:
    """Programs of this family."""
    return [_addresses(), _remote(), _arrivals(), _stores(), _copies(), _multicast(),
            *_reductions(), *_remote_reductions()]  # fmt: skip


def _program(
    name: str,
    body: str,
    labels: list[str],
    source: Array | None = None,
    words: int = CTAS * THREADS * 2,
) -> Program:
    """Two clusters of four CTAs. Array 0 is the source; array 1 has `words` words a label."""
    source = integers(32, 960, words) if source is None else source
    out = np.zeros(words * len(labels), np.uint32)
    results = tuple(Result(label, 1, words * k, words) for k, label in enumerate(labels))
    text = module_text(body, 2)
    return Program(
        f"clusters-{name}", "clusters", text, (source, out), results, (2 * CTAS, 1, 1),
        (THREADS, 1, 1), (CTAS, 1, 1), 16384,
    )  # fmt: skip


def _row(label: int, register: str) -> str:
    return f"  st.global.b32 [%rd12+{ROW_BYTES * label}], {register};\n"


def _addresses() -> Program:
    """mapa, getctarank, and the rank in shared addresses."""
    body = (
        START
        + """
  and.b32 %r8, %r3, 3;
  mapa.shared::cluster.u32 %r11, %r20, %r8;
  getctarank.shared::cluster.u32 %r12, %r11;
  sub.u32 %r13, %r11, %r20;
  and.b32 %r14, %r20, 0xffffff;
  cvta.shared.u64 %rd20, 0;
  cvt.u64.u32 %rd21, %r20;
  add.u64 %rd22, %rd20, %rd21;
  mapa.u64 %rd23, %rd22, %r8;
  getctarank.u64 %r15, %rd23;
  sub.u64 %rd24, %rd23, %rd22;
  cvt.u32.u64 %r16, %rd24;
  isspacep.shared::cta %p2, %rd23;
  selp.u32 %r17, 1, 0, %p2;
  isspacep.shared::cluster %p3, %rd23;
  selp.u32 %r23, 1, 0, %p3;
  cvta.to.shared::cluster.u64 %rd25, %rd23;
  cvt.u32.u64 %r24, %rd25;
  sub.u32 %r24, %r24, %r11;
  and.b32 %r25, %r20, 0xfeffffff;
  sub.u32 %r25, %r25, %r20;
"""
    )
    rows = [("mapa.shared::cluster.u32", 11), ("getctarank.shared::cluster.u32", 12), ("rank", 13),
            ("offset", 14), ("getctarank.u64", 15), ("mapa.u64", 16), ("isspacep.shared::cta", 17),
            ("isspacep.shared::cluster", 23), ("cvta.to.shared::cluster.u64", 24),
            ("even CTA", 25)]  # fmt: skip
    body += "".join(_row(k, f"%r{number}") for k, (_, number) in enumerate(rows)) + MEET
    return _program("addresses", body, [label for label, _ in rows])


def _remote() -> Program:
    """Loads, stores and atomics in the next CTA's shared memory, by both kinds of address."""
    body = (
        START
        + f"""
  st.shared.b32 [%r21], %r10;
  mov.u32 %r11, 7;
  @%p1 st.shared.b32 [%r20+8192], %r11;
{MEET}
  ld.shared::cluster.b32 %r12, [%r22];
{_row(0, "%r12")}
  add.u32 %r13, %r10, 1;
  st.shared::cluster.b32 [%r22+1024], %r13;
  atom.shared::cluster.add.u32 %r14, [%r22+1024], 5;
  red.shared::cluster.add.u32 [%r6+8192], %r3;
{MEET}
  ld.shared.b32 %r15, [%r21+1024];
{_row(1, "%r15")}
{_row(2, "%r14")}
  ld.shared.b32 %r16, [%r20+8192];
{_row(3, "%r16")}
  cvta.shared.u64 %rd20, 0;
  cvt.u64.u32 %rd21, %r21;
  add.u64 %rd22, %rd20, %rd21;
  xor.b32 %r7, %r5, 2;
  mapa.u64 %rd23, %rd22, %r7;
  ld.b32 %r17, [%rd23];
{_row(4, "%r17")}
  st.b32 [%rd23+2048], %r10;
  atom.add.u32 %r23, [%rd23+2048], %r3;
{_row(5, "%r23")}
{MEET}
  ld.shared.b32 %r24, [%r21+2048];
{_row(6, "%r24")}
"""
    )
    labels = ["ld.shared::cluster.b32", "st.shared::cluster.b32", "atom.shared::cluster.add.u32",
              "red.shared::cluster.add.u32", "ld.b32", "atom.add.u32", "st.b32"]  # fmt: skip
    return _program("remote", body, labels)


def _arrivals() -> Program:
    """Arrivals and bytes at the next CTA's mbarrier."""
    body = (
        START
        + f"""
  @%p1 mbarrier.init.shared::cta.b64 [%r20+4096], 257;
  fence.mbarrier_init.release.cluster;
{MEET}
  mad.lo.u32 %r11, %r10, 3, %r5;
  st.shared::cluster.b32 [%r22], %r11;
  mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6+4096];
  mbarrier.arrive.shared::cluster.b64 _, [%r6+4096];
  @%p1 mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r6+4096], 512;
  @%p1 mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%r6+4096], 512;
  mov.u32 %r18, 0;
AGAIN:
  mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r20+4096], 0;
  add.u32 %r18, %r18, 1;
  setp.gt.u32 %p4, %r18, 4000000;
  @%p4 bra OVER;
  @!%p3 bra AGAIN;
OVER:
  ld.shared.b32 %r12, [%r21];
{_row(0, "%r12")}{MEET}
"""
    )
    return _program("arrivals", body, ["mbarrier.arrive.shared::cluster"])


def _stores() -> Program:
    """st.async and red.async."""
    body = (
        START
        + f"""
  @%p1 mbarrier.init.shared::cta.b64 [%r20+8192], 1;
  mov.b32 %r11, 100;
  st.shared.b32 [%r21+4096], %r11;
  st.shared.b32 [%r21+4608], %r10;
  st.shared.b32 [%r21+6144], %r3;
  fence.mbarrier_init.release.cluster;
{MEET}
  @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20+8192], {48 * THREADS};
  add.u32 %r12, %r6, 8192;
  mad.lo.u32 %r13, %r3, 16, %r6;
  mad.lo.u32 %r14, %r3, 8, %r6;
  add.u32 %r15, %r10, 1;
  mov.b64 %rd20, {{%r10, %r15}};
  st.async.shared::cluster.{COMPLETE}.b32 [%r22], %r10, [%r12];
  st.async.shared::cluster.{COMPLETE}.v4.b32 [%r13+512], {{%r10, %r15, %r3, %r5}}, [%r12];
  st.async.weak.shared::cluster.{COMPLETE}.b64 [%r14+2560], %rd20, [%r12];
  red.async.relaxed.cluster.shared::cluster.{COMPLETE}.add.u32 [%r22+4096], %r10, [%r12];
  red.async.relaxed.cluster.shared::cluster.{COMPLETE}.min.s32 [%r22+4608], %r3, [%r12];
  st.async.shared::cluster.{COMPLETE}.v2.u32 [%r14+5120], {{%r3, %r10}}, [%r12];
  red.async.relaxed.cluster.shared::cluster.{COMPLETE}.xor.b32 [%r22+6144], %r10, [%r12];
{wait("%r20+8192", "0", "WAIT")}
"""
    )
    for k, place in enumerate((0, 512, 1024, 1536, 2048, 2560, 3072, 4096, 4608, 5120, 5632, 6144)):
        body += f"  ld.shared.b32 %r23, [%r21+{place}];\n{_row(k, '%r23')}"
    labels = ["st.async.b32", *["st.async.v4.b32"] * 4, *["st.async.b64"] * 2]
    labels += ["red.async.add.u32", "red.async.min.s32", *["st.async.v2.u32"] * 2]
    labels.append("red.async.xor.b32")
    return _program("async-stores", body + MEET, labels)


def _copies() -> Program:
    """Bulk copies: global to shared, shared to another CTA, shared to global."""
    body = (
        START
        + f"""
  @%p1 mbarrier.init.shared::cta.b64 [%r20+8192], 1;
  @%p1 mbarrier.init.shared::cta.b64 [%r20+8200], 1;
  fence.mbarrier_init.release.cluster;
  mov.b32 %r11, 0x5555;
  st.shared.b32 [%r21+512], %r11;
  st.shared.b32 [%r21+1024], %r11;
  fence.proxy.async;
{MEET}
  mul.wide.u32 %rd13, %r1, 512;
  add.u64 %rd14, %rd1, %rd13;
  @!%p1 bra LOADED;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20+8192], 928;
  cp.async.bulk.shared::cluster.global.{COMPLETE} [%r20], [%rd14], 512, [%r20+8192];
  cp.async.bulk.shared::cta.global.{COMPLETE} [%r20+528], [%rd14+16], 416, [%r20+8192];
LOADED:
{wait("%r20+8192", "0", "WAIT")}
  ld.shared.b32 %r12, [%r21];
{_row(0, "%r12")}
  ld.shared.b32 %r12, [%r21+512];
{_row(1, "%r12")}
  fence.proxy.async.shared::cta;
{MEET}
  @!%p1 bra SENT;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20+8200], 496;
  add.u32 %r13, %r6, 8200;
  add.u32 %r14, %r6, 1040;
  cp.async.bulk.shared::cluster.shared::cta.{COMPLETE} [%r14], [%r20+16], 496, [%r13];
SENT:
{wait("%r20+8200", "0", "SECOND")}
  ld.shared.b32 %r12, [%r21+1024];
{_row(2, "%r12")}
  add.u32 %r15, %r10, 9;
  st.shared.b32 [%r21+2048], %r15;
  fence.proxy.async.shared::cta;
  bar.sync 0;
  add.u64 %rd15, %rd2, %rd13;
  @!%p1 bra STORED;
  cp.async.bulk.global.shared::cta.bulk_group [%rd15+{3 * ROW_BYTES}], [%r20+2048], 512;
  cp.async.bulk.commit_group;
  cp.async.bulk.global.shared::cta.bulk_group [%rd15+{4 * ROW_BYTES + 64}], [%r20+2080], 224;
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group.read 1;
  cp.async.bulk.wait_group 0;
STORED:
{MEET}
"""
    )
    labels = ["cp.async.bulk.shared::cluster.global", "cp.async.bulk.shared::cta.global",
              "cp.async.bulk.shared::cluster.shared::cta", "cp.async.bulk.global.shared::cta",
              "cp.async.bulk.global.shared::cta, a part"]  # fmt: skip
    return _program("copies", body, labels)


def _multicast() -> Program:
    """One CTA loads for several, whose mbarriers each count the bytes."""
    body = (
        START
        + f"""
  @%p1 mbarrier.init.shared::cta.b64 [%r20+8192], 1;
  fence.mbarrier_init.release.cluster;
  mov.b32 %r11, 0x7777;
  st.shared.b32 [%r21], %r11;
  fence.proxy.async;
{MEET}
  setp.ne.u32 %p5, %r5, 2;
  and.pred %p6, %p1, %p5;
  @%p6 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20+8192], 256;
  setp.eq.u32 %p7, %r5, 1;
  and.pred %p7, %p7, %p1;
  mul.wide.u32 %rd13, %r1, 512;
  add.u64 %rd14, %rd1, %rd13;
  mov.b16 %h1, 11;
  @%p7 cp.async.bulk.shared::cluster.global.{COMPLETE}.multicast::cluster
    [%r20+128], [%rd14], 256, [%r20+8192], %h1;
  @!%p5 bra READ;
{wait("%r20+8192", "0", "WAIT")}
READ:
  bar.sync 0;
  ld.shared.b32 %r12, [%r21];
{_row(0, "%r12")}{MEET}
"""
    )
    return _program("multicast", body, ["cp.async.bulk.multicast::cluster"])


def _reduction_forms() -> list[tuple[str, str]]:
    found = [("add", k) for k in ("u32", "s32", "u64", "f32", "f64", "noftz.f16", "noftz.bf16")]
    found += [(op, k) for op in ("min", "max") for k in ("u32", "s32", "u64", "s64", "f16", "bf16")]
    found += [("inc", "u32"), ("dec", "u32")]
    return found + [(op, k) for op in ("and", "or", "xor") for k in ("b32", "b64")]


def _values(kind: str, count: int, seed: int) -> tuple[Array, Array]:
    name = kind.rpartition(".")[2]
    if name in FORMATS:
        pair = floats(FORMATS[name], 2, seed, count)
        return pair[0], pair[1]
    return integers(bits_of(name), seed, count), integers(bits_of(name), seed + 1, count)


def _reductions() -> list[Program]:
    """cp.reduce.async.bulk into global memory: 4 KiB of values each."""
    programs = []
    for number, (operation, kind) in enumerate(_reduction_forms()):
        width = bits_of(kind.rpartition(".")[2])
        count = 8 * 4096 // width
        old, new = _values(kind, count, 970 + 3 * number)
        body = f"""
  mov.u32 %r3, %tid.x;
  mov.u32 %r20, smem;
  mad.lo.u32 %r21, %r3, 16, %r20;
  mul.wide.u32 %rd10, %r3, 16;
  add.u64 %rd11, %rd1, %rd10;
  ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd11];
  st.shared.v4.b32 [%r21], {{%r10, %r11, %r12, %r13}};
  fence.proxy.async.shared::cta;
  bar.sync 0;
  setp.ne.u32 %p1, %r3, 0;
  @%p1 bra END;
  cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{kind} [%rd2], [%r20], 4096;
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
END:
"""
        form = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{kind}"
        programs.append(
            Program(
                f"clusters-reduce-{operation}-{kind}",
                "clusters",
                module_text(body, 2),
                (new, old),
                (Result(form, 1, 0, count, f"b{width}"),),
                (1, 1, 1),
                (256, 1, 1),
                smem_bytes=4096,
            )
        )
    return programs


def _remote_reductions() -> list[Program]:
    """cp.reduce.async.bulk into the next CTA's shared memory."""
    forms = [("add", "u32"), ("add", "s32"), ("add", "u64"), ("min", "s32"), ("max", "u32"),
             ("min", "u32"), ("max", "s32"), ("inc", "u32"), ("dec", "u32"), ("and", "b32"),
             ("or", "b32"), ("xor", "b32")]  # fmt: skip
    body = (
        START
        + f"""
  @%p1 mbarrier.init.shared::cta.b64 [%r20+12288], 1;
  fence.mbarrier_init.release.cluster;
  @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20+12288], {512 * len(forms)};
  xor.b32 %r11, %r3, 77;
  mad.lo.u32 %r11, %r11, 0x01000193, %r10;
"""
    )
    for k in range(len(forms)):
        body += f"  st.shared.b32 [%r21+{512 * k}], %r11;\n"
    body += f"  st.shared.b32 [%r21+8192], %r10;\n  fence.proxy.async;\n{MEET}"
    body += "  @!%p1 bra ISSUED;\n  add.u32 %r12, %r6, 12288;\n"
    for k, (operation, kind) in enumerate(forms):
        body += f"  add.u32 %r13, %r6, {512 * k};\n"
        body += f"  cp.reduce.async.bulk.shared::cluster.shared::cta.{COMPLETE}.{operation}.{kind}"
        body += " [%r13], [%r20+8192], 512, [%r12];\n"
    body += f"ISSUED:\n{wait('%r20+12288', '0', 'WAIT')}"
    for k in range(len(forms)):
        body += f"  ld.shared.b32 %r14, [%r21+{512 * k}];\n{_row(k, '%r14')}"
    labels = [f"cp.reduce.async.bulk.shared::cluster.{op}.{kind}" for op, kind in forms]
    return [_program("remote-reductions", body + MEET, labels)]
