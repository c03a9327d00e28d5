"""The C++ of one wgmma of each width: its accumulators are too many to be written by hand."""

from __future__ import annotations

from collections.abc import Iterator

WIDTHS = (8, 16, 32, 64, 96, 128, 176, 192, 256)
ACROSS = (64, 128)  # widths also of operands in shared memory that are summed across their rows
DEPTH = 16  # of a bf16 product


def product(width: int, registers: bool, across: bool = False) -> str:
    """One specialisation of Product: m64, `width` columns, A from registers or shared memory.

    across: operands in shared memory are MN-major.
    """
    count = width // 2
    places = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    if registers:
        a_text = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        a_inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
        a_kind, used, transposes = "const uint32_t (&a)[4]", 4, f"{across:d}"
    else:
        a_text, a_inputs, a_kind, used = f"%{count}", '"l"(a)', "uint64_t a", 1
        transposes = f"{across:d}, {across:d}"
    which = ", ".join(str(flag).lower() for flag in (registers, across))
    return f"""template <>
struct Product<{width}, {which}> {{
  static __device__ __forceinline__ void issue(float (&d)[{count}], {a_kind}, uint64_t b) {{
    asm volatile(
        "{{.reg .pred add; setp.eq.u32 add, 0, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{width}k{DEPTH}.f32.bf16.bf16 {{{places}}}, "
        "{a_text}, %{count + used}, add, 1, 1, {transposes};}}"
        : {outputs}
        : {a_inputs}, "l"(b));
  }}
}};
"""


def header() -> Iterator[str]:
    """The lines of products.cuh."""
    yield "#pragma once\n#include <cstdint>\n"
    yield "template <int WIDTH, bool REGISTERS, bool ACROSS = false>\nstruct Product;\n"
    for width in WIDTHS:
        for registers in (False, True):
            yield product(width, registers)
            if width in ACROSS:
                yield product(width, registers, across=True)
