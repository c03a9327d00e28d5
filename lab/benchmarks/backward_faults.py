"""Which planted synchronisation faults the emulator notices in our backward kernel.

As faults.py, on three compiled kernels: dense with TMA stores and in any order of sums;
causal, packed, with plain stores and in a fixed order of sums, which is checked as well
(`ordered_sums`); and a pair of CTAs. Two CTAs, each with two query tiles of two heads that share
its keys: two terms are the same sum in either order, so that memory can be compared bit for bit.
Usage: python -m lab.benchmarks.backward_faults [--output FILE] [--only NAME]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fa4.emulator import Options
from fa4.sm100.backward.spec import BackwardSpec
from lab.benchmarks.common import record_path, write_record
from lab.benchmarks.emulated_kernels import Kernel, capture
from lab.benchmarks.faults import PACKAGES, campaign, show, summary

ROWS, KEYS = 200, 250
SPECS: dict[str, dict[str, Any]] = {
    "backward, dense d128": {},
    "backward, packed causal d128, fixed order": {
        "causal": True, "packed_q": True, "packed_k": True, "deterministic": True,
    },
    "backward, d128 pair": {"cta_group": 2},
}  # fmt: skip
PATIENCE = 5  # times the steps of the whole kernel: who polls for longer polls for ever


def backward_kernel(name: str) -> Kernel:
    """One of `SPECS`."""
    return captured(name, BackwardSpec(head_dim=128, head_dim_v=128, **SPECS[name]))


def captured(name: str, spec: Any, keys: int = KEYS) -> Kernel:
    """The launch of a backward spec's main kernel, Blackwell's or Hopper's; keys: of a sequence."""
    from fa4.testing import Case
    from tests.sm100.backward_kernel import arguments, compile_gradients, prepare
    from tests.sm100.forward_kernel import make_inputs

    case = Case(
        layout="packed", lengths=((ROWS, keys),), group=2, head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v, dtype="bf16", causal=spec.causal,
    )  # fmt: skip
    inputs, arch = make_inputs(spec, case), spec.gpu.arch
    call = arguments(spec, inputs, prepare(spec, inputs))
    compiled = compile_gradients(spec, arch)
    kernel = capture(name, lambda session: session.call(compiled, call, {}), arch=arch)
    steps = kernel.run(Options(schedule="adversarial")).steps
    choices: dict[str, Any] = {"max_steps": PATIENCE * steps}
    if spec.deterministic:  # one CTA after the other, so that all runs poll as often
        choices |= {"ordered_sums": True, "resident_clusters": 1, "clusters_limit": 1}
    return replace(kernel, choices=choices)


def run_campaigns(
    about: str | None, record: str, names: Iterable[str], make: Callable[[str], Kernel]
) -> None:
    """Run every kernel or one, print it, write the result file, which keeps the others."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--output", type=Path, default=record_path(record))
    parser.add_argument("--only", choices=names, help="run this one; keep the file's others")
    options = parser.parse_args()
    kept = kept_results(options.output) if options.only else {}
    for name in [options.only] if options.only else names:
        kept[name] = campaign(make(name))
        show(kept[name])
    report = summary([kept[name] for name in names if name in kept])
    write_record(options.output, report, PACKAGES, whole=not options.only)


def kept_results(path: Path) -> dict[str, dict[str, Any]]:
    """The campaigns of a result file by kernel."""
    return {one["kernel"]: one for one in json.loads(path.read_text())["kernels"]}


if __name__ == "__main__":
    run_campaigns(__doc__, "backward_faults", SPECS, backward_kernel)
