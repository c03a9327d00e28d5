"""The simulator's shares of time beside the counters of the same launches.

    python -m lab.hardware.hopper_counters.simulate RESULT.json [SHARES.json]

RESULT.json: what `compare` wrote of the package's kernels. A row per kernel: measured and simulated
percent of the time that the tensor core works, that the producer waits for free buffers, and that a
consumer waits for data, products or its turn. SHARES.json: the tensor core's, for `compare`. The
exit status is 1 if a share is further off than `compare` allows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fa4.config import Problem
from fa4.designs.tiles import forward_tiles
from fa4.plan.schema import Loop, Wait, walk
from fa4.plan.warpgroup import warpgroup_plan
from fa4.sim.machine import find_machine
from fa4.sim.predict import Prediction, predict
from fa4.sm90.forward.spec import WarpgroupSpec
from lab.hardware.hopper_counters.compare import POINTS

MACHINE = "h200"
# ncu's reasons for it: warps that look at an mbarrier (NANOSLEEP.SYNCS) are held by the long
# scoreboard, those whose products are not done (WARPGROUP.DEPBAR) or whose turn it is not by a
# barrier.
SIGNALS: Mapping[str, tuple[str, ...]] = {
    "producer": ("long_sb",),
    "consumer": ("long_sb", "barrier"),
}


def prediction(given: Mapping[str, Any]) -> Prediction:
    """Of a configuration's launch. Raises ValueError if its pipeline does not fit the machine."""
    spec, seqlen, heads = WarpgroupSpec(**given["spec"]), given["seqlen"], given["heads"]
    problem = Problem(
        batch=given["batch"], seqlen_q=seqlen, seqlen_k=seqlen, heads_q=heads, heads_k=heads,
        head_dim=spec.head_dim, head_dim_v=spec.head_dim_v, causal=spec.causal,
    )  # fmt: skip
    return predict(problem, spec.pipeline, find_machine(MACHINE))


def passed_barriers(found: Prediction, spec: WarpgroupSpec) -> dict[str, float]:
    """Of each role: cycles of looking at mbarriers, of an SM; ncu's waits contain them."""
    machine = find_machine(MACHINE)
    plan = warpgroup_plan(spec.pipeline, machine.gpu)
    barriers = {signal.name for signal in plan.signals if signal.kind == "mbarrier"}
    steps = forward_tiles(found.problem, spec.pipeline).trips[:, 0].sum() / machine.gpu.sm_count
    looks = {
        role.name: sum(isinstance(step, Wait) and step.signal in barriers for step in walk(loop))
        for role in plan.roles
        for loop in [[step for step in role.program if isinstance(step, Loop)][-1].body]
    }
    return {role: n * steps * machine.costs.mbarrier_wait_cycles for role, n in looks.items()}


def simulated(given: Mapping[str, Any]) -> dict[str, float]:
    """Percent of the time that an average SM has a CTA: of it, its producer and a mean consumer.

    given: a configuration.
    """
    found, spec = prediction(given), WarpgroupSpec(**given["spec"])
    percent = 100 / (1.0 - found.imbalance)  # ncu counts active cycles, and samples resident warps
    looks = passed_barriers(found, spec)
    waits = {
        role: percent * (sum(stalls.values()) + looks[role] / found.cycles)
        for role, stalls in found.role_stalls.items()
    }
    consumers = [share for role, share in waits.items() if role.startswith("consumer")]
    return {
        "tensor_percent": percent * found.unit_busy["tensor"],
        "producer_waits_percent": waits["load"],
        "consumer_waits_percent": sum(consumers) / len(consumers),
    }


def measured(kernel: Mapping[str, Any]) -> dict[str, float]:
    """The same of a kernel of the result file."""
    return {"tensor_percent": kernel["counters"]["tensor_percent"]} | {
        f"{role}_waits_percent": sum(
            kernel["roles"][role]["waits_percent"].get(reason, 0.0) for reason in reasons
        )
        for role, reasons in SIGNALS.items()
    }


def traffic(kernel: Mapping[str, Any], found: Prediction) -> dict[str, tuple[float, float]]:
    """Measured and simulated: wavefronts of shared memory, bytes of device memory, bytes of L2.

    Simulated bytes of L2 are those of bulk copies, each as often as an SM asks for it.
    """
    machine, counted = find_machine(MACHINE), kernel["counters"]
    sms = machine.gpu.sm_count
    memory_seconds = sum(kernel.hbm_seconds for kernel in found.kernels)
    return {
        "shared_wavefronts": (
            counted["shared_wavefronts"], found.unit_busy["smem"] * found.cycles * sms,
        ),
        "dram_bytes": (
            counted["dram_bytes"],
            memory_seconds * machine.costs.hbm_efficiency * machine.gpu.hbm_bytes_per_s,
        ),
        "l2_bytes": (
            counted["l2_bytes"], counted["tma_read_bytes"] + counted["tma_write_bytes"],
        ),
    }  # fmt: skip


def apart(one: Mapping[str, float], other: Mapping[str, float]) -> list[str]:
    """Names of the shares that are further apart than `POINTS`."""
    return [name for name in one if abs(one[name] - other[name]) > POINTS]


def main() -> int:
    """Prints the table; 1 if a share is too far off."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("shares", type=Path, nargs="?")
    arguments = parser.parse_args()
    shares, off = [], 0
    for kernel in json.loads(arguments.result.read_text(encoding="utf-8"))["kernels"]:
        there, here = measured(kernel), simulated(kernel["configuration"])
        off += len(apart(there, here))
        shares.append({"tensor_percent": round(here["tensor_percent"], 2)})
        cells = (f"{name} {there[name]:.1f}/{here[name]:.1f}" for name in there)
        print(kernel["configuration"]["spec"], *cells, f"off: {apart(there, here)}", sep="  ")
    if arguments.shares:
        arguments.shares.write_text(json.dumps(shares, indent=1) + "\n", encoding="utf-8")
    print(f"{off} of {3 * len(shares)} shares are off by more than {POINTS:g} points")
    return int(bool(off))


if __name__ == "__main__":
    sys.exit(main())
