"""Exchanges between the lanes of a warp, divergence, and special registers."""

from __future__ import annotations

import numpy as np

from lab.hardware.emulator_hopper.programs import (
    Array,
    Family,
    Form,
    Program,
    Result,
    module_text,
)
from lab.hardware.emulator_hopper.values import COUNT, below, chosen, integers, random_words

LANES = 32
# Operand c of shfl: whole warp, halves, quarters, odd clamps, and bits that do not count.
CLAMPS = (0x1F, 0, 0x101F, 0x1C03, 0x1800, 0x0A0B, 0x1E1F, 0xFFFFE0FF)
# %p5: this lane is named in the member mask {e}.
MEMBER = "  mov.u32 %r52, %laneid;\n  shr.u32 %r53, {mask}, %r52;\n  and.b32 %r53, %r53, 1;\n"
MEMBER += "  setp.ne.b32 %p5, %r53, 0;\n"
PAIR = "selp.b32 {s}, 1, 0, %p1;\n  shl.b32 {d}, {d}, 1;\n  or.b32 {d}, {d}, {s};"
PRESET = "mov.b32 {d}, 0x1234567;\n  setp.ne.b32 %p1, {a}, {a};\n  "


def member_masks(seed: int) -> Array:
    """The same mask, never empty, in the lanes of a warp."""
    words = random_words(COUNT // LANES, seed) & np.uint64(0xFFFFFFFF)
    sparse = words & random_words(COUNT // LANES, seed + 1)
    special = chosen((0xFFFFFFFF, 1, 1 << 31, 0xFFFF, 0x55555555), COUNT // LANES, seed + 2)
    kind = below(COUNT // LANES, 3, seed + 3)
    masks = np.where(kind == 0, special, np.where(kind == 1, words, sparse))
    masks = np.where(masks & np.uint64(0xFFFFFFFF) == 0, np.uint64(4), masks)
    return np.repeat(masks.astype(np.uint32), LANES)


def exchanges() -> list[Program]:
    """shfl, vote, match, redux, elect, activemask, movmatrix (PTX ISA 9.7.9.6 and 9.7.13)."""
    family = Family("exchanges")
    a, b = integers(32, 401), integers(32, 402)
    clamps = chosen(CLAMPS, COUNT, 403).astype(np.uint32)
    modes = ("up", "down", "bfly", "idx")
    text = "{op} {d}|%p1, {a}, {b}, {c}, -1;\n  " + PAIR
    forms = [Form(f"shfl.sync.{mode}.b32", 32, text) for mode in modes]
    for mode in modes:
        for offset, clamp in ((1, 31), (16, 31), (5, 0x181F), (3, 0)):
            text = f"{{op}} {{d}}, {{a}}, {offset}, {clamp}, -1;"
            forms.append(Form(f"shfl.sync.{mode}.b32", 32, text))
    family.add("shfl", (a, b, clamps), forms)
    masks = member_masks(410)
    leaders = _lowest_bit(masks)
    prologue = MEMBER.format(mask="%r24")
    text = PRESET + "@%p5 {op} {d}|%p1, {a}, {b}, 31, {c};\n  " + PAIR
    forms = [Form("shfl.sync.idx.b32", 32, text)]
    family.add("shfl-members", (a, leaders, masks), forms, prologue=prologue)
    few = below(COUNT, 5, 411).astype(np.uint32) % (np.repeat(below(2048, 4, 412), LANES) + 1)
    _votes(family, few.astype(np.uint32), masks, prologue)
    names = ("add.u32", "add.s32", "min.u32", "max.u32", "min.s32", "max.s32", "and.b32")
    text = PRESET + "@%p5 {op} {d}, {a}, {c};"
    forms = [Form(f"redux.sync.{name}", 32, text) for name in (*names, "or.b32", "xor.b32")]
    family.add("redux", (a, leaders, masks), forms, prologue=prologue)
    family.add("movmatrix", (a,), [Form("movmatrix.sync.aligned.m8n8.trans.b16")])
    return family.programs


def _lowest_bit(masks: Array) -> Array:
    lowest = masks & (~masks + np.uint32(1))
    return np.log2(lowest).astype(np.uint32)


def _votes(family: Family, few: Array, masks: Array, prologue: str) -> None:
    """few: values that often agree within a warp."""
    draw = PRESET + "setp.eq.b32 %p2, {a}, 1;\n  "
    forms = [
        Form(f"vote.sync.{mode}.pred", 32, draw + "@%p5 {op} %p1, %p2, {c};\n  " + PAIR)
        for mode in ("all", "any", "uni")
    ]
    forms.append(Form("vote.sync.ballot.b32", 32, draw + "@%p5 {op} {d}, !%p2, {c};"))
    for kind in ("b32", "b64"):
        value = "{a}" if kind == "b32" else "%rd50"
        wide = PRESET + "mov.b64 %rd50, {{{b}, {a}}};\n  "
        forms.append(
            Form(f"match.any.sync.{kind}", 32, wide + f"@%p5 {{op}} {{d}}, {value}, {{c}};")
        )
        text = wide + f"@%p5 {{op}} {{d}}|%p1, {value}, {{c}};\n  " + PAIR
        forms.append(Form(f"match.all.sync.{kind}", 32, text))
    forms.append(Form("elect.sync", 32, PRESET + "@%p5 {op} {d}|%p1, {c};\n  " + PAIR))
    same = np.repeat(below(COUNT // LANES, 3, 415), LANES).astype(np.uint32)
    family.add("votes", (few, same, masks), forms, prologue=prologue)
    text = "mov.b32 {d}, 0;\n  @!%p5 bra NOBODY;\n  {op} {d};\nNOBODY:"
    family.add(
        "activemask", (masks, few, masks), [Form("activemask.b32", 32, text)], prologue=prologue
    )


START = """
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mad.lo.u32 %r4, %r1, %r2, %r3;
  mul.wide.u32 %rd10, %r4, 4;
  add.u64 %rd11, %rd1, %rd10;
  add.u64 %rd12, %rd2, %rd10;
  ld.global.b32 %r10, [%rd11];
"""
LOOPS = """
  mov.b32 %r11, 0;
  mov.b32 %r12, %r10;
LOOP:
  and.b32 %r13, %r12, 1;
  setp.eq.b32 %p1, %r13, 0;
  @%p1 bra EVEN;
  mad.lo.u32 %r12, %r12, 3, 1;
  and.b32 %r14, %r12, 64;
  setp.ne.b32 %p2, %r14, 0;
  @%p2 bra JOINED;
  xor.b32 %r12, %r12, 0x5000;
  bra JOINED;
EVEN:
  shr.u32 %r12, %r12, 1;
JOINED:
  add.u32 %r11, %r11, 1;
  setp.gt.u32 %p3, %r12, 1;
  setp.lt.and.u32 %p4, %r11, 90, %p3;
  @%p4 bra LOOP;
  mad.lo.u32 %r11, %r11, 65537, %r12;
  bar.warp.sync -1;
  shfl.sync.bfly.b32 %r15, %r11, 9, 31, -1;
  add.u32 %r11, %r11, %r15;
  st.global.b32 [%rd12], %r11;
"""
SWITCH = """
  and.b32 %r11, %r10, 7;
  min.u32 %r11, %r11, 4;
TARGETS: .branchtargets ZERO, ONE, TWO, THREE, ONE;
  brx.idx %r11, TARGETS;
ZERO:
  mul.lo.u32 %r12, %r10, 7;
  bra END;
ONE:
  not.b32 %r12, %r10;
  @%p0 bra END;
TWO:
  add.u32 %r12, %r10, 99;
THREE:
  popc.b32 %r12, %r10;
END:
  st.global.b32 [%rd12], %r12;
"""
EXITS = """
  setp.gt.s32 %p1, %r10, 0;
  vote.sync.ballot.b32 %r11, !%p1, -1;
  @%p1 exit;
  and.b32 %r12, %r10, 1;
  setp.eq.b32 %p2, %r12, 1;
  vote.sync.ballot.b32 %r13, %p2, %r11;
  xor.b32 %r13, %r13, %r10;
  st.global.b32 [%rd12], %r13;
  @%p2 ret;
  st.global.b32 [%rd12], %r11;
"""
SPECIALS = (
    *(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"),
    *(f"%{name}.{axis}" for name in ("clusterid", "nclusterid") for axis in "xyz"),
    *(f"%{name}.{axis}" for name in ("cluster_ctaid", "cluster_nctaid") for axis in "xyz"),
    *("%cluster_ctarank", "%cluster_nctarank", "%laneid", "%dynamic_smem_size"),
    *("%total_smem_size", "%aggr_smem_size"),
    *(f"%lanemask_{relation}" for relation in ("eq", "le", "lt", "ge", "gt")),
)


def control() -> list[Program]:
    """Branches, loops, exits (PTX ISA 9.7.12), and special registers (10)."""
    values = integers(32, 420, 8192)
    programs = []
    for name, body in (("loops", LOOPS), ("switch", SWITCH), ("exits", EXITS)):
        text = START + ("  setp.eq.b32 %p0, %r10, %r10;\n" if name == "switch" else "") + body
        out = np.zeros(len(values), np.uint32)
        programs.append(
            Program(
                f"control-{name}",
                "control",
                module_text(text, 2),
                (values, out),
                (Result(name, 1, 0, len(values)),),
                (len(values) // 128, 1, 1),
                (128, 1, 1),
            )
        )
    return [*programs, _special_registers()]


def _special_registers() -> Program:
    """All threads of 2 x 2 clusters of CTAs in three dimensions."""
    grid, block, cluster = (4, 6, 2), (8, 3, 2), (2, 3, 1)
    threads = int(np.prod(grid) * np.prod(block))
    body = """
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ctaid.y;
  mov.u32 %r3, %ctaid.z;
  mad.lo.u32 %r2, %r3, 6, %r2;
  mad.lo.u32 %r1, %r2, 4, %r1;
  mov.u32 %r4, %tid.x;
  mov.u32 %r5, %tid.y;
  mov.u32 %r6, %tid.z;
  mad.lo.u32 %r5, %r6, 3, %r5;
  mad.lo.u32 %r4, %r5, 8, %r4;
  mad.lo.u32 %r4, %r1, 48, %r4;
  mul.wide.u32 %rd10, %r4, 4;
  add.u64 %rd10, %rd1, %rd10;
"""
    results = []
    for k, name in enumerate(SPECIALS):
        body += f"  mov.u32 %r10, {name};\n  st.global.b32 [%rd10+{4 * threads * k}], %r10;\n"
        results.append(Result(name, 0, threads * k, threads))
    out = np.zeros(threads * len(SPECIALS), np.uint32)
    return Program(
        "control-specials",
        "control",
        module_text(body, 1),
        (out,),
        tuple(results),
        grid,
        block,
        cluster,
        4096,
    )
