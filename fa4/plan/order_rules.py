"""The rule that two accesses to the same memory are ordered by signals, whatever the timing.

The roles of a CTA, or of both CTAs of a pair, are replayed with what each of them knows to have
ended: an arrival tells what its role knows, one after asynchronous work that this work has ended,
and a wait is told what all arrivals of its phase tell. An access must know of every earlier access
to the same columns or bytes, unless both only read.

- A warpgroup knows its own work; another one of its role only after a barrier among them (`Sync`)
  or a signal. In tensor memory a thread reaches its own lane, so that within a warpgroup each
  thread orders its accesses itself; a role's threads share out bytes of shared memory likewise.
- Asynchronous work begins after its issue. Products of one issuer run one after the other, and a
  commit is for all of them, as is an arrival after stores; one after loads for those since the
  arrival before.
- In a pair the leader's products use both CTAs' memory and its commits reach both; loads for it and
  `remote` arrivals come from both; a dsmem copy writes the other CTA's memory, and completes there.

What of a ring of uneven slots lies over another slot is not seen: its slots count as apart.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa4.hardware import Gpu
from fa4.plan.ordering import AccessReplay
from fa4.plan.phase_rules import REPLAYED
from fa4.plan.schema import PipelinePlan

Broken = Iterator[tuple[str, str]]


def ordered_accesses(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """Accesses to the same memory of which one writes are ordered by signals."""
    deepest = max((signal.stages for signal in plan.signals), default=1)
    found: dict[tuple[str, ...], str] = {}
    several = REPLAYED if plan.persistent else tuple((total,) for total in (1, 2, 3, 4))
    for totals in (*several, (deepest + 1,)):
        try:
            replay = AccessReplay(plan, totals)
        except IndexError:
            yield "rings", f"with tiles of {totals} a tile is read that no load brings"
            return
        replay.run()
        stuck = replay.stuck()
        if stuck is not None:
            yield stuck, f"never ends, tiles of {totals} in all CTAs of a cluster"
            return
        for key, message in replay.found.items():
            found.setdefault(key, message)
    for (subject, *_), message in found.items():
        yield subject, message
