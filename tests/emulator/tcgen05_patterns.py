"""The synchronisation patterns of PTX ISA 9.7.16.6.4 as kernels, in steps that can be left out.

Two warps, `first` and `second`, work on one tensor memory; D is in columns 0..15, a copy of A in
32..39. Each required step says what a finding must name when it is missing. The second warp (in
patterns of one thread, the first) reads D and stores it to its threads' rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fa4.emulator.execute import Report
from fa4.emulator.tcgen05.descriptors import Swizzle
from fa4.emulator.tcgen05.formats import Format
from tests.emulator.tensor_kernels import (
    LANE_ADDRESS,
    TensorKernel,
    load_values,
    own_row,
    registers,
    store_values,
)
from tests.emulator.tensor_operands import Operands, mma, operands

N, A_COLUMN, A_COLUMNS, WARPS, LANES = 16, 32, 8, 8, 32
FLAG = 40  # bytes behind the mbarriers: a word that is polled
PROBLEM = operands("f16", Format.F16, 128, N, swizzle=Swizzle.NONE, seed=3)
A_WORDS = np.ascontiguousarray(PROBLEM.a.astype(np.float16)).view(np.uint32)


@dataclass(frozen=True)
class Step:
    """An instruction of a pattern. names: what a finding says when it is left out; empty: it is not
    there for synchronisation."""

    text: str
    names: str = ""

    @property
    def waits(self) -> bool:
        """Whether it is the loop of a wait."""
        return "bra " in self.text and bool(self.names)


_counter = itertools.count()


def _by_lane_0(text: str) -> str:
    label = f"LEADER{next(_counter)}"
    return f"  @!%p10 bra {label};\n{text}{label}:\n"


def product(accumulate: str = "0", a: str = "%rd20", problem: Operands = PROBLEM) -> Step:
    """D = A B, or D += A B."""
    return Step(_by_lane_0(mma(problem, "f16", a=a, accumulate=accumulate)))


def commit(offset: int) -> Step:
    """One arrival when what the thread has issued is complete."""
    text = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64"
    return Step(f"  @%p10 {text} [%r20+{offset}];\n", "no tcgen05.commit follows")


def arrive(offset: int, who: str = "") -> Step:
    """A relaxed arrival. who: the guard; all lanes without one."""
    text = f"mbarrier.arrive.relaxed.cluster.shared::cta.b64 _, [%r20+{offset}];"
    return Step(f"  {who} {text}\n", "arrivals missing")


def wait(offset: int, parity: int = 0, names: str = "") -> Step:
    """Loops until a phase is over, relaxed."""
    label = f"WAIT{next(_counter)}"
    text = (
        f"mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 %p9, [%r20+{offset}], {parity}"
    )
    return Step(f"{label}:\n  {text};\n  @!%p9 bra {label};\n", names or "has waited for nothing")


BEFORE = Step("  tcgen05.fence::before_thread_sync;\n", "no tcgen05.fence::before_thread_sync")
AFTER = Step("  tcgen05.fence::after_thread_sync;\n", "no tcgen05.fence::after_thread_sync")
LOAD = Step(f"  tcgen05.ld.sync.aligned.32x32b.x{N}.b32 {registers(N)}, [%r22];\n")
WAIT_LOAD = Step("  tcgen05.wait::ld.sync.aligned;\n", "no tcgen05.wait::ld")
WAIT_STORE = Step("  tcgen05.wait::st.sync.aligned;\n", "no tcgen05.wait::st")
A_STORE = Step(
    own_row("%rd3", A_COLUMNS) + load_values(A_COLUMNS)
    + f"  tcgen05.st.sync.aligned.32x32b.x{A_COLUMNS}.b32 [%r22+{A_COLUMN}], "
    + f"{registers(A_COLUMNS)};\n"
)  # fmt: skip
STORE = Step(f"  tcgen05.st.sync.aligned.32x32b.x{N}.b32 [%r22], {registers(N)};\n")
COPY = Step(
    _by_lane_0(
        f"  mov.b64 %rd22, {PROBLEM.a_desc:#x};\n  add.u32 %r26, %r21, {A_COLUMN};\n"
        "  tcgen05.cp.cta_group::1.128x256b [%r26], %rd22;\n"
    )
)
SHIFT = Step(
    _by_lane_0(f"  add.u32 %r26, %r21, {A_COLUMN};\n  tcgen05.shift.cta_group::1.down [%r26];\n")
)
SET_FLAG = Step(f"  @%p10 st.relaxed.cta.shared::cta.b32 [%r20+{FLAG}], 1;\n")
POLL = Step(
    f"POLL:\n  ld.relaxed.cta.shared::cta.b32 %r27, [%r20+{FLAG}];\n"
    "  setp.eq.u32 %p9, %r27, 1;\n  @!%p9 bra POLL;\n",
    "has waited for nothing",
)
FROM_COPY = f"[%r21+{A_COLUMN}]"
# The descriptor of the product comes out of tensor memory.
BY_REGISTER = Step(
    f"  tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r28}}, [%r22+{A_COLUMN + A_COLUMNS}];\n"
    + _by_lane_0(mma(PROBLEM, "f16").replace(f"mov.b32 %r25, {PROBLEM.idesc:#x}",
                                             "mov.b32 %r25, %r28"))
)  # fmt: skip
# What reads D at the end, in the plain forms.
READ_OUT = [
    replace(commit(24), names=""),
    Step(wait(24).text.replace(".relaxed.cluster", "")),
    LOAD,
    Step(WAIT_LOAD.text),
    Step(own_row("%rd2", N) + store_values(N)),
]
STORED = Step(own_row("%rd2", N) + store_values(N))


@dataclass(frozen=True)
class Pattern:
    """first, second: what the two warps do; no second for a pattern of one thread.

    times: how often D has been added up, 0: once, with A shifted. counts: of the mbarriers at 0, 8,
    16 and 24. kept: D is what it was before.
    """

    first: tuple[Step, ...]
    second: tuple[Step, ...] = ()
    times: int = 1
    counts: tuple[int, ...] = (1, 1, 1, 1)
    kept: bool = False

    def required(self) -> Iterator[tuple[int, int]]:
        """(warp, index) of each required step."""
        for warp, steps in enumerate((self.first, self.second)):
            yield from ((warp, k) for k, step in enumerate(steps) if step.names)

    def step(self, warp: int, index: int) -> Step:
        """One of them."""
        return (self.first, self.second)[warp][index]

    def without(self, warp: int, index: int) -> Pattern:
        """The pattern without one step; instead of waiting, a warp only comes late."""
        steps = [list(self.first), list(self.second)]
        late = [Step("  nanosleep.u32 100;\n" * 100)] if steps[warp][index].waits else []
        steps[warp][index : index + 1] = late
        return replace(self, first=tuple(steps[0]), second=tuple(steps[1]))


NO_WAIT = "has not waited for the mbarrier of its tcgen05.commit"
PATTERNS = {
    "6.4.1 mma, mma": Pattern((product(), product("1"), *READ_OUT), times=2),
    "6.4.1 cp, mma": Pattern((COPY, product(a=FROM_COPY), *READ_OUT)),
    "6.4.1 cp, shift, mma": Pattern((COPY, SHIFT, product(a=FROM_COPY), *READ_OUT), times=0),
    "6.4.2 st, ld": Pattern((STORE, WAIT_STORE, LOAD, Step(WAIT_LOAD.text), STORED), kept=True),
    "6.4.2 mma, ld": Pattern(
        (product(), commit(0), wait(0, names=NO_WAIT), AFTER, LOAD, Step(WAIT_LOAD.text), STORED)
    ),
    "6.4.3 cp, mma": Pattern(
        (COPY, BEFORE, arrive(0, "@%p10")), (wait(0), AFTER, product(a=FROM_COPY), *READ_OUT)
    ),
    "6.4.3 mma, mma": Pattern(
        (product(), BEFORE, arrive(0, "@%p10")), (wait(0), AFTER, product("1"), *READ_OUT), times=2
    ),
    "11.1 cp, mma by a flag": Pattern(
        (COPY, BEFORE, SET_FLAG), (POLL, AFTER, product(a=FROM_COPY), *READ_OUT)
    ),
    "6.4.4 ld, mma": Pattern(
        (LOAD, WAIT_LOAD, BEFORE, arrive(0)), (wait(0), AFTER, product(), *READ_OUT),
        counts=(LANES, 1, 1, 1),
    ),
    "6.4.4 st, mma": Pattern(
        (STORE, WAIT_STORE, BEFORE, arrive(0)), (wait(0), AFTER, product(), *READ_OUT),
        counts=(LANES, 1, 1, 1),
    ),
    "6.4.4 mma, ld": Pattern(
        (product(), commit(0)),
        (wait(0, names=NO_WAIT), AFTER, LOAD, Step(WAIT_LOAD.text), STORED),
    ),
    "6.4.4 cp, ld": Pattern(
        (product(), COPY, commit(0)),
        (wait(0, names=NO_WAIT), AFTER, LOAD, Step(WAIT_LOAD.text), STORED),
    ),
    "6.4.4 mma, handed on, ld": Pattern(
        (product(), commit(0), wait(0, names=NO_WAIT), AFTER, BEFORE, arrive(8)),
        (wait(8), AFTER, LOAD, Step(WAIT_LOAD.text), STORED), counts=(1, LANES, 1, 1),
    ),
    "6.4.5 ld, mma by a register": Pattern((BY_REGISTER, *READ_OUT)),
    "6.4.5 ld, mma": Pattern((LOAD, WAIT_LOAD, product(), *READ_OUT)),
}  # fmt: skip


def kernel(pattern: Pattern, first: int = 0, second: int = 5) -> TensorKernel:
    """first, second: the two warps, of eight."""
    fill = "".join(f"  mov.b32 %v{k}, {k};\n" for k in range(N))
    descriptor = f"  mov.b32 %r28, {PROBLEM.idesc:#x};\n"
    setup = f"""
{LANE_ADDRESS}
  and.b32 %r40, %r1, 31;
  setp.eq.u32 %p10, %r40, 0;
  @%p1 st.shared.b32 [%r20+{FLAG}], 0;
{fill}
  setp.ge.u32 %p11, %r2, 4;
  @%p11 bra FILLED;
{STORE.text}{descriptor}
  tcgen05.st.sync.aligned.32x32b.x1.b32 [%r22+{A_COLUMN + A_COLUMNS}], {{%r28}};
{WAIT_STORE.text}
FILLED:
  bar.sync 0;
  setp.ne.u32 %p12, %r2, {first};
  setp.ne.u32 %p13, %r2, {second};
  @!%p12 bra FIRST;
  @!%p13 bra SECOND;
  bra END;
FIRST:
{"".join(step.text for step in pattern.first)}
  bra END;
SECOND:
{"".join(step.text for step in pattern.second)}
END:
"""
    return TensorKernel(
        barriers=pattern.counts, image_bytes=PROBLEM.image.shape[1], before=setup,
        threads=32 * WARPS,
    )  # fmt: skip


def run(
    pattern: Pattern, first: int = 0, second: int = 5, **options: Any
) -> tuple[Report, np.ndarray]:
    """The report, and what was read, float (32, N)."""
    out = np.zeros((32 * WARPS, N), np.uint32)
    arrays = [PROBLEM.image.copy(), out, np.tile(A_WORDS, (WARPS // 4, 1))]
    report = kernel(pattern, first, second).run(arrays, **options)
    reader = second if pattern.second else first
    return report, out[32 * reader : 32 * (reader + 1)]


def expected(pattern: Pattern, reader: int) -> np.ndarray:
    """What the reader finds in its quarter, uint32 (32, N)."""
    if pattern.kept:
        return np.tile(np.arange(N, dtype=np.uint32), (32, 1))
    quarter = slice(32 * (reader % 4), 32 * (reader % 4) + 32)
    a = PROBLEM.a.copy()
    if not pattern.times:  # shifted: lanes 0..30 take what is below them
        a[:31] = a[1:32]
    d = max(pattern.times, 1) * (a @ PROBLEM.b.T)[quarter]
    return d.astype(np.float32).view(np.uint32)
