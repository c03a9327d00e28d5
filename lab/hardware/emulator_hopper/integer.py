"""Integer arithmetic, bit operations, comparisons and moves between registers."""

from __future__ import annotations

from lab.hardware.emulator_hopper.programs import Family, Form, Program, predicate
from lab.hardware.emulator_hopper.values import below, integers, sources

TYPES = ("u16", "u32", "u64", "s16", "s32", "s64")
INTEGER_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
UNSIGNED_COMPARISONS = ("lo", "ls", "hi", "hs")
FLOAT_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu")
FLOAT_TYPES = ("f32", "f64", "f16", "bf16")
WIDTHS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}


def width(kind: str) -> int:
    """Bits of a PTX type."""
    return WIDTHS.get(kind) or int(kind[1:])


def integer() -> list[Program]:
    """PTX ISA 9.7.1 and 9.7.2."""
    family = Family("integer")
    for kind in TYPES:
        w = width(kind)
        a, b, c = sources(f"b{w}", 3)
        two, one = "{op} {d}, {a}, {b};", "{op} {d}, {a};"
        names = ("add", "sub", "mul.lo", "mul.hi", "div", "rem", "min", "max")
        forms = [Form(f"{name}.{kind}", w, two) for name in names]
        forms += [Form(f"{name}.{kind}", w) for name in ("mad.lo", "mad.hi", "sad")]
        if kind[0] == "s":
            forms += [Form(f"{name}.{kind}", w, one) for name in ("abs", "neg")]
        if w < 64:
            forms.append(Form(f"mul.wide.{kind}", 2 * w, two))
        family.add(kind, (a, b, c), forms)
        if w < 64:
            wide = sources(f"b{2 * w}", 3)[2]
            family.add(f"mad-{kind}", (a, b, wide), [Form(f"mad.wide.{kind}", 2 * w)])
    _saturating_and_bits(family)
    _carries(family)
    return family.programs


def _saturating_and_bits(family: Family) -> None:
    a, b, c, e = sources("b32", 4)
    two, one = "{op} {d}, {a}, {b};", "{op} {d}, {a};"
    saturating = ("add.sat", "sub.sat", "min.relu", "max.relu")
    forms = [Form(f"{name}.s32", 32, two) for name in saturating]
    for half in ("lo", "hi"):
        for kind in ("u32", "s32"):
            forms.append(Form(f"mul24.{half}.{kind}", 32, two))
            forms.append(Form(f"mad24.{half}.{kind}"))
    forms += [Form(name) for name in ("mad24.hi.sat.s32", "mad.hi.sat.s32")]
    family.add("saturating", (a, b, c), forms)
    forms = [Form(f"{op}.{kind}", 32, two) for op in ("add", "min", "max") for kind in PACKED]
    forms += [Form(f"{op}.relu.s16x2", 32, two) for op in ("min", "max")]
    for name in ("dp4a", "dp2a.lo", "dp2a.hi"):
        forms += [Form(f"{name}.{x}.{y}") for x in ("u32", "s32") for y in ("u32", "s32")]
    family.add("packed", (a, b, c), forms)
    for w in (32, 64):
        # The manual restricts positions and lengths to 8 bits; beyond, 64-bit fields differ.
        c, e = (c, e) if w == 32 else (c & 0xFF, e & 0xFF)
        words = sources(f"b{w}", 2, 5)
        forms = [Form(f"{name}.b{w}", 32, one) for name in ("popc", "clz")]
        forms.append(Form(f"brev.b{w}", w, one))
        kinds = (f"u{w}", f"s{w}")
        forms += [Form(f"bfind{s}.{k}", 32, one) for s in ("", ".shiftamt") for k in kinds]
        forms += [Form(f"bfe.{kind}", w, "{op} {d}, {a}, {c}, {e};") for kind in kinds]
        forms.append(Form(f"bfi.b{w}", w, "{op} {d}, {a}, {b}, {c}, {e};"))
        family.add(f"bits{w}", (*words, c, e), forms)
    forms = [Form(f"bmsk.{mode}.b32", 32, two) for mode in ("clamp", "wrap")]
    forms += [Form(f"szext.{m}.{k}", 32, two) for m in ("clamp", "wrap") for k in ("u32", "s32")]
    family.add("masks", (a, b), forms)
    lanes = integers(32, 77) & 31
    forms = [Form("fns.b32", 32, "rem.s32 {s}, {c}, 40;\n  {op} {d}, {a}, {b}, {s};")]
    family.add("fns", (a, lanes, c), forms)


PACKED = ("u16x2", "s16x2")


def _carries(family: Family) -> None:
    """The carry of the first instruction shows in the second."""
    a, b, c = sources("b32", 3)
    for w, kinds in ((32, ("u32", "s32")), (64, ("u64", "s64"))):
        a, b, c = sources(f"b{w}", 3)
        forms = []
        for kind in kinds:
            for first, second in (("add", "addc"), ("sub", "subc")):
                text = f"{first}.cc.{kind} {{d}}, {{a}}, {{b}};\n  {{op}} {{d}}, {{b}}, {{c}};"
                forms.append(Form(f"{second}.{kind}", w, text))
                text = text.replace("{op}", f"{second}.cc.{kind}")
                text += "\n  {op} {d}, {d}, {a};"
                forms.append(Form(f"{second}.{kind}", w, text, label=f"{second}.cc.{kind}"))
            for half in ("lo", "hi"):
                text = f"mad.{half}.cc.{kind} {{d}}, {{a}}, {{b}}, {{c}};\n  "
                forms.append(Form(f"madc.{half}.{kind}", w, text + "{op} {d}, {b}, {c}, {a};"))
                text += f"madc.{half}.cc.{kind} {{d}}, {{b}}, {{c}}, {{a}};\n  "
                text += "{op} {d}, {d}, {a};"
                forms.append(Form(f"addc.{kind}", w, text, label=f"madc.{half}.cc.{kind}"))
        family.add(f"carry{w}", (a, b, c), forms)


def logic() -> list[Program]:
    """PTX ISA 9.7.8."""
    family = Family("logic")
    shift = integers(32, 88)
    for w in (16, 32, 64):
        a, b = sources(f"b{w}", 2, 7)
        forms = [Form(f"{op}.b{w}", w, "{op} {d}, {a}, {b};") for op in ("and", "or", "xor")]
        forms += [Form(f"{op}.b{w}", w, "{op} {d}, {a};") for op in ("not", "cnot")]
        forms += [
            Form(f"{op}{w}", w, "{op} {d}, {a}, {c};")
            for op in ("shl.b", "shr.b", "shr.u", "shr.s")
        ]
        family.add(f"b{w}", (a, b, shift), forms)
    a, b = sources("b32", 2, 8)
    forms = [
        Form("lop3.b32", 32, f"{{op}} {{d}}, {{a}}, {{b}}, {{c}}, {table};")
        for table in (0x00, 0x1E, 0x2D, 0x80, 0x96, 0xC0, 0xCA, 0xE8, 0xF8, 0xFE, 0x6A)
    ]
    for boolean in ("or", "and"):
        text = "setp.lt.s32 %p2, {b}, {c};\n  {op} {d}|%p1, {a}, {b}, {c}, 0x90, %p2;\n"
        text += "  selp.b32 {s}, 1, 0, %p1;\n  shl.b32 {d}, {d}, 1;\n  or.b32 {d}, {d}, {s};"
        forms.append(Form(f"lop3.{boolean}.b32", 32, text))
    for side in "lr":
        forms += [Form(f"shf.{side}.{mode}.b32") for mode in ("clamp", "wrap")]
    forms += [
        Form(f"{op}.pred", 32, f"{PREDICATES}{{op}} %p1, %p2, %p3;\n  selp.b32 {{d}}, 1, 0, %p1;")
        for op in ("and", "or", "xor")
    ]
    forms.append(
        Form("not.pred", 32, f"{PREDICATES}{{op}} %p1, %p2;\n  selp.b32 {{d}}, 1, 0, %p1;")
    )
    family.add("words", (a, b, shift), forms)
    return family.programs


PREDICATES = "setp.lt.s32 %p2, {a}, {b};\n  setp.gt.u32 %p3, {b}, {c};\n  "


def compare() -> list[Program]:
    """PTX ISA 9.7.6 and 9.7.7: setp, set, selp, slct, testp."""
    family = Family("compare")
    for kind in [f"{sign}{w}" for w in (16, 32, 64) for sign in "bus"] + list(FLOAT_TYPES):
        is_float = kind in FLOAT_TYPES
        names = [*FLOAT_COMPARISONS, "num", "nan"] if is_float else list(INTEGER_COMPARISONS)
        if kind[0] == "b" and not is_float:
            names = names[:2]
        elif kind[0] == "u":
            names += UNSIGNED_COMPARISONS
        ftz = ("", ".ftz") if kind in ("f32", "f16") else ("",)
        forms = [predicate(f"setp.{name}{f}.{kind}") for f in ftz for name in names]
        for boolean in ("and", "or", "xor"):
            second = "" if kind in ("f16", "bf16") else "|%p2"
            text = "and.b32 {s}, %r4, 4;\n  setp.eq.b32 %p3, {s}, 0;\n  setp.ne.b32 %p2, {s}, 0;\n"
            text += f"  {{op}} %p1{second}, {{a}}, {{b}}, !%p3;\n"
            text += "  selp.b32 {d}, 1, 0, %p1;\n  selp.b32 {s}, 2, 0, %p2;\n"
            text += "  or.b32 {d}, {d}, {s};"
            forms.append(Form(f"setp.{names[1]}.{boolean}.{kind}", 32, text))
        targets = ("u32", "f32") if not is_float or width(kind) > 16 else ("u32", kind)
        forms += [Form(f"set.{names[-1]}.{target}.{kind}", width(target)) for target in targets]
        family.add(kind, sources(kind if is_float else f"b{width(kind)}", 2, 11), forms)
    for kind in ("f16", "bf16"):
        ftz = ("", ".ftz") if kind == "f16" else ("",)
        text = "{op} %p1|%p2, {a}, {b};\n  selp.b32 {d}, 1, 0, %p1;\n"
        text += "  selp.b32 {s}, 2, 0, %p2;\n  or.b32 {d}, {d}, {s};"
        forms = [Form(f"setp.{n}{f}.{kind}x2", 32, text) for f in ftz for n in FLOAT_COMPARISONS]
        forms += [Form(f"set.{n}.{kind}x2.{kind}x2") for n in ("lt", "neu", "nan")]
        forms += [Form(f"set.{n}.u32.{kind}x2") for n in ("lt", "neu", "nan")]
        family.add(f"{kind}x2", sources(f"{kind}x2", 2, 12), forms)
    _selections(family)
    return family.programs


def _selections(family: Family) -> None:
    tested_integers, tested_floats = sources("b32", 1, 13)[0], sources("f32", 1, 13)[0]
    for w in (16, 32, 64):
        a, b = sources(f"b{w}", 2, 14)
        kinds = [f"{sign}{w}" for sign in "bus"] + ([f"f{w}"] if w > 16 else [])
        text = "setp.lt.s32 %p1, {c}, 5;\n  {op} {d}, {a}, {b}, %p1;"
        forms = [Form(f"selp.{kind}", w, text) for kind in kinds]
        forms += [Form(f"slct.{kind}.s32", w, "{op} {d}, {a}, {b}, {c};") for kind in kinds]
        for ftz in ("", ".ftz"):
            text = "{op} {d}, {a}, {b}, {e};"
            forms += [Form(f"slct{ftz}.{kind}.f32", w, text) for kind in kinds]
        family.add(f"select{w}", (a, b, tested_integers, tested_floats), forms)
    properties = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    for kind in ("f32", "f64"):
        forms = [predicate(f"testp.{name}.{kind}", "{a}") for name in properties]
        family.add(f"testp-{kind}", sources(kind, 1, 15), forms)


def moves() -> list[Program]:
    """PTX ISA 9.7.9: mov, prmt, cvta, isspacep, cvt.pack; packing and unpacking."""
    family = Family("moves")
    a, b, c = sources("b32", 3, 16)
    (halves,), (wide,) = sources("b16", 1, 16), sources("b64", 1, 16)
    forms = [Form(f"mov.{kind}32", 32, "{op} {d}, {a};") for kind in "bus"]
    forms += [Form("mov.f32", 32, "{op} {d}, {a};")]
    text = "mov.b32 {{%h50, %h51}}, {a};\n  {op} {d}, {{%h51, %h50}};"
    forms.append(Form("mov.b32", 32, text, label="mov.b32 {}"))
    forms += [
        Form(f"prmt.b32{mode}") for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16")
    ]
    for control in (0x3210, 0x7654, 0x5410, 0x1F3B, 0x8ACE):
        form = Form("prmt.b32", 32, f"{{op}} {{d}}, {{a}}, {{b}}, {control};")
        forms.append(form)
    family.add("words", (a, b, c), forms)
    forms = [Form(f"mov.{kind}64", 64, "{op} {d}, {a};") for kind in "busf"]
    text = "mov.b64 {{{s}, {t}}}, {a};\n  {op} {d}, {{{t}, {s}}};"
    forms.append(Form("mov.b64", 64, text, label="mov.b64 {}"))
    text = "mov.b64 {{%h50, %h51, %h52, %h53}}, {a};\n  {op} {d}, {{%h52, %h50, %h53, %h51}};"
    forms.append(Form("mov.b64", 64, text, label="mov.b64 {4}"))
    text = "mov.b128 %q1, {{{a}, %rd60}};\n  {op} {{%rd61, {d}}}, %q1;\n  xor.b64 {d}, {d}, {a};"
    draw = "not.b64 %rd60, {a};\n  "
    forms.append(Form("mov.b128", 64, draw + text))
    family.add("wide", (wide,), forms)
    family.add("halves", (halves,), [Form(f"mov.{k}16", 16, "{op} {d}, {a};") for k in "bus"])
    narrow = below(len(a), 1 << 20, 99).astype("int64") - (1 << 19)
    small = narrow.astype("int32").view("uint32")
    forms = [Form(f"cvt.pack.sat.{t}.s32", 32, "{op} {d}, {a}, {b};") for t in ("u16", "s16")]
    names = ("u8", "s8", "u4", "s4", "u2", "s2")
    forms += [Form(f"cvt.pack.sat.{t}.s32.b32") for t in names]
    family.add("pack", (small, b, c), forms)
    family.add("spaces", (a,), _space_forms())
    return family.programs


def _space_forms() -> list[Form]:
    """Generic addresses of shared and global memory."""
    forms = []
    start = "mov.u64 %rd61, smem;\n  cvta.shared.u64 %rd62, %rd61;\n  "
    for space in ("global", "shared", "shared::cta", "shared::cluster"):
        for pointer in ("%rd62", "%rd1"):
            text = f"{{op}} %p1, {pointer};\n  selp.b32 {{d}}, 1, 0, %p1;"
            forms.append(Form(f"isspacep.{space}", 32, start + text))
    text = "cvta.to.shared.u64 %rd62, %rd62;\n  sub.u64 %rd61, %rd62, %rd61;\n"
    forms.append(Form("cvta.shared.u64", 32, start + text + "  cvt.u32.u64 {d}, %rd61;"))
    text = "cvta.global.u64 %rd61, %rd1;\n  cvta.to.global.u64 %rd62, %rd61;\n"
    text += "  sub.u64 %rd62, %rd62, %rd1;\n  cvt.u32.u64 {d}, %rd62;"
    forms.append(Form("cvta.to.global.u64", 32, text))
    return forms
