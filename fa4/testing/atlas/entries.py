"""All bugs of the atlas, by theme and by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from fa4.testing.atlas.bug import Bug
from fa4.testing.atlas.gradients import GRADIENTS
from fa4.testing.atlas.layouts import LAYOUTS
from fa4.testing.atlas.masks import MASKS, MODIFICATIONS
from fa4.testing.atlas.numerics import FP8, NUMERICS
from fa4.testing.atlas.packed import PACKED
from fa4.testing.atlas.paging import PAGING
from fa4.testing.atlas.state import STATE

THEMES: Mapping[str, tuple[Bug, ...]] = {
    "masks": MASKS,
    "modifications": MODIFICATIONS,
    "packed": PACKED,
    "gradients": GRADIENTS,
    "layouts": LAYOUTS,
    "numerics": NUMERICS,
    "paging": PAGING,
    "state": STATE,
    "fp8": FP8,
}
BUGS: Mapping[str, Bug] = {bug.name: bug for bugs in THEMES.values() for bug in bugs}
assert len(BUGS) == sum(map(len, THEMES.values())), "names of bugs are unique"


def find_bugs(patterns: Iterable[str] | None = None) -> tuple[Bug, ...]:
    """The bugs whose names match one of the patterns (`*`, `?`), all for None.

    ValueError for a pattern that matches none.
    """
    if patterns is None:
        return tuple(BUGS.values())
    chosen: dict[str, Bug] = {}
    for pattern in patterns:
        found = {name: bug for name, bug in BUGS.items() if fnmatchcase(name, pattern)}
        if not found:
            raise ValueError(
                f"no bug of the atlas matches {pattern!r}; `fa4 verify --corpus --list` names "
                "them, and a pattern may hold * and ?"
            )
        chosen |= found
    return tuple(chosen.values())
