"""What orders what in a run, in a form that two runs of almost the same kernel can be compared in.

    before, after = Orderings(), Orderings()
    run([launch], memory, Options(events=before))
    run([replace(launch, ptx=without_one_barrier)], memory, Options(events=after))
    print("redundant" if before.same_as(after) else "orders something")

An event is a memory access, an operation of an mbarrier or the start of an asynchronous operation;
waits, barriers and fences are none, they only order events. For each event the vector clock of its
warp tells which earlier events happened before it. Clocks count epochs, which depend on how much
synchronisation there is; here they are translated into numbers of events. If two runs agree for all
events, and in what every CTA knows of others' work when it exits, then what one has more of waits,
barriers and fences orders nothing: both programs have the same happens-before, in all executions
that take the same branches.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np

from fa4.emulator.checks.clocks import FENCED, SEEN
from fa4.emulator.machine.actor_rows import POOL_ROWS
from fa4.emulator.machine.events import RunEvents
from fa4.emulator.machine.mbarrier import MBarrier
from fa4.emulator.machine.state import Cluster, Cta, Fragment, Warp
from fa4.emulator.translate.program import Step
from fa4.emulator.warp_lanes import LANES, lanes_of

# Handled instructions that are no events, by prefix of their opcode: they order, or touch nothing
# that a thread or a unit could race for.
_NO_EVENTS = (
    "bar.", "barrier.", "fence", "membar", "griddepcontrol", "mbarrier.try_wait",
    "mbarrier.test_wait", "tcgen05.wait", "tcgen05.fence", "tcgen05.relinquish",
    "cp.async.bulk.commit_group", "cp.async.bulk.wait_group", "cp.async.commit_group",
    "cp.async.wait", "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group",
    "nanosleep", "setmaxnreg", "prefetch", "ld.param",
)  # fmt: skip
_POOL_IDS = POOL_ROWS * LANES
Name = tuple[int, int, int]  # an operation: warp row, number of the event that began it, which
Place = tuple[int, int]  # a cluster: number of the grid in the run, index of the cluster


class Orderings(RunEvents):
    """A recorder (`Options.events`) of what happened before each event of a run."""

    def __init__(self) -> None:
        # By cluster and row of a warp:
        self._order: dict[tuple[Place, int], list[tuple[Any, ...]]] = {}
        self._epochs: dict[tuple[Place, int], list[list[int]]] = {}  # of each lane's events
        self._epoch: dict[tuple[Place, int], int] = {}  # of the next event
        self._warps: dict[tuple[Place, int], Warp] = {}
        self._translated: dict[tuple[Place, int], tuple[bytes, int]] = {}
        # By number of a cluster, which differs from run to run:
        self._clusters: dict[int, Cluster] = {}
        self._translated_foreign: dict[int, tuple[bytes, int]] = {}
        # By cluster and rank of a CTA:
        self._operations: dict[tuple[Place, int], list[Name]] = {}
        self._barriers: dict[tuple[Place, int], dict[int, MBarrier]] = {}

    def same_as(self, other: Orderings) -> bool:
        """Whether both runs had the same events, and the same ones happened before each."""
        return self._order == other._order and self._exits() == other._exits()

    # Called by the machine.

    def executed(self, fragment: Fragment, step: Step, outcome: Any, tick: int) -> None:
        """A handler ran, perhaps not for the last time if it returned a wait."""
        warp, instruction = fragment.warp, step.instruction
        me = _place(warp.cta.cluster), warp.row
        self._warps.setdefault(me, warp)
        self._clusters.setdefault(warp.cta.cluster.number, warp.cta.cluster)
        epoch = self._epoch.get(me, 1)
        self._epoch[me] = warp.clock.epoch
        if outcome is not None or instruction.opcode.startswith(_NO_EVENTS):
            return
        events = self._order.setdefault(me, [])
        self._note_operations(warp, len(events))
        # Nothing before the first use of its bytes can conflict with it.
        known = 0 if self._only_makes_barriers(warp.cta) else self._known(warp, fragment.mask)
        events.append((instruction.line, fragment.mask, known))
        by_lane = self._epochs.setdefault(me, [[] for _ in range(LANES)])
        for lane in lanes_of(fragment.mask).tolist():
            by_lane[lane].append(epoch)

    # Translation.

    def _only_makes_barriers(self, cta: Cta) -> bool:
        """Whether mbarriers have appeared in a CTA where there were none before."""
        known = self._barriers.setdefault((_place(cta.cluster), cta.rank), {})
        made = [at for at, barrier in cta.mbarriers.items() if known.get(at) is not barrier]
        fresh = bool(made) and not any(at in known for at in made)
        known.update((at, cta.mbarriers[at]) for at in made)
        return fresh

    def _note_operations(self, warp: Warp, event: int) -> None:
        """Names the operations that an event has started in the pools of the cluster."""
        cluster = warp.cta.cluster
        for cta in cluster.ctas:
            names = self._operations.setdefault((_place(cluster), cta.rank), [])
            names += [(warp.row, event, which) for which in range(cta.pool.begun - len(names))]

    def _known(self, warp: Warp, mask: int) -> int:
        """A hash of what a warp knows, the same in all runs where it knows the same.

        mask: the lanes of the event. What a lane did itself, it knows anyway.
        """
        cluster, knowledge = warp.cta.cluster, warp.clock.knowledge
        known = knowledge.known
        if mask & (mask - 1) == 0:
            known = known.copy()
            known[:, warp.row * LANES + mask.bit_length() - 1] = 0
        me, raw = (_place(cluster), warp.row), known.tobytes()
        cached = self._translated.get(me)
        if cached is None or cached[0] != raw:
            cached = self._translated[me] = raw, hash(self._translate(cluster, known))
        others = [self._foreign(number, theirs) for number, theirs in knowledge.foreign]
        return hash((cached[1], *others)) if others else cached[1]

    def _foreign(self, number: int, known: Any) -> tuple[Any, ...]:
        """What is known of another cluster, of this launch or of one that is over."""
        cluster = self._clusters.get(number)
        if cluster is None:
            return number, known.tobytes()
        raw = known.tobytes()
        cached = self._translated_foreign.get(number)
        if cached is None or cached[0] != raw:
            translated = hash(self._translate(cluster, known))
            cached = self._translated_foreign[number] = raw, translated
        return _place(cluster), cached[1]

    def _translate(self, cluster: Cluster, known: Any) -> tuple[Any, ...]:
        """Numbers of events instead of epochs, names of operations instead of ids."""
        warps = cluster.size * cluster.grid.warp_count
        pools = cluster.rows.pool(0) * LANES
        rest = pools + cluster.size * _POOL_IDS
        handed = cluster.rows.handed_id(0, 0)
        parts: list[Any] = []
        for column in (SEEN, FENCED):
            epochs = known[column]
            for row in np.flatnonzero(epochs[: warps * LANES].reshape(warps, LANES).any(axis=1)):
                by_lane = self._epochs.get((_place(cluster), int(row)), [])
                lanes = epochs[row * LANES : (row + 1) * LANES].tolist()
                counts = tuple(map(bisect_right, by_lane, lanes))
                if any(counts):
                    parts.append((column, int(row), counts))
            parts.append(epochs[warps * LANES : handed : LANES].tobytes())  # operations of pipes
            parts.append(epochs[rest:].tobytes())
            parts.append(frozenset(self._finished(cluster, epochs[pools:rest])))
        return tuple(parts)

    def _finished(self, cluster: Cluster, epochs: Any) -> list[Name]:
        """The operations whose end is known, by the epochs of the pools' ids."""
        found = []
        for place in np.flatnonzero(epochs).tolist():
            rank, identity = divmod(place, _POOL_IDS)
            names = self._operations[_place(cluster), rank]
            found += names[identity : epochs[place] * _POOL_IDS : _POOL_IDS]
        return found

    def _exits(self) -> dict[tuple[Place, int], tuple[Any, ...]]:
        """What the warps of each CTA know together when they have exited, but of each other."""
        joined: dict[tuple[Place, int], tuple[Cta, Any]] = {}
        for warp in self._warps.values():
            cta, known = warp.cta, warp.clock.knowledge.known
            place = _place(cta.cluster), cta.rank
            before = joined.get(place)
            joined[place] = cta, known if before is None else np.maximum(before[1], known)
        exits = {}
        for place, (cta, known) in joined.items():
            others = known.copy()
            first = cta.rank * cta.warp_count * LANES
            others[:, first : first + cta.warp_count * LANES] = 0
            exits[place] = self._translate(cta.cluster, others)
        return exits


def _place(cluster: Cluster) -> Place:
    return cluster.grid.index, cluster.index
