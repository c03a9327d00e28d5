"""The bug atlas: bugs that attention libraries published, each with the least that shows it.

    from fa4.testing.atlas import run_corpus

    report = run_corpus("mypackage.module:attention")
    for found in report.found:
        print(f"like {found.name}: {found.error}")
        print(found.test)                           # a test ready to paste into a file

Or from the shell: `fa4 verify --backend mypackage.module:attention --corpus`. The cases take
seconds. A function that passes them may still have any of these bugs where other features meet;
that is what the properties draw for (`fa4.testing.verify`).

    bug             what an entry is
    masks, ...      the entries, one file for each theme
    entries         all of them by name
    arrangements    how arrays lie in memory, beyond what a `Case` says
    probes          what is judged
    corpus          the run on a back end
"""

from __future__ import annotations

from fa4.testing.atlas.bug import Bug
from fa4.testing.atlas.corpus import BugResult, CorpusReport, run_corpus
from fa4.testing.atlas.entries import BUGS, THEMES, find_bugs
from fa4.testing.atlas.probes import check_bug

__all__ = [
    "BUGS",
    "THEMES",
    "Bug",
    "BugResult",
    "CorpusReport",
    "check_bug",
    "find_bugs",
    "run_corpus",
]
