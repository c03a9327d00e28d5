"""Which step of a hand-over of tensor memory is not there (PTX ISA 9.7.16.6.4), for reports.

An operation has to be complete: tcgen05.wait for loads and stores, tcgen05.commit and a wait for
its mbarrier for what the tensor pipe does. Then each warp between passes it on, with
tcgen05.fence::before_thread_sync and an arrival, or with a release; and the next takes it over,
with a relaxed wait and tcgen05.fence::after_thread_sync, or by an acquire.
"""

from __future__ import annotations

from fa4.emulator.checks.conflict import Conflict
from fa4.emulator.machine.state import Cluster, Warp
from fa4.emulator.warp_lanes import LANES

BEFORE, AFTER = "tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync"


def missing_step(conflict: Conflict, warp: Warp) -> str:
    """What is missing between the earlier access and that of `warp`; empty if it cannot be told."""
    cluster, identity, epoch = warp.cta.cluster, conflict.other_id, conflict.other_epoch
    rows, row = cluster.rows, conflict.other_id // LANES
    if conflict.other_cluster >= 0 or conflict.other_id < 0:
        return ""
    if rows.pipe(0) <= row < rows.pipe(cluster.size):
        if cluster.ctas[row - rows.pipe(0)].pipe_actor.committed < epoch:
            return "no tcgen05.commit follows it"
    elif rows.stream(0, 0) <= row < rows.products(0, 0):
        rank, index, what = rows.stream_of(identity)
        owner = cluster.ctas[rank].warps[index]
        stream = owner.tmem_storing if what == "tcgen05.st" else owner.tmem_loading
        if stream.actors.awaited < epoch:
            return f"{owner.name} has executed no {what.replace('.', '.wait::')} behind it"
    else:
        return ""
    return _hand_over(cluster, warp, identity, epoch)


def _knows(warp: Warp, identity: int, epoch: int) -> bool:
    return bool(warp.clock.knowledge.seen[identity] >= epoch)


def _has_heard(warp: Warp, identity: int, epoch: int) -> bool:
    pending = warp.fences.pending
    return pending is not None and bool(pending.seen[identity] >= epoch)


def _hand_over(cluster: Cluster, warp: Warp, identity: int, epoch: int) -> str:
    """The first step that is missing on the way of a complete operation to `warp`."""
    if _has_heard(warp, identity, epoch):
        return f"{warp.name} has executed no {AFTER} since its relaxed wait"
    others = [w for cta in cluster.ctas for w in cta.warps if w is not warp]
    holders = [w for w in others if _knows(w, identity, epoch)]
    if not holders:
        for other in others:
            if _has_heard(other, identity, epoch):
                return f"{other.name} has executed no {AFTER} since its relaxed wait"
        return f"{warp.name} has not waited for the mbarrier of its tcgen05.commit"
    for holder in holders:
        published = holder.fences.published
        if published is not None and published.seen[identity] >= epoch:
            return f"{warp.name} has waited for nothing behind the {BEFORE} of {holder.name}"
    return (
        f"{holders[0].name} has executed no {BEFORE} since, and {warp.name} has taken over no "
        "release of it"
    )
