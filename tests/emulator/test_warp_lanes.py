"""Lanes as masks, numbers and flags."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fa4.emulator.warp_lanes import FULL_MASK, LANES, lane_flags, lanes_of, lowest, mask_of

masks = st.integers(0, FULL_MASK) | st.sampled_from([0, 1, 1 << 31, FULL_MASK])


@given(mask=masks)
def test_the_three_ways_agree(mask: int) -> None:
    """Each can be made of each."""
    numbers, flags = lanes_of(mask), lane_flags[mask]
    assert numbers.tolist() == [lane for lane in range(LANES) if mask >> lane & 1]
    assert flags.dtype == bool and flags.nonzero()[0].tolist() == numbers.tolist()
    assert mask_of(flags) == sum(1 << lane for lane in numbers.tolist()) == mask
    if mask:
        assert lowest(mask) == numbers[0]


def test_what_is_shared_is_not_written() -> None:
    """The flags of a mask are those of all who ask for it."""
    flags = lane_flags[5]
    assert flags is lane_flags[5]
    with np.testing.assert_raises(ValueError):
        flags[0] = False
