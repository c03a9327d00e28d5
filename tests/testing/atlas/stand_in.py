"""What a stand-in is: the honest back end with the one change that gives it a bug of the atlas."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fa4.testing import Backend
from tests.testing.planted.fault import Fault, Method

Attention = Callable[..., Any]


@dataclass(frozen=True)
class StandIn:
    """A bug's name, and how to plant it.

    kernel, call: methods of the honest back end that are replaced. make: builds the function if
    methods do not do. What a stand-in remembers between calls starts anew with `attention`.
    """

    bug: str
    kernel: Mapping[str, Method] = field(default_factory=dict)
    call: Mapping[str, Method] = field(default_factory=dict)
    make: Callable[[], Attention] | None = None

    @property
    def name(self) -> str:
        """Its name in `tests.testing.atlas`."""
        return re.sub(r"\W", "_", self.bug)

    def attention(self) -> Attention:
        """The function, as `fa4.testing` takes it."""
        if self.make is not None:
            return self.make()
        return Fault(self.name, "atlas", self.bug, (), self.kernel, self.call).attention()

    def backend(self) -> Backend:
        """The back end, with nothing remembered."""
        return Backend.wrap(self.attention(), f"tests.testing.atlas:{self.name}")
