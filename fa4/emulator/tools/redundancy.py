"""What orders what in a run, in a form that two runs of almost the same kernel can be compared in.

    before, after = Orderings(), Orderings()
    run([launch], memory, Options(events=before))
    run([replace(launch, ptx=without_one_barrier)], memory, Options(events=after))
    print("redundant" if before.same_as(after) else "orders something")

An event is a memory access, an operation of an mbarrier or the start of an asynchronous operation;
waits, barriers and fences are none, they only order events. For each event the vector clock of its
warp tells which earlier events happened before it; those of them count that touch a kind of memory
that the event touches, too (`touched`): whether one has happened before that touches another cannot
matter. An operation is what touches memory, not the instruction that starts it. Clocks count
epochs, which depend on how much synchronisation there is; here they are translated into numbers of
events. If two runs agree for all events, and in what every CTA knows of others' work when it exits,
then what one has more of waits, barriers and fences orders nothing: in both programs the same pairs
of conflicting accesses are ordered, in all executions that take the same branches. Whether waits
meet the phase that they mean is another question, which a run answers (`fa4.emulator.checks`).
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
from fa4.emulator.tools.touched import EVERYTHING, KINDS, Touched, touched
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
# What a clock says, by the kind of memory that those who know it would have to touch to mind; the
# last: of operations that may touch any kind.
Known = tuple[tuple[Touched, int], ...]


class Orderings(RunEvents):
    """A recorder (`Options.events`) of what happened before each event of a run."""

    def __init__(self) -> None:
        # By cluster and row of a warp:
        self._order: dict[tuple[Place, int], list[tuple[Any, ...]]] = {}
        # Of each lane's events, those that touch a kind of memory:
        self._epochs: dict[tuple[Place, int, Touched], list[list[int]]] = {}
        self._epoch: dict[tuple[Place, int], int] = {}  # of the next event
        self._warps: dict[tuple[Place, int], Warp] = {}
        self._translated: dict[tuple[Place, int], tuple[bytes, Known]] = {}
        # By number of a cluster, which differs from run to run:
        self._clusters: dict[int, Cluster] = {}
        self._translated_foreign: dict[int, tuple[bytes, Known]] = {}
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
        by_threads, at_all = touched(instruction)
        # Nothing before the first use of its bytes can conflict with it.
        fresh = self._only_makes_barriers(warp.cta)
        known = 0 if fresh else self._known(warp, fragment.mask, at_all)
        events.append((instruction.line, fragment.mask, known))
        lanes = lanes_of(fragment.mask).tolist()
        for kind in KINDS:
            if kind & by_threads:
                by_lane = self._epochs.setdefault((*me, kind), [[] for _ in range(LANES)])
                for lane in lanes:
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

    def _known(self, warp: Warp, mask: int, kinds: Touched) -> int:
        """A hash of what a warp knows of some kinds of memory, the same in all runs where it is.

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
            cached = self._translated[me] = raw, self._translate(cluster, known)
        others = [self._foreign(number, theirs, kinds) for number, theirs in knowledge.foreign]
        return hash((_of_kinds(cached[1], kinds), *others))

    def _foreign(self, number: int, known: Any, kinds: Touched) -> tuple[Any, ...]:
        """What is known of another cluster, of this launch or of one that is over."""
        cluster = self._clusters.get(number)
        if cluster is None:
            return number, known.tobytes()
        raw = known.tobytes()
        cached = self._translated_foreign.get(number)
        if cached is None or cached[0] != raw:
            cached = self._translated_foreign[number] = raw, self._translate(cluster, known)
        return _place(cluster), _of_kinds(cached[1], kinds)

    def _translate(self, cluster: Cluster, known: Any) -> Known:
        """Numbers of events instead of epochs, names of operations instead of ids."""
        rows, warps = cluster.rows, cluster.size * cluster.grid.warp_count
        pipes, pools = warps * LANES, rows.pool(0) * LANES
        streams, products = rows.stream(0, 0) * LANES, rows.products(0, 0) * LANES
        handed = rows.handed_id(0, 0)
        by_kind: dict[Touched, list[Any]] = {kind: [] for kind in (*KINDS, Touched.OPERANDS)}
        others: list[Any] = []
        for column in (SEEN, FENCED):
            epochs = known[column]
            for row in np.flatnonzero(epochs[:pipes].reshape(warps, LANES).any(axis=1)).tolist():
                lanes = epochs[row * LANES : (row + 1) * LANES].tolist()
                for kind in KINDS:
                    by_lane = self._epochs.get((_place(cluster), row, kind), [])
                    counts = tuple(map(bisect_right, by_lane, lanes))
                    if any(counts):
                        by_kind[kind].append((column, row, counts))
            of_pipes = epochs[pipes:handed:LANES].tobytes()
            by_kind[Touched.SHARED].append(of_pipes)
            by_kind[Touched.TENSOR] += [of_pipes, epochs[streams:products].tobytes()]
            by_kind[Touched.OPERANDS].append(epochs[products:].tobytes())
            others.append(frozenset(self._finished(cluster, epochs[pools:streams])))
        hashes = [(kind, hash(tuple(parts))) for kind, parts in by_kind.items()]
        return (*hashes, (EVERYTHING, hash(tuple(others))))

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


def _of_kinds(known: Known, kinds: Touched) -> tuple[int, ...]:
    """What touches one of these kinds."""
    return tuple(told for kind, told in known if kind & kinds)


def _place(cluster: Cluster) -> Place:
    return cluster.grid.index, cluster.index
