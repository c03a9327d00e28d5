"""Which planted synchronisation faults the emulator notices in our kernels of wide gradients.

As gradient_faults.py, on Hopper's two kernels above head dim 128: that of dK and dV, dense and
causal, and that of dQ with three places for K and, packed, with two. Two heads share their keys.
Usage: python -m lab.benchmarks.wide_gradient_faults [--output FILE] [--only NAME]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from fa4.emulator import Options
from fa4.plan.schema import PipelinePlan
from fa4.sm90.wide.spec import WideBackwardSpec
from lab.benchmarks.backward_faults import PATIENCE, run_campaigns
from lab.benchmarks.emulated_kernels import Kernel, capture

OF_KEYS, OF_QUERIES = range(2)  # in the order of launches
# Of each ring, which arrivals of the code give back the place of a CTA's last tile: each role has
# one in its loop and one behind it; `values` comes before `keys`.
LAST: Mapping[int, Mapping[str, tuple[int, ...]]] = {
    OF_KEYS: {"q_empty": (1, 3), "do_empty": (1, 3)},
    OF_QUERIES: {"k_empty": (1,)},
}
VALUES_READ = 2  # number of the named barrier
BY_END = "it gives back the place of the CTA's last tile, into which nothing is loaded any more"
FENCE = "fence.proxy.async.shared::cta"  # the last one is before a gradient leaves
BY_THREADS = "where sequences are packed, threads store the gradient, which no other proxy reads"
BY_P = "P of the last tile is there: the product of its S, the last one that reads K, is done"


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


def arrivals_at(lines: list[str], plan: PipelinePlan, name: str) -> list[int]:
    """Lines of the arrivals at the mbarriers of a ring, which lie in the plan's order."""
    names = [s.name for s in plan.signals for _ in range(s.stages) if s.kind == "mbarrier"]
    inits = [int(x) for line in lines for x in re.findall(r"mbarrier\.init.*\+(\d+)\]", line)]
    offset = inits[0] - 8 + 8 * names.index(name)  # the first one has no offset in its address
    arrival = re.compile(rf"\s*mbarrier\.arrive\.shared\.b64 \S+ \[%r\d+\+{offset}\]")
    return [at + 1 for at, line in enumerate(lines) if arrival.match(line)]


def reasons(ptx: str, spec: WideBackwardSpec, number: int) -> dict[tuple[str, int], str]:
    """Why some faults of a kernel of a module change nothing: by kind and line."""
    lines, plan = ptx.split("\n"), (spec.keys_plan, spec.queries_plan)[number]
    first, stop = entry(lines, number), len(lines)
    if number == OF_KEYS:
        stop = entry(lines, OF_QUERIES)
    mine, found = lines[first:stop], {}
    for name, places in LAST[number].items():
        arrivals = arrivals_at(mine, plan, name)
        for kind in ("arrive removed", "arrive twice"):
            found |= {(kind, first + arrivals[place]): BY_END for place in places}
    if number == OF_KEYS:
        read = f"bar.sync {VALUES_READ},"
        waits = (at for at, x in enumerate(mine) if " ".join(x.split()).startswith(read))
        found |= {("barrier removed", first + at + 1): BY_P for at in waits}
    if spec.packed_q and spec.packed_k:
        *_, leaving = (at for at, x in enumerate(mine) if FENCE in x)
        found["proxy fence removed", first + leaving + 1] = BY_THREADS
    return found


def entry(lines: list[str], number: int) -> int:
    """The line, from 0, where a kernel of a module begins."""
    return [at for at, line in enumerate(lines) if ".entry" in line][number]


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
    why = reasons(kernel.launch.ptx, spec, number)
    return replace(kernel, choices={"max_steps": PATIENCE * steps}, why=why)


if __name__ == "__main__":
    run_campaigns(__doc__, "wide_gradient_faults", SPECS, wide_kernel)
