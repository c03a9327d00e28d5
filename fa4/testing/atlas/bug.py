"""What an entry of the atlas is: a published bug, in our words, and the least that shows it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fa4.testing.case import Case

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def ordinary(**fields: Any) -> Case:
    """A case in bf16 with head dim 64, which every library takes, unless `fields` say otherwise."""
    usual: dict[str, Any] = {"head_dim": 64, "head_dim_v": 64, "dtype": "bf16"}
    return Case(**(usual | fields))


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A bug that was reported upstream.

    repository, number: of the issue or pull request that tells of it. versions: those that it
    names as affected, "unknown" if none. summary: one sentence, what went wrong. cases: calls that
    show it, one after another; a bug of a single call has one. probe: what is judged of them, a
    name in `fa4.testing.atlas.probes.PROBES`. arrangement: how the arrays lie in memory, a name in
    `fa4.testing.atlas.arrangements.ARRANGEMENTS`, "" as the case says. needs: features without
    which the case says nothing, as in `Backend.reason_missing`. group: "core", or "robustness" for
    what a back end may leave open.
    """

    repository: str
    number: int
    summary: str
    cases: tuple[Case, ...]
    versions: str = "unknown"
    probe: str = "forward"
    arrangement: str = ""
    needs: tuple[str, ...] = ()
    group: str = "core"

    def __post_init__(self) -> None:
        """Check what is written by hand; ValueError with one line."""
        if not _REPOSITORY.fullmatch(self.repository) or self.number < 1:
            raise ValueError(f'a bug is "owner/name" and a number; got {self.where}')
        if not self.cases:
            raise ValueError(f"{self.where} has no case")

    @property
    def where(self) -> str:
        """ "owner/name#number"."""
        return f"{self.repository}#{self.number}"

    @property
    def name(self) -> str:
        """ "name#number", as in "pytorch#196678"; unique in the atlas."""
        return self.where.partition("/")[2]
