"""The main backward kernel without tcgen05, as a Hopper GPU is given it, in the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")

from lab.hardware.backward_hopper import skeleton, skeleton_cases
from lab.records import read_record

D64 = {"head_dim": 64, "head_dim_v": 64}
FIXED = {**D64, "window_left": True, "deterministic": True}
SMALL: dict[str, dict[str, Any]] = {
    "integers": {"spec": FIXED, "lengths": [(140, 200)], "heads": (1, 1), "window": (90, None)},
    "products": {
        "spec": {**D64, "causal": True, "deterministic": True}, "products": True,
        "lengths": [(60, 140)], "heads": (1, 1),
    },
}  # fmt: skip


def test_an_h200_gave_what_the_definition_says() -> None:
    """Every case ended each time; in any order dQ did change, so that a fixed one is not luck."""
    recorded = read_record("backward_skeleton_hopper")
    assert set(recorded["cases"]) == set(skeleton_cases.cases()) and recorded["wrong"] == []
    for name, case in recorded["cases"].items():
        assert "H200" in case["device"] and case["launches"] == skeleton_cases.repeats(name)
        assert not skeleton.is_wrong(name, case)
        assert ("findings" in case) != (name in skeleton_cases.ONLY_ON_THE_GPU)
    assert recorded["cases"]["products"]["different"]["dq_accum"] > 0


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases that take seconds."""
    monkeypatch.setattr(skeleton, "cases", lambda: SMALL)
    monkeypatch.setattr(skeleton_cases, "cases", lambda: SMALL)


@pytest.mark.usefixtures("small")
def test_without_products_sums_are_exact() -> None:
    """No finding, the right integers; another bit, a tile more or less is seen."""
    found, findings = skeleton.emulate_case("integers")
    assert findings == [] and skeleton.error_of("integers", found) == 0.0
    for name in ("dq_accum", "dk", "dv"):
        wrong = {key: array.copy() for key, array in found.items()}
        wrong[name][40] ^= 1
        assert skeleton.error_of("integers", wrong) == float("inf")
    wrong = {**found, "dq_accum": (2 * found["dq_accum"].view(np.float32)).view(np.uint8)}
    assert skeleton.error_of("integers", wrong) == float("inf")


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_with_products_gradients_are_within_budget() -> None:
    found, findings = skeleton.emulate_case("products")
    assert findings == [] and skeleton.error_of("products", found) < 1.0
    found["dk"].view(np.uint16)[5] ^= 0x0400
    assert skeleton.error_of("products", found) > 1.0


@pytest.mark.usefixtures("small")
def test_what_counts_as_wrong() -> None:
    """Other bits where they must be the same, errors, findings."""
    assert skeleton_cases.same_every_time("products") == skeleton_cases.OUTPUTS
    right = {"different": dict.fromkeys(skeleton_cases.OUTPUTS, 0), "share": 0.3,
             "emulator_share": 0.3, "findings": []}  # fmt: skip
    assert not skeleton.is_wrong("products", right)
    for fault in ({"different": right["different"] | {"dq_accum": 1}}, {"share": 1.1},
                  {"emulator_share": float("inf")}, {"findings": ["race"]}):  # fmt: skip
        assert skeleton.is_wrong("products", right | fault)


def test_any_order_may_change_dq(monkeypatch: pytest.MonkeyPatch) -> None:
    """With real sums, where no order is fixed; never dK and dV."""
    free = {"products": {**SMALL["products"], "spec": D64}}
    monkeypatch.setattr(skeleton_cases, "cases", lambda: free)
    assert "dq_accum" not in skeleton_cases.same_every_time("products")
    assert {"dk", "dv"} < set(skeleton_cases.same_every_time("products"))
