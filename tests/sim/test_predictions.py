"""The recorded predictions are those of this code, figure by figure.

What no definition decides (instructions around a loop, latencies that were fitted) is decided by
the measurements it was fitted to, within their tolerances. This holds it still between two fits:
who changes the model records `lab/benchmarks/predictions.py` anew, and shows the
difference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.benchmarks import predictions
from lab.records import read_record

ROOT = Path(__file__).resolve().parents[2]
RECORDED = read_record("predictions")
CLOSE = 1e-9  # relative; sums may come in another order


def differences(old: Any, new: Any, place: str = "") -> list[str]:
    """Where two reports differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            found
            for key in dict.fromkeys([*old, *new])
            for found in differences(old.get(key), new.get(key), f"{place}/{key}")
        ]
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        pairs = dict(enumerate(old)), dict(enumerate(new))
        return differences(*pairs, place)
    same = new == (pytest.approx(old, rel=CLOSE) if isinstance(old, float) else old)
    return [] if same else [f"{place}: {old} -> {new}"]


@pytest.mark.parametrize("name", RECORDED["predictions"])
def test_the_recorded_figures(name: str) -> None:
    """Times, bounds, busy units and stalls."""
    new = {"call": predictions.CALLS[name], **predictions.figures(name)}
    assert differences(RECORDED["predictions"][name], json.loads(json.dumps(new))) == []


def test_every_call_is_recorded() -> None:
    """None is left out of the file."""
    assert list(predictions.CALLS) == list(RECORDED["predictions"])


def test_a_difference_is_found() -> None:
    """In a nested figure, in a list, a key that came and one that went."""
    old = {"a": {"b": 1.0}, "c": [1, "x"], "d": 0}
    new = {"a": {"b": 1.0 + 1e-6}, "c": [1, "y"], "e": 1}
    assert len(differences(old, new)) == 4 and differences(old, old) == []
