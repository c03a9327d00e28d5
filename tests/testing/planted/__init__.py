"""An honest attention back end in NumPy, and one more for every planted fault.

`tests.testing.planted:NAME` is a back end for `fa4 verify`: the honest one, one that offers little
(`offers`), or the honest one with the fault of that name. A fault is a method replaced; `FAULTS`
says what it does and which words the property that catches it must have in its name.

    kernel, gradients   attention over one sequence, forward and backward
    calls               dense, packed, padded and paged calls
    masks, scores, combinations, numbers, memory, backward,
    layout, state, gradient_pairs, fp8, mla, sessions        the faults, by class
    styles                                                   what is right too
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tests.testing.planted.backward import BACKWARD_FAULTS
from tests.testing.planted.combinations import COMBINATION_FAULTS
from tests.testing.planted.fault import Fault
from tests.testing.planted.fp8 import FP8_FAULTS
from tests.testing.planted.gradient_pairs import GRADIENT_PAIR_FAULTS
from tests.testing.planted.layout import LAYOUT_FAULTS
from tests.testing.planted.masks import HEAD_FAULTS, MASK_FAULTS
from tests.testing.planted.memory import ALIASING_FAULTS, BEHAVIOUR_FAULTS, OFFSET_FAULTS
from tests.testing.planted.mla import MLA_FAULTS
from tests.testing.planted.numbers import NUMBER_FAULTS
from tests.testing.planted.offers import (
    honest,
    minimal,
    not_callable,
    only_fp32,
    refuses,
    type_error_if_causal,
    without_parameters,
)
from tests.testing.planted.scores import LSE_FAULTS, ORDER_FAULTS, SCALE_FAULTS
from tests.testing.planted.sessions import SESSION_FAULTS
from tests.testing.planted.state import STATE_FAULTS
from tests.testing.planted.styles import STYLES as _STYLES

__all__ = [
    "FAULTS", "STYLES", "Fault", "honest", "minimal", "not_callable", "only_fp32", "refuses",
    "type_error_if_causal", "without_parameters",
]  # fmt: skip

_ALL = (
    *MASK_FAULTS, *HEAD_FAULTS, *LSE_FAULTS, *SCALE_FAULTS, *ORDER_FAULTS, *COMBINATION_FAULTS,
    *NUMBER_FAULTS, *ALIASING_FAULTS, *OFFSET_FAULTS, *BACKWARD_FAULTS, *BEHAVIOUR_FAULTS,
    *LAYOUT_FAULTS, *STATE_FAULTS, *GRADIENT_PAIR_FAULTS,
    *FP8_FAULTS, *MLA_FAULTS, *SESSION_FAULTS,
)  # fmt: skip
FAULTS: dict[str, Fault] = {fault.name: fault for fault in _ALL}
STYLES: dict[str, Fault] = {style.name: style for style in _STYLES}
assert len(FAULTS) == len(_ALL), "names of faults are unique"


@cache
def _attention(name: str) -> Callable[..., Any]:
    return (FAULTS | STYLES)[name].attention()


def __getattr__(name: str) -> Callable[..., Any]:
    """The back end with the fault, or in the style, of that name."""
    if name not in FAULTS and name not in STYLES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _attention(name)
