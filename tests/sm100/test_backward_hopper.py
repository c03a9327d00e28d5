"""The judge of what a Hopper GPU gives for the kernels around the backward kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")

from fa4.emulator.host.session import Session
from lab.hardware.backward_hopper import prepost
from lab.hardware.launches import ARCH
from tests.sm100.backward_prepost import FUNCTIONS, Call, compile_small, copy


@pytest.fixture(scope="module", params=FUNCTIONS)
def launched(request: pytest.FixtureRequest) -> tuple[str, Call, dict[str, Any]]:
    """The text for Hopper, run by the emulator."""
    name, call = request.param, prepost.calls()["packed"]
    before = call.buffer(name)
    after = copy(before)
    kernel = compile_small(name, call.spec, ARCH)
    Session(None, (), {}).call(kernel, call.arguments(name, after), {})
    return name, call, {"before": before, "after": after}


def judged(name: str, call: Call, given: dict[str, Any], after: Any, different: int = 0) -> Any:
    """The row of a launch that left this memory."""
    row = prepost.judged(name, call, given["before"], after, given["after"])
    return row | {"different": different}


def is_wrong(row: dict[str, Any]) -> bool:
    return prepost.is_wrong("", row)


def test_what_the_emulator_gives_is_right(launched: tuple[str, Call, dict[str, Any]]) -> None:
    name, call, given = launched
    row = judged(name, call, given, given["after"])
    assert not is_wrong(row) and row["errors"] == [] and row["other_bytes"] == {}
    assert row["bytes"] > 10_000


def test_wrong_results_are_seen(launched: tuple[str, Call, dict[str, Any]]) -> None:
    """Other bits in another launch; a last bit; a byte of no tensor; a sum that is far off."""
    name, call, given = launched
    assert is_wrong(judged(name, call, given, given["after"], 1))
    place = call.places["dq" if name == "postprocess" else "stats"]
    (written,) = np.flatnonzero((given["after"] ^ given["before"])[place.start :])[:1]
    for where in (place.start + written, call.bytes_used - 1):
        changed = given["after"].copy()
        changed[where] ^= 1
        assert is_wrong(judged(name, call, given, changed))


def test_last_bits_of_exponentials_are_not_wrong() -> None:
    """The emulator does not know those of ex2.approx, which reach the parts of dsink alone."""
    row = {"errors": [], "other_bytes": {"sink_parts": 3}, "bytes": 1, "different": 0}
    assert not is_wrong(row)
    assert is_wrong(row | {"errors": ["sink_parts"]})
    assert is_wrong(row | {"other_bytes": {"sink_parts": 3, "stats": 1}})


def test_rates() -> None:
    """Bytes read and written, in both."""
    found = prepost.rates(np.array([[1e-3, 2e-3], [1e-3, 2e-3], [5e-3, 2e-3]]), 4_000_000_000)
    assert found == {
        "gb_per_s": 4000.0, "copy_gb_per_s": 2000.0, "ratio": 2.0, "microseconds": 1000.0,
    }  # fmt: skip
    call = prepost.large_call()
    assert prepost.moved_bytes("postprocess", call) == 6 * 128 * 16 * 16384
    assert prepost.moved_bytes("preprocess", call) == (8 * 128 + 12) * 16 * 16384


def test_every_launch_has_its_file() -> None:
    labels = [prepost.label(call, name) for call in prepost.calls() for name in FUNCTIONS]
    assert len({*labels}) == len(labels) and prepost.TIMED not in prepost.calls()
