"""Bytes through shared memory for each query tile of a backward kernel, as the emulator counts.

    python -m tests.sm100.backward_traffic      writes lab/benchmarks/results/backward_traffic.json

What a KV tile costs once (K and V, dK and dV) is in no difference between two lengths.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from fa4.compiled.build import build as build_cached
from fa4.emulator.host.session import Session
from fa4.emulator.tools.traffic import SharedTraffic
from fa4.kit.units import TILE_ROWS
from fa4.plan.traffic import tile_traffic
from fa4.sm100.backward.spec import BackwardSpec
from fa4.testing import Case
from lab.records import record_path, write_record
from tests.sm100.backward_kernel import BackwardKernel, compile_gradients
from tests.sm100.forward_kernel import KERNELS, make_inputs

RESULT = record_path("backward_traffic")
SHORT, LONG = 2, 4  # query tiles
# Name -> dims and CTAs of a kernel.
KERNELS_COUNTED = {
    "d 64": (64, 64, 1),
    "d 128": (128, 128, 1),
    "d 128, pair": (128, 128, 2),
    "d 192, dv 128, pair": (192, 128, 2),
}
# Cycles of the shared-memory port for a query tile of 128 keys, and what it carries in each.
LIMIT_CYCLES = {"d 128": 3328, "d 128, pair": 2688}
PORT_BYTES = 128
COPIES, STATISTICS = "copies", "loads"  # what the limits do not count


def spec_of(name: str) -> BackwardSpec:
    head_dim, head_dim_v, cta_group = KERNELS_COUNTED[name]
    return BackwardSpec(head_dim=head_dim, head_dim_v=head_dim_v, cta_group=cta_group)


@cache
def kernel(name: str) -> BackwardKernel:
    """The main kernel, compiled once on this machine as long as no source changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FA4_CACHE", "1")
        patch.setenv("FA4_CACHE_DIR", str(KERNELS))
        compiled = build_cached(spec_of(name), compiler=compile_gradients)
        return BackwardKernel(spec_of(name), compiled, Session(None, (), {}))


@cache
def count(name: str, q_tiles: int) -> SharedTraffic:
    """Of a launch with one head and a KV tile for each CTA."""
    run, traffic = kernel(name), SharedTraffic()
    keys = TILE_ROWS * run.spec.cta_group
    case = Case(
        layout="packed", lengths=((q_tiles * TILE_ROWS, keys),), head_dim=run.spec.head_dim,
        head_dim_v=run.spec.head_dim_v, dtype=run.spec.dtype,
    )  # fmt: skip
    run(make_inputs(run.spec, case), events=traffic)
    return traffic


def counted(name: str) -> list[dict[str, int]]:
    """For each CTA, bytes of a query tile by what moves them."""
    few, many = count(name, SHORT), count(name, LONG)
    found = []
    for cta in range(spec_of(name).cta_group):
        before, after = few.of(cta), many.of(cta)
        rows = {kind: (after[kind] - before.get(kind, 0)) // (LONG - SHORT) for kind in after}
        found.append({kind: num_bytes for kind, num_bytes in sorted(rows.items()) if num_bytes})
    return found


def reduced_bytes(name: str) -> list[int]:
    """dQ that each CTA adds into global memory for a query tile, in bytes."""
    kind = "bulk reductions"
    few, many = count(name, SHORT), count(name, LONG)
    ctas = range(spec_of(name).cta_group)
    return [
        (many.by_issuer[cta, kind] - few.by_issuer[cta, kind]) // (LONG - SHORT) for cta in ctas
    ]


def port_bytes(traffic: dict[str, int]) -> int:
    """What the limits count: operands of products, dS, and dQ on its way out."""
    return sum(size for kind, size in traffic.items() if kind not in (COPIES, STATISTICS))


def report() -> dict[str, Any]:
    """Everything as plain data."""
    return {
        name: {
            "planned": tile_traffic(spec_of(name).plan),
            "counted": counted(name),
            "reduced_bytes": reduced_bytes(name),
            "limit_bytes": LIMIT_CYCLES[name] * PORT_BYTES if name in LIMIT_CYCLES else None,
        }
        for name in KERNELS_COUNTED
    }


def main() -> None:
    """Writes the result file."""
    found = report()
    print(json.dumps(found, indent=2))
    write_record(RESULT, found, ("numba", "nvidia-cutlass-dsl"))


if __name__ == "__main__":
    main()
