"""Which query tiles a KV tile visits, and its turn at each, against a model by definition."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")

from fa4.emulator import launch
from fa4.masks import Chunked
from fa4.sm100.backward.spec import BackwardSpec
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
    "chunks of 300, pair": {"mask": Chunked(300), "cta_group": 2},
    "both, pair": {"window_left": True, "window_right": True, "cta_group": 2},
    "causal, left, pair": {"causal": True, "window_left": True, "cta_group": 2},
}


def spec_of(name: str) -> BackwardSpec:
    return BackwardSpec(
        head_dim=128, head_dim_v=128, used_q=True, used_k=True, deterministic=True, **MASKS[name]
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
