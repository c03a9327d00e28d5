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
from fa4.hardware import B200, H200
from fa4.plan.warpgroup_key_parts import KeyCtas, cost_of_parts, key_parts, seen_tiles
from fa4.plan.warpgroup_parts import key_work
from tests.sm90.key_parts_times import LATER, NARROW, WIDE, Times

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


@pytest.mark.parametrize(
    ("measured", "mean", "most"),
    [(NARROW, 1.004, 1.09), (LATER, 1.014, 1.11), (WIDE, 1.02, 1.08)],
)
def test_choices_are_fast(measured: Times, mean: float, most: float) -> None:
    """Beside the fastest of these parts, little is lost on average and in any call."""
    lost = []
    for (shape, window), times in measured.items():
        batch, rows, keys, heads, heads_k, d, dv = shape
        call = BackwardCall(
            dtype="bf16", head_dim=d, head_dim_v=dv, heads_q=heads, heads_k=heads_k, batch=batch,
            rows_q=rows, rows_k=keys, window=window,
        )  # fmt: skip
        work = key_work(variants.sizes_of(call))
        chosen = min(times, key=lambda parts, w=work: cost_of_parts(w, SMS, parts))
        lost.append(times[chosen] / min(times.values()))
    assert max(lost) <= most and fmean(lost) <= mean


def test_a_gpu_without_work_gets_some() -> None:
    """84 CTAs of 132 SMs, 16 heads each; none on Blackwell, none where every head has its keys."""
    assert variants.find_key_parts(CALL, H200) in (8, 16)
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
        ((1, 150), (40, 40), {}),  # more than a block of rows, of half as many units as threads
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
