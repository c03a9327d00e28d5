"""PTX of the probes: one instruction on a tile for each CTA of 128 threads."""

from __future__ import annotations

from dataclasses import dataclass

K_BYTES, ROWS, THREADS = 32, 64, 128


@dataclass(frozen=True)
class Kernel:
    """One instruction: D = A B + D.

    d, a, b: types. core: "wgmma" or "mma" (mma.sync by each warp on its 16 rows). a_from: "shared"
    or "registers". scale_d: 0 leaves D out. negate_a: imm-scale-a is -1. saturate: .satfinite.
    """

    d: str
    a: str
    b: str
    n: int = 64
    core: str = "wgmma"
    a_from: str = "shared"
    scale_d: int = 1
    negate_a: bool = False
    saturate: bool = False

    @property
    def registers(self) -> int:
        """Of each thread for D."""
        return self.n // (4 if self.d == "f16" else 2)

    @property
    def k(self) -> int:
        """Elements of K of one instruction."""
        return K_BYTES // {"f16": 2, "bf16": 2, "tf32": 4}.get(self.a, 1)

    def text(self) -> str:
        """A module with the kernel `kernel`; parameters: addresses of images of A and B, and D.

        D: registers of tiles, threads and registers in that order reversed (tiles, registers, 128).
        """
        b_bytes = self.n * K_BYTES
        loads = "".join(
            f"  ld.global.b32 %v{i}, [%rd6+{512 * i}];\n" for i in range(self.registers)
        )
        stores = loads.replace("ld.global", "st.global")
        for i in range(self.registers):
            stores = stores.replace(f"%v{i}, [%rd6+{512 * i}]", f"[%rd6+{512 * i}], %v{i}")
        return f""".version 8.8
.target sm_90a
.address_size 64
.visible .entry kernel(.param .b64 pa, .param .b64 pb, .param .b64 pd)
{{
  .shared .align 1024 .b8 image[{ROWS * K_BYTES + b_bytes}];
  .reg .pred %p<8>;
  .reg .b32 %r<64>;
  .reg .b64 %rd<32>;
  .reg .b32 %v<128>, %a<4>, %b<2>;
  ld.param.b64 %rd1, [pa];
  ld.param.b64 %rd2, [pb];
  ld.param.b64 %rd3, [pd];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, image;
  mad.wide.u32 %rd1, %r2, {ROWS * K_BYTES}, %rd1;
  mad.wide.u32 %rd2, %r2, {b_bytes}, %rd2;
  mad.wide.u32 %rd3, %r2, {512 * self.registers}, %rd3;
  shl.b32 %r4, %r1, 4;
  add.u32 %r5, %r3, %r4;
  cvt.u64.u32 %rd4, %r4;
  add.u64 %rd1, %rd1, %rd4;
  add.u64 %rd2, %rd2, %rd4;
  ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd1];
  st.shared.v4.b32 [%r5], {{%r10, %r11, %r12, %r13}};
COPY:
  setp.ge.u32 %p1, %r4, {b_bytes};
  @%p1 bra COPIED;
  ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd2];
  st.shared.v4.b32 [%r5+{ROWS * K_BYTES}], {{%r10, %r11, %r12, %r13}};
  add.u32 %r4, %r4, 2048;
  add.u32 %r5, %r5, 2048;
  add.u64 %rd2, %rd2, 2048;
  bra COPY;
COPIED:
  mul.wide.u32 %rd5, %r1, 4;
  add.u64 %rd6, %rd3, %rd5;
{loads}
  fence.proxy.async.shared::cta;
  bar.sync 0;
{self._fragment() if self.core == "mma" or self.a_from == "registers" else ""}
{self._mma() if self.core == "mma" else self._wgmma()}
{stores}
  ret;
}}
"""

    def _fragment(self) -> str:
        """%a0 .. %a3; %r9: where the thread's words of a block of 8 rows lie."""
        loads = "".join(
            f"  ld.shared.b32 %a{i}, [%r8+{256 * (i % 2) + 128 * (i // 2)}];\n" for i in range(4)
        )
        return f"""
  shr.u32 %r6, %r1, 5;
  and.b32 %r7, %r1, 31;
  shl.b32 %r7, %r7, 2;
  add.u32 %r9, %r3, %r7;
  shl.b32 %r6, %r6, 9;
  add.u32 %r8, %r9, %r6;
{loads}"""

    def _wgmma(self) -> str:
        listed = ", ".join(f"%v{i}" for i in range(self.registers))
        a = "%rd10" if self.a_from == "shared" else "{%a0, %a1, %a2, %a3}"
        integers = self.d == "s32"
        saturate = ".satfinite" if self.saturate else ""
        rest = "" if integers else f", {-1 if self.negate_a else 1}, 1"
        if self.a in ("f16", "bf16"):
            rest += ", 0, 0" if self.a_from == "shared" else ", 0"
        return f"""
  shr.u32 %r20, %r3, 4;
  cvt.u64.u32 %rd10, %r20;
  or.b64 %rd10, %rd10, {128 // 16 << 16 | 256 // 16 << 32};
  add.u64 %rd11, %rd10, {ROWS * K_BYTES // 16};
  setp.ne.u32 %p2, {self.scale_d}, 0;
  wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n{self.n}k{self.k}{saturate}.{self.d}.{self.a}.{self.b}
    {{{listed}}}, {a}, %rd11, %p2{rest};
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 0;
"""

    def _mma(self) -> str:
        each = 2 if self.d == "f16" else 4
        text = ""
        for block in range(self.n // 8):
            d = ", ".join(f"%v{each * block + i}" for i in range(each))
            at = ROWS * K_BYTES + 256 * block
            text += f"""
  ld.shared.b32 %b0, [%r9+{at}];
  ld.shared.b32 %b1, [%r9+{at + 128}];
  mma.sync.aligned.m16n8k{self.k}.row.col.{self.d}.{self.a}.{self.b}.{self.d}
    {{{d}}}, {{%a0, %a1, %a2, %a3}}, {{%b0, %b1}}, {{{d}}};
"""
        return text
