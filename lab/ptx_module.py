"""The text of a PTX module around the body of a kernel; needs nothing of the emulator."""

from __future__ import annotations

from collections.abc import Sequence

HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"
DYNAMIC = ".extern .shared .align 1024 .b8 smem[];\n"
REGISTERS = """
  .reg .pred %p<32>;
  .reg .b16 %h<64>;
  .reg .b32 %r<128>;
  .reg .b64 %rd<64>;
  .reg .f32 %f<64>;
  .reg .f64 %fd<64>;
  .reg .b128 %q<8>;
"""


def module_text(
    body: str, pointers: int, blocks: Sequence[int] = (), declarations: str = ""
) -> str:
    """A module with one kernel around `body`.

    Its parameters: `pointers` addresses, loaded into %rd1, %rd2, ...; then byte blocks block0,
    block1, ... of the given sizes (a multiple of 64 is aligned like a tensor map). `smem` is the
    dynamic shared memory; declarations stand in the kernel, before the body.
    """
    parameters = [f".param .b64 pointer{k}" for k in range(pointers)] + [
        f".param .align {64 if size % 64 == 0 else 8} .b8 block{k}[{size}]"
        for k, size in enumerate(blocks)
    ]
    loads = "".join(f"  ld.param.b64 %rd{k + 1}, [pointer{k}];\n" for k in range(pointers))
    listed = ",\n  ".join(parameters)
    return (
        f"{HEADER}{DYNAMIC}.visible .entry kernel(\n  {listed})\n{{{REGISTERS}{declarations}\n"
        f"{loads}{body}\n  ret;\n}}\n"
    )
