"""Smaller examples: what is left is needed, and what is needed is named."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.testing import Case
from fa4.testing import strategies as draw
from fa4.testing.shrink import (
    SIZES,
    drop_features,
    keep_only,
    needed_features,
    one_longer,
    shrink,
    simpler,
)

BIG = Case(
    batch=2, seqlen_q=129, seqlen_k=300, heads_k=2, group=4, head_dim=192, head_dim_v=128,
    dtype="bf16", values="activations", seed=77, softcap=15.0, sink=1.5, window_size=(7, 3),
    num_splits=3, score_mod=None, dropout_p=0.1,
)  # fmt: skip
PAGED = Case(
    layout="paged",
    lengths=((3, 40), (17, 300), (0, 1)),
    page_size=64,
    sink=0.0,
    seed=5,
    causal=True,
)


def test_the_plainest_case_remains_if_everything_fails() -> None:
    """Nothing is needed."""
    for case in (BIG, PAGED):
        small = shrink(case, lambda case: True)
        assert small == Case() and needed_features(small) == ()


def test_lengths_shrink_to_one() -> None:
    """One query and one key are the least, and are tried before two."""
    small = shrink(BIG, lambda case: bool(case.softcap))
    assert (small.seqlen_q, small.seqlen_k) == (Case().seqlen_q, Case().seqlen_k)
    for name in ("seqlen_q", "seqlen_k"):
        tried = [getattr(case, name) for case in simpler(BIG, frozenset({name}))]
        assert min(tried) == 1 and sorted(tried) == tried


def test_a_sequence_without_rows_is_tried_first() -> None:
    """Of packed lengths 0 is the least, on either side."""
    tried = [case.lengths for case in simpler(PAGED, frozenset({"lengths"}))]
    assert ((0, 40), (17, 300), (0, 1)) in tried and ((3, 40), (17, 0), (0, 1)) in tried
    small = shrink(PAGED, lambda case: case.layout == "paged" and min(case.lengths)[0] == 0)
    assert small.lengths == ((0, 1),) or small.lengths == ((0, 0),)


@pytest.mark.parametrize(("name", "now", "tried"), [
    ("num_splits", 7, [1, 2]),
    ("softcap", 5.0, [0.0, 1.0]),
    ("sink", 3.0, [None, 0.0, 1.0]),
    ("dropout_p", 0.9, [0.0, 0.5]),
    ("batch", 5, [1, 2]),
    ("heads_k", 7, [1, 2]),
    ("group", 16, [1, 1, 2, 3, 4]),
    ("head_dim", 200, [8, 8, 16, 24, 32, 64, 128]),
    ("dtype", "e4m3", ["fp32", "bf16", "fp16"]),
    ("values", "grid", ["normal"]),
    ("seed", 9, [0, 1, 8]),
    ("seqlen_q", 9, [1, 2, 3, 4, 5, 8, 8]),
    ("seqlen_k", 600, [1, 2, 3, 4, 5, 8, 17, 33, 64, 65, 129, 257, 513, 599]),
    ("score_mod", "temper", [None, "alibi"]),
    ("mask_mod", "documents", [None, "stripes"]),
])  # fmt: skip
def test_what_is_tried_of_a_field(name: str, now: Any, tried: list[Any]) -> None:
    """The plainest first, then what is usual, then the next smaller one."""
    cases = list(simpler(Case(**{name: now})))
    assert [getattr(case, name) for case in cases if getattr(case, name) != now] == tried


def test_what_is_needed_stays() -> None:
    """Two features at once, a length, a layout, an element type."""
    small = shrink(BIG, lambda case: bool(case.softcap) and case.window_size != (None, None))
    assert needed_features(small) == ("window_size", "softcap")
    small = shrink(BIG, lambda case: case.seqlen_k > 257)
    assert small == Case(seqlen_k=258) and needed_features(small) == ("length 258",)
    small = shrink(PAGED, lambda case: case.layout == "paged" and max(case.lengths)[1] > 16)
    assert needed_features(small)[0] == "paged" and len(small.lengths) == 1
    shared = replace(PAGED, shared_prefix=True)
    small = shrink(shared, lambda case: case.layout != "dense")
    assert small.layout == "packed" and not small.shared_prefix
    small = shrink(BIG, lambda case: case.dtype == "bf16" and case.head_dim != case.head_dim_v)
    assert needed_features(small) == ("bf16", "head_dim unlike head_dim_v")


def test_only_allowed_fields_change() -> None:
    """A relation keeps its features."""
    small = shrink(BIG, lambda case: True, allowed=SIZES)
    assert (small.softcap, small.window_size, small.seqlen_k) == (15.0, (7, 3), 300)
    assert small.group == small.head_dim // 8 == small.batch == 1


def test_time_ends_it() -> None:
    """With no time the case comes back as it was."""
    assert shrink(BIG, lambda case: True, seconds=-1.0) == BIG


def test_a_busy_machine_finds_the_same() -> None:
    """Where calls run in this thread, time that others have does not count; its own does."""

    def slow(case: Case) -> bool:
        time.sleep(0.02)
        return True

    assert shrink(BIG, slow, seconds=0.1) != Case()
    assert shrink(BIG, slow, seconds=0.1, patience=1000.0) == Case()

    def busy(case: Case) -> bool:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        return True

    assert shrink(BIG, busy, seconds=0.1, patience=1000.0) != Case()


@settings(max_examples=60)
@given(st.one_of(draw.dense_cases(causal=True), draw.paged_cases()))
def test_steps_get_smaller_and_end(case: Case) -> None:
    """No step leads back: shrinking anything ends at the plainest case."""
    for step in simpler(case):
        assert step != case
    assert shrink(case, lambda case: True) == Case()


def test_features_are_left_out_at_the_sizes_at_hand() -> None:
    """One after another, with other seeds where the first shows nothing."""
    small = drop_features(BIG, lambda case: bool(case.softcap) and case.seed == 1, seconds=10.0)
    assert small.softcap and (small.dtype, small.seqlen_k) == ("fp32", 300)
    assert (small.sink, small.window_size, small.group) == (None, (None, None), 1)
    assert small.values == "normal"
    assert drop_features(BIG, lambda case: False, seconds=10.0) == BIG


def test_one_longer_has_a_row_and_a_key_more() -> None:
    """In every sequence, and where all are of one size."""
    longer = one_longer(replace(PAGED, page_size=64))
    assert longer.lengths == ((4, 41), (18, 301), (1, 2))
    dense = one_longer(BIG)
    assert (dense.seqlen_q, dense.seqlen_k) == (BIG.seqlen_q + 1, BIG.seqlen_k + 1)


def test_only_some_features_are_kept() -> None:
    """Those of another failure, at the sizes of this one; None where it has not all of them."""
    kept = keep_only(BIG, ("softcap", "bf16", "length 65"))
    assert kept is not None and kept.softcap == BIG.softcap and kept.seqlen_k == 300
    assert (kept.sink, kept.group, kept.values) == (None, 1, "normal")
    assert keep_only(BIG, ("fp16",)) is None and keep_only(BIG, ("paged",)) is None
    dense = keep_only(PAGED, ("causal",))
    assert dense is not None and dense.layout == "dense" and dense.causal
    assert (dense.seqlen_q, dense.seqlen_k) == (17, 300)
    assert keep_only(PAGED, ("paged",)) == replace(PAGED, causal=False, sink=None)
