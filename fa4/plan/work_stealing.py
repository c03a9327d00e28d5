"""Work stealing: a CTA asks the hardware for its next work tile (cluster launch control).

The grid has one CTA per work tile. A CTA that runs cancels one that has not started and takes over
its work tile (PTX ISA 9.7.13.18, clusterlaunchcontrol): a scheduler warp asks one tile ahead, and
every role reads the answer when it has finished its tile.
"""

from __future__ import annotations

from dataclasses import replace

from fa4.plan.schema import Arrive, Copy, Program, Role, Signal, SmemAccess, Wait, Work

SCHEDULER_WARP = 15
RESPONSE_BYTES = 16


def steal_work(roles: list[Role], registers: int) -> tuple[list[Role], list[Signal]]:
    """The roles with their wait for the next work tile, the scheduler, and the two signals."""
    scheduler = Role(
        name="scheduler",
        warps=(SCHEDULER_WARP,),
        registers=registers,
        program=(
            Wait("work_empty"),
            Work(
                "ask for a work tile",
                Copy(kind="load", num_bytes=RESPONSE_BYTES),
                asynchronous=True,
                writes=("work",),
            ),
            Arrive("work_full", after="tma"),
        ),
    )
    readers = [
        replace(role, program=(*role.program, *_read_answer())) for role in [*roles, scheduler]
    ]
    arrivals = {role.name: 1 if role.name == "mma" else len(role.warps) for role in readers}
    return readers, [
        Signal(
            name="work_full",
            arrivals={"scheduler": 1},
            waiters=tuple(arrivals),
            tx_bytes=RESPONSE_BYTES,
        ),
        Signal(name="work_empty", arrivals=arrivals, waiters=("scheduler",), free=1),
    ]


def _read_answer() -> Program:
    return (
        Wait("work_full"),
        Work("read the next work tile", SmemAccess(num_bytes=RESPONSE_BYTES), reads=("work",)),
        Arrive("work_empty"),
    )
