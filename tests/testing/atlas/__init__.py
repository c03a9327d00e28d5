"""A stand-in for every bug of the atlas: an honest back end that has this bug and no other.

`tests.testing.atlas:NAME` is one for `fa4 verify`, where NAME is the bug's with its punctuation as
underscores: `tests.testing.atlas:pytorch_196678`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.testing.atlas.gradients import GRADIENT_STAND_INS, LAYOUT_STAND_INS
from tests.testing.atlas.masks import MASK_STAND_INS, MODIFICATION_STAND_INS
from tests.testing.atlas.numbers import FP8_STAND_INS, NUMBER_STAND_INS, STATE_STAND_INS
from tests.testing.atlas.packed import PACKED_STAND_INS, PAGING_STAND_INS
from tests.testing.atlas.stand_in import StandIn

__all__ = ["STAND_INS", "StandIn"]

_ALL = (
    *MASK_STAND_INS, *MODIFICATION_STAND_INS, *PACKED_STAND_INS, *GRADIENT_STAND_INS,
    *LAYOUT_STAND_INS, *NUMBER_STAND_INS, *PAGING_STAND_INS, *STATE_STAND_INS, *FP8_STAND_INS,
)  # fmt: skip
STAND_INS: dict[str, StandIn] = {stand_in.bug: stand_in for stand_in in _ALL}
_BY_NAME = {stand_in.name: stand_in for stand_in in _ALL}
assert len(STAND_INS) == len(_BY_NAME) == len(_ALL), "one stand-in for a bug"


@cache
def _attention(name: str) -> Any:
    return _BY_NAME[name].attention()


def __getattr__(name: str) -> Any:
    """The stand-in of that name."""
    if name not in _BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _attention(name)
