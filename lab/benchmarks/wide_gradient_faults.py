"""Which planted synchronisation faults the emulator notices in our kernels of wide gradients.

As gradient_faults.py, on Hopper's two kernels above head dim 128: that of dK and dV, dense and
causal, and that of dQ with three places for K and, packed, with two. Two heads share their keys.
Usage: python -m lab.benchmarks.wide_gradient_faults [--output FILE] [--only NAME]
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from fa4.emulator import Options
from fa4.sm90.wide.spec import WideBackwardSpec
from lab.benchmarks.backward_faults import PATIENCE, run_campaigns
from lab.benchmarks.emulated_kernels import Kernel, capture

OF_KEYS, OF_QUERIES = range(2)  # in the order of launches


class WideKernel(NamedTuple):
    """Fields of a spec, which of its kernels, and what is different of the call."""

    fields: dict[str, Any]
    number: int
    lengths: tuple[int, int]


SPECS = {
    "wide gradients, dK and dV, (24, 136) causal": WideKernel(
        {"head_dim": 24, "head_dim_v": 136, "causal": True}, OF_KEYS, (260, 130)
    ),
    "wide gradients, dQ, (136, 24), K in three places": WideKernel(
        {"head_dim": 136, "head_dim_v": 24, "causal": True}, OF_QUERIES, (130, 330)
    ),
    "wide gradients, dQ, d208 packed, K in two places": WideKernel(
        {"head_dim": 208, "head_dim_v": 208, "packed_q": True, "packed_k": True}, OF_QUERIES,
        (130, 330),
    ),
}  # fmt: skip


def wide_kernel(name: str) -> Kernel:
    """One of `SPECS`."""
    from fa4.testing import Case
    from tests.sm90.wide_kernel import arguments, compile_gradients
    from tests.sm100.backward_kernel import prepare_stats
    from tests.sm100.forward_kernel import make_inputs

    fields, number, lengths = SPECS[name]
    spec = WideBackwardSpec(**fields)
    case = Case(
        layout="packed", lengths=(lengths,), group=2, head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v, dtype="bf16", causal=spec.causal,
    )  # fmt: skip
    if not spec.packed_q:
        case = Case(
            batch=1, seqlen_q=lengths[0], seqlen_k=lengths[1], heads_k=1, group=2,
            head_dim=spec.head_dim, head_dim_v=spec.head_dim_v, dtype="bf16", causal=spec.causal,
        )  # fmt: skip
    inputs, arch = make_inputs(spec, case), spec.gpu.arch
    stats, _ = prepare_stats(spec, inputs)
    call, compiled = arguments(spec, inputs, stats), compile_gradients(spec, arch)
    kernel = capture(
        name, lambda session: session.call(compiled, call, {}), arch=arch, number=number, of=2
    )
    steps = kernel.run(Options(schedule="adversarial")).steps
    return replace(kernel, choices={"max_steps": PATIENCE * steps})


if __name__ == "__main__":
    run_campaigns(__doc__, "wide_gradient_faults", SPECS, wide_kernel)
