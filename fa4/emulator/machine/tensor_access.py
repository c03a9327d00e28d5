"""The tensor memory and the tensor pipe that a CTA, or its pair, works with."""

from __future__ import annotations

import numpy as np

from fa4.emulator.checks.clocks import actor_id
from fa4.emulator.checks.conflict import Access
from fa4.emulator.machine.checks import record_tensor
from fa4.emulator.machine.issuers import Issuers, PipeThread
from fa4.emulator.machine.shadows import WRITE, Touch
from fa4.emulator.machine.state import Cta, Warp
from fa4.emulator.machine.tensor import TensorGroup, TensorMemory, granules_of
from fa4.emulator.tcgen05.errors import TmemError
from fa4.emulator.tcgen05.tmem import LANES


def group_of(cta: Cta, size: int) -> TensorGroup:
    """The group that a CTA belongs to under .cta_group::size. Raises TmemError if there is none."""
    ranks = (cta.rank,) if size == 1 else (cta.rank & ~1, cta.rank | 1)
    cluster = cta.cluster
    if ranks[-1] >= cluster.size:
        raise TmemError(
            f"cta_group::2 in CTA rank {cta.rank} of a cluster of {cluster.size}: there is no "
            "peer CTA"
        )
    leader = cluster.ctas[ranks[0]]
    group = leader.tensor_groups.get(size)
    if group is None:
        issuers = Issuers(actor_id(cluster.rows.pipe(leader.rank)))
        ctas = {rank: cluster.ctas[rank].index for rank in ranks}
        group = leader.tensor_groups[size] = TensorGroup(ctas, leader.pipe_actor, issuers)
    return group


def members_of(cta: Cta, group: TensorGroup) -> list[Cta]:
    """The CTAs of a group that `cta` belongs to."""
    return [cta.cluster.ctas[rank] for rank in group.ctas]


def tensor_memory(cta: Cta, cta_group: int | None = None) -> TensorMemory:
    """The tensor memory of a CTA that has allocated some.

    Raises TmemError if it has not, or if it allocated with another cta_group.
    """
    tensor = cta.tensor
    if tensor is None:
        raise TmemError(f"uses tensor memory of CTA {cta.index}, which has allocated none")
    if cta_group is not None and cta_group != len(tensor.group.ctas):
        raise TmemError(
            f"cta_group::{cta_group} after tcgen05.alloc with cta_group::{len(tensor.group.ctas)}: "
            "all tcgen05 instructions of a kernel must have the same"
        )
    return tensor


def make_tensor_memory(cta: Cta, group: TensorGroup, line: int) -> TensorMemory:
    """The tensor memory of a CTA from its first tcgen05.alloc on, which is at this PTX line."""
    shadow = cta.machine.shadows.of_tmem(cta.cluster.rows.count)
    cta.tensor = group.memories[cta.rank] = TensorMemory(shadow, group, line)
    return cta.tensor


def pipe_thread(warp: Warp, lane: int) -> PipeThread:
    """A thread as the issuers of a tensor pipe see it."""
    return PipeThread(warp.row, lane, warp.name, warp.clock, warp.fences)


def record_free(warp: Warp, lane: int, first: int, columns: int, how: Access) -> None:
    """Deallocation counts as a write: whatever still uses the columns must be ordered before."""
    granules = granules_of(np.arange(LANES), np.arange(first, first + columns))
    record_tensor(warp.cta, granules, Touch(warp.clock, how, WRITE, lane), warp)
