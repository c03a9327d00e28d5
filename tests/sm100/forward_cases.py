"""Strategies of problems for a compiled kernel: what may vary without compiling again."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from fa4.config import normalize_window
from fa4.kit.features import BackwardFeatures
from fa4.testing import Case
from fa4.testing import strategies as draw
from fa4.testing.values import REGIMES
from tests.sm100.forward_kernel import identity

EDGES = (1, 127, 128, 129, 255, 257, 513)
SHORT = (1, 3, 64, 130)
GROUPS = (1, 2, 3, 5, 8)
MOST_TILES = 12  # pairs of a query block and a KV tile, over heads and sequences
# masked_nan hides NaN among keys that other rows of the tile see: 0 * NaN is NaN in any kernel
# that multiplies whole tiles.
VALUES = tuple(name for name in REGIMES if name != "masked_nan")
GRADIENT_VALUES = tuple(name for name in VALUES if name != "largest")  # those of K overflow
# Logits of -1e5, squared by a score_mod, have no digit left behind the point in float32.
FLAT_VALUES = tuple(name for name in GRADIENT_VALUES if name != "low")
# V as the first channels of K needs as many.
WIDE = ("latent",)
# With a sink of 100 a row's sum overflows float32 where O, 1e-36, is just beyond its band.
HUGE = ("common_mean", "activations")
SCHEDULES = ("random", "adversarial", "fifo")


@st.composite
def cases(draw_: Any, spec: Any, room: int = MOST_TILES) -> Case:
    """A problem for a spec, forward or backward: lengths at the edges of tiles, heads, features.

    room: pairs of a query block and a KV tile, over heads and sequences.
    """
    forward = not isinstance(spec, BackwardFeatures)
    packed_group = spec.group if forward else 1
    longest = 128 if forward and spec.numerics.q_tiles == 1 and not spec.packed_q else 10**6
    lengths_q = [n for n in EDGES if n <= longest]
    group = packed_group if packed_group > 1 else draw_(st.sampled_from(GROUPS))
    varied_q, varied_k = spec.packed_q or spec.used_q, spec.packed_k or spec.used_k
    count = draw_(st.sampled_from((1, 2, 3) if varied_q or varied_k else (1, 2)))
    lengths: list[tuple[int, int]] = []
    for number in range(count):
        rows = lengths[0][0] if lengths and not varied_q else draw_(st.sampled_from(lengths_q))
        keys = lengths[0][1] if lengths and not varied_k else draw_(st.sampled_from(EDGES))
        if number and varied_q:
            rows = draw_(st.sampled_from((0, *SHORT)))
        if number and varied_k:
            keys = draw_(st.sampled_from((0, *SHORT)))
        lengths.append((rows, keys))
    first = draw_(st.integers(0, count - 1))  # an empty sequence may also come first
    lengths = lengths[first:] + lengths[:first]
    height = 256 if forward else 128
    blocks = sum(-(-rows * packed_group // height) * -(-keys // 128) for rows, keys in lengths)
    unpacked = 1 if packed_group > 1 else group
    squares = getattr(spec.score_mod, "__name__", "") == "curved"
    values = VALUES if forward else FLAT_VALUES if squares else GRADIENT_VALUES
    excluded = (HUGE if spec.sink else ()) + (WIDE if spec.head_dim_v > spec.head_dim else ())
    if blocks * unpacked > room and packed_group == 1:
        group = unpacked = 1
    heads_k = 2 if 2 * blocks * unpacked <= room else 1
    fields: dict[str, Any] = {
        "layout": "packed", "lengths": tuple(lengths), "heads_k": heads_k, "group": group,
        "head_dim": spec.head_dim, "head_dim_v": spec.head_dim_v, "dtype": spec.dtype,
        "causal": spec.causal,
        "values": draw_(st.sampled_from([name for name in values if name not in excluded])),
        "seed": draw_(draw.seeds()),
    }  # fmt: skip
    if spec.sink:
        fields["sink"] = draw_(draw.sinks())
    if spec.softcap:
        fields["softcap"] = draw_(draw.softcaps())
    scales = draw.softmax_scales()
    fields["softmax_scale"] = draw_(
        scales if spec.score_mod is identity else scales.filter(lambda s: s is None or s > 0)
    )
    if spec.window_left or spec.window_right:
        fields["window_size"] = _window(draw_, spec, *map(max, zip(*lengths, strict=True)))
    return Case(**fields)


def _window(draw_: Any, spec: Any, rows: int, keys: int) -> tuple[int | None, int | None]:
    """A window whose unbounded sides are those that the spec does not have."""
    left, right = draw_(draw.windows(rows, keys, causal=spec.causal))
    left = left if spec.window_left else None
    right = right if spec.window_right else None
    normalize_window((left, right), spec.causal)
    return left, right


def runs() -> st.SearchStrategy[dict[str, Any]]:
    """How the emulator runs it: schedule, seed, and so few CTAs that each has several tiles."""
    return _runs(num_sms=st.sampled_from((1, 2, 3)))


def backward_runs() -> st.SearchStrategy[dict[str, Any]]:
    """Schedule, seed, and how many CTAs there are at a time."""
    return _runs(resident_clusters=st.sampled_from((1, 2, 5)))


def _runs(**more: st.SearchStrategy[int]) -> st.SearchStrategy[dict[str, Any]]:
    chosen = {"schedule": st.sampled_from(SCHEDULES), "seed": st.integers(0, 2**16)}
    return st.fixed_dictionaries(chosen | more)
