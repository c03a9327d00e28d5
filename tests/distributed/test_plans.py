"""Plans in float64 in one process: every method, layout and number of ranks equals the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fa4.distributed.blocks import Block, SequenceMask, make_blocks
from fa4.distributed.check import check_plan
from fa4.distributed.exact import ExactCalculator
from fa4.distributed.layout import LAYOUTS, RowLayout, make_layout, positions_of
from fa4.distributed.methods import make_plan
from fa4.distributed.plan import Sizes, Spec
from tests.distributed.draws import Inputs, backward_here, forward_here, specs, worst

BUDGET = 1e-12


def require_right(spec: Spec, seed: int) -> None:
    """O, LSE, dQ, dK and dV within the budget, and nothing for the checker to find."""
    inputs = Inputs.of(spec, seed)
    wanted = inputs.attend()
    found = forward_here(spec, inputs)
    assert [worst(x, y) < BUDGET for x, y in zip(found, wanted, strict=True)] == [True] * 2
    gradients = backward_here(spec, inputs, wanted)
    for x, y in zip(gradients, inputs.gradients(), strict=True):
        assert worst(x, y) < BUDGET
    for backward in (False, True):
        assert check_plan(make_plan(replace(spec, backward=backward))).findings == ()


@settings(max_examples=40)
@given(specs(), st.integers(0, 2**32 - 1))
def test_plans_equal_the_oracle(spec: Spec, seed: int) -> None:
    """Documents, windows, grouped heads, ranks without rows."""
    require_right(spec, seed)


@pytest.mark.slow
@settings(max_examples=2000)
@given(specs(), st.integers(0, 2**32 - 1))
def test_plans_equal_the_oracle_for_long(spec: Spec, seed: int) -> None:
    """The same, more often."""
    require_right(spec, seed)


def dense_visible(block: Block) -> np.ndarray:
    """(rows, keys) bool of a block."""
    rows, keys = block.shape
    apart = np.arange(keys)[None] - np.arange(rows)[:, None]
    low = -(10**9) if block.low is None else block.low
    high = 10**9 if block.high is None else block.high
    return (apart >= low) & (apart <= high)


@given(specs(), st.integers(0, 3))
def test_blocks_are_the_mask(spec: Spec, tile: int) -> None:
    """Every visible pair once, no other, with windows that kernels can have."""
    seen = np.zeros((spec.rows.seqlen, spec.rows.seqlen), int)
    for rows in spec.rows.shards:
        for keys in spec.keys.shards:
            for block in make_blocks(rows, keys, spec.mask, tile):
                visible = dense_visible(block)
                where = np.ix_(positions_of(block.rows), positions_of(block.keys))
                seen[where] += visible
                assert block.pairs == visible.sum() > 0
                assert all(side is None or side >= 0 for side in block.window)
    first, stop = spec.mask.visible(np.arange(spec.rows.seqlen))
    key = np.arange(spec.rows.seqlen)
    assert np.array_equal(seen, (key >= first[:, None]) & (key < stop[:, None]))


@given(st.sampled_from(LAYOUTS), st.integers(0, 50), st.integers(1, 9), st.integers(1, 5))
def test_layouts_hold_every_row_once(name: str, seqlen: int, ranks: int, tile: int) -> None:
    """shard, unshard and positions."""
    offsets = (0, seqlen // 3, seqlen)
    layout = make_layout(name, seqlen, ranks, cu_seqlens=offsets, tile=tile)
    x = np.arange(seqlen)[None]
    parts = [layout.shard(x, rank) for rank in range(ranks)]
    assert sorted(np.concatenate(parts, axis=1)[0]) == list(range(seqlen))
    assert np.array_equal(layout.unshard(parts), x)
    assert all(np.array_equal(p[0], layout.positions(r)) for r, p in enumerate(parts))


@example(8, 1)
@given(st.integers(1, 8), st.integers(1, 40))
def test_trees_and_passing_decode(ranks: int, keys: int) -> None:
    """Few queries at the end of many keys: every rank has the result, or its own rows of it."""
    queries = min(3, keys)
    rows = range(keys - queries, keys)
    cached = make_layout("striped", keys, ranks)
    everywhere = RowLayout("replicated", keys, ((rows,),) * ranks)
    divided = RowLayout("divided", keys, tuple((rows[r::ranks],) for r in range(ranks)))
    mask, sizes = SequenceMask(None, 0, (0, keys)), Sizes(4, 2, 4, 3, 1, 8)
    for method, layout in (("tree", everywhere), ("pass_q", divided)):
        spec = Spec(method, layout, cached, mask, sizes)
        assert check_plan(make_plan(spec)).findings == ()
        whole = Spec("ring", everywhere, cached, mask, sizes)
        inputs = Inputs.of(whole, 0)
        wanted = inputs.attend()[0]
        for rank, found in enumerate(decode_here(spec, inputs)):
            assert worst(found, wanted[positions_of(layout.shards[rank])]) < BUDGET


def decode_here(spec: Spec, inputs: Inputs) -> list[np.ndarray]:
    """O of each rank's queries."""
    from fa4.distributed.execute import run_here

    calculator = ExactCalculator(spec.sizes, spec.sizes.head_dim**-0.5)
    cut = []
    for rank in range(spec.ranks):
        keys = positions_of(spec.keys.shards[rank])
        queries = inputs.q[positions_of(spec.rows.shards[rank])]
        cut.append({"q": (queries[None],), "kv": (inputs.k[keys][None], inputs.v[keys][None])})
    return [x["o"][0][0] for x in run_here(make_plan(spec), calculator, cut)]


def test_modifications_are_given_global_positions() -> None:
    """ALiBi as a score_mod, chunks as a mask_mod, softcap: on striped rows, as in one call."""
    layout = make_layout("striped", 23, 4)
    spec = Spec("ring", layout, layout, SequenceMask(None, 0, (0, 23)), Sizes(4, 2, 4, 3, 1, 8))
    slopes = 2.0 ** -np.arange(1, 5)[:, None, None]

    def bias(score: np.ndarray, head: np.ndarray, row: np.ndarray, key: np.ndarray) -> np.ndarray:
        return score + slopes[head[:, 0, 0]] * (key - row)

    def unbias(grad: np.ndarray, *_: np.ndarray) -> np.ndarray:
        return grad

    def chunked(head: np.ndarray, row: np.ndarray, key: np.ndarray) -> np.ndarray:
        return row // 7 == key // 7

    inputs = Inputs.of(
        spec,
        5,
        score_mod=lambda s, b, h, i, j, info, aux: s + slopes[np.ravel(h)] * (j - i),
        score_mod_bwd=lambda g, s, b, h, i, j, info, aux: g,
        mask_mod=lambda b, h, i, j, info, aux: i // 7 == j // 7,
    )
    calculator = ExactCalculator(spec.sizes, 0.5, 0.0, bias, unbias, chunked)
    wanted = inputs.attend()
    found = forward_here(spec, inputs, calculator)
    assert all(worst(x, y) < BUDGET for x, y in zip(found, wanted, strict=True))
    gradients = backward_here(spec, inputs, wanted, calculator)
    for x, y in zip(gradients, inputs.gradients(), strict=True):
        assert worst(x, y) < BUDGET
    capped = Inputs.of(spec, 6, softcap=1.5)
    calculator = ExactCalculator(spec.sizes, 0.5, 1.5)
    wanted = capped.attend()
    assert worst(forward_here(spec, capped, calculator)[0], wanted[0]) < BUDGET
    for x, y in zip(
        backward_here(spec, capped, wanted, calculator), capped.gradients(), strict=True
    ):
        assert worst(x, y) < BUDGET
