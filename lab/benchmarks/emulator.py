"""How fast the emulator runs, with and without its checks, and what a plain interpreter would do.

    python -m lab.benchmarks.emulator

Instruction classes run in a loop of hand-written PTX (4 warps, 1 CTA); the peer interprets the same
register instructions with one NumPy call per warp instruction, in the same run. Kernels are those
of `lab/benchmarks/emulated_kernels.py`: the example's, and NVIDIA's where `make conformance`
installed them. Figures are thread-instructions per second of one core, the best of several runs;
seconds are those that the CPU spent here, since others use the machine as well.
"""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import numpy as np

from fa4.emulator import Options
from fa4.emulator.host.ptx_launch import run_ptx
from lab.benchmarks import emulated_kernels
from lab.benchmarks.common import parse_output, write_record

ROUNDS = 3
WARPS = 4
TRIPS = 200
UNROLLED = 16

HEADER = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry kernel(.param .b64 out)
{ .reg .b32 %r<64>; .reg .b64 %rd<32>; .reg .pred %p<4>;
  .shared .align 1024 .b8 buffer[8192];
  ld.param.b64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2; mov.u32 %r2, buffer; shl.b32 %r3, %r1, 4; add.u32 %r4, %r2, %r3;
  mov.u32 %r60, 0; mov.b32 %r10, 0f3F800000; mov.b32 %r11, 0f3F000000; mov.b32 %r12, %r10;
  mov.b32 %r13, %r11; mov.b64 %rd10, {%r10, %r11}; mov.b64 %rd11, %rd10; mov.b64 %rd12, %rd10;
  st.shared.v4.b32 [%r4], {%r10, %r11, %r12, %r13};
  setp.eq.u32 %p2, %r1, 0; @%p2 mbarrier.init.shared.b64 [buffer+4096], 1000000; bar.sync 0;
LOOP:
"""
FOOTER = """
  add.u32 %r60, %r60, 1; setp.lt.u32 %p1, %r60, {trips}; @%p1 bra LOOP;
  st.global.b32 [%rd3], %r12;
  ret;
}}
"""
# One instruction of each class.
CLASSES = {
    "integer": "mad.lo.u32 %r12, %r12, %r11, %r10;",
    "fma.f32": "fma.rn.f32 %r12, %r12, %r11, %r10;",
    "fma.f32x2": "fma.rn.f32x2 %rd12, %rd12, %rd11, %rd10;",
    "ex2": "ex2.approx.ftz.f32 %r12, %r12;",
    "cvt.bf16x2": "cvt.rn.bf16x2.f32 %r12, %r12, %r11;",
    "shfl": "shfl.sync.bfly.b32 %r12, %r12, 1, 31, 0xffffffff;",
    "bar.sync": "bar.sync 0;",
    "mbarrier.arrive": "mbarrier.arrive.shared.b64 _, [buffer+4096];",
    "ld.shared": "ld.shared.b32 %r12, [%r4];",
    "ld.shared.v4": "ld.shared.v4.b32 {%r12, %r13, %r14, %r15}, [%r4];",
    "st.shared.v4": "st.shared.v4.b32 [%r4], {%r10, %r11, %r10, %r11};",
    "atom.shared": "atom.shared.add.u32 %r12, [%r4], %r10;",
    "ld.global": "ld.global.b32 %r12, [%rd3];",
    "st.global": "st.global.b32 [%rd3], %r11;",
}
INTERPRETED = ("integer", "fma.f32")


def measure_class(statement: str, checks: bool) -> float:
    """Thread-instructions per second of a class."""
    text = HEADER + statement * UNROLLED + FOOTER.format(trips=TRIPS)
    best = 0.0
    for _ in range(ROUNDS):
        out = np.zeros(32 * WARPS, np.uint32)
        report = run_ptx(text, [out], block=(32 * WARPS, 1, 1), checks=checks)
        best = max(best, report.instructions.total() / report.seconds)
    return best


def interpret(kind: str) -> float:
    """The peer: one NumPy expression for each warp instruction."""
    one = np.uint32 if kind == "integer" else np.float32
    a, b, c = (np.full(32, v, one) for v in (3, 2 if kind == "integer" else 0.5, 1))
    count = TRIPS * UNROLLED * WARPS
    best = 0.0
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(count):
            a = a * b + c
            a[0] = c[0]  # keeps the values finite, as a mask would touch them too
        best = max(best, 32 * count / (time.perf_counter() - began))
    return best


def measure_kernels() -> list[dict[str, Any]]:
    """Whole kernels, with checks and without."""
    makers = [emulated_kernels.example_gemm]
    if not emulated_kernels.missing():
        makers += [
            emulated_kernels.persistent_gemm,
            emulated_kernels.pair_gemm,
            lambda: emulated_kernels.fmha(256, 256),
            lambda: emulated_kernels.fmha(1024, 1024),
        ]
    rows = []
    for make in makers:
        kernel = make()
        row: dict[str, Any] = {"kernel": kernel.name}
        for name, checks in (("with_checks", True), ("without_checks", False)):
            reports = [kernel.run(Options(checks=checks)) for _ in range(ROUNDS)]
            best = min(reports, key=lambda report: report.seconds)
            row[name] = round(best.instructions.total() / best.seconds)
            row[f"{name}_seconds"] = round(best.seconds, 4)
        row["thread_instructions"] = best.instructions.total()
        rows.append(row)
    return rows


def main() -> None:
    """Prints the table and writes the result file."""
    options = parse_output(__doc__ or "", "emulator")
    classes = {}
    for name, statement in CLASSES.items():
        row = {
            "with_checks": round(measure_class(statement, True)),
            "without_checks": round(measure_class(statement, False)),
        }
        if name in INTERPRETED:
            row["interpreter"] = round(interpret(name))
        classes[name] = row
        print(f"{name:16}", *(f"{k} {v / 1e6:9.2f} M/s" for k, v in row.items()))
    kernels = measure_kernels()
    for row in kernels:
        print(row)
    report = {"classes": classes, "kernels": kernels}
    write_record(options.output, report, ("numpy", "numba", "llvmlite"))


if __name__ == "__main__":
    with patch.object(time, "perf_counter", time.thread_time):
        main()
