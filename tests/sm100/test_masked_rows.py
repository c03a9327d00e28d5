"""Masks of `fa4.masks` in the kernel: results, tiles that are skipped, and which kernel it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass")

import fa4
from fa4 import emulator
from fa4.compiled import cache
from fa4.compiled.build import find_key
from fa4.compiled.support import ForwardCall, NotSupported, check
from fa4.compiled.variants import choose_spec, tuned_spec
from fa4.masks import Band, Chunked, IntervalMask
from fa4.sm100.forward.spec import ForwardSpec
from fa4.testing import assert_within_budget
from fa4.testing.budget import Outputs
from fa4.testing.inputs import dense_inputs
from tests.sm100.neutral import ROWS, TILE_FIELDS, compile_neutral
from tests.sm100.neutral_expected import sizes_array, tile_errors

CALL = ForwardCall(
    dtype="bf16", head_dim=64, head_dim_v=64, heads_q=1, heads_k=1, batch=1, rows_q=512, rows_k=512
)


@dataclass(frozen=True)
class Mine(IntervalMask):
    """A mask that is not of this package: a causal one, some keys late."""

    late: int

    def start(self, row: Any, seqlen_q: Any, seqlen_k: Any) -> Any:
        return None

    def stop(self, row: Any, seqlen_q: Any, seqlen_k: Any) -> Any:
        return row + (seqlen_k - seqlen_q) + 1 - self.late

    def first_row(self, key: Any, seqlen_q: Any, seqlen_k: Any) -> Any:
        return key - (seqlen_k - seqlen_q) + self.late

    def stop_row(self, key: Any, seqlen_q: Any, seqlen_k: Any) -> Any:
        return None


def operands() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = (1, 300, 2, 64), (1, 420, 1, 64), (1, 420, 1, 64)
    return [rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in shapes]


@pytest.mark.parametrize("mask", [Chunked(100), Chunked(128), Band(60, 20)], ids=repr)
def test_within_budget(mask: IntervalMask) -> None:
    """The compiled kernel in the emulator against the oracle: several work tiles, ends in tiles."""
    q, k, v = operands()
    out, lse = fa4.flash_attn_func(q, k, v, mask_mod=mask, impl="emulator", return_lse=True)
    assert_within_budget(dense_inputs(q, k, v, mask_mod=mask), Outputs(out, lse))
    other = dense_inputs(q, k, v, mask_mod=Chunked(101))
    with pytest.raises(AssertionError):
        assert_within_budget(other, Outputs(out, lse))


def test_a_mask_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Works; but what a class means cannot be told, so that the kernel is not kept on disk."""
    monkeypatch.setattr(cache, "_said", set())
    q, k, v = operands()
    with pytest.warns(cache.CacheWarning, match="Mine cannot be in a cache key"):
        out, lse = fa4.flash_attn_func(q, k, v, mask_mod=Mine(30), impl="emulator", return_lse=True)
    assert_within_budget(dense_inputs(q, k, v, mask_mod=Mine(30)), Outputs(out, lse))


@pytest.fixture(scope="module")
def chunks() -> tuple[ForwardSpec, Any]:
    spec = ForwardSpec(head_dim=64, head_dim_v=64, mask=Chunked(200), group=2, scheduler="lpt")
    return spec, compile_neutral("tiles", spec, "sm_100a")


@settings(max_examples=12)
@given(
    seqlen_q=st.integers(1, 900),
    seqlen_k=st.sampled_from([1, 127, 128, 129, 700, 300_000]),
    heads=st.integers(1, 3),
)
def test_hidden_tiles_are_skipped(
    chunks: tuple[ForwardSpec, Any], seqlen_q: int, seqlen_k: int, heads: int
) -> None:
    """A work tile has the KV tiles that some row sees, no more; whole ones need no comparison."""
    spec, kernel = chunks
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads": heads, "group": 1, "batch": 1}
    out = np.full((ROWS, len(TILE_FIELDS)), -1, np.int32)
    emulator.launch(kernel, sizes_array(sizes), out)
    assert tile_errors(spec, sizes, out) == []
    out[0, TILE_FIELDS.index("kv_stop")] += 1
    assert tile_errors(spec, sizes, out)


def test_choice() -> None:
    """A mask of this kind is in the spec as such, longest tiles first; it shares no key."""
    plain = choose_spec(CALL)
    masked = choose_spec(replace(CALL, mask_mod=Chunked(100)))
    assert (masked.mask, masked.mask_mod, masked.scheduler) == (Chunked(100), None, "lpt")
    assert masked.pipeline.causal and masked.hides_first_keys and masked.cta_group == 1
    assert masked.numerics == replace(plain.numerics, exp2=masked.numerics.exp2)
    specs = [plain, masked, *(choose_spec(replace(CALL, mask_mod=Chunked(n))) for n in (99, 101))]
    assert len({find_key(spec, "sm_100a") for spec in specs}) == 4


def test_refusals() -> None:
    """One mask at a time; a mask is no score_mod; other Python functions stay refused."""
    for other in ({"causal": True}, {"window_left": True}, {"mask_mod": min}):
        with pytest.raises(ValueError, match="mask_mod replaces causal"):
            tuned_spec(64, 64, mask=Chunked(8), **other)
    with pytest.raises(NotSupported, match="score_mod"):
        check(replace(CALL, score_mod=Chunked(8)))
    with pytest.raises(NotSupported, match="mask_mod"):
        check(replace(CALL, mask_mod=lambda *_: True))
