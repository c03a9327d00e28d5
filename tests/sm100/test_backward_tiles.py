"""Which query tiles a KV tile visits, and its turn at each, against a model by definition."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass")

from fa4.emulator import launch
from fa4.masks import Chunked
from fa4.sm100.backward.spec import BackwardSpec
from fa4.sm100.backward.workspace import DQ_WARPS, dq_offset, first_tile, tiles_of
from tests.sm100.backward_tiles import (
    BLOCKS,
    FIELDS,
    TILE,
    Sequence,
    compile_tiles,
    tile_errors,
)

BATCH = 320  # sequences of a launch
LONGEST = TILE * BLOCKS
EDGES = (0, 1, 2, 127, 128, 129, 255, 256, 257, 383, 385, 640, 700, LONGEST)
SIDES = (0, 1, 63, 127, 128, 129, 300, 2000)
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "left": {"window_left": True},
    "right": {"window_right": True},
    "causal, left": {"causal": True, "window_left": True},
    "both": {"window_left": True, "window_right": True},
    "chunks of 100": {"mask": Chunked(100)},
    "chunks of 256": {"mask": Chunked(256)},
}


def spec_of(name: str) -> BackwardSpec:
    return BackwardSpec(
        head_dim=64, head_dim_v=64, used_q=True, used_k=True, deterministic=True, **MASKS[name]
    )


@cache
def compiled(name: str) -> Any:
    return compile_tiles(spec_of(name), BATCH)


def draw_sequences(spec: BackwardSpec, seed: int) -> list[Sequence]:
    """Lengths at tile edges and between, windows of either sign that hide not everything."""
    rng = np.random.default_rng(seed)

    def length() -> int:
        return int(rng.choice(EDGES) if rng.random() < 0.7 else rng.integers(0, LONGEST + 1))

    def side() -> int:
        return int(rng.choice(SIDES) if rng.random() < 0.7 else rng.integers(0, 1200))

    found = []
    for _ in range(BATCH):
        left, right = side(), side()
        if rng.random() < 0.3 and not spec.causal:  # one side hides the diagonal itself
            if rng.random() < 0.5:
                right = -int(rng.integers(0, left + 1))
            else:
                left = -int(rng.integers(0, right + 1))
        found.append(Sequence(length(), length(), left, right))
    return found


def run(name: str, sequences: list[Sequence]) -> tuple[np.ndarray, np.ndarray]:
    sizes = np.array([[getattr(one, x) for one in sequences]
                      for x in ("seqlen_q", "seqlen_k", "left", "right")], np.int32)  # fmt: skip
    fields = np.full((BATCH * BLOCKS, len(FIELDS)), -1, np.int32)
    turns = np.full((BATCH * BLOCKS, BLOCKS), -1, np.int32)
    launch(compiled(name), sizes, fields, turns)
    return fields, turns


@pytest.mark.parametrize("name", MASKS)
def test_visited_tiles_and_turns(name: str) -> None:
    """Exactly those with a visible pair; turns are 0, 1, ... in the order of launch."""
    spec = spec_of(name)
    sequences = draw_sequences(spec, len(name))
    assert list(tile_errors(spec, sequences, *run(name, sequences))) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", MASKS)
def test_thousands_of_sequences(name: str, seed: int) -> None:
    spec = spec_of(name)
    sequences = draw_sequences(spec, 1000 + seed)
    assert list(tile_errors(spec, sequences, *run(name, sequences))) == []


def test_wrong_tiles_are_seen() -> None:
    """One more or one less of each field, two turns changed."""
    spec, sequences = spec_of("both"), [Sequence(1000, 900, 200, 100)] * BATCH
    fields, turns = run("both", sequences)
    assert list(tile_errors(spec, sequences, fields, turns)) == []
    for number, field in enumerate(FIELDS):
        for change in (-1, 1):
            wrong = fields.copy()
            wrong[3, number] += change
            assert list(tile_errors(spec, sequences, wrong, turns)), field
    wrong = turns.copy()
    wrong[[2, 3]] = wrong[[3, 2]]
    assert list(tile_errors(spec, sequences, fields, wrong))


@settings(deadline=None)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=8), st.booleans())
def test_tiles_of_sequences_in_the_workspace(lengths: list[int], packed: bool) -> None:
    """No two sequences share a tile, and all are within what is allocated."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    rows = int(starts[-1]) if packed else max(lengths)
    count, taken = tiles_of(rows, len(lengths), packed=packed), set[int]()
    for batch, length in enumerate(lengths):
        first = first_tile(batch, int(starts[batch]), -(-rows // TILE), packed=packed)
        mine = set(range(first, first + -(-length // TILE)))
        assert not mine & taken and all(tile < count for tile in mine)
        taken |= mine


@pytest.mark.parametrize("dim", range(16, 129, 16))
def test_places_of_dq_in_a_tile(dim: int) -> None:
    """Each element has one of its own; a warp's 32 rows are one run, 16 bytes a lane."""
    row, col = np.meshgrid(np.arange(TILE), np.arange(dim), indexing="ij")
    places = dq_offset(row, col, dim)
    assert sorted(places.ravel()) == list(range(TILE * dim))
    for warp in range(DQ_WARPS // 2):
        mine = places[warp * 32 : (warp + 1) * 32]
        assert mine.min() == warp * 32 * dim and mine.max() == (warp + 1) * 32 * dim - 1
        np.testing.assert_array_equal(mine[:, :4], mine[0, 0] + np.arange(128).reshape(32, 4))
