"""Where the packed rows of a work tile lie: each in its place, whatever the group."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fa4.plan.warpgroup_packing import ATOM_ROWS, packings, query_place, straddles


@given(st.integers(1, 63), st.sampled_from((64, 128, 192)), st.integers(0, 200))
def test_a_box_has_every_row_in_its_place(packed: int, rows: int, block: int) -> None:
    """A box of whole positions, of which the tile's first row lies at `lead`: it holds all rows of
    the tile, and nothing outside the place; and it has no position too many."""
    place, first = query_place(packed, rows), block * rows
    position, earlier = divmod(first, packed)
    start = place.lead - earlier
    stop = start + place.positions * packed
    assert start >= 0 and stop <= place.rows
    assert position * packed + (place.lead - start) == first and stop >= place.lead + rows
    assert place.lead % ATOM_ROWS == place.rows % ATOM_ROWS == 0
    assert (place.positions - 2) * packed < rows


@given(st.integers(1, 400), st.booleans())
def test_numbers_of_heads_to_choose_from(ratio: int, packed: bool) -> None:
    """Divisors that a kernel takes, the largest first; none packed unless that is asked for."""
    least = 1 + (packed and ratio > 1)
    found = packings(ratio, least)
    assert list(found) == sorted(found, reverse=True) and len(found) <= 3
    assert all(ratio % n == 0 and (n <= 64 or n % 64 == 0) for n in found)
    divisible = any(ratio % n == 0 for n in range(2, 65))
    assert (min(found) == 1) == (not packed or not divisible)
    if ratio <= 64:
        assert found[0] == ratio


def test_what_straddles() -> None:
    """No power of two, and no group of several tiles for each position."""
    assert [n for n in range(1, 14) if straddles(n)] == [3, 5, 6, 7, 9, 10, 11, 12, 13]
    assert not any(map(straddles, (16, 32, 64, 128, 192)))
    assert query_place(6, 192) == (192, 0, 32)  # work tiles have whole positions
    assert query_place(5, 128) == (144, 8, 27)
