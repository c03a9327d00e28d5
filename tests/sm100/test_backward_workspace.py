"""Tiles of the workspace: each sequence has its own, each element of a dQ tile its place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4.kit.units import TILE_ROWS, WARP
from fa4.sm100.backward.workspace import VECTOR, dq_offset, first_tile, tiles_of

EDGES = st.sampled_from((0, 1, 127, 128, 129, 255, 256, 257)) | st.integers(0, 1000)


@given(lengths=st.lists(EDGES, min_size=1, max_size=8), tail=EDGES)
def test_tiles_of_packed_sequences_are_apart(lengths: list[int], tail: int) -> None:
    starts = np.concatenate([[0], np.cumsum(lengths)])
    free = 0
    for batch, length in enumerate(lengths):
        first = first_tile(batch, int(starts[batch]), 0, packed=True)
        assert first >= free
        free = first + -(-length // TILE_ROWS)
    assert free <= tiles_of(int(starts[-1]) + tail, len(lengths), packed=True)


@given(batch=st.integers(1, 5), rows=EDGES)
def test_tiles_of_equal_sequences_follow_one_another(batch: int, rows: int) -> None:
    blocks = -(-rows // TILE_ROWS)
    firsts = [first_tile(number, 0, blocks, packed=False) for number in range(batch + 1)]
    assert firsts == [number * blocks for number in range(batch + 1)]
    assert firsts[-1] == tiles_of(rows, batch, packed=False)


@pytest.mark.parametrize("head_dim", [16, 80, 128, 192])
def test_every_element_of_a_tile_has_its_place(head_dim: int) -> None:
    """A warp's columns are one run, its 32 lanes' vectors of four lie side by side."""
    rows, cols = np.mgrid[:TILE_ROWS, :head_dim]
    offsets = dq_offset(rows, cols, head_dim)
    assert sorted(offsets.ravel()) == list(range(TILE_ROWS * head_dim))
    for start in (0, VECTOR, head_dim - VECTOR):
        run = offsets[WARP : 2 * WARP, start : start + VECTOR].ravel()
        np.testing.assert_array_equal(run, run[0] + np.arange(WARP * VECTOR))
