"""Which planted synchronisation faults the emulator notices in the forward kernel with halves.

As forward_faults.py, on a pair of CTAs without a mask and on one CTA under a causal mask. Each
works on two work tiles of three KV tiles.
Usage: python -m lab.benchmarks.halves_faults [--output FILE]
"""

from __future__ import annotations

from fa4.compiled.forward import compile_halves
from fa4.compiled.variants import tuned_halves_spec
from lab.benchmarks.common import parse_output, write_record
from lab.benchmarks.emulated_kernels import Kernel
from lab.benchmarks.faults import PACKAGES, report_on
from lab.benchmarks.forward_faults import launched

# Features, and query rows of two work tiles.
CASES = {
    "halves, pair, d128": ({"cta_group": 2}, 600),
    "halves, causal d128": ({"cta_group": 1, "causal": True}, 400),
}


def halves_kernel(name: str) -> Kernel:
    """One of `CASES`."""
    features, rows = CASES[name]
    spec = tuned_halves_spec(128, 128, **features)
    return launched(name, spec, compile_halves(spec), rows, spec.cta_group)


def main() -> None:
    """Run everything, print it, write the result file."""
    options = parse_output(__doc__ or "", "halves_faults")
    report = report_on([halves_kernel(name) for name in CASES])
    write_record(options.output, report, PACKAGES)


if __name__ == "__main__":
    main()
