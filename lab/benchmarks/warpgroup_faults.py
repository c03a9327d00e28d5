"""Which planted synchronisation faults the emulator notices in our Hopper forward kernel.

As faults.py, on two compiled kernels under a causal mask: two warpgroups that take turns
at the tensor core, and three that do not. One CTA works on two work tiles.
Usage: python -m lab.benchmarks.warpgroup_faults [--output FILE]
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fa4.compiled.forward import compile_warpgroup
from fa4.sm90.forward.spec import WarpgroupSpec
from lab.benchmarks.common import parse_output, write_record
from lab.benchmarks.emulated_kernels import Kernel, capture
from lab.benchmarks.faults import PACKAGES, report_on

D128 = {"head_dim": 128, "head_dim_v": 128, "causal": True, "scheduler": "snake"}
SPECS: dict[str, dict[str, Any]] = {
    "Hopper, two in turns": {**D128, "tile_n": 128, "consumers": 2, "ping_pong": True},
    "Hopper, three warpgroups": {**D128, "tile_n": 80, "consumers": 3, "ping_pong": False},
}
KV_TILES = 5


def warpgroup_kernel(name: str) -> Kernel:
    """One of `SPECS` on one head, values that make the warpgroups rescale."""
    import torch

    spec = WarpgroupSpec(**SPECS[name])
    compiled = compile_warpgroup(spec)
    rng = np.random.default_rng(0)
    rows, keys = 2 * 64 * spec.consumers - 16, KV_TILES * spec.tile_n - 15

    def drawn(length: int, factor: float = 1.0) -> torch.Tensor:
        return torch.from_numpy(factor * rng.standard_normal((1, length, 1, 128))).bfloat16()

    q, k, v = drawn(rows, 20.0), drawn(keys), drawn(keys)
    out, lse = torch.zeros_like(q), torch.zeros((1, 1, rows))
    arguments = (q, k, v, out, lse, 128**-0.5, None, None, None, rows, None, None, None, None,
                 None, None, 1)  # fmt: skip
    return capture(name, lambda session: session.call(compiled, arguments, {}))


def main() -> None:
    """Run everything, print it, write the result file."""
    options = parse_output(__doc__ or "", "warpgroup_faults")
    report = report_on([warpgroup_kernel(name) for name in SPECS])
    write_record(options.output, report, PACKAGES)


if __name__ == "__main__":
    main()
