"""Tile ranges and masks against brute force, and the dropout generator."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.config import ForwardConfig
from fa4.reference.dropout import keep_scale, philox_4x32
from fa4.reference.sequences import Sequence
from fa4.reference.spec import Attention, BlockSparseTensors, Dropout
from fa4.reference.tiles import Tile, TileMasks, cut

sides = st.none() | st.integers(-6, 30)


def masks_of(seqlen_q: int, seqlen_k: int, spec: Attention) -> tuple[TileMasks, np.ndarray]:
    """TileMasks of a one-head sequence and the definition's (1, Sq, Sk) visibility."""
    seq = Sequence(0, *(np.zeros((1, n, 1)) for n in (seqlen_q, seqlen_k, seqlen_k)))
    left, right = spec.window
    distance = np.arange(seqlen_k) - np.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    seen = np.ones((1, seqlen_q, seqlen_k), bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return TileMasks(seq, spec), seen


@settings(max_examples=200)
@given(st.integers(1, 30), st.integers(1, 30), sides, sides, st.integers(1, 9), st.integers(1, 9))
def test_tiles_cover_exactly_what_is_visible(sq, sk, left, right, tile_m, tile_n) -> None:
    spec = Attention(softmax_scale=1.0, window=(left, right))
    masks, truth = masks_of(sq, sk, spec)
    covered = np.zeros((1, sq, sk), bool)
    for rows in cut(sq, tile_m):
        tiles = masks.kv_tiles(rows, tile_n)
        assert tiles == sorted(tiles, reverse=True)
        for cols in tiles:
            keep = masks.visible(rows, cols)
            block = np.ones((1, rows.size, cols.size), bool) if keep is None else keep
            covered[:, rows.slice, cols.slice] = block
            assert keep is None or not keep.all()
    assert (covered == truth).all()
    covered[:] = False
    for cols in cut(sk, tile_n):
        for rows in masks.q_tiles(cols, tile_m):
            keep = masks.visible(rows, cols)
            covered[:, rows.slice, cols.slice] = True if keep is None else keep
    assert (covered == truth).all()


def test_unmasked_tiles_are_recognised() -> None:
    masks, _ = masks_of(256, 256, Attention(softmax_scale=1.0, window=(None, 0)))
    assert masks.visible(Tile(128, 256), Tile(0, 128)) is None
    assert masks.visible(Tile(128, 256), Tile(128, 256)) is not None
    assert len(masks.kv_tiles(Tile(0, 128), 128)) == 1


# Known answers of Random123's kat_vectors for philox4x32-10 (Salmon et al. 2011).
@pytest.mark.parametrize(
    ("counter", "seed", "words"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, seed, words) -> None:
    got = philox_4x32(tuple(np.array(word) for word in counter), seed)
    assert tuple(int(word) for word in got) == words


@settings(max_examples=40)
@given(st.integers(0, 2**64 - 1), st.integers(1, 40), st.integers(1, 40), st.data())
def test_any_tile_replays_the_same_choices(seed, sq, sk, data) -> None:
    masks, _ = masks_of(sq, sk, Attention(softmax_scale=1.0))
    dropout = Dropout(probability=0.4, seed=seed)
    whole = keep_scale(dropout, masks.region(Tile(0, sq), Tile(0, sk)))
    rows = Tile(*sorted(data.draw(st.tuples(st.integers(0, sq), st.integers(0, sq)))))
    cols = Tile(*sorted(data.draw(st.tuples(st.integers(0, sk), st.integers(0, sk)))))
    part = keep_scale(dropout, masks.region(rows, cols))
    assert (part == whole[:, rows.slice, cols.slice]).all()


def test_dropout_keeps_the_asked_share_independently_of_position() -> None:
    masks, _ = masks_of(400, 400, Attention(softmax_scale=1.0))
    region = masks.region(Tile(0, 400), Tile(0, 400))
    kept = keep_scale(Dropout(probability=0.3, seed=1), region)[0] > 0
    deviation = 5 * np.sqrt(0.3 * 0.7 / kept.size)  # five standard deviations
    assert abs(kept.mean() - 0.7) < deviation
    flat = kept - kept.mean()
    for lag in (flat[:, 1:] * flat[:, :-1], flat[1:] * flat[:-1]):
        assert abs(lag.mean()) < 5 * 0.21 / np.sqrt(lag.size)
    other = keep_scale(Dropout(probability=0.3, seed=2), region)[0] > 0
    assert abs((kept == other).mean() - 0.58) < 0.01  # 0.7^2 + 0.3^2


def test_block_lists_count_in_tiles_of_the_kernel_by_default() -> None:
    """A block is what a CTA computes at once: two Q tiles of the default config, one KV tile."""
    config = ForwardConfig()
    counts = np.zeros((1, 1, 1), np.int32)
    lists = BlockSparseTensors(counts, counts[..., None], counts, counts[..., None])
    assert lists.block_size == (config.q_tiles * config.tile_m, config.tile_n)
