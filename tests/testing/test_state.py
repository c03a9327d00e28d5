"""What calls keep from one another, and NaN that a row sees: the questions are the right ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fa4.testing import Case, load_backend
from fa4.testing.checks import differentiate, gradient_inputs
from fa4.testing.coverage import listed_cases
from fa4.testing.inputs import Inputs
from fa4.testing.refusals import Breach
from fa4.testing.state import _CHANGES, MEMORY, STATE, visible_nan

REFERENCE = load_backend("reference")


class DropsNan:
    """The reference, to which a NaN in one of its arguments is 0."""

    def __init__(self, name: str) -> None:
        self.dropped = name

    def forward(self, inputs: Inputs) -> Any:
        """O and LSE."""
        given = getattr(inputs, self.dropped)
        return REFERENCE.forward(replace(inputs, **{self.dropped: np.nan_to_num(given)}))


def test_what_looks_at_memory_has_the_same_case_of_a_layout() -> None:
    """What a call keeps for later ones of its shapes is not found under the name of memory."""
    every = listed_cases(MEMORY[0])
    padded = [prop for prop in (*MEMORY, *STATE) if prop.name.startswith("padded_")]
    assert len(padded) == 2
    for prop in (*MEMORY, *padded):
        assert listed_cases(prop) and set(listed_cases(prop)) <= set(every), prop.name


@pytest.mark.parametrize("batch", [1, 2])
def test_a_nan_that_a_row_sees_may_not_be_dropped(batch: int) -> None:
    """In q, k or v, of any head; who keeps it is right."""
    case = Case(batch=batch, heads_k=2, group=3, seqlen_q=3, seqlen_k=5, causal=True)
    assert visible_nan(REFERENCE, case) == 0.0
    for name in "qkv":
        with pytest.raises(AssertionError, match=rf"^{name}\[0, .*\] is NaN and row 2 of head 5"):
            visible_nan(DropsNan(name), case)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "first", "second"), [(name, a, b) for name, _, a, b in _CHANGES])
def test_two_calls_differ_in_one_thing(
    name: str, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """Sequences in another order: sums and numbers of rows, by which a cache may be asked, stay."""
    assert first != second and set(first) == set(second)
    cases = Case(**first), Case(**second)
    if first.get("layout", "dense") != "dense" and name != "pages":
        assert sorted(cases[0].lengths) == sorted(cases[1].lengths)
        assert cases[0].lengths == cases[1].lengths[::-1]
    elif name == "pages":
        assert cases[0].lengths == cases[1].lengths and cases[0].seed != cases[1].seed


class LeavesGradients:
    """The reference, with a number in the last row of dQ."""

    forward = REFERENCE.forward

    def __init__(self, value: float) -> None:
        self.value = value

    def gradients(self, *arguments: Any, **options: Any) -> Any:
        """Gradients."""
        found = REFERENCE.gradients(*arguments, **options)
        dq = found.dq.copy()
        dq[-1] = self.value
        return replace(found, dq=dq)


@pytest.mark.parametrize("value", [5.0, -5.0, np.nan])
def test_gradients_where_no_sequence_lies_are_zero(value: float) -> None:
    """What is there is said."""
    case = Case(layout="packed", lengths=((2, 3), (1, 2)), slack="buffer")
    inputs = gradient_inputs(case)
    for backend in (REFERENCE, LeavesGradients(0.0)):
        differentiate(backend, case, inputs)  # type: ignore[arg-type]
    with pytest.raises(Breach, match=f"dq there is {value:.9g}$"):
        differentiate(LeavesGradients(value), case, inputs)  # type: ignore[arg-type]
