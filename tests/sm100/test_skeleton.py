"""The forward kernel without tcgen05: what an H100 computed, and what the emulator does."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass")

from lab.hardware.forward_hopper import skeleton, skeleton_cases
from lab.hardware.forward_hopper.skeleton_ptx import without_tensor_core
from lab.records import read_record


@pytest.fixture(scope="module")
def emulated() -> tuple[dict[str, Any], list[str]]:
    return skeleton.emulate_case("packed causal")


def test_halves_in_the_emulator() -> None:
    """Five warpgroups with what a launch brings, and named barriers in turn."""
    case, findings = skeleton.emulate_case("halves, packed causal")
    o_error, lse_error = skeleton_cases.errors(case, case["o"], case["lse"])
    assert findings == [] and o_error <= skeleton.O_LIMIT and lse_error <= skeleton.LSE_LIMIT


def test_a_hopper_gpu_gave_what_the_definition_says_of_halves() -> None:
    """Every case ended, each time with the same bits, the right ones."""
    recorded = read_record("halves_skeleton_hopper")
    assert set(recorded["cases"]) == set(skeleton_cases.cases_of_halves())
    assert recorded["wrong"] == []
    for name, case in recorded["cases"].items():
        assert "NVIDIA H" in case["device"] and case["launches"] == skeleton_cases.repeats(name)
        assert not skeleton.is_wrong(name, case)


def test_an_h100_gave_what_the_definition_says() -> None:
    """Every case ended each time with the same bits, the right ones."""
    recorded = read_record("forward_skeleton_hopper")
    assert set(recorded["cases"]) == set(skeleton_cases.cases()) and recorded["wrong"] == []
    for name, case in recorded["cases"].items():
        assert "H100" in case["device"] and case["launches"] == skeleton_cases.repeats(name)
        assert not skeleton.is_wrong(name, case)
        for fault in ({"different": 1}, {"o_error": 0.008}, {"lse_error": 2e-4},
                      {"findings": ["race"]}):  # fmt: skip
            assert skeleton.is_wrong(name, case | fault)


def test_the_emulator_gives_the_same(emulated: tuple[dict[str, Any], list[str]]) -> None:
    """The text that was launched, or what has become of it since, has no finding."""
    case, findings = emulated
    o_error, lse_error = skeleton_cases.errors(case, case["o"], case["lse"])
    assert findings == [] and o_error <= skeleton.O_LIMIT and lse_error <= skeleton.LSE_LIMIT


@pytest.mark.slow
@pytest.mark.timeout(1200)  # minutes of one process, more beside others
def test_with_products_it_is_attention() -> None:
    """Operands by TMA and descriptors, P through tensor memory, O rescaled."""
    case, findings = skeleton.emulate_case("products")
    errors = skeleton_cases.errors(case, case["o"], case["lse"])
    assert findings == [] and errors[0] <= skeleton.PRODUCTS_O_LIMIT
    assert errors[1] <= skeleton.LSE_LIMIT
    o = case["o"].copy()
    o[0, 7, 1, 5] ^= 0x0080
    assert skeleton_cases.errors(case, o, case["lse"])[0] > skeleton.PRODUCTS_O_LIMIT


def test_a_wrong_value_is_seen(emulated: tuple[dict[str, Any], list[str]]) -> None:
    """One bit of O, one row of LSE, a row that was not written."""
    case, _ = emulated
    o, lse = case["o"].copy(), case["lse"].copy()
    o[5, 0, 3] ^= 0x0010
    assert skeleton_cases.errors(case, o, lse)[0] > skeleton.O_LIMIT
    lse[1, 7] += 2e-4
    assert skeleton_cases.errors(case, o, lse)[1] > skeleton.LSE_LIMIT
    o[400] = 0xFFFF
    assert skeleton_cases.errors(case, o, lse)[0] == float("inf")


def test_a_mask_that_shows_one_key_more_is_seen(
    emulated: tuple[dict[str, Any], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, _ = emulated
    lengths = [(300, 701), (1, 130), (0, 50), (513, 257)]
    other = skeleton_cases.cases()["packed causal"] | {"lengths": lengths}
    monkeypatch.setattr(skeleton_cases, "cases", lambda: {"packed causal": other})
    assert skeleton_cases.errors(case, case["o"], case["lse"])[1] > skeleton.LSE_LIMIT


def test_unknown_instructions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no way to do without: tcgen05\.shift"):
        without_tensor_core("\ttcgen05.shift.cta_group::1.down [%r1];", 1)
