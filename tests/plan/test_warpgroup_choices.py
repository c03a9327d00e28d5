"""Which other kernels are timed for the slow calls of a record, and that calls get them."""

from __future__ import annotations

import pytest

from fa4.compiled.variants import choose_sm90_spec, count_splits, warpgroup_problem
from fa4.hardware import H200
from fa4.plan.warpgroup_tuned import tuned_warpgroups
from lab.hardware.warpgroup_forward.choices import alternatives, call_of, chosen, slow_calls
from lab.records import read_record

SLOW = slow_calls(read_record("hopper_random")["rows"])


def test_slow_calls_are_those_that_a_peer_was_faster_in() -> None:
    """The slowest first."""
    ratios = [ratio for ratio, _ in SLOW]
    assert ratios == sorted(ratios) and 0.5 < ratios[0] < ratios[-1] < 1 and len(ratios) > 9


@pytest.mark.parametrize("number", [0, 1, -1])
def test_a_call_gets_the_kernel_that_is_timed(number: int) -> None:
    """The first is what it gets anyway; the others are other kernels."""
    call = call_of(SLOW[number][1])
    found = alternatives(SLOW[number][1], 6)
    assert found[0] == tuned_warpgroups(warpgroup_problem(call), H200)
    assert len(set(found)) == len(found) and 1 < len(found) <= 6
    for one in found:
        with chosen(one):
            spec = choose_sm90_spec(call)
            assert count_splits(call, spec) == one.num_splits
        assert (spec.group, spec.tile_n, spec.kv_stages) == (one.packed, one.tile_n, one.kv_stages)
        assert spec.consumers == one.consumers and spec.plan.bytes_used("smem") > 0
