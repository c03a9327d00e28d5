"""Which planted synchronisation faults the emulator notices in our forward kernel.

As faults.py, on two compiled kernels: dense with TMA stores, causal, and packed with
plain stores. One CTA works on two work tiles of three KV tiles each, in a ring of three slots.
Usage: python -m lab.benchmarks.forward_faults [--output FILE]
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fa4.compiled.forward import compile_forward
from fa4.config import ForwardConfig
from fa4.sm100.forward.spec import ForwardSpec
from lab.benchmarks.common import parse_output, write_record
from lab.benchmarks.emulated_kernels import Kernel, capture
from lab.benchmarks.faults import PACKAGES, report_on

ROWS, KEYS = 400, 257
SPECS = {
    "dense causal d128": {"head_dim": 128, "head_dim_v": 128, "causal": True},
    "packed d128, sink": {
        "head_dim": 128, "head_dim_v": 128, "packed_q": True, "packed_k": True, "sink": True,
    },
}  # fmt: skip


def forward_kernel(name: str) -> Kernel:
    """One of `SPECS`, launched by one CTA."""
    tuned = ForwardConfig.tuned("bf16", 128, SPECS[name].get("causal", False))
    spec = ForwardSpec(**SPECS[name], numerics=tuned)
    return launched(name, spec, compile_forward(spec))


def launched(name: str, spec: Any, compiled: Any, rows: int = ROWS, sms: int = 1) -> Kernel:
    """A kernel at head dim 128 on one head, values that make its warps rescale O."""
    import torch

    rng = np.random.default_rng(0)

    def drawn(count: int, factor: float = 1.0) -> torch.Tensor:
        values = torch.from_numpy(factor * rng.standard_normal((1, count, 1, 128))).bfloat16()
        return values[0] if spec.packed_q else values

    q, k, v = drawn(rows, 20.0), drawn(KEYS), drawn(KEYS)
    out, lse = torch.zeros_like(q), torch.zeros((1, rows) if spec.packed_q else (1, 1, rows))
    offsets = [
        torch.tensor([0, n], dtype=torch.int32) if spec.packed_q else None for n in (rows, KEYS)
    ]
    sink = torch.zeros(1) if spec.sink else None
    arguments = (q, k, v, out, lse, 128**-0.5, None, None, None, rows, sink, *offsets, None,
                 None, None, sms)  # fmt: skip
    return capture(name, lambda session: session.call(compiled, arguments, {}))


def main() -> None:
    """Run everything, print it, write the result file."""
    options = parse_output(__doc__ or "", "forward_faults")
    report = report_on([forward_kernel(name) for name in SPECS])
    write_record(options.output, report, PACKAGES)


if __name__ == "__main__":
    main()
