"""Two features that meet: whichever is lost where the other is on, a first look at the pair sees.

Planted in every pair, not in the chosen ones of `tests.testing.planted`: forward, and in gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from fa4.testing import VerifyOptions, load_backend
from fa4.testing.levels import FEATURES, may_meet
from fa4.testing.properties import find_properties
from fa4.testing.property import Property
from fa4.testing.runner import _Recorder, _search
from tests.testing.planted.fault import (
    Fault,
    Method,
    is_grouped,
    is_split,
    is_windowed,
    laid_out,
    replaced,
)
from tests.testing.planted.gradients import GradientKernel as Honest

Condition = Callable[[Any], bool]


def given(name: str) -> Condition:
    """Has this option a value that does something?"""
    return lambda kernel: getattr(kernel.options, name) not in (None, False, 0)


ON: dict[str, Condition] = {
    "causal": given("causal"),
    "window": is_windowed,
    "mask_mod": lambda kernel: kernel.options.mask_mod is not None,
    "softmax_scale": given("softmax_scale"),
    "softcap": given("softcap"),
    "score_mod": lambda kernel: kernel.options.score_mod is not None,
    "aux_tensors": lambda kernel: kernel.options.aux_tensors is not None,
    "sink": lambda kernel: kernel.options.learnable_sink is not None,
    "gqa": is_grouped,
    "splits": is_split,
    "dropout": given("dropout_p"),
    "varlen": laid_out("packed"),
    "seqused": laid_out("padded"),
    "paged": laid_out("paged"),
}
# What a kernel without the feature does: (method, its answer).
LOST: dict[str, tuple[str, Any]] = {
    "causal": ("sides", lambda kernel, sides: (sides[0], None)),
    "window": ("sides", lambda kernel, sides: (None, 0 if kernel.options.causal else None)),
    "softmax_scale": ("scale", lambda kernel, _: kernel.dim**-0.5),
    "softcap": ("softcap", 0.0),
    "sink": ("sink", None),
    "score_mod": ("score_mod", None),
}


def rolled(name: str, condition: Condition) -> dict[str, Method]:
    """dQ or dK is a row off."""

    def backward(kernel: Any, *arrays: np.ndarray) -> Any:
        found = Honest.backward(kernel, *arrays)
        wrong = np.roll(getattr(found, name), 1, axis=0)
        return found._replace(**{name: wrong}) if condition(kernel) else found

    return {"backward": backward}


def faults_of(pair: tuple[str, str], *, gradients: bool) -> Iterator[tuple[str, dict[str, Method]]]:
    """What may go wrong where both features are on; with gradients, in them alone."""

    def both(kernel: Any) -> bool:
        return all(ON[x](kernel) for x in pair) and (kernel.is_backward or not gradients)

    for feature in pair:
        if feature in LOST:
            method, answer = LOST[feature]
            yield f"{feature} lost", replaced(method, both, answer)
    for name in ("dq", "dk") if gradients else ():
        yield f"{name} a row off", rolled(name, both)


def is_seen(prop: Property, methods: dict[str, Method]) -> bool:
    """By the first look at a property, without a diagnosis."""
    backend = load_backend(Fault("planted", "", "", (), methods).attention())
    recorder = _Recorder(prop, backend)
    _search(recorder, prop.dtypes, VerifyOptions(), prop.first_look)
    return recorder.error is not None


@pytest.mark.slow
@pytest.mark.parametrize("gradients", [False, True])
def test_a_first_look_sees_what_is_lost_in_a_pair(gradients: bool) -> None:
    """All but one in a hundred: a window may be wider than the few rows."""
    seen, missed = 0, []
    name = "gradients_with_{}_and_{}" if gradients else "{}_with_{}"
    with threadpool_limits(1):
        for pair in (x for x in combinations(FEATURES, 2) if may_meet(*x)):
            (prop,) = find_properties([name.format(*pair)])
            for what, methods in faults_of(pair, gradients=gradients):
                if is_seen(prop, methods):
                    seen += 1
                else:
                    missed.append(f"{prop.name}: {what}")
    assert seen > (240 if gradients else 70) and len(missed) <= seen // 100, missed
