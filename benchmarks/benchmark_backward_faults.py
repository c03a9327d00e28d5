"""Which planted synchronisation faults the emulator notices in our backward kernel.

As benchmark_faults.py, on two compiled kernels: dense with TMA stores and in any order of sums; and
causal, packed, with plain stores and in a fixed order of sums, which is checked as well
(`ordered_sums`). Two CTAs, each with two query tiles of two heads that share its keys: two terms
are the same sum in either order, so that memory can be compared bit for bit.
Usage: python benchmarks/benchmark_backward_faults.py [--output FILE]
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmark_faults import report_on
from common import parse_output, write_result
from emulated_kernels import Kernel, capture

from fa4.emulator import Options
from fa4.sm100.backward.spec import BackwardSpec

ROWS, KEYS = 200, 250
SPECS: dict[str, dict[str, Any]] = {
    "backward, dense d128": {},
    "backward, packed causal d128, fixed order": {
        "causal": True, "packed_q": True, "packed_k": True, "deterministic": True,
    },
}  # fmt: skip
PATIENCE = 5  # times the steps of the whole kernel: who polls for longer polls for ever


def backward_kernel(name: str) -> Kernel:
    """One of `SPECS`."""
    from fa4.testing import Case
    from tests.sm100.backward_kernel import arguments, compile_gradients, prepare
    from tests.sm100.forward_kernel import make_inputs

    spec = BackwardSpec(head_dim=128, head_dim_v=128, **SPECS[name])
    case = Case(
        layout="packed", lengths=((ROWS, KEYS),), group=2, head_dim=128, head_dim_v=128,
        dtype="bf16", causal=spec.causal,
    )  # fmt: skip
    inputs = make_inputs(spec, case)
    call = arguments(spec, inputs, prepare(spec, inputs))
    compiled = compile_gradients(spec)
    kernel = capture(name, lambda session: session.call(compiled, call, {}))
    steps = kernel.run(Options(schedule="adversarial")).steps
    choices = {"max_steps": PATIENCE * steps}
    if (
        spec.deterministic
    ):  # one CTA after the other, so that how often they poll is always the same
        choices |= {"ordered_sums": True, "resident_clusters": 1, "clusters_limit": 1}
    return replace(kernel, choices=choices)


def main() -> None:
    """Run everything, print it, write the result file."""
    options = parse_output(__doc__ or "", "backward_faults")
    write_result(options.output, report_on([backward_kernel(name) for name in SPECS]))


if __name__ == "__main__":
    main()
