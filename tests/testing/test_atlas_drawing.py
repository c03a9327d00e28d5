"""Bugs of the atlas are caught by what the kit draws, not by the cases made for them alone.

Most show at the first look of `fa4 verify -x`. Some take the whole run of a property, and some are
beyond what is drawn today: those are listed with what they would need, and a test fails as soon as
one of them is caught.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fa4.testing.atlas import BUGS
from tests.testing.atlas import STAND_INS
from tests.testing.atlas.drawing import draw
from tests.testing.remembered import remembered_budgets

# Caught by the whole run, after 8 to 40 CPU seconds: no first look at a property has them. Bugs of
# state among them show by luck, where two drawn calls have the same shapes.
LATE = (
    "flash-attention#1537",
    "flash-attention#2541",
    "flash-attention#2552",
    "flash-attention#2623",
    "mistral.rs#2094",
    "flashinfer#4051",
    "b12x#63",
    "cudnn-frontend#981",
)
# Not caught: what no property draws.
NOT_DRAWN = {
    "tpu-inference#2756": "more than 32,767 keys",
    "pytorch#171271": "block lists of several row blocks with grouped heads",
    "cudnn-frontend#304": "an LSE with strides",
    "flashinfer#50": "split keys with and without the LSE",
    "flashinfer#4972": "packed rows in number, under a window, before many more keys",
    "flash-attention#2298": "a batch of one with stride 0, then a larger one",
}
# Looked for at once, among all properties, which catch them soon; the rest are slow tests.
SAMPLE = ("torchax#39", "jax#19237", "TransformerEngine#3528", "pytorch#188484", "vllm#28840",
          "flash-attention#2745")  # fmt: skip

AT_FIRST_LOOK = [name for name in BUGS if name not in {*LATE, *NOT_DRAWN}]


@pytest.fixture(scope="module", autouse=True)
def shared_budgets() -> Iterator[None]:
    """What is expected of a case is the same for every stand-in."""
    with remembered_budgets():
        yield


def sampled() -> list[Any]:
    """The bugs that a first look catches, all but a few of them marked as slow."""
    return [
        pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow)
        for name in AT_FIRST_LOOK
    ]


@pytest.mark.parametrize("name", sampled())
def test_caught_at_the_first_look(name: str) -> None:
    """With an example."""
    drawn = draw(STAND_INS[name])
    assert drawn.failure is not None and drawn.at_first_look, f"{name}: {drawn}"
    assert drawn.failure.example.startswith("Case(")


@pytest.mark.parametrize(
    ("name", "prop"),
    [
        ("pytorch#196678", "gradients_with_mask_mod_and_paged"),
        ("flash-attention#2374", "unused_nan_paged"),
        ("vllm#39148", "gradients_with_window_and_splits"),
    ],
)
def test_caught_by_a_property(name: str, prop: str) -> None:
    """At the first look at that one alone, which comes late in a run."""
    drawn = draw(STAND_INS[name], only=[prop])
    assert drawn.failure is not None and drawn.at_first_look, f"{name}: {drawn}"


@pytest.mark.slow
@pytest.mark.parametrize("name", LATE)
def test_caught_by_the_whole_run(name: str) -> None:
    """However long it takes; if the first look has it, too, the name may leave the list."""
    drawn = draw(STAND_INS[name], most_cpu_seconds=120.0)
    assert drawn.failure is not None, f"{name}: {drawn}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(reason=missing, strict=True))
        for name, missing in NOT_DRAWN.items()
    ],
)
def test_not_drawn_today(name: str) -> None:
    """Passes when the kit draws what it needs; then the name leaves the list."""
    assert draw(STAND_INS[name]).failure is not None


def test_lists_name_bugs() -> None:
    """Each in one list at most; most bugs are in none."""
    assert set(LATE) | set(NOT_DRAWN) <= set(BUGS) and not set(LATE) & set(NOT_DRAWN)
    assert len(AT_FIRST_LOOK) >= 60 and set(SAMPLE) <= set(AT_FIRST_LOOK)
