"""Faults of mask edges and of the mapping from query heads to KV heads."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.testing.planted.fault import (
    EVERYWHERE,
    Fault,
    is_windowed,
    lengths_differ,
    replaced,
)
from tests.testing.planted.gradients import GradientKernel as Honest


def _shifted(kernel: Any, sides: tuple[Any, Any], left: int, right: int) -> tuple[Any, Any]:
    return tuple(
        None if side is None else side + by for side, by in zip(sides, (left, right), strict=True)
    )


def _edge_lost_at_tile(kernel: Any, cols: slice) -> np.ndarray:
    left, _ = kernel.sides()
    inside = Honest.band(kernel, cols)
    if left is not None and cols.start:
        inside[:, :, 0] &= Honest.distance(kernel, cols)[:, 0] != -left
    return inside


def _tile_of_one_key_skipped(kernel: Any) -> list[slice]:
    _, right = kernel.sides()
    tiles = Honest.tiles(kernel)
    last = kernel.diagonal() + kernel.rows - 1 + (right or 0)
    return tiles if right is None else [t for t in tiles if t.start == 0 or t.start != last]


def _causal_yields_to_window(kernel: Any) -> tuple[Any, Any]:
    left, right = Honest.sides(kernel)
    given = kernel.options.window_size[1]
    return left, given if kernel.options.causal and given not in (None, -1) else right


def _minus_one_is_a_number(kernel: Any) -> tuple[Any, Any]:
    left, right = Honest.sides(kernel)
    return (-1 if kernel.options.window_size[0] == -1 and right not in (None, 0) else left), right


def _reads_masked_keys(kernel: Any, cols: slice, keep: np.ndarray) -> tuple[Any, Any]:
    return Honest.keys_and_values(kernel, cols, np.ones_like(keep))


def _finite_mask(kernel: Any, k: np.ndarray, keep: np.ndarray, cols: slice) -> np.ndarray:
    scores = Honest.bent(kernel, kernel.scaled(k), cols)
    return np.where(keep, scores, kernel.work.type(-1e4))


def _mean_of_empty_rows(kernel: Any, state: Any) -> np.ndarray:
    out = Honest.normalised(kernel, state)
    if kernel.keys and kernel.sink() is None:
        mean = kernel.v.astype(kernel.work).mean(axis=1)[kernel.kv_heads(slice(0, 1))]
        out = np.where((state.total == 0)[..., None], mean[:, None], out)
    return out


EDGES = "mask edges"
MASK_FAULTS = (
    Fault(
        "wide_window", EDGES, "the left side shows one key too many", ("window",),
        replaced("sides", is_windowed, lambda x, sides: _shifted(x, sides, 1, 0)),
    ),
    Fault(
        "window_left_wide_if_lengths_differ", EDGES,
        "the left side shows one key too many where Sq != Sk", ("window",),
        replaced("sides", lengths_differ, lambda x, sides: _shifted(x, sides, 1, 0)),
    ),
    Fault(
        "window_left_narrow_if_more_keys", EDGES,
        "the left side shows one key too few where Sk > Sq", ("window",),
        replaced("sides", lambda x: x.keys > x.rows, lambda x, sides: _shifted(x, sides, -1, 0)),
    ),
    Fault(
        "window_right_wide_if_lengths_differ", EDGES,
        "the right side, unless causal, shows one key too many where Sq != Sk", ("window",),
        replaced(
            "sides", lambda x: x.rows != x.keys and not x.options.causal,
            lambda x, sides: _shifted(x, sides, 0, 1),
        ),
    ),
    Fault(
        "window_right_narrow_if_more_rows", EDGES,
        "the right side shows one key too few where Sq > Sk", ("window",),
        replaced(
            "sides", lambda x: x.rows > x.keys and is_windowed(x),
            lambda x, sides: _shifted(x, sides, 0, -1),
        ),
    ),
    Fault(
        "window_of_zero_is_unbounded", EDGES, "a left side of 0 is taken for none", ("window",),
        replaced("sides", is_windowed, lambda x, sides: (sides[0] or None, sides[1])),
    ),
    Fault(
        "window_minus_one_is_a_number", EDGES,
        "a left side of -1 is an offset where the right side is bounded", ("window",),
        {"sides": _minus_one_is_a_number},
    ),
    Fault(
        "window_edge_lost_at_tile", EDGES,
        "the leftmost key of a row is lost where it is the first of a further tile", ("window",),
        {"band": _edge_lost_at_tile},
    ),
    Fault(
        "tile_of_one_key_skipped", EDGES,
        "a tile of which only the first key is visible, to the last row, is skipped",
        ("causal", "window"), {"tiles": _tile_of_one_key_skipped},
    ),
    Fault(
        "top_left_causal", EDGES, "masks are aligned at the top left",
        ("causal", "window", "decode_row"), replaced("diagonal", lambda x: True, 0),
    ),
    Fault(
        "top_left_causal_if_more_keys", EDGES, "causal is aligned at the top left where Sk > Sq",
        ("causal", "decode_row"),
        replaced("diagonal", lambda x: x.options.causal and x.keys > x.rows, 0),
    ),
    Fault(
        "top_left_causal_if_more_rows", EDGES, "causal is aligned at the top left where Sq > Sk",
        ("causal", "rows_without_keys"),
        replaced("diagonal", lambda x: x.options.causal and x.keys < x.rows, 0),
    ),
    Fault(
        "causal_yields_to_window", EDGES, "a right side of the window replaces causal's",
        ("causal window",), {"sides": _causal_yields_to_window},
    ),
    Fault(
        "causal_drops_left_side", EDGES, "causal unbounds the left side of the window",
        ("causal window",),
        replaced("sides", lambda x: x.options.causal, lambda x, sides: (None, sides[1])),
    ),
    Fault(
        "finite_mask", EDGES, "masked scores are -10,000, not -inf",
        ("mask", "causal", "window", "rows_without_keys"), {"scores": _finite_mask},
    ),
    Fault(
        "mean_of_empty_rows", EDGES, "rows without a key are the mean of V",
        ("rows_without_keys", "causal", "window", "mask"), {"normalised": _mean_of_empty_rows},
    ),
    Fault(
        "reads_masked_keys", EDGES, "NaN in values that no row sees reaches O through 0 * NaN",
        ("masked_nan",), {"keys_and_values": _reads_masked_keys},
    ),
)  # fmt: skip


def _interleaved(kernel: Any) -> np.ndarray:
    return np.arange(kernel.heads) % kernel.heads_k


def _mapping(condition: Any, wrong: Any) -> dict[str, Any]:
    """Query heads read the KV heads `wrong(kernel)` where condition(kernel, cols) holds."""

    def kv_heads(kernel: Any, cols: slice) -> np.ndarray:
        return wrong(kernel) if condition(kernel, cols) else Honest.kv_heads(kernel, cols)

    return {"kv_heads": kv_heads}


HEADS = "head mapping"
HEAD_FAULTS = (
    Fault(
        "interleaved_heads", HEADS, "query head h reads KV head h mod Hk", ("gqa", "head"),
        _mapping(lambda x, cols: True, _interleaved),
    ),
    Fault(
        "interleaved_in_large_groups", HEADS, "h mod Hk where four or more share a KV head",
        ("gqa", "head"), _mapping(lambda x, cols: x.group >= 4, _interleaved),
    ),
    Fault(
        "wrong_head_beyond_one_tile", HEADS, "grouped heads read KV head 0 beyond 128 keys",
        ("gqa", "head"),
        _mapping(
            lambda x, cols: x.group > 1 and cols.start > 0, lambda x: np.zeros(x.heads, int)
        ),
    ),
    Fault(
        "group_of_three_as_two", HEADS, "a group of three is divided by a shift, as if of two",
        ("gqa", "head"),
        _mapping(
            lambda x, cols: x.group == 3,
            lambda x: np.minimum(np.arange(x.heads) // 2, x.heads_k - 1),
        ),
    ),
    Fault(
        "last_head_of_eight", HEADS, "the eighth head of a group reads the next KV head",
        ("gqa", "head"),
        _mapping(
            lambda x, cols: x.group == 8,
            lambda x: (np.arange(x.heads) + 1) // 8 % x.heads_k,
        ),
    ),
    Fault(
        "third_head_reads_second", HEADS, "of three or more KV heads the third reads the second's",
        (*EVERYWHERE, "head", "gqa"),
        _mapping(
            lambda x, cols: x.heads_k > 2,
            lambda x: np.where(Honest.kv_heads(x, slice(0)) == 2, 1, Honest.kv_heads(x, slice(0))),
        ),
    ),
)  # fmt: skip
