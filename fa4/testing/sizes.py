"""Sizes of the cases of a design: keys by class, rows within a limit of work, sequences, extents.

An *extent* is a size that goes beyond something a kernel is built around: more heads, batch entries
or sequences than a warp has lanes, more than one tile of rows against several tiles of keys.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from fa4.testing.levels import WARP
from fa4.testing.strategies import MOST_SCORES

MOST_GRADIENT_SCORES = 8_000  # a gradient costs three times as much as a result

KEYS = {  # several tiles first: there, most goes wrong
    "keys_long": (1025, 1153, 1030, 1281),
    "keys_tiles": (257, 300, 385, 256, 513),
    "keys_edge": (127, 128, 129, 64, 63, 65, 17, 130, 113),
    "keys_1": (1,),
}
# The order in which they are dealt: for gradients, lengths of a few tiles come more often.
LENGTHS = tuple(KEYS)
GRADIENT_LENGTHS = ("keys_tiles", "keys_edge", "keys_long", "keys_edge", "keys_tiles", "keys_edge",
                    "keys_tiles", "keys_1")  # fmt: skip
_ROWS = (1, 3, 17, 33, 64, 65, 128, 130, 200)
HEAD_DIMS = {
    "dim_to_64": ((64, 64), (8, 8), (32, 32), (40, 40), (16, 16)),
    "dim_to_128": ((128, 128), (96, 96), (72, 72), (80, 80)),
    "dim_beyond_128": ((192, 192), (256, 256)),
    "dim_unequal": ((64, 128), (192, 128), (40, 24), (16, 64)),
    "dim_odd": ((7, 7), (20, 20), (33, 33), (1, 1), (100, 100), (12, 30), (65, 64), (129, 129)),
}
# "shared" and "blocks" are sizes at which pages can be shared, and blocks be skipped.
EXTENTS = ("many_heads", "many_batch", "many_sequences", "rows_and_keys", "shared", "blocks")


def choose_sizes(
    rng: random.Random, fields: Mapping[str, Any], length: str, *, gradients: bool
) -> dict[str, Any]:
    """batch, heads_k, seqlen_q, seqlen_k and lengths for the features `fields`."""
    group, layout = fields.get("group", 1), fields.get("layout", "dense")
    keys = rng.choice(KEYS[length])
    heads_k = rng.choice((1, 2)) if group < 5 else 1
    if fields.get("strides") == "expanded_kv":
        heads_k = 2
    batch = rng.choice((1, 2)) if layout == "dense" else 1
    if layout == "dense" and {"score_mod", "mask_mod"} & set(fields):
        batch = 2  # callbacks are told which
    most = MOST_GRADIENT_SCORES if gradients else MOST_SCORES
    room = most // (batch * heads_k * group * keys)
    tall = fields.get("rows")
    rows = min(tall, 8 * room) if tall else _choose_rows(rng, room, length, keys)
    rows = max(rows, fields.get("least_rows", 0))
    sizes: dict[str, Any] = {"batch": batch, "heads_k": heads_k}
    if layout == "dense":
        return sizes | {"seqlen_q": rows, "seqlen_k": keys}
    return sizes | {"lengths": _choose_lengths(rng, rows, keys)}


def _choose_rows(rng: random.Random, most: int, length: str, keys: int) -> int:
    """Rows within the work limit; as many as keys now and then, or a few more."""
    fits = [rows for rows in _ROWS if rows <= most] or [1]
    if length in ("keys_edge", "keys_1") and keys + 3 <= most and rng.random() < 0.3:
        fits = [keys, keys + 3]
    return rng.choice(fits)


def _choose_lengths(rng: random.Random, rows: int, keys: int) -> tuple[tuple[int, int], ...]:
    """The sequence of the class among short ones; half of the time behind one without rows."""
    short = [(rng.choice((0, 1, 5, 17)), rng.choice((0, 1, 6, 19))) for _ in range(2)]
    lengths = [(rows, keys), *short[: rng.choice((1, 2))]]
    rng.shuffle(lengths)
    if rng.random() < 0.5:
        lengths = [(0, rng.choice((6, 0, 19))), *lengths]
    return tuple(lengths)


def choose_extent(rng: random.Random, fields: Mapping[str, Any], extent: str) -> dict[str, Any]:
    """As `choose_sizes`, beyond a warp or a tile; few rows and keys where there is much else."""
    group, layout = fields.get("group", 1), fields.get("layout", "dense")
    sizes: dict[str, Any] = {"batch": 1, "heads_k": 1}
    rows, keys = rng.choice((1, 2, 3)), rng.choice((3, 5, 9, 17))
    if extent == "many_heads":
        sizes["heads_k"] = WARP // group + rng.choice((1, 2, 3))
    if extent == "rows_and_keys":
        rows, keys = rng.choice((129, 130, 145)), rng.choice((513, 520, 577))
    if extent == "blocks":
        sizes["heads_k"] = 2 if group == 1 else 1
        rows, keys = rng.choice((130, 70)), rng.choice((257, 129))
    if layout == "dense":
        if extent == "many_batch":
            sizes["batch"] = WARP + rng.choice((1, 3))
        return sizes | {"seqlen_q": rows, "seqlen_k": keys}
    lengths = [(rows, keys), (0, 4), (2, 3)]
    if extent == "shared":
        lengths = [(3, 40), (2, 33), (0, 17), (1, 5)]
    if extent == "many_sequences":
        more = WARP + rng.choice((1, 3)) - len(lengths)
        lengths += [(rng.choice((1, 0, 2)), rng.choice((3, 0, 5, 1))) for _ in range(more)]
    rng.shuffle(lengths)
    return sizes | {"lengths": tuple(lengths)}


def choose_window(
    rng: random.Random, kind: str, lengths: Sequence[tuple[int, int]]
) -> tuple[int | None, int | None]:
    """A window of a kind that hides something of the longest sequence, if anything can be.

    An unbounded side is None or -1: both are in use.
    """
    keys = max(keys for _, keys in lengths)
    sides = [side for side in (0, 1, 2, 7, 31, 64, 127, 128) if side < max(keys, 1)]
    unbounded = rng.choice((None, -1))
    left = rng.choice(sides) if kind in ("left", "both") else unbounded
    right = rng.choice(sides[:5]) if kind in ("right", "both") else unbounded
    return left, right
