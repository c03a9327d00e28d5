"""Which planted synchronisation faults the emulator notices in our Hopper backward kernel.

As backward_faults.py, on two compiled kernels up to head dim 128: dense, with tiles of 128 queries
and in any order of sums; causal, packed, with tiles of 64 and in a fixed order. One CTA draws four
work tiles, so that each place in shared memory has a second one, each with several query tiles of
two heads that share its keys.
Usage: python -m lab.benchmarks.gradient_faults [--output FILE] [--only NAME]
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from fa4.hardware import H200
from fa4.plan.schema import PipelinePlan
from fa4.sm90.backward.spec import WarpgroupBackwardSpec
from lab.benchmarks.backward_faults import captured, run_campaigns
from lab.benchmarks.emulated_kernels import Kernel

KEYS = 500
ONE_SM = replace(H200, sm_count=1)
SPECS: dict[str, dict[str, Any]] = {
    "Hopper gradients, dense d64": {"head_dim": 64, "head_dim_v": 64, "gpu": ONE_SM},
    "Hopper gradients, packed causal d80, fixed order": {
        "head_dim": 80, "head_dim_v": 80, "causal": True, "packed_q": True, "packed_k": True,
        "deterministic": True, "gpu": ONE_SM,
    },
}  # fmt: skip
VALUES_DONE = "wgmma.wait_group.sync.aligned 1;"  # S's wait has no warp barrier behind it
TURNS = "ld.acquire.gpu", "red.release.gpu"  # of the counters of a fixed order of sums
BARRIER, COMMIT, NEAR, WAIT_NEAR = "bar.warp.sync", "wgmma.commit_group", 6, 8
FENCE = "fence.proxy.async.shared::cta"  # the last one is before dV and dK leave
BY_Q = (
    "dO is given back when dV is done; the load warp waits for Q of the same tile before, which is "
    "given back when dK, a later product, is done"
)
BY_DV = "dV and dK are handed over together: who has waited for dV has waited for both"
BY_ONE = "the launch has one CTA: nobody else waits for its turn"
BY_THREADS = "where keys are packed, threads store dV and dK, which no other proxy reads before"


def waits_for(lines: list[str], plan: PipelinePlan, name: str) -> list[int]:
    """Lines of the waits for a signal of a ring, or for its namesake of the other warpgroup.

    mbarriers lie in the plan's order, one behind the other.
    """
    names = [s.name for s in plan.signals for _ in range(s.stages) if s.kind == "mbarrier"]
    inits = [int(x) for line in lines for x in re.findall(r"mbarrier\.init.*\+(\d+)\]", line)]
    offset = inits[0] - 8 + 8 * names.index(name)  # the first one has no offset in its address
    found = []
    for at, line in enumerate(lines):
        address = re.match(rf"\s*add\.s32\s+(%r\d+), %r\d+, {offset};", line)
        if address:
            found += [
                n + 1
                for n in range(at, min(at + WAIT_NEAR, len(lines)))
                if f"try_wait.parity.shared.b64 P1, [{address[1]}]" in lines[n]
            ]
    return found


def reasons(ptx: str, spec: WarpgroupBackwardSpec) -> dict[tuple[str, int], str]:
    """Why some faults change nothing: by kind and line."""
    lines = ptx.split("\n")
    found = {("wait removed", at): BY_DV for at in waits_for(lines, spec.plan, "dk0_full")}
    *steps, _ = (  # the last one is of dQ, beside S of the next work tile
        at
        for at, line in enumerate(lines)
        if VALUES_DONE in line and any(BARRIER in x for x in lines[at + 1 : at + NEAR])
    )
    for at in steps:
        *_, dv, _ = (n for n, x in enumerate(lines[:at]) if COMMIT in x)
        found["wgmma commit removed", dv + 1] = BY_Q
        found |= {(kind, at + 1): BY_Q for kind in ("wgmma wait removed", "one group more left")}
    of_turns = (at for at, x in enumerate(lines) if x.strip().startswith(TURNS))
    found |= {("order within the CTA", at + 1): BY_ONE for at in of_turns}
    if spec.packed_k:
        *_, leaving = (n for n, x in enumerate(lines) if FENCE in x)
        found["proxy fence removed", leaving + 1] = BY_THREADS
    return found


def gradient_kernel(name: str) -> Kernel:
    """One of `SPECS`."""
    spec = WarpgroupBackwardSpec(**SPECS[name])
    kernel = captured(name, spec, KEYS)
    return replace(kernel, why=reasons(kernel.launch.ptx, spec))


if __name__ == "__main__":
    run_campaigns(__doc__, "gradient_faults", SPECS, gradient_kernel)
