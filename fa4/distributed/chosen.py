"""`method="auto"`: the method that the simulator finds fastest, the same on every rank.

Asked is what all ranks know: the call, the layout, the GPU and how many of the group share a host.
Where the GPU is none that `fa4.sim` knows (a CPU, say), or nothing is simulated for it, a rule
decides: halo for a window, all_gather for the exact order, else ring.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from fa4.distributed.forecast import PassForecast, forecast, make_model, own_fabric
from fa4.distributed.methods import check_spec
from fa4.distributed.plan import Spec
from fa4.sim.links import Fabric

# In the order in which they are preferred where times are equal.
CANDIDATES = ("ring", "all_gather", "halo", "ulysses", "ring+ulysses")
MOST_GATHERED = 0.1  # of HBM, that gathered keys may take
CLEARLY = 0.98  # of the rule's time: what is hardly faster is not taken


@dataclass(frozen=True)
class GroupPlace:
    """Where a group runs: a machine of `fa4 machines`, "" if it is none, hosts and transport."""

    machine: str
    nodes: int
    transport: str


def known_machine(device_name: str) -> str:
    """The machine of a GPU's name, such as "NVIDIA H200"; "" for one that is not known."""
    from fa4.hardware import GPUS

    words = device_name.lower().replace("-", " ").split()
    return next((name for name in GPUS if name in words), "")


def hosts_of(ranks: int) -> int:
    """Hosts of a group by torchrun's LOCAL_WORLD_SIZE; one where that does not say."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    each = int(local) if local.isdecimal() and int(local) else ranks
    return ranks // each if each <= ranks and ranks % each == 0 else 1


def rule(spec: Spec) -> str:
    """Without a simulator."""
    if spec.tile:
        return "all_gather"
    return "halo" if spec.mask.left is not None else "ring"


def candidates(spec: Spec, hbm_bytes: float = float("inf")) -> Iterator[Spec]:
    """Methods that fit a spec of method ring, its layout kept; the rule's first."""
    names = dict.fromkeys((rule(spec), *CANDIDATES))
    for name in names:
        if spec.tile and name not in ("all_gather", "halo"):
            continue
        if name == "halo" and spec.mask.left is None:
            continue
        degrees = [1]
        if name == "ring+ulysses":
            degrees = [x for x in range(2, spec.ranks) if spec.ranks % x == 0]
        for degree in degrees:
            try:
                found = check_spec(replace(spec, method=name, degree=degree))
            except ValueError:
                continue
            gathered = found.sizes.element_bytes("kv") * found.sizes.heads_k * found.sizes.batch
            if name == "all_gather" and gathered * spec.rows.seqlen > MOST_GATHERED * hbm_bytes:
                continue
            yield found


def rank_methods(spec: Spec, place: GroupPlace, fabric: Fabric | None = None) -> list[PassForecast]:
    """Forecasts of all that fit, the fastest first. ValueError for a machine that is not known."""
    from fa4.sim.machine import find_machine

    fabric = fabric or own_fabric(
        spec.ranks, place.machine, None, place.nodes, "infiniband50", place.transport
    )
    model = make_model(spec.sizes, place.machine, fabric)
    hbm_bytes = find_machine(place.machine).gpu.hbm_bytes
    found = [forecast(one, model) for one in candidates(spec, hbm_bytes)]
    return sorted(found, key=lambda x: x.seconds)


@lru_cache(maxsize=256)
def choose(spec: Spec, place: GroupPlace) -> Spec:
    """The spec of the method to take."""
    fallback = check_spec(replace(spec, method=rule(spec), degree=1))
    if not place.machine or spec.ranks == 1 or spec.sizes.item_bytes > 2:
        return fallback
    try:
        found = rank_methods(spec, place)
    except (ValueError, ImportError):  # no kernel of these sizes is simulated
        return fallback
    usual = next((x for x in found if x.spec == fallback), found[0])
    return found[0].spec if found[0].seconds < CLEARLY * usual.seconds else usual.spec
