"""A queue of work tiles: CTAs that stay draw the number of their next one from a counter.

As many CTAs as SMs; the load warp draws a work tile before the last load of the one before, and
leaves its number in shared memory, where every consumer reads it when it has come so far. CTAs that
have had shorter work tiles get more of them, and none is started anew for each.
"""

from __future__ import annotations

from fa4.plan.memory import Layout
from fa4.plan.schema import Arrive, Program, Signal, SmemAccess, Wait, Work

PLACES = 2  # for numbers that are drawn and not yet read by all
NUMBER_BYTES = 4


def add_numbers(layout: Layout) -> None:
    """Room for the numbers of work tiles."""
    layout.add("work", "smem", NUMBER_BYTES, stages=PLACES, align=NUMBER_BYTES)


def queue_signals(readers: dict[str, int]) -> tuple[Signal, ...]:
    """A ring of numbers; readers: roles and how often each arrives for one."""
    full = Signal(
        name="work_full", arrivals={"load": 1}, waiters=tuple(readers), stages=PLACES
    )  # fmt: skip
    empty = Signal(
        name="work_empty", arrivals=readers, waiters=("load",), stages=PLACES, free=PLACES
    )
    return full, empty


def draw_number() -> Program:
    """What the load warp does when it has loaded a work tile; it drew before the last load."""
    return (
        Wait("work_empty"),
        Work("draw a work tile", SmemAccess(num_bytes=NUMBER_BYTES), writes=("work",)),
        Arrive("work_full"),
    )


def read_number() -> Program:
    """What a consumer does once it has started its last product of a work tile."""
    return (
        Wait("work_full"),
        Work("read the next work tile", SmemAccess(num_bytes=NUMBER_BYTES), reads=("work",)),
        Arrive("work_empty"),
    )
