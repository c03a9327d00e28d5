"""Joins the machine with the happens-before engine: records accesses, reports what conflicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np

from fa4.emulator.checks.clocks import Actor
from fa4.emulator.checks.conflict import (
    SAME_INSTRUCTION_WRITE,
    WRITE_AFTER_WRITE,
    Conflict,
    describe,
)
from fa4.emulator.checks.memory import ShadowMemory
from fa4.emulator.errors import Site
from fa4.emulator.machine.memory import GlobalBuffer
from fa4.emulator.machine.missing_steps import missing_step
from fa4.emulator.machine.names import name_access
from fa4.emulator.machine.shadows import (
    TMEM_COLUMNS,
    TMEM_GROUP_LANES,
    Change,
    Touch,
    element_bytes,
)
from fa4.emulator.machine.state import Cta, RemoteArrival, Warp
from fa4.emulator.machine.unused_reads import IdleRead, conflicts_by_reader, idle_read
from fa4.emulator.warp_lanes import LANES, Array

# What a store that races with another one says beside it.
STORED = {
    Change.VALUES: "",
    Change.ROUNDING: "; the floats are nearly equal: which is kept is undefined",
    Change.NOTHING: "; both store the same",
}


def record_shared(target: Cta, offsets: Array, size_bytes: int, touch: Touch) -> None:
    """Records units of size_bytes at byte offsets of a CTA's shared memory."""
    shadow = target.smem_shadow
    if shadow is not None and len(offsets):
        conflict, start = _record(shadow, offsets, size_bytes, touch)
        if conflict is not None:
            change = Change.VALUES
            if conflict.kind == WRITE_AFTER_WRITE:
                change = _change(*shadow.conflicts(touch.actor, touch.how), touch)
            where = f"shared address {start:#x} of CTA {target.index}"
            _report_stores(conflict, target, where, touch.actor, change)
        if target.cluster.size > 1:
            _note_remote_use(target, touch)


def _note_remote_use(target: Cta, touch: Touch) -> None:
    """Threads of another CTA access the shared memory of this one, which has to live until then."""
    cluster, row = target.cluster, touch.actor.row
    if row >= cluster.rows.pipe(0) or row // target.warp_count == target.rank:
        return
    rank, warp = divmod(row, target.warp_count)
    who = f"{cluster.ctas[rank].index} warp {warp}"
    target.remote_uses[row] = RemoteArrival(
        f"CTA {who}", touch.how.line, touch.actor.epoch, cluster.barrier.phase
    )


def record_tensor(target: Cta, granules: Array, touch: Touch, warp: Warp) -> None:
    """Records accesses to tensor memory by a warp; granule = lane // 16 * 512 + column."""
    if target.tensor is None or target.tensor.shadow is None or not len(granules):
        return
    shadow = target.tensor.shadow
    conflict = getattr(shadow, touch.kind)(granules, touch.lanes, touch.actor, touch.how)
    if conflict is not None:
        group, column = divmod(conflict.granule, TMEM_COLUMNS)
        first = group * TMEM_GROUP_LANES
        place = f"in TMEM column {column}, lanes {first}..{first + TMEM_GROUP_LANES - 1}"
        why = missing_step(conflict, warp)
        where = f"CTA {target.index}" + (f": {why}" if why else "")
        _report(conflict, target, where, touch.actor, place)


def record_buffer(
    cta: Cta, buffer: GlobalBuffer, offsets: Array, size_bytes: int, touch: Touch
) -> None:
    """Records units of size_bytes at byte offsets of a global buffer."""
    machine = cta.machine
    if not machine.shadows.enabled or not len(offsets):
        return
    if buffer.shadow is None:
        buffer.shadow = machine.shadows.of_buffer(buffer.data)
        machine.memory.refresh()
    conflict, _ = _record(buffer.shadow, offsets, size_bytes, touch)
    if conflict is None:
        return
    conflicts, has_more = buffer.shadow.conflicts(touch.actor, touch.how)
    change = _change(conflicts, has_more, touch)
    for one in conflicts_by_reader(conflicts):
        where = f"{buffer.name} byte {one.granule * buffer.shadow.granule_bytes}"
        if one.kind == WRITE_AFTER_WRITE and change is not Change.VALUES:
            _report_stores(one, cta, where, touch.actor, change)
            continue
        read = idle_read(one, cta, buffer.shadow, touch.actor, touch.lanes)
        if read is None or has_more:
            _report(one, cta, where, touch.actor)
            return
        key = one.kind, one.line, one.other_line, id(read.warp), read.lanes
        machine.judgements.setdefault(key, partial(_judge, one, cta, where, touch.actor, read))


def _report_stores(conflict: Conflict, cta: Cta, where: str, actor: Actor, change: Change) -> None:
    """Reports a race with a store, by what it changes: of equal ones each pair of lines once."""
    excuse = "rounding" if change is Change.ROUNDING else ""
    if change is Change.NOTHING:
        pair = conflict.line, conflict.other_line
        told = cta.machine.told_equal_stores
        if pair in told:
            return
        told.add(pair)
        excuse = _of_sizes(conflict, cta, "same-value")
    _report(conflict, cta, where + STORED[change], actor, excuse=excuse)


def _of_sizes(conflict: Conflict, cta: Cta, excuse: str) -> str:
    """The excuse if both accesses are of one size, else its form for two sizes."""
    program, number = cta.grid.program, conflict.other_cluster
    own = number < 0 or 0 <= number - cta.grid.number < cta.grid.cluster_count
    lines = (conflict.line, conflict.other_line) if own else ()
    sizes = {element_bytes(program, line) for line in lines}
    return excuse if len(sizes) == 1 and 0 not in sizes else f"mixed-{excuse}"


def _change(conflicts: Iterable[Conflict], has_more: bool, touch: Touch) -> Change:
    """What a store changes of what it races for with other stores. Whichever of two equal ones is
    last, the memory is the same."""
    lanes = [one.mine for one in conflicts if one.kind == WRITE_AFTER_WRITE]
    if not lanes or touch.idle is None:
        return Change.VALUES
    is_known = isinstance(touch.lanes, np.ndarray) and not has_more
    return touch.idle(np.isin(touch.lanes, lanes) if is_known else slice(None))


def _judge(conflict: Conflict, cta: Cta, where: str, actor: Actor, read: IdleRead) -> None:
    """Reports a race in which what was read may turn out to be used by nobody."""
    if not read.is_unused():
        _report(conflict, cta, where, actor)
        return
    where += "; what was read goes only into stores that the reading threads do not make"
    _report(conflict, cta, where, actor, excuse=_of_sizes(conflict, cta, "unused-read"))


def _record(
    shadow: ShadowMemory, offsets: Array, size_bytes: int, touch: Touch
) -> tuple[Conflict | None, int]:
    granule = shadow.granule_bytes
    unit = (granule, max(size_bytes // granule, 1))
    access = getattr(shadow, touch.kind)
    conflict = access(offsets, touch.lanes, touch.actor, touch.how, unit)
    return conflict, conflict.granule * granule if conflict is not None else 0


def _report(
    conflict: Conflict,
    cta: Cta,
    where: str,
    actor: Actor,
    place: str = "",
    *,
    excuse: str = "",
) -> None:
    if conflict.kind == SAME_INSTRUCTION_WRITE:
        return
    cluster = cta.cluster
    text = describe(conflict, partial(name_access, cta.grid, cluster.number), place)
    owner, warp = cta, -1
    if actor.row < cluster.rows.pipe(0):
        rank, warp = divmod(actor.row, cta.warp_count)
        owner = cluster.ctas[rank]
    kind = "race" if conflict.kind.startswith("race") else conflict.kind
    sites = (
        *_site(conflict.other_id, conflict.other_line, conflict.other_cluster, cta),
        *_site(conflict.my_id, conflict.line, -1, cta),
    )
    owner.report(kind, f"{text}; {where}", conflict.line, warp, excuse=excuse, sites=sites)


def _site(identity: int, line: int, cluster_number: int, cta: Cta) -> tuple[Site, ...]:
    """Where an access was made. cluster_number: -1 is that of the CTA; of others only those of one
    CTA are known, whose warps may be gone."""
    if identity < 0 or not line:
        return ()
    cluster, row = cta.cluster, identity // LANES
    if cluster_number >= 0:
        index = cluster_number - cta.grid.number
        if cluster.size > 1 or not 0 <= index < cta.grid.cluster_count:
            return ()
        return (Site(index, row if row < cta.warp_count else -1, line, 1),)
    if row < cluster.rows.pipe(0):
        rank, warp = divmod(row, cta.warp_count)
        return (cluster.ctas[rank].warps[warp].site(line),)
    return (Site(cta.index, -1, line, 1),)


# Ends.


def check_warp_exit(warp: Warp) -> None:
    """Nothing that a warp started in its registers may still be under way."""
    if warp.tmem_loading.count:
        warp.cta.report(
            "exit",
            "exits while a tcgen05.ld is under way",
            next(iter(warp.tmem_loads.values()), 0),
            warp.index,
        )
    for product in warp.products.under_way:
        text = "exits without a wgmma.wait_group for the group of this wgmma.mma_async"
        warp.cta.report("exit", text, product.line, warp.index)


def check_cta_exit(cta: Cta) -> None:
    """No operation of a CTA may be under way; its tensor memory must be free again."""
    me = cta.cluster.number, cta.index
    under_way = [o for o in cta.machine.operations if (o.cluster, o.cta) == me and not o.harmless]
    if under_way:
        listed = ", ".join(sorted({f"{o.what} (PTX line {o.line})" for o in under_way}))
        text = f"the CTA exits while operations are under way: {listed}"
        cta.report("exit", text, under_way[0].line)
    elif cta.machine.shadows.enabled:
        _check_unawaited(cta)
    if cta.machine.shadows.enabled:
        for remote, what in (
            (cta.remote_arrivals, "arrives at an mbarrier"),
            (cta.remote_uses, "accesses shared memory"),
        ):
            _check_remote(cta, remote, what)
    if cta.tensor is not None and cta.tensor.allocated_columns:
        columns = cta.tensor.allocated_columns
        text = f"the CTA exits without tcgen05.dealloc of {columns} columns"
        cta.report("tmem", text, cta.tensor.line)


def _check_unawaited(cta: Cta) -> None:
    """Shared memory that copies read has to live until then: who issued them must wait for it."""
    for warp in cta.warps:
        for copy in warp.bulk_copies.unawaited():
            text = "reads shared memory, and nothing keeps the CTA from exiting before"
            cta.report("exit", f"a copy of {warp.name} {text}", copy.line, warp.index)
            return


def _check_remote(cta: Cta, remote: Mapping[int, RemoteArrival], what: str) -> None:
    """Other CTAs may use the shared memory of a CTA only while it lives: it has to wait for them.

    A cluster barrier since then will do, even a relaxed one.
    """
    for row, arrival in remote.items():
        own = slice(row * LANES, (row + 1) * LANES)
        known = max(int(warp.clock.knowledge.executed[own].max()) for warp in cta.warps)
        if known < arrival.epoch and arrival.phase == cta.cluster.barrier.phase:
            cta.report(
                "exit",
                f"{arrival.who} {what} of CTA {cta.index}, and nothing keeps "
                "that CTA from exiting before",
                arrival.line,
            )
