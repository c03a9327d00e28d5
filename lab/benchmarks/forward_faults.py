"""Which planted synchronisation faults the emulator notices in our forward kernel.

As faults.py, on two compiled kernels: dense with TMA stores, causal, and packed with
plain stores. One CTA works on two work tiles of three KV tiles each, in a ring of three slots.
Usage: python -m lab.benchmarks.forward_faults [--output FILE]
"""

from __future__ import annotations

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
    """One of `SPECS` on one head, values that make the correction warps rescale."""
    import torch

    tuned = ForwardConfig.tuned("bf16", 128, SPECS[name].get("causal", False))
    spec = ForwardSpec(**SPECS[name], numerics=tuned)
    compiled = compile_forward(spec)
    rng = np.random.default_rng(0)

    def drawn(rows: int, factor: float = 1.0) -> torch.Tensor:
        values = torch.from_numpy(factor * rng.standard_normal((1, rows, 1, 128))).bfloat16()
        return values[0] if spec.packed_q else values

    q, k, v = drawn(ROWS, 20.0), drawn(KEYS), drawn(KEYS)
    out, lse = torch.zeros_like(q), torch.zeros((1, ROWS) if spec.packed_q else (1, 1, ROWS))
    offsets = [
        torch.tensor([0, n], dtype=torch.int32) if spec.packed_q else None for n in (ROWS, KEYS)
    ]
    sink = torch.zeros(1) if spec.sink else None
    arguments = (q, k, v, out, lse, 128**-0.5, None, None, None, ROWS, sink, *offsets, None,
                 None, None, 1)  # fmt: skip
    return capture(name, lambda session: session.call(compiled, arguments, {}))


def main() -> None:
    """Run everything, print it, write the result file."""
    options = parse_output(__doc__ or "", "forward_faults")
    report = report_on([forward_kernel(name) for name in SPECS])
    write_record(options.output, report, PACKAGES)


if __name__ == "__main__":
    main()
