"""Kernels for the benchmarks of the emulator: their launches, captured once and run at will.

The GEMM of examples/ is always there; NVIDIA's are where `make conformance` put them.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fa4.emulator import Allocation, Launch, Options, Report, emulate, run
from fa4.emulator.machine.memory import buffer_at
from lab import ROOT

sys.path.insert(0, str(ROOT / "examples"))


@dataclass(frozen=True)
class Kernel:
    """One launch, and the memory as it was before. choices: options that all of its runs have.

    formal: how many formal findings it has as it is. why: of faults that change nothing, (kind,
    PTX line) -> the reason.
    """

    name: str
    launch: Launch
    allocations: tuple[Allocation, ...]
    memory: tuple[np.ndarray, ...]
    images: tuple[np.ndarray, ...]
    choices: Mapping[str, Any] = field(default_factory=dict)
    formal: int = 0
    why: Mapping[tuple[str, int], str] = field(default_factory=dict)

    def run(self, options: Options, ptx: str = "") -> Report:
        """Runs it from the same memory as ever, perhaps with other PTX."""
        for memory, image in zip(self.memory, self.images, strict=True):
            memory[:] = image
        launch = replace(self.launch, ptx=ptx) if ptx else self.launch
        return run([launch], self.allocations, replace(options, **self.choices))

    def contents(self) -> bytes:
        """The memory as the last run left it."""
        return b"".join(memory.tobytes() for memory in self.memory)


def capture(
    name: str, call: Callable[[Any], Any], one_cluster: bool = False, arch: str = "sm_100a",
    number: int = 0, of: int = 1,
) -> Kernel:  # fmt: skip
    """A launch of a program that runs inside `emulate()`: the only one, or `number` of so many.

    one_cluster: a persistent kernel gets one cluster for all its work tiles.
    """
    found: list[Kernel] = []

    def keep(
        launches: Sequence[Launch], allocations: Sequence[Allocation], options: object
    ) -> None:
        memory = tuple(buffer_at(a.name, a.address, a.size_bytes, True).data for a in allocations)
        images = tuple(part.copy() for part in memory)
        for launch in launches:
            one = replace(launch, grid=launch.cluster) if one_cluster else launch
            found.append(Kernel(name, one, tuple(allocations), memory, images))

    with emulate(keep, arch=arch) as session:
        call(session)
    if len(found) != of:
        raise ValueError(f"the program must launch {of} kernels; got {len(found)}")
    return found[number]


def example_gemm() -> Kernel:
    """One tile, one stage: examples/emulate_gemm.py, which also runs when it is imported."""
    with redirect_stdout(io.StringIO()):
        import emulate_gemm as example
    from cutlass.cute.runtime import from_dlpack

    def call(session: Any) -> None:
        tensors = (example.a, example.b, example.c)
        example.multiply(*(from_dlpack(x, assumed_align=16) for x in tensors), True)

    return capture("examples/emulate_gemm.py", call)


def persistent_gemm() -> Kernel:
    """Six tiles of 128 x 128 x 256 in one CTA; a ring of 6 stages, two accumulators."""
    from tests.conformance.gemms import Gemm, dense_gemm

    program = dense_gemm("dense_gemm_persistent", Gemm(mnkl=(256, 384, 256, 1)))
    return capture("NVIDIA dense_gemm_persistent.py", program.run, one_cluster=True)


def pair_gemm() -> Kernel:
    """Four tiles of 256 x 256 x 512 in one CTA pair; a ring of 6 stages."""
    from tests.conformance.gemms import tutorial_gemm

    program = tutorial_gemm("3", 512, 512, 512)
    return capture("NVIDIA fp16_gemm_3.py, CTA pair", program.run, one_cluster=True)


def fmha(
    seqlen_q: int, seqlen_k: int, heads: int = 1, head_dim: int = 128, persistent: bool = False
) -> Kernel:
    """NVIDIA's forward attention; persistent: one CTA for all heads."""
    from fa4.testing import Case
    from tests.conformance import attention

    case = Case(
        dtype="fp16", seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_k=heads, head_dim=head_dim,
        head_dim_v=head_dim,
    )  # fmt: skip
    shape = f"H{heads} Sq{seqlen_q} Sk{seqlen_k} D{head_dim}"
    kind = ", persistent" if persistent else ""
    program = attention.fmha(case, persistent)
    return capture(f"NVIDIA fmha.py, {shape}{kind}", program.run, one_cluster=persistent)


def missing() -> str:
    """Why NVIDIA's kernels cannot be had here; empty if they can."""
    from lab.foreign import missing as why

    return why()
