"""Classes of bugs: the finding that each broken kernel must give, and none of the mended one."""

from __future__ import annotations

import pytest

from fa4.emulator.errors import LaunchError
from fa4.emulator.kinds import KINDS
from lab.bug_zoo import BUGS, Bug
from lab.pages.bug_zoo import PAGE, TABLES

SCHEDULES = (("fifo", 0), ("adversarial", 1))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_broken_kernel_gives_its_finding(bug: Bug) -> None:
    """In any order of events; the mended one gives none, not even a formal one."""
    assert "<>" in bug.text and bug.broken != bug.mended
    for schedule, seed in SCHEDULES:
        found = {(f.kind, f.severity) for f in bug.run(bug.broken, schedule, seed).findings}
        assert (bug.kind, bug.severity) in found, (schedule, found)
        assert bug.run(bug.mended, schedule, seed).findings == [], schedule


def test_there_are_many_and_of_most_kinds() -> None:
    """At least forty classes, each called by a name of its own."""
    assert len(BUGS) >= 40 and len({bug.name for bug in BUGS}) == len(BUGS)
    missing = KINDS.keys() - {bug.kind for bug in BUGS}
    assert missing == {"descriptor", "assert", "brkpt", "fault"}


def test_the_page_is_up_to_date() -> None:
    """And a changed word is noticed."""
    page = PAGE.read_text("utf-8")
    assert list(TABLES.stale(page)) == []
    assert list(TABLES.stale(page.replace("without bar.warp.sync", "with bar.warp.sync"))) == [
        "Shared memory"
    ]
    assert TABLES.fill(page) == page


def test_a_kernel_that_cannot_run_is_no_finding() -> None:
    """A typing error in the zoo does not pass for a bug that is found."""
    with pytest.raises(LaunchError):
        Bug(name="", story="", text="ret;", kind="race", threads=2000).run("")
