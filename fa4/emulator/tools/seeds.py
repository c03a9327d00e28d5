"""Runs the same launches under several seeds: other orders of events on the same data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fa4.emulator.execute import Report, run
from fa4.emulator.machine.launch_record import Allocation, Launch
from fa4.emulator.machine.memory import buffer_at
from fa4.emulator.machine.options import Options
from fa4.emulator.tools.trace import Recorder


@dataclass
class Exploration:
    """What several runs found.

    report, recorder: of the last run, the one with findings if there was one (None: not recorded).
    seeds: those that ran. differing: name of each allocation that a run left with other bytes than
    the first run did, and the first seed that did so. That is no fault where atomics add
    floating-point numbers.
    """

    report: Report
    seeds: list[int] = field(default_factory=list)
    differing: dict[str, int] = field(default_factory=dict)
    recorder: Recorder | None = None


def explore(
    launches: Sequence[Launch],
    allocations: Sequence[Allocation],
    options: Options | None = None,
    seeds: int = 1,
    record: bool = False,
) -> Exploration:
    """Runs seeds options.seed, options.seed + 1, ..., `seeds` of them, until one has findings.

    Style does not count. Every run starts with the memory as it is now, and the last one's results
    stay in it. Findings are returned, not raised. Raises LaunchError for an impossible launch,
    before anything runs.
    """
    options = options or Options()
    written = [a for a in allocations if a.writable and a.size_bytes]
    memories = [buffer_at(a.name, a.address, a.size_bytes, True).data for a in written]
    before = [data.copy() for data in memories] if seeds > 1 else []
    results: list[bytes] = []
    found = Exploration(Report())
    for seed in range(options.seed, options.seed + seeds):
        if found.seeds:
            for data, content in zip(memories, before, strict=True):
                data[:] = content
        found.recorder = Recorder() if record else None
        chosen = replace(options, seed=seed, collect=True, events=found.recorder)
        found.report = run(launches, allocations, chosen)
        found.seeds.append(seed)
        if not found.report.ok:
            break
        if seeds > 1:
            left = [data.tobytes() for data in memories]
            results = results or left
            for allocation, mine, first in zip(written, left, results, strict=True):
                if mine != first:
                    found.differing.setdefault(allocation.name, seed)
    return found
