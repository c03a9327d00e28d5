"""Kernels around the tcgen05 instructions, in pieces that a test can leave out or replace.

Shared memory: mbarriers from byte 0 on, the address of tensor memory at 64, data from 1024 on.
Registers: %r1 thread, %r2 warp, %r20 shared memory, %r21 tensor memory, %p1 thread 0, %p2 warp 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fa4.emulator.execute import Report
from tests.emulator.kernels import run_ptx

SCHEDULES = ("fifo", "random", "adversarial")
SHARED_START = 1024  # where dynamic shared memory of a kernel without static variables lies
DATA = SHARED_START + 1024
VALUES = 128
DECLARATIONS = f"  .reg .b32 %v<{VALUES}>;\n"


def registers(count: int, first: int = 0) -> str:
    """{%v0, %v1, ...}"""
    return "{" + ", ".join(f"%v{k}" for k in range(first, first + count)) + "}"


def wait(offset: int = 0, parity: int = 0, name: str = "DONE") -> str:
    """All threads wait for a phase of the mbarrier at smem + offset."""
    return f"""
{name}:
  mbarrier.try_wait.parity.shared::cta.b64 %p9, [%r20+{offset}], {parity};
  @!%p9 bra {name};
"""


@dataclass(frozen=True)
class TensorKernel:
    """One kernel: the pieces in the order of their execution.

    columns: of tcgen05.alloc. image_bytes: copied from %rd1 to shared memory by all threads
    (unless fill is False).
    work: by thread 0 alone. after: by all threads.
    """

    columns: int = 64
    group: int = 1
    barriers: tuple[int, ...] = (1,)
    image_bytes: int = 0
    fill: bool = True
    fence: str = "fence.proxy.async.shared::cta;"
    sync: str = "bar.sync 0;"
    before: str = ""
    work: str = ""
    after: str = ""
    sync_end: str = "bar.sync 0;"
    relinquish: str = "tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;"
    dealloc: str = "tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r21, {columns};"
    threads: int = 128

    def but(self, **changes: Any) -> TensorKernel:
        """The same with other pieces."""
        return replace(self, **changes)

    def text(self) -> str:
        """The body."""
        initialise = "".join(
            f"  @%p1 mbarrier.init.shared::cta.b64 [%r20+{8 * k}], {count};\n"
            for k, count in enumerate(self.barriers)
        )
        names = {"group": self.group, "columns": self.columns}
        return f"""
  mov.u32 %r1, %tid.x;
  shr.u32 %r2, %r1, 5;
  mov.u32 %r20, smem;
  setp.eq.u32 %p1, %r1, 0;
  setp.eq.u32 %p2, %r2, 0;
{initialise}
  @%p2 tcgen05.alloc.cta_group::{self.group}.sync.aligned.shared::cta.b32 [%r20+64], {self.columns};
  @%p2 {self.relinquish.format(**names)}
{self._copy()}
  {self.fence}
  {self.sync}
  ld.shared.b32 %r21, [%r20+64];
{self.before}
  @!%p1 bra JOIN;
{self.work}
JOIN:
{self.after}
  {self.sync_end}
  {"@%p2 " + self.dealloc.format(**names) if self.dealloc else ""}
"""

    def _copy(self) -> str:
        if not self.image_bytes or not self.fill:
            return ""
        return f"""
  mov.u32 %r5, %cluster_ctarank;
  mul.wide.u32 %rd40, %r5, {self.image_bytes};
  add.u64 %rd41, %rd1, %rd40;
  shl.b32 %r6, %r1, 4;
COPY:
  setp.ge.u32 %p8, %r6, {self.image_bytes};
  @%p8 bra COPIED;
  cvt.u64.u32 %rd42, %r6;
  add.u64 %rd43, %rd41, %rd42;
  ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd43];
  add.u32 %r14, %r20, %r6;
  st.shared.v4.b32 [%r14+{DATA - SHARED_START}], {{%r10, %r11, %r12, %r13}};
  add.u32 %r6, %r6, {16 * self.threads};
  bra COPY;
COPIED:
"""

    def run(self, arrays: list[np.ndarray], **options: Any) -> Report:
        """On arrays %rd1, %rd2, ...; findings are collected."""
        smem = DATA - SHARED_START + self.image_bytes
        cluster = (self.group, 1, 1)
        arguments = {"grid": cluster, "cluster": cluster, "block": (self.threads, 1, 1)} | options
        return run_ptx(
            self.text(), arrays, smem=smem, collect=True, declarations=DECLARATIONS, **arguments
        )


LANE_ADDRESS = """
  and.b32 %r22, %r2, 3;
  shl.b32 %r22, %r22, 21;
  add.u32 %r22, %r22, %r21;
"""


def own_row(pointer: str, columns: int) -> str:
    """%rd50: the row of this thread in an array of `columns` words, CTA after CTA."""
    return f"""
  mov.u32 %r30, %cluster_ctarank;
  mov.u32 %r31, %ntid.x;
  mad.lo.u32 %r30, %r30, %r31, %r1;
  mul.wide.u32 %rd50, %r30, {4 * columns};
  add.u64 %rd50, {pointer}, %rd50;
"""


def load_values(columns: int) -> str:
    """%v0.. from the row at %rd50."""
    return "".join(f"  ld.global.b32 %v{k}, [%rd50+{4 * k}];\n" for k in range(columns))


def store_values(columns: int, first: int = 0) -> str:
    """%v0.. to the row at %rd50."""
    return "".join(f"  st.global.b32 [%rd50+{4 * (first + k)}], %v{k};\n" for k in range(columns))


def read_out(pointer: str, columns: int, chunk: int = 32) -> str:
    """Every warp stores its 32 lanes, `columns` columns of them, to its threads' rows."""
    text = own_row(pointer, columns) + LANE_ADDRESS
    for first in range(0, columns, chunk):
        count = min(chunk, columns - first)
        text += f"  tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {registers(count)}, [%r22+{first}];"
        text += "\n  tcgen05.wait::ld.sync.aligned;\n" + store_values(count, first)
    return text
