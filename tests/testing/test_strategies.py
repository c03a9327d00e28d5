"""Every strategy draws valid problems, of bounded size, that rebuild from their own repr."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa4.config import normalize_window
from fa4.dtypes import dtype_name
from fa4.reference.spec import BlockSparseTensors
from fa4.testing import PROPERTIES, Case, build_inputs, strategies
from fa4.testing.case import MASK_MODS, SCORE_MODS
from fa4.testing.inputs import visible_pairs
from fa4.testing.levels import FEATURES, needs_of
from fa4.testing.property import Plan
from fa4.testing.runner import DEFAULT_EXAMPLES
from fa4.testing.values import REGIMES
from fa4.testing.walk import Walk

few = settings(max_examples=25, suppress_health_check=list(HealthCheck))


def check_case(case: Case) -> None:
    """The case rebuilds from its repr, and its arrays have the shapes and type it says."""
    assert eval(repr(case), {"Case": Case}) == case
    inputs = build_inputs(case)
    assert inputs.dtype == case.dtype == dtype_name(inputs.v.dtype)
    assert len(inputs.sequences) == len(case.sequences)
    for (rows, keys), seq in zip(case.sequences, inputs.sequences, strict=True):
        assert seq.q.shape == (rows, case.heads_q, case.head_dim)
        assert seq.k.shape == (keys, case.heads_k, case.head_dim)
        assert seq.v.shape == (keys, case.heads_k, case.head_dim_v)
        assert seq.visible.shape == (case.heads_q, rows, keys)
    for packed, plain in (
        (inputs.split_rows(inputs.q), [seq.q for seq in inputs.sequences]),
        (inputs.split_keys(inputs.k), [seq.k for seq in inputs.sequences]),
        (inputs.split_keys(inputs.v), [seq.v for seq in inputs.sequences]),
        (inputs.split_rows(inputs.dout), [seq.dout for seq in inputs.sequences]),
        (inputs.split_lse(inputs.dlse), [seq.dlse for seq in inputs.sequences]),
    ):
        for a, b in zip(packed, plain, strict=True):
            assert a.tobytes() == np.ascontiguousarray(b).tobytes()


@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.name)
def test_cases_of_every_property_are_valid(prop) -> None:
    """What the suite lists and draws can be built, in every layout, and is of bounded size."""

    def check(case: Case) -> None:
        if isinstance(case, Walk):
            assert eval(repr(case), {"Case": Case, "Walk": Walk}) == case
            return
        check_case(case)
        for rows, keys in case.sequences:
            heads = case.heads_q * (case.batch if case.layout == "dense" else 1)
            assert heads == 1 or heads * rows * keys <= 10 * strategies.MOST_SCORES

    if prop.listed is not None:
        needs = {need for feature in FEATURES for need in needs_of(feature)}
        for case in prop.listed(Plan(prop.dtypes, 1, 0, frozenset(needs)))[:12]:
            check(case)
    if prop.strategy is not None:
        settings(few, max_examples=5)(given(prop.strategy(prop.dtypes))(check))()
    assert prop.listed or prop.strategy


def test_a_first_look_is_no_more_than_the_whole_run() -> None:
    """Of each property, as many cases as it will draw by default at most."""
    assert all(1 <= prop.first_look <= DEFAULT_EXAMPLES for prop in PROPERTIES)


@few
@given(st.data(), st.integers(0, 300), st.integers(0, 300), st.booleans())
def test_windows_are_accepted(data, seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    """No drawn window hides every key by left + right < 0."""
    window = data.draw(strategies.windows(seqlen_q, seqlen_k, causal=causal))
    normalize_window(window, causal)


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16", "fp16", "e4m3", "e5m2"])
@pytest.mark.parametrize("regime", REGIMES)
def test_regimes_are_finite_and_repeatable(regime: str, dtype: str) -> None:
    """Values and raw scores are finite in float32 (float64), and the same each time."""
    case = Case(
        batch=2, seqlen_q=3, seqlen_k=300, heads_k=2, group=2, head_dim=64, dtype=dtype,
        values=regime, seed=5, window_size=(9, 0),
    )  # fmt: skip
    inputs, again = build_inputs(case), build_inputs(case)
    for a, b in ((inputs.q, again.q), (inputs.k, again.k), (inputs.v, again.v)):
        assert a.tobytes() == b.tobytes()
    work = np.float64 if dtype == "fp64" else np.float32
    for seq in inputs.sequences:
        seen = seq.visible.any(axis=(0, 1))
        q, k, v = (x.astype(work) for x in (seq.q, seq.k[seen], seq.v[seen]))
        assert np.isfinite(q).all() and np.isfinite(k).all() and np.isfinite(v).all()
        scores = np.einsum("qhd,kgd->hgqk", q, k)
        assert np.isfinite(scores).all()
        unseen = np.concatenate([seq.k[~seen].astype(work), seq.v[~seen].astype(work)], axis=None)
        assert (regime == "masked_nan") == (not np.isfinite(unseen).all())


@pytest.mark.parametrize("fields", [{"values": "latent"}, {"strides": "latent"}])
def test_v_of_k_is_no_wider_than_k(fields: dict) -> None:
    """A case whose V is the first channels of K says so where K has fewer."""
    assert Case(head_dim=16, head_dim_v=16, **fields).head_dim_v == 16
    with pytest.raises(ValueError, match="head_dim_v must be at most"):
        Case(head_dim=16, head_dim_v=24, **fields)


def test_jumps_lie_on_both_sides_of_tau() -> None:
    """Between neighbouring blocks of 128 keys the logits rise by a bit less, or more, than 8."""
    for regime, low, high in (("jumps_under", 7.9, 8.0), ("jumps_over", 8.0, 8.1)):
        case = Case(seqlen_k=257, head_dim=64, values=regime, seed=3)
        inputs = build_inputs(case)
        channel = inputs.q[0, 0, 0, 0] * inputs.k[0, :, 0, 0] * case.scale / np.log(2.0)
        for rise in (channel[0] - channel[128], channel[128] - channel[256]):
            assert low < rise < high


def test_a_batch_entry_does_not_depend_on_the_others() -> None:
    """Shrinking the batch keeps the entries that stay."""
    two, one = (build_inputs(Case(batch=n, seqlen_q=3, seqlen_k=4, seed=9)) for n in (2, 1))
    assert np.array_equal(two.q[:1], one.q) and np.array_equal(two.v[:1], one.v)


def test_paged_layout_hides_nothing_valid() -> None:
    """Unused table entries point out of range, unused slots are marked, no page is used twice."""
    case = Case(
        layout="paged", lengths=((2, 9), (1, 0), (1, 4)), page_size=4, seed=2, values="masked_nan"
    )  # fmt: skip
    inputs = build_inputs(case)
    table, used = inputs.options["page_table"], [-(-keys // 4) for _, keys in case.lengths]
    taken = np.concatenate([row[:n] for row, n in zip(table, used, strict=True)])
    assert len(set(taken.tolist())) == len(taken)
    rest = np.concatenate([row[n:] for row, n in zip(table, used, strict=True)])
    assert ((rest < 0) | (rest >= len(inputs.k))).all()
    assert np.isnan(inputs.k).any(axis=(2, 3)).sum() == inputs.k.shape[0] * 4 - 13
    ordinary = build_inputs(replace(case, values="normal"))
    assert np.isfinite(ordinary.k).all() and (np.abs(ordinary.k) > 50).any()


def test_visible_pairs_by_hand() -> None:
    """Bottom-right alignment, a window, a mask_mod and block lists, counted by hand."""
    causal = visible_pairs({"causal": True}, 0, 1, (2, 3))[0]
    assert causal.tolist() == [[True, True, False], [True, True, True]]
    assert visible_pairs({"causal": True}, 0, 1, (3, 1))[0].tolist() == [[False], [False], [True]]
    window = visible_pairs({"window_size": (1, 0)}, 0, 1, (3, 3))[0]
    assert window.sum(axis=1).tolist() == [1, 2, 2]
    odd = visible_pairs({"mask_mod": MASK_MODS["odd_rows_empty"]}, 0, 2, (2, 4))
    assert odd.sum(axis=-1).tolist() == [[2, 0], [2, 0]]


def test_block_lists_of_each_sequence_or_of_all() -> None:
    """The second sequence has its own lists, or those that stand for the whole batch."""
    counts = np.array([[[1]], [[2]]], np.int32)  # (batch, heads, row blocks)
    blocks = np.array([[[[1, 0]]], [[[0, 1]]]], np.int32)
    own = BlockSparseTensors(counts, blocks, block_size=(2, 2))
    seen = [visible_pairs({"block_sparse_tensors": own}, b, 1, (2, 4))[0, 0] for b in (0, 1)]
    assert [row.tolist() for row in seen] == [[False, False, True, True], [True] * 4]
    shared = BlockSparseTensors(counts[:1], blocks[:1], block_size=(2, 2))
    for b in (0, 1):
        again = visible_pairs({"block_sparse_tensors": shared}, b, 1, (2, 4))[0, 0]
        assert again.tolist() == seen[0].tolist()


@given(st.sampled_from(sorted(SCORE_MODS)), st.integers(0, 40), st.integers(0, 40))
@few
def test_score_mod_derivatives(name: str, row: int, key: int) -> None:
    """score_mod_bwd is the derivative of score_mod, by central differences."""
    from fa4.reference import SeqlenInfo

    forward, backward = SCORE_MODS[name]
    aux = (np.arange(2 * 3 * 13.0).reshape(2, 3, 13),)
    where = (1, 2, row, key, SeqlenInfo(41, 41), aux)
    up, down = (np.float64(forward(0.7 + step, *where)) for step in (1e-3, -1e-3))
    expected = 0.0 if np.isneginf(up) else (up - down) / 2e-3
    assert backward(1.0, 0.7, *where) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seqlen_q": -1}, "seqlen_q"),
        ({"dtype": "int8"}, "dtype"),
        ({"layout": "ragged"}, "layout"),
        ({"layout": "packed"}, "lengths"),
        ({"score_mod": "other"}, "score_mod"),
        ({"mask_mod": "other"}, "mask_mod"),
        ({"window_size": (-3, 2)}, "window_size"),
    ],
)
def test_bad_cases_are_refused(fields: dict, message: str) -> None:
    """One line that names the field."""
    with pytest.raises(ValueError, match=message):
        Case(**fields)


def test_unknown_regime_is_refused() -> None:
    """The message lists the regimes."""
    with pytest.raises(ValueError, match=r"values must be one of .*'normal'"):
        build_inputs(Case(values="other"))
