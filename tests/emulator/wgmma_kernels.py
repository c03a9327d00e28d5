"""Kernels around wgmma, in pieces that a test can leave out or replace; and their operands.

Shared memory from SMEM on holds the images of A and B, copied from %rd1 by all threads. Registers:
%r1 thread, %r20 shared memory, %v0 .. the accumulator, %a0 .. %a3 a fragment of A.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from fa4.emulator.execute import Report
from fa4.emulator.tcgen05.descriptors import SmemDescriptor, Swizzle
from fa4.emulator.tcgen05.formats import Format
from tests.emulator.kernels import module_text, run_ptx
from tests.emulator.tcgen05_support import element_address, packed_descriptor

SMEM = 1024
ROWS = 64
DTYPES = {
    Format.F16: np.float16,
    Format.BF16: ml_dtypes.bfloat16,
    Format.TF32: np.float32,
    Format.E4M3: ml_dtypes.float8_e4m3fn,
    Format.E5M2: ml_dtypes.float8_e5m2,
    Format.S8: np.int8,
    Format.U8: np.uint8,
}
_MODES = {Swizzle.NONE: 0, Swizzle.B128: 1, Swizzle.B64: 2, Swizzle.B32: 3}
SWIZZLES = tuple(_MODES)


def descriptor_bits(desc: SmemDescriptor) -> int:
    """The 64-bit matrix descriptor, from PTX ISA 9.7.15.5.1.2."""
    return (
        desc.start_address // 16
        | desc.leading_byte_offset // 16 << 16
        | desc.stride_byte_offset // 16 << 32
        | desc.base_offset << 49
        | _MODES[desc.swizzle] << 62
    )


@dataclass(frozen=True)
class Types:
    """Types of a product: D, A, B."""

    d: Format
    a: Format
    b: Format

    @property
    def k(self) -> int:
        """Elements of K of one instruction."""
        return 32 // self.a.container_bytes

    def opcode(self, n: int, more: str = "") -> str:
        """The whole opcode for m64."""
        shape = f"m64n{n}k{self.k}{more}"
        return f"wgmma.mma_async.sync.aligned.{shape}.{self.d}.{self.a}.{self.b}"

    def d_registers(self, n: int) -> int:
        """Registers of each thread for D."""
        return n // 4 if self.d is Format.F16 else n // 2


@dataclass(frozen=True)
class Layouts:
    """How A and B lie in shared memory; a: None where registers hold it."""

    a: tuple[Swizzle, bool] | None = (Swizzle.NONE, False)
    b: tuple[Swizzle, bool] = (Swizzle.NONE, False)


@dataclass
class Product:
    """A problem D = A B^T; a (64, k), b (n, k) float64.

    image: bytes of shared memory from SMEM on. a_desc, b_desc: descriptors. a_words: the registers
    of A, uint32 (4, 128 threads), as PTX ISA's figures have them.
    """

    types: Types
    a: np.ndarray
    b: np.ndarray
    image: np.ndarray
    a_desc: int
    b_desc: int
    a_words: np.ndarray
    layouts: Layouts

    @property
    def n(self) -> int:
        """Columns of D."""
        return len(self.b)


def product(types: Types, n: int, layouts: Layouts | None = None, seed: int = 0) -> Product:
    """A random problem of small integers, so that every order of summation gives the same."""
    layouts = layouts or Layouts()
    rng = np.random.default_rng(seed)
    low = {Format.U8: 0}
    a = rng.integers(low.get(types.a, -3), 4, (ROWS, types.k)).astype(np.float64)
    b = rng.integers(low.get(types.b, -3), 4, (n, types.k)).astype(np.float64)
    size = types.a.container_bytes
    a_swizzle, a_transposed = layouts.a or (Swizzle.NONE, False)
    places = []
    start = SMEM
    for rows, swizzle, transposed in ((ROWS, a_swizzle, a_transposed), (n, *layouts.b)):
        places.append(packed_descriptor(start, swizzle, rows, types.k, size, not transposed))
        start += 1024 * (-(-rows * types.k * size * (swizzle.row_bytes // 16) // 1024) + 1)
    image = np.zeros(start - SMEM, np.uint8)
    place(image, places[0], a.astype(DTYPES[types.a]), a_transposed)
    place(image, places[1], b.astype(DTYPES[types.b]), layouts.b[1])
    words = fragments(np.ascontiguousarray(a.astype(DTYPES[types.a])))
    return Product(types, a, b, image, *map(descriptor_bits, places), words, layouts)


def place(image: np.ndarray, desc: SmemDescriptor, values: np.ndarray, transposed: bool) -> None:
    """Writes elements where the descriptor says, into bytes that start at SMEM."""
    size = values.dtype.itemsize
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(*values.shape, size)
    for row in range(values.shape[0]):
        for k in range(values.shape[1]):
            start = element_address(desc, row, k, size, not transposed) - SMEM
            image[start : start + size] = raw[row, k]


def fragments(values: np.ndarray) -> np.ndarray:
    """The four registers of each thread that hold A (64, k), uint32 (4, 128)."""
    rows = values.view(np.uint32)
    words = np.zeros((4, 128), np.uint32)
    for thread in range(128):
        warp, group, t = thread // 32, thread % 32 // 4, thread % 4
        for i in range(4):
            words[i, thread] = rows[16 * warp + group + 8 * (i % 2), t + 4 * (i // 2)]
    return words


def elements(words: np.ndarray, d: Format, n: int) -> np.ndarray:
    """D (64, n) as numbers, from the registers of 128 threads, uint32 (registers, 128)."""
    found = np.zeros((ROWS, n))
    kind = {Format.F32: np.float32, Format.S32: np.int32}
    for thread in range(128):
        warp, group, t = thread // 32, thread % 32 // 4, thread % 4
        for i in range(len(words)):
            if d is Format.F16:
                row, column = 16 * warp + group + 8 * (i % 2), 8 * (i // 2) + 2 * t
                pair = words[i, thread : thread + 1].view(np.float16)
                found[row, column : column + 2] = pair
            else:
                row = 16 * warp + group + 8 * (i // 2 % 2)
                column = 8 * (i // 4) + 2 * t + i % 2
                found[row, column] = words[i, thread : thread + 1].view(kind[d])[0]
    return found


def registers(count: int, name: str = "v", first: int = 0) -> str:
    """{%v0, %v1, ...}"""
    return "{" + ", ".join(f"%{name}{k}" for k in range(first, first + count)) + "}"


def multiply(
    problem: Product, scale_d: int | str = 0, scales: tuple[int, int] = (1, 1), **more: Any
) -> str:
    """The instruction and the moves of its operands. more: first, the first accumulator."""
    types, layouts = problem.types, problem.layouts
    d = registers(types.d_registers(problem.n), first=more.get("first", 0))
    a = "%rd20" if layouts.a is not None else registers(4, "a")
    rest = ""
    if types.d is not Format.S32:
        rest = f", {scales[0]}, {scales[1]}"
        if types.a in (Format.F16, Format.BF16):
            rest += f", {int(layouts.a[1])}" if layouts.a is not None else ""
            rest += f", {int(layouts.b[1])}"
    return f"""
  mov.b64 %rd20, {problem.a_desc:#x};
  mov.b64 %rd21, {problem.b_desc:#x};
  setp.ne.u32 %p5, {scale_d}, 0;
  {types.opcode(problem.n, more.get("modifier", ""))} {d}, {a}, %rd21, %p5{rest};
"""


@dataclass(frozen=True)
class WgmmaKernel:
    """One kernel of a warpgroup: the pieces in the order of their execution.

    copy: threads copy the image to shared memory. before: behind the first synchronisation. work:
    the products. store: accumulators to %rd2, register by register, 128 threads each.
    """

    problem: Product
    threads: int = 128
    copy: bool = True
    proxy_fence: str = "fence.proxy.async.shared::cta;"
    sync: str = "bar.sync 0;"
    before: str = ""
    fence: str = "wgmma.fence.sync.aligned;"
    work: str = ""
    commit: str = "wgmma.commit_group.sync.aligned;"
    wait: str = "wgmma.wait_group.sync.aligned 0;"
    after: str = ""
    store: bool = True
    registers_stored: int = 0

    def but(self, **changes: Any) -> WgmmaKernel:
        """The same with other pieces."""
        return replace(self, **changes)

    def text(self) -> str:
        """The body."""
        return f"""
  mov.u32 %r1, %tid.x;
  shr.u32 %r2, %r1, 5;
  mov.u32 %r20, smem;
{self._copy() if self.copy else ""}
  {self.proxy_fence}
  {self.sync}
{self._fragments()}
{self.before}
  {self.fence}
{self.work or multiply(self.problem)}
  {self.commit}
  {self.wait}
{self.after}
{self._store() if self.store else ""}
"""

    @property
    def stored(self) -> int:
        """How many accumulator registers the kernel stores."""
        return self.registers_stored or self.problem.types.d_registers(self.problem.n)

    def _copy(self) -> str:
        return f"""
  shl.b32 %r6, %r1, 4;
COPY:
  setp.ge.u32 %p8, %r6, {len(self.problem.image)};
  @%p8 bra COPIED;
  cvt.u64.u32 %rd42, %r6;
  add.u64 %rd43, %rd1, %rd42;
  ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd43];
  add.u32 %r14, %r20, %r6;
  st.shared.v4.b32 [%r14], {{%r10, %r11, %r12, %r13}};
  add.u32 %r6, %r6, {16 * self.threads};
  bra COPY;
COPIED:
"""

    def _fragments(self) -> str:
        if self.problem.layouts.a is not None:
            return ""
        loads = "".join(f"  ld.global.b32 %a{i}, [%rd45+{512 * i}];\n" for i in range(4))
        return f"  mul.wide.u32 %rd44, %r1, 4;\n  add.u64 %rd45, %rd3, %rd44;\n{loads}"

    def _store(self) -> str:
        stores = "".join(f"  st.global.b32 [%rd47+{512 * i}], %v{i};\n" for i in range(self.stored))
        return f"  mul.wide.u32 %rd46, %r1, 4;\n  add.u64 %rd47, %rd2, %rd46;\n{stores}"

    def module(self) -> str:
        """The whole PTX."""
        declarations = "  .reg .b32 %v<256>;\n  .reg .b32 %a<4>;\n"
        return module_text(self.text(), 3, (), declarations)

    def run(self, **options: Any) -> tuple[np.ndarray, Report]:
        """(D as numbers, the report); findings are collected."""
        return self.run_text(self.module(), **options)

    def run_text(self, text: str, **options: Any) -> tuple[np.ndarray, Report]:
        """The same with other PTX."""
        out = np.zeros((self.stored, max(self.threads, 128)), np.uint32)
        arrays = [self.problem.image.copy(), out, self.problem.a_words]
        given = {"block": (self.threads, 1, 1), "smem": len(self.problem.image), "collect": True}
        report = run_ptx(text, arrays, **(given | options))
        d = self.problem.types.d
        return elements(out, d, self.stored * (4 if d is Format.F16 else 2)), report
