"""The masks of `fa4.masks`: what makes them masks, and what each one means."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fa4
from fa4.masks import MASKS, Band, Chunked, IntervalMask
from fa4.oracle.visible import SequenceLengths, visible_keys

LENGTHS = st.integers(1, 60)


@st.composite
def drawn_masks(draw: Any) -> IntervalMask:
    """One of `MASKS` with small numbers in all of its fields."""
    kind = draw(st.sampled_from(MASKS))
    return kind(**{field.name: draw(st.integers(1, 40)) for field in fields(kind)})


def shown(mask: IntervalMask, rows: int, keys: int) -> np.ndarray:
    """(rows, keys) bool, as the oracle takes a mask_mod."""
    return visible_keys({"mask_mod": mask}, 0, 1, SequenceLengths(rows, keys))[0]


@given(mask=drawn_masks(), rows=LENGTHS, keys=LENGTHS)
def test_bounds_never_go_back(mask: IntervalMask, rows: int, keys: int) -> None:
    """What kernels rely on where they skip tiles."""
    row = np.arange(rows + 200)
    for bound in (mask.start(row, rows, keys), mask.stop(row, rows, keys)):
        assert bound is None or (np.diff(bound) >= 0).all()
    assert mask.has_start == (mask.start(0, rows, keys) is not None)


@given(mask=drawn_masks(), rows=LENGTHS, keys=LENGTHS)
def test_bounds_are_the_mask(mask: IntervalMask, rows: int, keys: int) -> None:
    """As a mask_mod it shows exactly the keys between its bounds, for plain integers too."""
    seen = shown(mask, rows, keys)
    for row in range(rows):
        start, stop = mask.start(row, rows, keys), mask.stop(row, rows, keys)
        run = range(max(start or 0, 0), keys if stop is None else min(stop, keys))
        assert list(np.flatnonzero(seen[row])) == list(run)


@given(mask=drawn_masks(), rows=LENGTHS, keys=LENGTHS)
def test_rows_of_a_key(mask: IntervalMask, rows: int, keys: int) -> None:
    """The rows that see a key are a run, which never goes back from a key to the next."""
    seen = shown(mask, rows, keys)
    for key in range(keys):
        first, stop = mask.first_row(key, rows, keys), mask.stop_row(key, rows, keys)
        run = range(max(first or 0, 0), rows if stop is None else min(stop, rows))
        assert list(np.flatnonzero(seen[:, key])) == list(run)
    key = np.arange(keys + 200)
    for bound in (mask.first_row(key, rows, keys), mask.stop_row(key, rows, keys)):
        assert bound is None or (np.diff(bound) >= 0).all()


@given(sides=st.tuples(*[st.none() | st.integers(0, 40)] * 2), rows=LENGTHS, keys=LENGTHS)
def test_band(sides: tuple[int | None, int | None], rows: int, keys: int) -> None:
    """The same as window_size; with a right side of 0 as causal."""
    lengths = SequenceLengths(rows, keys)
    expected = visible_keys({"window_size": sides}, 0, 1, lengths)[0]
    assert np.array_equal(shown(Band(*sides), rows, keys), expected)
    causal = visible_keys({"causal": True}, 0, 1, lengths)[0]
    assert np.array_equal(shown(Band(right=0), rows, keys), causal)


@given(size=st.integers(1, 70), rows=LENGTHS, keys=LENGTHS)
def test_chunked(size: int, rows: int, keys: int) -> None:
    """Key by key: no later than the diagonal, and in its chunk."""
    seen = shown(Chunked(size), rows, keys)
    for row in range(rows):
        diagonal = row + keys - rows
        wanted = [j for j in range(keys) if j <= diagonal and j // size == diagonal // size]
        assert list(np.flatnonzero(seen[row])) == wanted


@pytest.mark.parametrize("size", [0, -3, 2**31, 2.5, True])
def test_sizes_without_a_meaning(size: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="size must be"):
        Chunked(size)


def test_reference_and_oracle_take_masks() -> None:
    """Forward and backward, against the oracle; a window is what window_size gives."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 2, 8)) for n in (30, 45, 45))
    for mask in (Chunked(16), Band(7, 2)):
        out = fa4.flash_attn_func(q, k, v, mask_mod=mask)
        assert np.allclose(out, fa4.flash_attn_func(q, k, v, mask_mod=mask, impl="oracle"))
        assert not np.allclose(out, fa4.flash_attn_func(q, k, v, impl="oracle"))
    assert np.array_equal(out, fa4.flash_attn_func(q, k, v, window_size=(7, 2)))
