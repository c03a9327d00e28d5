"""The PTX of a Blackwell kernel without its tensor core, for a Hopper GPU."""

from __future__ import annotations

import re
from typing import Any

from fa4.hardware import H100
from fa4.plan.work import WARPGROUP, launch_registers

# Of the numbers that tensor memory holds: so few that no maximum rises by 8 powers of two.
STEP_ROW, STEP_COLUMN, VALUES = 29, 37, 32
TMEM_WORDS = 512 * 128
HELPERS = ".reg .f32 hf<8>; .reg .b32 hr<8>; .reg .b64 hd<4>;"


def tmem_value(lane: Any, column: Any) -> Any:
    """What `without_tensor_core` reads from a lane and column of tensor memory."""
    return (lane * STEP_ROW + column * STEP_COLUMN) % VALUES


def without_tensor_core(ptx: str, ctas: int) -> str:
    """PTX of sm_100a for a grid of `ctas` as PTX of sm_90a.

    Products are left out; commits arrive at once; what is read of tensor memory is `tmem_value`,
    what is written goes to global memory; a packed float32 instruction becomes two. Raises
    ValueError for another instruction of tcgen05.
    """
    return retargeted("\n".join(_without(line) for line in ptx.splitlines()), ctas)


def retargeted(text: str, ctas: int) -> str:
    """The module for sm_90a, with a global array `tmem` and registers for setmaxnreg to give."""
    text = text.replace(".target sm_100a", ".target sm_90a")
    array = f".global .align 16 .b8 tmem[{ctas * TMEM_WORDS * 4}];\n"
    text = text.replace(".extern .shared", array + ".extern .shared", 1)
    threads = int(re.findall(r"\.reqntid (\d+), 1, 1", text)[0])
    registers = launch_registers(threads // WARPGROUP, H100.registers_per_sm)
    return re.sub(r"(\.reqntid \d+, 1, 1)", rf"\1\n.maxnreg {registers}", text, count=1)


def _without(line: str) -> str:
    code = line.strip()
    if code.startswith("@") and "tcgen05.mma" in code:
        return ""
    if code.startswith("tcgen05.ld"):
        registers, address = re.findall(r"\{(.*)\}, \[(.*)\]", code)[0]
        return _numbers(registers.split(", "), address)
    if code.startswith("tcgen05.st"):
        address, registers = re.findall(r"\[(.*)\], \{(.*)\}", code)[0]
        return _stores(registers.split(", "), address)
    return replaced(line)


def replaced(line: str) -> str:
    """A line with what Hopper lacks done by other instructions, but for tensor memory's contents.

    Raises ValueError for an instruction of tcgen05 that there is nothing for.
    """
    code = line.strip()
    if packed := re.match(r"(\w+)\.(rn|rm)(\.ftz)?\.f32x2\s+(.*);", code):
        return _two(*packed.groups())
    if not code.startswith("tcgen05."):
        return line
    if code.startswith("tcgen05.commit"):
        return f"mbarrier.arrive.shared.b64 _, {_address(code)};"
    if code.startswith("tcgen05.alloc"):
        return f"st.shared.b32 {_address(code)}, 0;"
    if re.match(r"tcgen05\.(wait|dealloc|relinquish|fence)", code):
        return ""
    raise ValueError(f"no way to do without: {code}")


def _address(code: str) -> str:
    return re.findall(r"\[.*?\]", code)[0]


def _two(name: str, rounding: str, flush: str | None, operands: str) -> str:
    """A packed instruction as two."""
    target, *sources = operands.split(", ")
    lines = [f"mov.b64 {{hf{2 * i}, hf{2 * i + 1}}}, {source};" for i, source in enumerate(sources)]
    opcode = f"{name}.{rounding}{flush or ''}.f32"
    for half in range(2):
        read = ", ".join(f"hf{2 * i + half}" for i in range(len(sources)))
        lines.append(f"{opcode} hf{6 + half}, {read};")
    return "{" + HELPERS + " ".join(lines) + f" mov.b64 {target}, {{hf6, hf7}};}}"


# hr0: the thread's lane, hr1: the first column.
_PLACE = (
    "shr.u32 hr0, {address}, 16; mov.u32 hr1, %laneid; add.u32 hr0, hr0, hr1; "
    "and.b32 hr1, {address}, 65535; "
)


def _numbers(registers: list[str], address: str) -> str:
    lines = f"mul.lo.u32 hr0, hr0, {STEP_ROW}; mad.lo.u32 hr0, hr1, {STEP_COLUMN}, hr0; "
    for number, register in enumerate(registers):
        lines += (
            f"add.u32 hr2, hr0, {number * STEP_COLUMN}; and.b32 hr2, hr2, {VALUES - 1}; "
            f"cvt.rn.f32.u32 hf0, hr2; mov.b32 {register}, hf0; "
        )
    return "{" + HELPERS + _PLACE.format(address=address) + lines + "}"


def _stores(registers: list[str], address: str) -> str:
    lines = (
        "mad.lo.u32 hr0, hr0, 512, hr1; mov.u32 hr1, %ctaid.x; "
        f"mad.lo.u32 hr0, hr1, {TMEM_WORDS}, hr0; mul.wide.u32 hd0, hr0, 4; "
        "mov.u64 hd1, tmem; add.u64 hd0, hd0, hd1; "
    )
    for number, register in enumerate(registers):
        lines += f"st.global.b32 [hd0+{4 * number}], {register}; "
    return "{" + HELPERS + _PLACE.format(address=address) + lines + "}"
