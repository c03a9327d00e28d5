"""Which planted synchronisation faults the emulator notices in what Triton's compiler writes.

As faults.py, on a persistent GEMM that Triton compiles in two ways: for `sm_100a` with roles for
warps and tensor memory, for `sm_90a` as a pipeline of wgmma. One program works on five tiles of
four steps each, so that every ring is used again. What is formal in the kernel as Triton has
written it counts for nothing.
Usage: python -m lab.benchmarks.foreign_faults [--output FILE]   (`make conformance`)
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from typing import Any

import numpy as np

from fa4.emulator import Options
from lab.benchmarks.common import parse_output, write_record
from lab.benchmarks.emulated_kernels import Kernel, capture
from lab.benchmarks.faults import PACKAGES, report_on
from lab.foreign import SITE

ROLES = {"sm_100a": True, "sm_90a": False}

_REMOVED, _WARP = "barrier removed", "warp barrier removed"
_ELECTED = (
    "the lane that is elected to issue has waited at the mbarrier itself, as has every lane of its "
    "warp: nobody races for what this orders"
)
_TWO_WARPS = (
    "each of the two warps that load waits for the slot itself, and before a copy of the warp that "
    "does not announce the bytes the third of the barriers follows. Without all three a missing "
    "fence is found"
)
_AFTER_ALL = (
    "barrier.sync 1 stands before it, behind all use of tensor memory, and who has exited is not "
    "waited for"
)
_NOBODY = "nobody waits for that phase: all tiles are done, and the mbarriers are invalidated next"
_ONE_LOADS = (
    "threads of one warp initialise the mbarriers, announce the bytes and copy; the other warps "
    "look at them first behind the last of six barriers. Without five of them an mbarrier is found "
    "to be used before its initialisation is known"
)
_SLOT_FREE = (
    "products of all warps are done with the slot before it is filled again: of the two barriers "
    "between wgmma.wait_group and the first copy one is enough, and the third stands behind them. "
    "Without both a race is found"
)
# Of Triton 3.9: why a fault that is not caught changes nothing.
WHY: dict[str, dict[tuple[str, int], str]] = {
    "sm_100a": {
        (_REMOVED, 63): "the address of tensor memory is read where a slot of the ring lies; the "
        "first copy into it comes behind barrier.sync 1, which all warps pass after they have read",
        **{(_WARP, line): _ELECTED for line in (722, 786, 925)},
        **{(_REMOVED, line): _TWO_WARPS for line in (880, 885)},
        **{(_REMOVED, line): _AFTER_ALL for line in (940, 1123)},
        ("arrive removed", 1052): _NOBODY,
        ("arrive twice", 1052): _NOBODY,
    },
    "sm_90a": {
        **{(_REMOVED, line): _ONE_LOADS for line in (96, 105, 118, 142, 149, 159)},
        **{(_REMOVED, line): _SLOT_FREE for line in (627, 636, 645)},
        (_REMOVED, 517): "every thread has waited for the slot itself",
        (_REMOVED, 894): "before the mbarriers are invalidated every warp has passed the barrier "
        "of its last tile's store, behind its last wait",
        ("one group more left", 898): "the wait before the last tile's store has left none",
    },
}


def triton_gemm(arch: str) -> Kernel:
    """Five tiles of 128 x 128 x 256 in one program."""
    if str(SITE) not in sys.path:
        sys.path.append(str(SITE))
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    from tests.conformance import triton_kernels

    random = np.random.default_rng(3)
    a, b = (
        torch.from_numpy(random.standard_normal(shape)).half() for shape in ((640, 256), (256, 128))
    )
    c = torch.zeros((640, 128), dtype=torch.float16)
    maps = [
        TensorDescriptor.from_tensor(x, box)
        for x, box in ((a, [128, 64]), (b, [64, 128]), (c, [128, 128]))
    ]

    def call(session: Any) -> None:
        triton_kernels.persistent[(1,)](*maps, 5, 1, 4, 128, 128, 64, 1, ROLES[arch])

    kernel = capture(f"Triton, persistent GEMM, {arch}", call, arch=arch)
    report = kernel.run(Options(collect=True))
    assert all(finding.severity == "formal" for finding in report.findings), str(report)
    assert np.abs(c.double().numpy() - a.double().numpy() @ b.double().numpy()).max() < 0.1
    return replace(kernel, formal=len(report.findings), why=WHY[arch])


def main() -> None:
    """Run everything, print it, write the result file."""
    options = parse_output(__doc__ or "", "foreign_faults")
    warnings.simplefilter("ignore")  # those of other people's code
    write_record(options.output, report_on([triton_gemm(arch) for arch in ROLES]), PACKAGES)


if __name__ == "__main__":
    main()
