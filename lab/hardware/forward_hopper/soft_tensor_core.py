"""The PTX of a Blackwell kernel with a tensor core of plain instructions, for a Hopper GPU.

Tensor memory is a global array, and the warp that would issue a product computes it: each lane four
rows, one column after the other. Operands in shared memory are found by their descriptors (PTX ISA
9.7.16.4.1), swizzled by 128 bytes, and read along rows or columns as the instruction descriptor
says. Slow, but everything else is as compiled, and TMA fills shared memory.
"""

from __future__ import annotations

import re

from lab.hardware.forward_hopper.skeleton_ptx import TMEM_WORDS, replaced, retargeted

ROWS_PER_LANE, DEPTH, SWIZZLE_ROW_BYTES = 4, 16, 128
TRANSPOSE_A, TRANSPOSE_B = 1 << 15, 1 << 16  # in an instruction descriptor (PTX ISA 9.7.16.4.2)
PRODUCT = re.compile(
    r"@%pred_\d+ tcgen05\.mma\.cta_group::1\.kind::f16 \[(\S+)\], (\S+), (\S+), (\S+), (\S+);"
)
REGISTERS = ".reg .b32 s<48>; .reg .b64 sd<8>; .reg .f32 sa<16>, sb, sc; .reg .pred sp;\n"


def with_soft_tensor_core(ptx: str, ctas: int) -> str:
    """PTX of sm_100a for a grid of `ctas` as PTX of sm_90a. Raises ValueError for instructions of
    tcgen05 that it cannot do without."""
    lines = [_line(line) for line in ptx.splitlines()]
    return retargeted("\n".join(lines), ctas)


def _line(line: str) -> str:
    code = line.strip()
    if product := PRODUCT.match(code):
        return _product(*product.groups())
    if code.startswith("tcgen05.ld"):
        registers, address = re.findall(r"\{(.*)\}, \[(.*)\]", code)[0]
        return _tmem_access("ld", registers.split(", "), address)
    if code.startswith("tcgen05.st"):
        address, registers = re.findall(r"\[(.*)\], \{(.*)\}", code)[0]
        return _tmem_access("st", registers.split(", "), address)
    if code.startswith("tcgen05.wait"):
        return "bar.warp.sync 0xffffffff;"  # one lane arrives for what all have stored
    return replaced(line)


def _row_pointer(lane: str) -> str:
    """sd0: a lane of this CTA's tensor memory."""
    return (
        f"mul.wide.u32 sd0, {lane}, 2048; mov.u32 s47, %ctaid.x; "
        f"mul.wide.u32 sd1, s47, {TMEM_WORDS * 4}; add.u64 sd0, sd0, sd1; "
        "mov.u64 sd1, tmem; add.u64 sd0, sd0, sd1;\n"
    )


def _tmem_access(what: str, registers: list[str], address: str) -> str:
    text = (
        "{" + REGISTERS + f"shr.u32 s0, {address}, 16; mov.u32 s1, %laneid; add.u32 s0, s0, s1;\n"
        + _row_pointer("s0")
        + f"and.b32 s2, {address}, 65535; mul.wide.u32 sd1, s2, 4; add.u64 sd0, sd0, sd1;\n"
    )  # fmt: skip
    for number, register in enumerate(registers):
        place = f"[sd0+{4 * number}]"
        operands = f"{register}, {place}" if what == "ld" else f"{place}, {register}"
        text += f"{what}.global.b32 {operands};\n"
    return text + "}"


def _swizzled(address: str) -> str:
    return f"shr.u32 s45, {address}, 3; and.b32 s45, s45, 112; xor.b32 {address}, {address}, s45;\n"


def _row_of(start: str, stride: str, row: str) -> str:
    """s40: where a row of a K-major operand starts, before swizzling."""
    return (
        f"shr.u32 s40, {row}, 3; mad.lo.u32 s40, s40, {stride}, {start}; and.b32 s41, {row}, 7; "
        f"mad.lo.u32 s40, s41, {SWIZZLE_ROW_BYTES}, s40;\n"
    )


def _load_row() -> str:
    """16 bfloat16 of the row at s40 as words s20 to s27."""
    text = ""
    for half in range(2):
        text += f"add.u32 s42, s40, {16 * half};\n" + _swizzled("s42")
        words = ", ".join(f"s{20 + 4 * half + i}" for i in range(4))
        text += f"ld.shared.v4.b32 {{{words}}}, [s42];\n"
    return text


def _descriptor(name: str, first: int) -> str:
    """Start, leading and stride byte offset of a descriptor in s<first> and the two behind it."""
    return (
        f"mov.b64 {{s43, s44}}, {name}; "
        f"and.b32 s{first}, s43, 16383; shl.b32 s{first}, s{first}, 4; "
        f"shr.u32 s{first + 1}, s43, 16; and.b32 s{first + 1}, s{first + 1}, 16383; "
        f"shl.b32 s{first + 1}, s{first + 1}, 4; and.b32 s{first + 2}, s44, 16383; "
        f"shl.b32 s{first + 2}, s{first + 2}, 4;\n"
    )


def _product(target: str, a: str, b: str, kind: str, add: str) -> str:
    """D = A B^T (+ D) of one step of 16."""
    in_tmem = a.startswith("[")
    text = "{" + REGISTERS + _descriptor(b, 0)
    if not in_tmem:
        text += _descriptor(a, 3)
    text += (
        f"shr.u32 s6, {kind}, 17; and.b32 s6, s6, 63; shl.b32 s6, s6, 3; mov.u32 s7, %laneid; "
        f"and.b32 s12, {kind}, {TRANSPOSE_A}; and.b32 s13, {kind}, {TRANSPOSE_B};\n"
        f"and.b32 s8, {target}, 65535; mov.u32 s9, 0;\nROWS:\n"
        "shl.b32 s10, s9, 5; add.u32 s10, s10, s7;\n" + _row_pointer("s10")
    )  # fmt: skip
    if in_tmem:
        text += f"and.b32 s42, {a[1:-1]}, 65535; mul.wide.u32 sd2, s42, 4; add.u64 sd2, sd2, sd0;\n"
        text += "ld.global.v4.b32 {s20, s21, s22, s23}, [sd2];\n"
        text += "ld.global.v4.b32 {s24, s25, s26, s27}, [sd2+16];\n" + _unpack()
    else:
        text += _either("s12", "A", _column("sa", 3, "s10"), _row("s10", 3) + _unpack())
    text += (
        "mul.wide.u32 sd2, s8, 4; add.u64 sd2, sd2, sd0; mov.u32 s11, 0;\nCOLUMNS:\n"
        f"mov.f32 sc, 0f00000000; @{add} ld.global.f32 sc, [sd2];\n"
        + _either("s13", "B", _times_column(), _times_row())
        + "st.global.f32 [sd2], sc; add.u64 sd2, sd2, 4; add.u32 s11, s11, 1; "
        "setp.lt.u32 sp, s11, s6; @sp bra COLUMNS;\n"
        f"add.u32 s9, s9, 1; setp.lt.u32 sp, s9, {ROWS_PER_LANE}; @sp bra ROWS;\n"
        "bar.warp.sync 0xffffffff;\nfence.proxy.async;\n}"
    )  # fmt: skip
    return text


def _either(flag: str, name: str, along_columns: str, along_rows: str) -> str:
    """The first of two texts where a flag is set."""
    return (
        f"setp.ne.u32 sp, {flag}, 0; @sp bra COLUMN_{name};\n{along_rows}bra END_{name};\n"
        f"COLUMN_{name}:\n{along_columns}END_{name}:\n"
    )


def _unpack() -> str:
    """sa0 to sa15 from the words s20 to s27."""
    text = ""
    for word in range(8):
        text += f"shl.b32 s45, s{20 + word}, 16; mov.b32 sa{2 * word}, s45; "
        text += f"and.b32 s45, s{20 + word}, 0xffff0000; mov.b32 sa{2 * word + 1}, s45;\n"
    return text


def _row(row: str, first: int) -> str:
    """A row of a K-major operand, as words; `first`: of its descriptor's registers."""
    return _row_of(f"s{first}", f"s{first + 2}", row) + _load_row()


def _times_row() -> str:
    """sc += row s11 of a K-major B times A's row."""
    text = _row("s11", 0)
    for word in range(8):
        text += f"shl.b32 s45, s{20 + word}, 16; mov.b32 sb, s45; "
        text += f"fma.rn.f32 sc, sa{2 * word}, sb, sc; and.b32 s45, s{20 + word}, 0xffff0000; "
        text += f"mov.b32 sb, s45; fma.rn.f32 sc, sa{2 * word + 1}, sb, sc;\n"
    return text


def _column(target: str, first: int, number: str) -> str:
    """Column `number` of an operand that is stored by K, as floats <target>0 to 15."""
    text = _column_start(first, number)
    for k in range(DEPTH):
        text += _element(first, k) + f"mov.b32 {target}{k}, s45;\n"
    return text


def _times_column() -> str:
    """sc += column s11 of an N-major B times A's row."""
    text = _column_start(0, "s11")
    for k in range(DEPTH):
        text += _element(0, k) + f"mov.b32 sb, s45; fma.rn.f32 sc, sa{k}, sb, sc;\n"
    return text


def _column_start(first: int, number: str) -> str:
    """s40: where a column starts, before swizzling."""
    return (
        f"shr.u32 s40, {number}, 6; mad.lo.u32 s40, s40, s{first + 1}, s{first}; "
        f"and.b32 s41, {number}, 63; shl.b32 s41, s41, 1; add.u32 s40, s40, s41;\n"
    )


def _element(first: int, k: int) -> str:
    """s45: the bits of element k of the column at s40, as float32."""
    return (
        f"mad.lo.u32 s42, s{first + 2}, {k // 8}, s40; add.u32 s42, s42, {k % 8 * 128};\n"
        + _swizzled("s42")
        + "{ .reg .b16 h; ld.shared.b16 h, [s42]; cvt.u32.u16 s45, h; } shl.b32 s45, s45, 16; "
    )
