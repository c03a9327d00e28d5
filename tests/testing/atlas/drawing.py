"""Is a stand-in caught by what the kit draws, and by which property?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from fa4.testing import PropertyResult, verify
from tests.testing.atlas.stand_in import StandIn

CPU_SECONDS = 30.0  # within which a bug should be caught


class Drawn(NamedTuple):
    """The first failure, None if there was none; was it at the first look?"""

    failure: PropertyResult | None
    at_first_look: bool
    cpu_seconds: float


class TimeIsUp(Exception):
    """The end of a run that has caught nothing."""


def draw(
    stand_in: StandIn,
    most_cpu_seconds: float = CPU_SECONDS,
    only: Sequence[str] | None = None,
) -> Drawn:
    """What `fa4 verify -x --strict` reports, of all properties or some.

    A run that has caught nothing when the time is up ends with the property it is at.
    """
    start = time.process_time()

    def look_at_the_clock(done: int, total: int, name: str) -> None:
        if time.process_time() - start > most_cpu_seconds and done > 1:
            raise TimeIsUp

    failed, results = (), 0
    try:
        report = verify(
            stand_in.backend(), exitfirst=True, strict=True, only=only, progress=look_at_the_clock
        )
        failed, results = report.with_status("failed"), len(report.results)
    except TimeIsUp:
        pass
    used = time.process_time() - start
    return Drawn(failed[0] if failed else None, bool(failed) and results == 1, used)
