"""Which planted synchronisation faults the emulator notices in what Triton's compiler writes.

As faults.py, on a persistent GEMM that Triton compiles in two ways: for `sm_100a` with roles for
warps and tensor memory, for `sm_90a` as a pipeline of wgmma. One program works on five tiles of
four steps each, so that every ring is used again. What is formal in the kernel as Triton has written it counts for nothing.
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
    return replace(kernel, formal=len(report.findings))


def main() -> None:
    """Run everything, print it, write the result file."""
    options = parse_output(__doc__ or "", "foreign_faults")
    warnings.simplefilter("ignore")  # those of other people's code
    write_record(options.output, report_on([triton_gemm(arch) for arch in ROLES]), PACKAGES)


if __name__ == "__main__":
    main()
