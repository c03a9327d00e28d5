"""Accumulators in a ring: one thread multiplies into them, four warps of each CTA read them.

All signals are relaxed and every hand-over has its fences, as PTX ISA 9.7.16.6.4 writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fa4.emulator.execute import Report
from fa4.emulator.tcgen05.formats import Format
from tests.emulator.tensor_kernels import (
    LANE_ADDRESS,
    TensorKernel,
    own_row,
    registers,
    store_values,
)
from tests.emulator.tensor_operands import Operands, mma, operands

N, LANES, WARPS = 32, 128, 8
_PROBLEMS: dict[int, Operands] = {}
# Step -> what a finding says when it is left out; of a wait nothing certain (who comes first?).
LEFT_OUT = {
    "commit": "no tcgen05.commit follows",
    "wait for full": "",
    "after full": "no tcgen05.fence::after_thread_sync",
    "wait::ld": "no tcgen05.wait::ld",
    "before": "no tcgen05.fence::before_thread_sync",
    "arrive": "arrivals missing",
    "wait for empty": "",
    "after empty": "no tcgen05.fence::after_thread_sync",
}
BEFORE, AFTER = "  tcgen05.fence::before_thread_sync;\n", "  tcgen05.fence::after_thread_sync;\n"


@dataclass(frozen=True)
class Ring:
    """stages: accumulators. extra: rounds behind the first of each. group: CTAs. issuer: warp."""

    stages: int = 2
    extra: int = 1
    group: int = 1
    issuer: int = 4

    @property
    def problem(self) -> Operands:
        """One product of the group."""
        if self.group not in _PROBLEMS:
            rows = LANES * self.group
            _PROBLEMS[self.group] = operands("f16", Format.F16, rows, N, group=self.group)
        return _PROBLEMS[self.group]

    def product(self) -> np.ndarray:
        """What the last round leaves, uint32 (group * 128, N)."""
        return self.problem.product.astype(np.float32).view(np.uint32)

    def run(self, left_out: str = "", **options: Any) -> tuple[Report, np.ndarray]:
        """The report, and what the readers have stored."""
        out = np.zeros((self.group * 32 * WARPS, N), np.uint32)
        report = self.kernel(left_out).run([self.problem.image.copy(), out], **options)
        return report, out.reshape(self.group, -1, N)[:, :LANES].reshape(-1, N)

    def kernel(self, left_out: str) -> TensorKernel:
        """The kernel without one step, wherever it is."""
        rounds = range(self.stages + self.extra)
        sync = "bar.sync 0;"
        if self.group == 2:
            sync += "\n  barrier.cluster.arrive.release;\n  barrier.cluster.wait.acquire;"
        body = f"""
{LANE_ADDRESS}
  mov.b16 %h1, 3;
  mov.u32 %r5, %cluster_ctarank;
  mapa.shared::cluster.u32 %r41, %r20, 0;
  setp.lt.u32 %p11, %r2, 4;
  @%p11 bra READER;
  setp.ne.u32 %p12, %r1, {32 * self.issuer};
  setp.ne.or.u32 %p12, %r5, 0, %p12;
  @%p12 bra END;
{"".join(self._issue(k, left_out) for k in rounds)}
  bra END;
READER:
{"".join(self._read(k, left_out) for k in rounds)}
{own_row("%rd2", N) + store_values(N)}
END:
"""
        counts = (1,) * self.stages + (LANES * self.group,) * self.stages
        return TensorKernel(
            columns=128, group=self.group, barriers=counts, threads=32 * WARPS, sync=sync,
            image_bytes=self.problem.image.shape[1], before=body, sync_end=sync,
        )  # fmt: skip

    def _wait(self, number: int, label: str, parity: int) -> str:
        test = "mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64"
        return f"{label}:\n  {test} %p9, [%r20+{8 * number}], {parity};\n  @!%p9 bra {label};\n"

    def _issue(self, k: int, left_out: str) -> str:
        stage, text = k % self.stages, ""
        if k >= self.stages:
            if left_out != "wait for empty":
                number, parity = self.stages + stage, (k // self.stages - 1) & 1
                text += self._wait(number, f"EMPTY{k}", parity)
            text += AFTER if left_out != "after empty" else ""
        text += f"  add.u32 %r26, %r21, {N * stage};\n"
        text += mma(self.problem, "f16", d="%r26", group=self.group)
        if left_out == "commit":
            return text
        multicast = ".multicast::cluster" if self.group == 2 else ""
        return text + (
            f"  tcgen05.commit.cta_group::{self.group}.mbarrier::arrive::one.shared::cluster"
            f"{multicast}.b64 [%r20+{8 * stage}]{', %h1' if multicast else ''};\n"
        )

    def _read(self, k: int, left_out: str) -> str:
        stage, text = k % self.stages, ""
        if left_out != "wait for full":
            text += self._wait(stage, f"FULL{k}", k // self.stages & 1)
        text += AFTER if left_out != "after full" else ""
        text += f"  tcgen05.ld.sync.aligned.32x32b.x{N}.b32 {registers(N)}, [%r22+{N * stage}];\n"
        text += "  tcgen05.wait::ld.sync.aligned;\n" if left_out != "wait::ld" else ""
        text += BEFORE if left_out != "before" else ""
        if left_out != "arrive":
            arrive = "mbarrier.arrive.relaxed.cluster.shared::cluster.b64"
            text += f"  {arrive} _, [%r41+{8 * (self.stages + stage)}];\n"
        return text
