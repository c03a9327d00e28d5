"""A witness of a finding: a short list of choices that leads to it, to be kept and replayed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fa4.emulator.errors import LaunchError
from fa4.emulator.execute import run
from fa4.emulator.machine.choices import EventChoice, RecordedOrder, ReplayedOrder
from fa4.emulator.machine.holds import BASES, HeldOrder, Hold
from fa4.emulator.machine.launch_record import Allocation, Launch
from fa4.emulator.machine.options import Options
from fa4.emulator.machine.schedule import make_schedule
from fa4.emulator.orders.kept_memory import kept

VERSION = 1
MOST_RUNS = 64  # of the kernel, to make a list short


@dataclass(frozen=True, kw_only=True)
class Witness:
    """kind, line: of the finding. choices: where the order differs from fifo; gave_up: attempts to
    wait that ended without success. Or holds: what is late in the order `base`."""

    kind: str
    line: int
    choices: tuple[EventChoice, ...] = ()
    gave_up: tuple[int, ...] = ()
    holds: tuple[Hold, ...] = ()
    base: str = "fifo"

    def schedule(self) -> ReplayedOrder | HeldOrder:
        """For one run."""
        if self.holds:
            return HeldOrder(self.holds, self.base)
        return ReplayedOrder(self.choices, self.gave_up)

    def steps(self) -> list[str]:
        """What differs from the base order, in words."""
        gave_up = (f"wait {number} gives up" for number in self.gave_up)
        return [*map(str, self.holds), *map(str, self.choices), *gave_up]

    def text(self) -> str:
        """As a file holds it."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n"


def read_witness(text: str) -> Witness:
    """Reads `Witness.text`. Raises LaunchError for what is none."""
    try:
        document: Any = json.loads(text)
        if document.pop("version") != VERSION:
            raise LaunchError(f"a witness of another version; this reads {VERSION}")
        choices = tuple(EventChoice(*map(int, row)) for row in document["choices"])
        holds = tuple(Hold(*map(int, row)) for row in document.get("holds", ()))
        base = str(document.get("base", "fifo"))
        if base not in BASES:
            raise KeyError(base)
        return Witness(
            kind=str(document["kind"]),
            line=int(document["line"]),
            choices=choices,
            gave_up=tuple(map(int, document["gave_up"])),
            holds=holds,
            base=base,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise LaunchError("no witness: --witness writes one") from None


def find_witness(
    launches: Sequence[Launch], allocations: Sequence[Allocation], options: Options
) -> Witness | None:
    """The first finding under these options, and a short list of choices that leads to it.

    The memory is what it was, afterwards. None if nothing is found.
    """
    with kept(allocations) as memory:

        def found(schedule: Any) -> list[tuple[str, int]]:
            memory.restore()
            chosen = replace(options, schedule=schedule, collect=True, events=None)
            findings = run(launches, allocations, chosen).findings
            return [(f.kind, f.line) for f in findings if f.severity != "style"]

        name = options.schedule
        first = make_schedule(name, options.seed) if isinstance(name, str) else name
        recording = RecordedOrder(first)
        goals = found(recording)
        if not goals:
            return None
        goal = goals[0]
        steps: list[Any] = [*recording.choices, *recording.gave_up]
        needed = _shortest(steps, lambda left: goal in found(_replay(left)))
    choices = tuple(step for step in needed if isinstance(step, EventChoice))
    gave_up = tuple(step for step in needed if not isinstance(step, EventChoice))
    return Witness(kind=goal[0], line=goal[1], choices=choices, gave_up=gave_up)


def _replay(steps: Sequence[Any]) -> ReplayedOrder:
    choices = [step for step in steps if isinstance(step, EventChoice)]
    return ReplayedOrder(choices, [step for step in steps if not isinstance(step, EventChoice)])


def _shortest(steps: list[Any], leads_there: Callable[[list[Any]], bool]) -> list[Any]:
    """Steps without those that are not needed, as far as MOST_RUNS trials show (Zeller and
    Hildebrandt, TSE 2002)."""
    runs, parts = 1, 2
    if leads_there([]):
        return []
    while len(steps) > 1 and runs < MOST_RUNS:
        size = -(-len(steps) // parts)
        for first in range(0, len(steps), size):
            left = steps[:first] + steps[first + size :]
            runs += 1
            if leads_there(left):
                steps, parts = left, max(parts - 1, 2)
                break
            if runs >= MOST_RUNS:
                break
        else:
            if size == 1:
                break
            parts = min(2 * parts, len(steps))
    return steps
