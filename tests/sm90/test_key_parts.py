"""Hopper's gradients of few keys: query heads that share them are divided over CTAs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cutlass")

import fa4
from fa4.backends import kernel_backward
from fa4.compiled import variants
from fa4.compiled.support import BackwardCall
from fa4.config import Window
from fa4.hardware import B200, H200
from fa4.plan.warpgroup_key_parts import KeyCtas, cost_of_parts, key_parts, seen_tiles

SMS = H200.sm_count
CALL = BackwardCall(
    dtype="bf16", head_dim=96, head_dim_v=96, heads_q=64, heads_k=4, batch=1, rows_q=2654,
    rows_k=2654, window=(None, 0),
)  # fmt: skip


@given(st.integers(1, 2000), st.integers(1, 64), st.floats(0.1, 500), st.floats(1, 2))
def test_parts_divide_the_group(ctas: int, group: int, tiles: float, uneven: float) -> None:
    """Never more than there are heads; short CTAs that fill whole rounds are left as they are."""
    work = KeyCtas(ctas=ctas, group=group, tiles=tiles, longest=uneven * tiles)
    assert group % key_parts(work, SMS) == 0
    assert key_parts(replace(work, group=1), SMS) == 1
    few = min(tiles, 100 / group)
    whole = replace(work, ctas=SMS * (ctas % 8 + 1), tiles=few, longest=few)
    assert key_parts(whole, SMS) == 1
    beside = replace(work, beside=1e9 * SMS, longest_beside=1.0)
    assert key_parts(beside, SMS) == 1  # the other kernel's CTAs fill what is left


@given(
    st.integers(1, 700), st.integers(1, 700), st.none() | st.integers(0, 300),
    st.none() | st.integers(0, 300), st.sampled_from([64, 128]),
)  # fmt: skip
def test_tiles_seen_are_the_masks(
    rows: int, keys: int, left: int | None, right: int | None, tile_n: int
) -> None:
    """Of a tile's keys, the queries that see one, counted in the mask."""
    offset = np.arange(keys) - np.arange(rows)[:, None] - (keys - rows)
    seen = (offset >= -keys - rows if left is None else offset >= -left) & (
        offset <= keys + rows if right is None else offset <= right
    )
    starts = range(0, keys, tile_n)
    counts = [int(seen[:, start : start + tile_n].any(1).sum()) / 64 for start in starts]
    mean, most = seen_tiles(rows, keys, (left, right), tile_n)
    # The last tile is counted as a whole one.
    assert most >= max(counts) - 1e-9 and mean >= float(np.mean(counts)) - 1e-9
    exact = [keys - start >= tile_n for start in starts]
    if all(exact):
        assert mean == pytest.approx(np.mean(counts)) and most == pytest.approx(max(counts))


# (batch, queries, keys, query heads, KV heads, head dim), window: microseconds by parts, the least
# of four medians of one run on an H200, sums in any order.
TIMES: dict[tuple[tuple[int, ...], Window], dict[int, int]] = {
    ((1, 467, 4860, 10, 2, 128), (None, 0)): {1: 94, 5: 110},
    ((1, 1499, 1499, 30, 6, 240), (None, 0)): {1: 256, 5: 276},
    ((1, 1531, 1531, 16, 2, 48), (None, None)): {1: 241, 2: 131, 4: 75, 8: 81},
    ((1, 1652, 1652, 6, 1, 240), (None, 0)): {1: 240, 2: 136, 3: 101, 6: 93},
    ((1, 2171, 2171, 16, 2, 112), (1259, 0)): {1: 364, 2: 193, 4: 126, 8: 130},
    ((1, 5282, 5282, 4, 1, 104), (None, 0)): {1: 616, 2: 320, 4: 186},
    ((2, 881, 881, 20, 4, 64), (None, None)): {1: 107, 5: 92},
    ((2, 2007, 2007, 16, 1, 112), (None, 0)): {1: 962, 2: 490, 4: 280, 8: 198, 16: 221},
    ((2, 2033, 2033, 3, 1, 160), (None, None)): {1: 138, 3: 132},
    ((2, 2451, 2451, 25, 5, 96), (None, None)): {1: 698, 5: 627},
    ((2, 4284, 4284, 24, 6, 120), (None, 0)): {1: 1148, 2: 1043, 4: 1088},
    ((3, 1053, 1053, 15, 3, 184), (None, None)): {1: 306, 5: 285},
    ((3, 1846, 1846, 20, 4, 88), (None, 0)): {1: 297, 5: 291},
    ((3, 1846, 1846, 48, 3, 88), (None, 0)): {1: 946, 2: 717, 4: 628, 8: 630, 16: 680},
    ((5, 8202, 8202, 36, 12, 56), (None, None)): {1: 14706, 3: 14922},
    ((11, 4104, 4104, 16, 1, 64), (None, None)): {1: 3954, 2: 4118, 4: 3987, 8: 3964, 16: 4038},
    ((27, 7472, 7472, 16, 1, 96), (543, 543)): {1: 9252, 2: 7774, 4: 7510, 8: 7823, 16: 8774},
}  # fmt: skip


def test_choices_are_fast() -> None:
    """Beside the fastest of these parts, on average 2% lost at most, and 8% in any call."""
    lost = []
    for (shape, window), times in TIMES.items():
        batch, rows, keys, heads, heads_k, d = shape
        call = BackwardCall(
            dtype="bf16", head_dim=d, head_dim_v=d, heads_q=heads, heads_k=heads_k, batch=batch,
            rows_q=rows, rows_k=keys, window=window,
        )  # fmt: skip
        work = variants.key_work(call)
        chosen = min(times, key=lambda parts, w=work: cost_of_parts(w, SMS, parts))
        lost.append(times[chosen] / min(times.values()))
    assert max(lost) <= 1.08 and fmean(lost) <= 1.02


def test_a_gpu_without_work_gets_some() -> None:
    """84 CTAs of 132 SMs, 16 heads each; none on Blackwell, none where every head has its keys."""
    assert variants.find_key_parts(CALL, H200) == 4
    assert variants.choose_backward_spec(CALL, H200).key_parts
    fields = vars(CALL)
    call = BackwardCall(**fields | {"heads_k": 64})
    assert variants.find_key_parts(call, H200) == 1
    assert not variants.choose_backward_spec(call, H200).key_parts
    packed = BackwardCall(**fields | {"batch": 3, "packed_q": True, "packed_k": True})
    assert variants.find_key_parts(packed, H200) > 1
    assert variants.find_key_parts(CALL, B200) == 1
    none = fields | {"batch": 0, "packed_q": True, "packed_k": True}
    assert variants.find_key_parts(BackwardCall(**none), H200) == 1


def gradients(shape: tuple[int, ...], dims: tuple[int, int], impl: str, **options: Any) -> Any:
    """dQ, dK and dV of a drawn call: six query heads on two; packed in two sequences, one empty."""
    drawn = torch.Generator().manual_seed(3)
    sizes = ((6, dims[0]), (2, dims[0]), (2, dims[1]))
    q, k, v = (
        torch.randn(*shape, *size, generator=drawn).bfloat16().requires_grad_() for size in sizes
    )
    if len(shape) == 1:
        lengths = torch.tensor([0, 40, 40, shape[0] - 7], dtype=torch.int32)
        options |= {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths}
        out = fa4.flash_attn_varlen_func(q, k, v, impl=impl, **options)
    else:
        out = fa4.flash_attn_func(q, k, v, impl=impl, **options)
    dout = torch.randn(out.shape, generator=drawn).bfloat16()
    return torch.autograd.grad(out, (q, k, v), dout)


def force(monkeypatch: Any, **parts: int) -> set[int]:
    """Calls have so many parts, and are not remembered; those that were asked for."""
    asked: set[int] = set()

    def find(count: int, *_: Any) -> int:
        asked.add(count)
        return count

    for module in (variants, kernel_backward):
        for name, count in parts.items():
            monkeypatch.setattr(module, name, partial(find, count))
    monkeypatch.setattr(
        kernel_backward, "remembered", lambda call, key, find, *rest: find(call, *rest)
    )
    return asked


def compare(found: Any, wanted: Any) -> None:
    """As the reference's, what a part lacks is seen, and packed rows of no sequence are 0."""
    for mine, right in zip(found, wanted, strict=True):
        assert mine.dtype == right.dtype and mine.shape == right.shape
        bound = 2**-7 * float(right.abs().max())
        torch.testing.assert_close(mine, right, rtol=0, atol=bound)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(mine * 0.9, right, rtol=0, atol=bound)
        if mine.dim() == 3:
            assert not mine[-7:].any()


@pytest.mark.parametrize(
    ("shape", "dims", "options"),
    [
        ((1, 150), (96, 72), {"causal": True}),
        ((150,), (40, 64), {"deterministic": True}),
        ((2, 70), (136, 24), {}),
        ((150,), (24, 136), {"causal": True}),
    ],
)
def test_parts_add_up(
    monkeypatch: Any, shape: tuple[int, ...], dims: tuple[int, int], options: dict[str, Any]
) -> None:
    """As the reference's; rows of no sequence are 0, and what a part lacks is seen."""
    asked = force(monkeypatch, find_key_parts=3)
    found = gradients(shape, dims, "emulator_sm90", **options)
    assert asked == {3}
    compare(found, gradients(shape, dims, "reference", **options))
