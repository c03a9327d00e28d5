"""Which elements of an accumulator a thread has, and what of them a mask shows."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cutlass")

from fa4.config import Exp2Split
from fa4.sm90.forward import fragment
from fa4.sm90.forward.products import operand_tiles

THREADS = 128
WIDTHS = st.integers(1, 16).map(lambda n: 16 * n)


def place(thread: int, element: int) -> tuple[int, int]:
    """Row and column of an element of a thread."""
    row = fragment.thread_row(thread) + fragment.ROW_STEP * fragment.row_of(element)
    return row, fragment.column_of(element) + 2 * (thread % fragment.QUAD)


@given(WIDTHS)
def test_every_element_has_one_owner(width: int) -> None:
    """128 threads with width / 2 elements each share 64 rows."""
    owned = Counter(place(t, e) for t in range(THREADS) for e in range(width // 2))
    assert set(owned) == {(r, c) for r in range(64) for c in range(width)}
    assert set(owned.values()) == {1}


@given(WIDTHS, st.integers(-300, 300), st.integers(0, THREADS - 1))
def test_a_run_of_columns_is_a_run_of_elements(width: int, columns: int, thread: int) -> None:
    """Of a thread's row, the elements in the first columns are its first ones."""
    elements = [e for e in range(width // 2) if fragment.row_of(e) == 0]
    inside = [place(thread, e)[1] < columns for e in elements]
    shown = fragment.visible_elements(columns, thread % fragment.QUAD)
    assert inside == [i < shown for i in range(len(elements))]


@given(WIDTHS)
def test_rows_are_joined_as_they_were(width: int) -> None:
    elements = list(range(width // 2))
    rows = [fragment.of_row(elements, row) for row in range(2)]
    assert fragment.joined(*rows) == elements
    assert all(fragment.row_of(e) == row for row in range(2) for e in rows[row])


@given(WIDTHS, st.sampled_from((2, 4, 8, 16)), st.data())
def test_emulated_share(width: int, frequency: int, data: st.DataObject) -> None:
    """Whole pairs; residue of every `frequency` elements."""
    residue = data.draw(st.integers(0, frequency // 2).map(lambda n: 2 * n))
    flags = fragment.emulated_elements(Exp2Split(frequency=frequency, residue=residue), width)
    assert flags[::2] == flags[1::2]
    assert sum(flags[: frequency * (width // frequency)]) == residue * (width // frequency)


@given(WIDTHS, WIDTHS)
def test_descriptors_step_through_a_tile(rows: int, dim: int) -> None:
    """Each step of 16 along K begins where TMA has put it; none lies outside of the tile."""
    for along_rows, depth in ((False, dim), (True, rows)):
        tiles = operand_tiles(0, rows, dim, along_rows=along_rows, stage_bytes=rows * dim * 2)
        assert len(tiles.steps) == depth // 16 == len(set(tiles.steps))
        assert max(tiles.steps) * 16 < rows * dim * 2
        width = {1: 128, 2: 64, 3: 32}[tiles.high >> 30]
        assert tiles.high & 0x3FFF == 8 * width // 16
        leading = rows * width // 16 if along_rows else 1
        assert tiles.low >> 16 == leading
