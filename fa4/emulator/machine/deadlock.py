"""Explains why nothing can go on: what every warp waits for, and who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence

from fa4.emulator.machine.mbarrier import MBarrier
from fa4.emulator.machine.state import Cta, Fragment, Grid


def explain(grids: Sequence[Grid], kind: str) -> tuple[str, int, Cta | None, int]:
    """(message, PTX line, CTA, warp) of the first fragment that stands still."""
    stuck: list[Fragment] = []
    for grid in grids:
        for cluster in grid.resident:
            for cta in cluster.ctas:
                for warp in cta.warps:
                    stuck += warp.fragments
    if not stuck:
        return "clusters remain that cannot start", 0, None, -1
    arrivers = _arrivers(grids)
    lines = ["    " + _describe(fragment) for fragment in stuck]
    cycle = _cycle(stuck, arrivers)
    verb = "nothing can go on" if kind == "deadlock" else "warps poll forever"
    text = f"{verb}; {len(stuck)} warp fragment(s) wait:\n" + "\n".join(lines)
    if cycle:
        text += "\n    wait-for cycle: " + " -> ".join(cycle)
    for fragment in stuck:
        who = fragment.warp.name
        for name, line in fragment.warp.uncommitted.values():
            text += f"\n    no tcgen05.commit follows the {name} of {who} (PTX line {line})"
    first = stuck[0]
    return text, first.line, first.warp.cta, first.warp.index


def _describe(fragment: Fragment) -> str:
    warp = fragment.warp
    mask = "" if fragment.mask == warp.threads else f" lanes {fragment.mask:#010x}"
    wait = fragment.wait
    what = wait.describe() if wait is not None else "polls"
    source = warp.program.source_of(fragment.line)
    place = f"PTX line {fragment.line}" + (f", {source}" if source else "")
    return f"{warp.name}{mask}: {what} ({place})"


def _arrivers(grids: Sequence[Grid]) -> dict[MBarrier, set[str]]:
    """Which warps have ever arrived on each mbarrier: those a waiter waits for."""
    found: dict[MBarrier, set[str]] = {}
    for grid in grids:
        for cluster in grid.resident:
            for cta in cluster.ctas:
                for barrier in cta.mbarriers.values():
                    found[barrier] = barrier.arrivers
    return found


def _cycle(stuck: list[Fragment], arrivers: dict[MBarrier, set[str]]) -> list[str]:
    """A cycle among stuck warps: each waits on a barrier on which the next has arrived before."""
    edges: dict[str, set[str]] = {}
    for fragment in stuck:
        on = fragment.wait.on if fragment.wait is not None else None
        if isinstance(on, MBarrier):
            edges.setdefault(fragment.warp.name, set()).update(arrivers.get(on, set()))
    for start in edges:
        path, seen = [start], {start}
        while True:
            following = sorted(n for n in edges.get(path[-1], ()) if n in edges)
            if start in following and len(path) > 1:
                return [*path, start]
            fresh = [n for n in following if n not in seen]
            if not fresh:
                break
            path.append(fresh[0])
            seen.add(fresh[0])
    return []
