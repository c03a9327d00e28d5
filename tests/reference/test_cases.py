"""Situations that broke attention kernels in the field, one test each, on FA4 mode and the oracle.

The numbers are those of the table in tests/README.md.
"""

import ml_dtypes
import numpy as np
import pytest
import torch

import fa4
from fa4.dtypes import round_to, ulp_distance
from fa4.reference import Attention, BlockSparseTensors
from fa4.reference.sequences import Sequence
from fa4.reference.tiles import Tile, TileMasks
from tests.reference.support import (
    EXACT,
    Drawn,
    arrays,
    assert_exact,
    keep_two_of_three,
    small_tiles,
    worst,
)

BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
BOTH = pytest.mark.parametrize("impl", ["reference", "oracle"])


def attend(q, k, v, **options):
    """(out, lse) with tiles of 8 x 16."""
    options = {"config": small_tiles(), **options}
    varlen = {"cu_seqlens_q", "seqused_q", "seqused_k", "page_table"} & set(options)
    function = fa4.flash_attn_varlen_func if varlen else fa4.flash_attn_func
    return function(q, k, v, return_lse=True, **options)


def exact(shape, seed=0, scale=1.0, **options):
    """Forward and backward of a random problem equal the oracle."""
    assert_exact(Drawn(*arrays(shape, seed, scale=scale), options))


@BOTH
def test_case_01_first_visited_tile_fully_masked(impl) -> None:
    q, k, v = arrays((1, 20, 64, 2, 1, 8, 8))
    hide_last = {"mask_mod": lambda b, h, i, j, *_: (j < 16) & (i > 3)}
    out, lse = attend(q, k, v, impl=impl, **hide_last)
    assert (out[:, :4] == 0).all() and np.isneginf(lse[:, :, :4]).all()
    expected, _ = attend(q[:, 4:], k[:, :16], v[:, :16], impl="oracle")
    assert worst(out[:, 4:], expected) <= EXACT


@BOTH
def test_case_02_fully_masked_rows_with_sink(impl) -> None:
    q, k, v = arrays((1, 30, 10, 2, 1, 8, 8))
    sink = np.array([0.5, -3.0])
    out, lse = attend(q, k, v, causal=True, learnable_sink=sink, impl=impl)
    assert (out[:, :20] == 0).all()
    assert worst(lse[0, :, :20], np.repeat(sink[:, None], 20, 1)) <= EXACT


@BOTH
@pytest.mark.parametrize("causal", [False, True])
def test_case_03_no_keys(impl, causal) -> None:
    out, lse = attend(*arrays((2, 5, 0, 2, 1, 8, 8)), causal=causal, impl=impl)
    assert out.shape == (2, 5, 2, 8) and (out == 0).all() and np.isneginf(lse).all()


@BOTH
def test_case_04_no_queries_or_no_batch(impl) -> None:
    for shape in ((1, 0, 5, 2, 1, 8, 8), (0, 4, 5, 2, 1, 8, 8)):
        out, lse = attend(*arrays(shape), impl=impl)
        assert out.shape == (*shape[:2], 2, 8) and lse.shape == (shape[0], 2, shape[1])
    q, k, v = (x[0] for x in arrays((1, 0, 5, 2, 1, 8, 8)))
    offsets = {"cu_seqlens_q": np.array([0, 0]), "cu_seqlens_k": np.array([0, 5])}
    assert attend(q, k, v, impl=impl, **offsets)[0].shape == (0, 2, 8)


def packed(lengths_q, lengths_k, heads=(4, 1), dim=16, seed=0):
    """q, k, v (total, H, D) and the offsets of packed sequences."""
    q, k, v = arrays((1, sum(lengths_q), sum(lengths_k), *heads, dim, dim), seed)
    cu_q, cu_k = (np.cumsum([0, *lengths]).astype(np.int32) for lengths in (lengths_q, lengths_k))
    return Drawn(q[0], k[0], v[0], {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k})


def assert_packed_equals_dense(drawn: Drawn) -> None:
    cu_q, cu_k = drawn.options["cu_seqlens_q"], drawn.options["cu_seqlens_k"]
    shared = {n: x for n, x in drawn.options.items() if not n.startswith(("cu_", "max_"))}
    out, lse = attend(drawn.q, drawn.k, drawn.v, **drawn.options)
    for b in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one, one_lse = attend(drawn.q[None, rows], drawn.k[None, keys], drawn.v[None, keys],
                              impl="oracle", **shared)  # fmt: skip
        assert worst(out[rows], one[0]) <= EXACT and worst(lse[:, rows], one_lse[0]) <= EXACT


def test_case_05_some_query_lengths_zero() -> None:
    drawn = packed([0, 60, 42, 0], [10, 60, 42, 3], heads=(4, 1))
    assert_packed_equals_dense(drawn)
    assert_exact(drawn, varlen=True)


def test_case_06_some_key_lengths_zero() -> None:
    drawn = packed([5, 9, 3], [0, 20, 0])
    assert_packed_equals_dense(drawn)
    assert_exact(drawn, varlen=True)


def test_case_07_decode_with_empty_entries() -> None:
    drawn = packed([1, 0, 1, 1], [17, 3, 0, 33], heads=(6, 2))
    drawn.options["max_seqlen_q"] = 1
    assert_packed_equals_dense(drawn)


def test_case_08_many_equal_sequences() -> None:
    assert_packed_equals_dense(packed([37] * 7, [37] * 7))


@BOTH
@pytest.mark.parametrize(("rows", "keys"), [(40, 20), (33, 32), (129, 128)])
def test_case_09_causal_with_more_queries_than_keys(impl, rows, keys) -> None:
    q, k, v = arrays((1, rows, keys, 2, 1, 8, 8))
    out, lse = attend(q, k, v, causal=True, impl=impl)
    empty = rows - keys
    assert (out[:, :empty] == 0).all() and np.isneginf(lse[:, :, :empty]).all()
    assert worst(out[0, empty], np.repeat(v[0, :1], 2, axis=1)[0]) <= EXACT  # sees key 0 alone


def test_case_10_right_window_beyond_the_keys() -> None:
    exact((1, 60, 20, 2, 1, 8, 8), window_size=(5, 100))
    exact((1, 60, 20, 2, 1, 8, 8), window_size=(5, 25))


@pytest.mark.parametrize("left", [0, 1, 31, 32, 33])
def test_case_11_window_edges(left) -> None:
    q, k, v = arrays((1, 32, 32, 2, 1, 8, 8))
    out, _ = attend(q, k, v, window_size=(left, 0))
    i, j = np.arange(32)[:, None], np.arange(32)[None, :]
    band = (j <= i) & (j >= i - left)
    masked, _ = attend(q, k, v, impl="oracle", mask_mod=lambda *_: band[None])
    assert worst(out, masked) <= EXACT
    if left >= 31:
        assert worst(out, attend(q, k, v, causal=True)[0]) == 0


def test_case_12_spellings_of_unbounded() -> None:
    q, k, v = arrays((1, 20, 30, 2, 1, 8, 8))
    causal, full = attend(q, k, v, causal=True)[0], attend(q, k, v)[0]
    for window in ((-1, 0), (None, 0)):
        assert worst(attend(q, k, v, window_size=window)[0], causal) == 0
        assert worst(attend(q, k, v, window_size=window, causal=True)[0], causal) == 0
    for window in ((-1, -1), (None, None)):
        assert worst(attend(q, k, v, window_size=window)[0], full) == 0
        assert worst(attend(q, k, v, window_size=window, causal=True)[0], causal) == 0
    with pytest.raises(ValueError, match=r"left \+ right >= 0.*left 2 and right -3"):
        attend(q, k, v, window_size=(2, -3))


@BOTH
def test_case_13_window_that_leaves_rows_empty(impl) -> None:
    q, k, v = arrays((1, 129, 10, 2, 1, 8, 8))
    out, lse = attend(q, k, v, window_size=(32, 64), impl=impl)
    diagonal = np.arange(129) + 10 - 129
    empty = diagonal + 64 < 0
    assert empty.any() and (out[:, empty] == 0).all() and np.isneginf(lse[:, :, empty]).all()
    exact((1, 129, 10, 2, 1, 8, 8), window_size=(32, 64))


@pytest.mark.parametrize("sizes", [(113, 203), (239, 1), (799, 3), (1, 1), (64, 64), (1, 300)])
@pytest.mark.parametrize("causal", [False, True])
def test_case_14_lengths_off_the_tile_grid(sizes, causal) -> None:
    q, k, v = arrays((1, *sizes, 2, 1, 8, 8))
    configs = (fa4.ForwardConfig(), fa4.BackwardConfig())
    assert_exact(Drawn(q, k, v, {"causal": causal}), *configs)


def fp8_error(dtype, keys, seed=0, spread=1.0, causal=False):
    """Relative RMS error of FP8 attention against the oracle on the same FP8 values."""
    shape = (1, 4, keys, 6, 1, 64, 64)
    name = "e4m3" if dtype is E4M3 else "e5m2"
    q, k, v = (round_to(x * spread, name) for x in arrays(shape, seed, np.float32))
    out = fa4.flash_attn_func(q, k, v, causal=causal).astype(np.float64)
    truth = fa4.flash_attn_func(q, k, v, causal=causal, impl="oracle")
    return np.sqrt(((out - truth) ** 2).mean() / (truth**2).mean())


def test_case_15_fp8_error_is_smooth_at_tile_boundaries() -> None:
    errors = [fp8_error(E4M3, keys) for keys in (126, 127, 128, 129, 130, 255, 256, 257, 385)]
    assert max(errors) < 1.6 * min(errors)
    assert max(errors) < 2.0**-4  # e4m3 rounds P to 2^-4 relative at worst


@pytest.mark.parametrize("spread", [0.8, 1.5, 3.0])
def test_case_16_fp8_numerator_and_denominator_agree(spread) -> None:
    shape = (1, 8, 300, 2, 1, 64, 64)
    q, k, v = (round_to(x * spread, "e4m3") for x in arrays(shape, 1, np.float32))
    ones = np.ones_like(v)
    out = fa4.flash_attn_func(q, k, ones).astype(np.float64)
    assert worst(out, np.ones(out.shape)) <= 2.0**-4  # rounding of P, never saturation
    unsafe = fa4.ForwardConfig(p_offset_log2=8.0, rescale_threshold_log2=8.0)
    with pytest.raises(ValueError, match=r"below log2\(largest e4m3\) = 8\.807.*16\.0"):
        fa4.flash_attn_func(q, k, v, config=unsafe)


def test_case_17_e4m3_is_no_worse_than_e5m2() -> None:
    for seed in range(4):
        assert fp8_error(E4M3, 200, seed) <= fp8_error(E5M2, 200, seed)


@pytest.mark.parametrize("tau", [0.0, 1.0, 4.0, 8.0])
def test_case_18_threshold_does_not_change_the_result(tau) -> None:
    q, k, v = arrays((1, 30, 200, 2, 1, 16, 16), 2, scale=8.0)
    out, lse = attend(q, k, v, config=small_tiles(rescale_threshold_log2=tau))
    truth, true_lse = attend(q, k, v, impl="oracle")
    assert worst(out, truth) <= EXACT and worst(lse, true_lse) <= 100 * EXACT


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_case_19_large_logits_with_splits(dtype) -> None:
    q, k, v = arrays((1, 16, 300, 2, 1, 64, 64), 0, dtype, scale=100.0)
    out, lse = fa4.flash_attn_func(q, k, v, num_splits=2, return_lse=True)
    truth, true_lse = fa4.flash_attn_func(q, k, v, impl="oracle", return_lse=True)
    assert np.isfinite(lse).all()
    assert worst(lse, true_lse) <= 2.0**-20 * np.abs(true_lse).max()
    assert worst(out, truth) <= (2.0**-7 if dtype is BF16 else 1e-3)


@BOTH
@pytest.mark.parametrize("low", [-5e4, -2.45e5])
def test_case_20_all_logits_very_low(impl, low) -> None:
    q = np.full((1, 4, 1, 8), 1.0, np.float32)
    k = np.full((1, 40, 1, 8), low / 8, np.float32)
    v = arrays((1, 4, 40, 1, 1, 8, 8))[2].astype(np.float32)
    out, lse = attend(q, k, v, impl=impl, softmax_scale=1.0)
    assert worst(out, np.broadcast_to(v.mean(axis=1, keepdims=True), out.shape)) <= 1e-6
    assert worst(lse, np.full(lse.shape, low + np.log(40))) <= abs(low) * 2.0**-22


@pytest.mark.parametrize("binade", range(0, 17, 4))
def test_case_21_a_saturated_winner_keeps_probability_one(binade) -> None:
    q = np.zeros((1, 1, 1, 8), np.float32)
    q[..., 0] = 1.2345 * 2.0**binade
    k = np.zeros((1, 40, 1, 8), np.float32)
    k[0, 17, 0, 0] = 3.1
    v = arrays((1, 1, 40, 1, 1, 8, 8))[2].astype(np.float32)
    out = fa4.flash_attn_func(q, k, v, softmax_scale=10.0)
    assert (out[0, 0, 0] == v[0, 17, 0]).all()
    low = [round_to(x, "bf16") for x in (q, k, v)]
    winner = fa4.flash_attn_func(*low, softmax_scale=10.0)[0, 0, 0]
    assert ulp_distance(winner, low[2][0, 17, 0]).max() <= 1


def test_case_22_zero_and_negative_scale() -> None:
    q, k, v = arrays((1, 9, 40, 2, 1, 8, 8))
    out, _ = attend(q, k, v, softmax_scale=0.0)
    mean = np.broadcast_to(v.mean(axis=1, keepdims=True), out.shape)
    assert worst(out, mean) <= EXACT
    negative, flipped = (
        attend(*x, softmax_scale=s) for x, s in (((q, k, v), -0.7), ((-q, k, v), 0.7))
    )
    assert worst(negative[0], flipped[0]) <= EXACT and worst(negative[1], flipped[1]) <= EXACT


@BOTH
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_case_23_inf_and_nan_at_keys_nobody_sees(impl, bad) -> None:
    q, k, v = arrays((1, 20, 40, 2, 1, 8, 8))
    hide = {"mask_mod": lambda b, h, i, j, *_: (j % 5 != 2) & (i >= 0)}
    clean = attend(q, k, v, impl="oracle", **hide)
    k[:, 2::5], v[:, 2::5] = bad, bad
    out, lse = attend(q, k, v, impl=impl, **hide)
    assert worst(out, clean[0]) <= EXACT and worst(lse, clean[1]) <= EXACT


@BOTH
def test_case_24_minus_inf_scores_and_sink(impl) -> None:
    q, k, v = arrays((1, 6, 20, 2, 1, 8, 8))
    kill = {"score_mod": lambda s, b, h, i, j, *_: np.where(i >= 3, s, -np.inf)}
    out, lse = attend(q, k, v, impl=impl, learnable_sink=np.array([1.5, -2.0]), **kill)
    assert (out[:, :3] == 0).all() and not np.isnan(out).any()
    assert worst(lse[0, :, :3], np.array([[1.5], [-2.0]]) * np.ones(3)) <= EXACT
    _, lse = attend(q, k, v, impl=impl, **kill)
    assert np.isneginf(lse[:, :, :3]).all()


@pytest.mark.parametrize("dtype", [np.float64, np.float32, BF16])
@pytest.mark.parametrize("sink", [100.0, -100.0, 3.0])
def test_case_25_sink_far_above_or_below_the_keys(dtype, sink) -> None:
    q, k, v = arrays((1, 20, 50, 2, 1, 8, 8), 0, dtype, scale=0.01)
    options = {"learnable_sink": np.full(2, sink)}
    out, lse = attend(q, k, v, **options)
    truth, true_lse = attend(q, k, v, impl="oracle", **options)
    tolerance = {np.float64: EXACT, np.float32: 1e-5, BF16: 2.0**-7}[dtype]
    assert worst(out, truth) <= tolerance
    assert worst(lse, true_lse) <= max(EXACT, 100 * 2.0**-23 * (dtype is not np.float64)) * 10


@pytest.mark.parametrize("splits", [2, 3, 8])
def test_case_26_splits_count_the_sink_once(splits) -> None:
    exact((1, 20, 50, 2, 1, 8, 8), num_splits=splits, learnable_sink=np.array([2.0, -1.0]))


def test_case_27_softcap_is_cap_times_tanh() -> None:
    exact((1, 20, 50, 2, 1, 8, 8), scale=30.0, softcap=5.0, causal=True)
    q, k, v = arrays((1, 1, 2, 1, 1, 1, 1))
    score = (q[0, 0, 0] * k[0, :, 0]).ravel()
    p = np.exp(5.0 * np.tanh(score / 5.0))
    out, _ = attend(q, k, v, softmax_scale=1.0, softcap=5.0)
    assert out.item() == pytest.approx((p / p.sum() * v.ravel()).sum(), abs=EXACT)


def test_case_28_more_splits_than_blocks() -> None:
    exact((1, 20, 50, 2, 1, 8, 8), num_splits=40)
    exact((1, 20, 50, 2, 1, 8, 8), num_splits=5, window_size=(3, -2))
    exact((1, 60, 20, 2, 1, 8, 8), num_splits=7, causal=True)


def paged(lengths, page_size, seed=0, extra=3):
    """(q, k pages, v pages, options, dense k, dense v): shuffled pages, NaN where unused."""
    rng = np.random.default_rng(seed)
    pages_each = [-(-n // page_size) for n in lengths]
    total = sum(pages_each) + extra
    order = rng.permutation(total)
    table = rng.integers(-5, 10**6, (len(lengths), max(pages_each) + 1))
    k_pages, v_pages = np.full((2, total, page_size, 2, 8), np.nan)
    longest = max(lengths)
    q, k, v = arrays((len(lengths), 12, longest, 4, 2, 8, 8), seed)
    taken = 0
    for b, count in enumerate(pages_each):
        table[b, :count] = order[taken : taken + count]
        taken += count
        keys = np.arange(lengths[b])
        where = (table[b, keys // page_size], keys % page_size)
        k_pages[where], v_pages[where] = k[b, keys], v[b, keys]
    options = {"page_table": table, "seqused_k": np.array(lengths)}
    return q, k_pages, v_pages, options, k, v


@BOTH
@pytest.mark.parametrize("page_size", [1, 4, 16, 64, 128])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_case_30_and_31_paged_equals_gathered(impl, page_size, num_splits) -> None:
    lengths = [50, 0, 33, 128]
    q, k_pages, v_pages, options, k, v = paged(lengths, page_size)
    more = {"causal": True, "num_splits": num_splits}
    out, lse = attend(q, k_pages, v_pages, impl=impl, **options, **more)
    truth, true_lse = attend(q, k, v, impl="oracle", seqused_k=np.array(lengths), **more)
    assert worst(out, truth) <= EXACT and worst(lse, true_lse) <= EXACT


def test_case_30_varlen_queries_over_paged_keys() -> None:
    lengths = [50, 7, 33]
    q, k_pages, v_pages, options, k, v = paged(lengths, 16)
    rows = [12, 5, 0]
    flat = np.concatenate([q[b, :n] for b, n in enumerate(rows)])
    cu = np.cumsum([0, *rows])
    out, _ = attend(flat, k_pages, v_pages, cu_seqlens_q=cu, num_splits=2, **options)
    for b, n in enumerate(rows):
        one, _ = attend(q[b : b + 1, :n], k[b : b + 1, : lengths[b]], v[b : b + 1, : lengths[b]])
        assert worst(out[cu[b] : cu[b + 1]], one[0]) <= EXACT


def test_case_31_paged_gradients_land_in_their_pages() -> None:
    lengths = [20, 9]
    q, k_pages, v_pages, options, k, v = paged(lengths, 4)
    out, lse = attend(q, k_pages, v_pages, **options)
    dout = np.random.default_rng(0).standard_normal(out.shape)
    got = fa4.flash_attn_varlen_backward(dout, q, k_pages, v_pages, out, lse, **options)
    used = {"seqused_k": options["seqused_k"]}
    want = fa4.flash_attn_varlen_backward(dout, q, k, v, out, lse, impl="oracle", **used)
    assert worst(got.dq, want.dq) <= EXACT
    for b, n in enumerate(lengths):
        where = (options["page_table"][b, np.arange(n) // 4], np.arange(n) % 4)
        assert worst(got.dk[where], want.dk[b, :n]) <= EXACT
        assert worst(got.dv[where], want.dv[b, :n]) <= EXACT


@pytest.mark.parametrize("rows", [1, 100, 128, 129, 256])
def test_case_32_one_or_two_query_tiles_give_the_same(rows) -> None:
    q, k, v = arrays((1, rows, 150, 1, 1, 192, 128))
    one, two = (
        fa4.flash_attn_func(q, k, v, causal=True, config=fa4.ForwardConfig(q_tiles=n))
        for n in (1, 2)
    )
    assert worst(one, two) <= EXACT


def test_case_34_views_of_a_fused_qkv_tensor() -> None:
    fused = np.random.default_rng(0).standard_normal((2, 20, 3, 4, 8))
    views = [fused[:, :, i] for i in range(3)]
    copies = [x.copy() for x in views]
    out, lse = attend(*views)
    expected, _ = attend(*copies)
    assert not views[0].flags.c_contiguous and worst(out, expected) == 0
    grads, same = (
        fa4.flash_attn_backward(out, *x, out, lse, config=small_tiles()) for x in (views, copies)
    )
    assert all(worst(a, b) == 0 for a, b in zip(grads[:3], same[:3], strict=True))


def test_case_35_dout_with_zero_strides() -> None:
    q, k, v = arrays((2, 20, 30, 4, 2, 8, 8))
    out, lse = attend(q, k, v)
    stretched = np.broadcast_to(np.ones(()), out.shape)
    got, want = (
        fa4.flash_attn_backward(x, q, k, v, out, lse) for x in (stretched, np.ones(out.shape))
    )
    assert all(worst(a, b) == 0 for a, b in zip(got[:3], want[:3], strict=True))
    leaf = torch.tensor(q, requires_grad=True)
    fa4.flash_attn_func(leaf, torch.tensor(k), torch.tensor(v)).sum().backward()
    assert worst(leaf.grad, want.dq) <= EXACT


def test_case_36_indices_beyond_two_to_the_31() -> None:
    seqlen_k = 2**33
    k = np.broadcast_to(np.float32(0), (1, seqlen_k, 8))
    seq = Sequence(0, np.zeros((1, 4, 8), np.float32), k, k)
    masks = TileMasks(seq, Attention(softmax_scale=1.0, window=(300, 0)))
    first, last = masks.key_limits(np.arange(4))
    assert last.tolist() == [seqlen_k - 3, seqlen_k - 2, seqlen_k - 1, seqlen_k]
    assert (last - first == 301).all()
    tile = Tile(seqlen_k - 128, seqlen_k)
    visible = masks.visible(Tile(0, 4), tile)
    assert visible is not None and visible.sum(axis=-1).tolist() == [[125, 126, 127, 128]]


def test_case_37_size_one_dimensions_with_stride_zero() -> None:
    q, k, v = arrays((1, 10, 20, 2, 1, 8, 8))
    single = attend(q, k, v)[0]
    batched = [np.broadcast_to(x, (3, *x.shape[1:])) for x in (q, k, v)]
    assert worst(attend(*batched)[0], np.repeat(single, 3, axis=0)) == 0


def test_case_38_unaligned_base_and_padded_strides() -> None:
    q, k, v = arrays((1, 10, 20, 2, 1, 8, 8), 0, np.float32)
    expected = attend(q, k, v)[0]

    def odd(x):
        raw = np.zeros(x.nbytes + 1, np.uint8)
        raw[1:] = np.frombuffer(x.tobytes(), np.uint8)
        return raw[1:].view(x.dtype).reshape(x.shape)

    padded = [np.pad(x, [(0, 0)] * 3 + [(0, 5)])[..., :8] for x in (q, k, v)]
    assert worst(attend(*map(odd, (q, k, v)))[0], expected) == 0
    assert worst(attend(*padded)[0], expected) <= 1e-6


@pytest.mark.parametrize("dims", [(d, d) for d in (8, 16, 24, 32, 40, 96, 128, 256)]
                         + [(128, 96), (64, 128), (192, 128), (1, 7)])  # fmt: skip
def test_case_39_head_dims(dims) -> None:
    exact((1, 20, 30, 2, 1, *dims), causal=True)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 16])
def test_case_40_grouped_queries_equal_repeated_keys(group) -> None:
    q, k, v = arrays((1, 12, 20, 2 * group, 2, 8, 8))
    repeated = [np.repeat(x, group, axis=2) for x in (k, v)]
    assert worst(attend(q, k, v)[0], attend(q, *repeated)[0]) <= EXACT
    exact((1, 12, 20, 2 * group, 2, 8, 8))
    if group > 1:
        with pytest.raises(ValueError, match="multiple of those of k; got 3 and 2"):
            attend(q[:, :, :3], k, v)


def test_case_41_packing_changes_nothing() -> None:
    q, k, v = arrays((1, 12, 20, 6, 2, 8, 8))
    results = [
        attend(q, k, v, pack_gqa=x, mask_mod=keep_two_of_three)[0] for x in (None, True, False)
    ]
    assert worst(results[0], results[1]) == worst(results[0], results[2]) == 0


def test_case_42_deterministic_gradients_are_bitwise_equal() -> None:
    q, k, v = arrays((1, 40, 60, 6, 2, 8, 8), 0, np.float32)
    out, lse = attend(q, k, v)
    runs = [
        fa4.flash_attn_backward(out, q, k, v, out, lse, config=fa4.BackwardConfig(tile_n=16))
        for _ in range(100)
    ]
    assert all((a == b).all() for run in runs for a, b in zip(run[:3], runs[0][:3], strict=True))


@BOTH
def test_case_45_unused_rows_are_zero(impl) -> None:
    q, k, v = arrays((2, 20, 30, 2, 1, 8, 8))
    used_q, used_k = np.array([3, 20]), np.array([30, 4])
    q[0, 3:], k[1, 4:], v[1, 4:] = np.nan, np.nan, np.nan
    out, lse = attend(q, k, v, seqused_q=used_q, seqused_k=used_k, impl=impl)
    assert (out[0, 3:] == 0).all() and np.isneginf(lse[0, :, 3:]).all()
    one, _ = attend(q[1:], k[1:, :4], v[1:, :4], impl="oracle")
    assert worst(out[1], one[0]) <= EXACT


def test_case_46_varlen_gradients_ignore_what_lies_between_sequences() -> None:
    drawn = packed([20, 13], [30, 17])
    cu_k = drawn.options["cu_seqlens_k"]
    out, lse = attend(drawn.q, drawn.k, drawn.v, **drawn.options)
    clean = fa4.flash_attn_varlen_backward(
        out, drawn.q, drawn.k, drawn.v, out, lse, **drawn.options
    )
    tail = np.full((40, *drawn.k.shape[1:]), np.nan)
    padded = [np.concatenate([x, tail]) for x in (drawn.k, drawn.v)]
    grads = fa4.flash_attn_varlen_backward(out, drawn.q, *padded, out, lse, **drawn.options)
    assert (grads.dk[cu_k[-1] :] == 0).all() and (grads.dv[cu_k[-1] :] == 0).all()
    assert worst(grads.dq, clean.dq) == 0 and worst(grads.dk[: cu_k[-1]], clean.dk) == 0


@BOTH
def test_case_47_consecutive_empty_blocks(impl) -> None:
    q, k, v = arrays((1, 40, 64, 2, 1, 8, 8))
    counts = np.array([0, 0, 2, 0, 1])[None, None]
    indices = np.zeros((1, 1, 5, 4), int)
    indices[0, 0, 2, :2], indices[0, 0, 4, 0] = (3, 0), 2
    sparse = BlockSparseTensors(counts, indices, block_size=(8, 16))
    out, lse = attend(q, k, v, block_sparse_tensors=sparse, impl=impl)
    for block, keys in ((0, []), (1, []), (2, [0, 3]), (3, []), (4, [2])):
        rows = slice(8 * block, 8 * block + 8)
        chosen = np.concatenate([np.arange(16 * n, 16 * n + 16) for n in keys] or [[]]).astype(int)
        one, one_lse = attend(q[:, rows], k[:, chosen], v[:, chosen], impl="oracle")
        assert worst(out[:, rows], one) <= EXACT and worst(lse[..., rows], one_lse) <= EXACT


def test_case_48_callables_never_see_an_index_outside_the_problem() -> None:
    bias = np.random.default_rng(0).standard_normal((2, 21, 37))

    def add_bias(score, batch, head, q_idx, kv_idx, info, aux):
        assert np.all((q_idx >= 0) & (kv_idx >= 0))
        return score + aux[0][head, q_idx, kv_idx]

    q, k, v = arrays((1, 21, 37, 2, 1, 8, 8))
    out, _ = attend(q, k, v, score_mod=add_bias, aux_tensors=[bias])
    want, _ = attend(q, k, v, score_mod=lambda s, *_: s + bias, impl="oracle")
    assert worst(out, want) <= EXACT


def integer_problem(rows: int, keys: int):
    """Inputs whose products and P V sums are exact in any order, so that bits can be compared."""
    rng = np.random.default_rng(0)
    q = rng.integers(-2, 3, (1, rows, 1, 16)).astype(BF16)
    k = rng.integers(-2, 3, (1, keys, 1, 16)).astype(BF16)
    return q, k, np.eye(keys, dtype=BF16)[None, :, None, :]


def test_case_49_decode_row_equals_prefill_row_bitwise() -> None:
    q, k, v = integer_problem(300, 256)
    config = fa4.ForwardConfig.tuned("bf16", 128, causal=True)
    whole = fa4.flash_attn_func(q, k, v, causal=True, config=config)
    single = fa4.ForwardConfig(exp2=config.exp2, q_tiles=1)
    row = fa4.flash_attn_func(q[:, -1:], k, v, causal=True, config=single)
    assert (whole[:, -1:].view(np.uint16) == row.view(np.uint16)).all()


def test_case_50_a_sequence_does_not_see_its_batch() -> None:
    q, k, v = arrays((5, 30, 70, 4, 2, 16, 16), 0, BF16)
    together = fa4.flash_attn_func(q, k, v, num_splits=2)
    for b in range(5):
        alone = fa4.flash_attn_func(*(x[b : b + 1] for x in (q, k, v)), num_splits=2)
        assert (alone.view(np.uint16) == together[b : b + 1].view(np.uint16)).all()


def test_case_51_asking_for_the_lse_changes_nothing_and_its_gradient_counts() -> None:
    q, k, v = arrays((1, 20, 30, 2, 1, 8, 8))
    out, lse = attend(q, k, v)
    assert worst(fa4.flash_attn_func(q, k, v, config=small_tiles()), out) == 0
    without = fa4.flash_attn_backward(out, q, k, v, out, lse)
    zero = fa4.flash_attn_backward(out, q, k, v, out, lse, dlse=np.zeros(lse.shape))
    some = fa4.flash_attn_backward(out, q, k, v, out, lse, dlse=np.ones(lse.shape))
    assert worst(without.dq, zero.dq) == 0 and worst(without.dq, some.dq) > 1e-3
    assert worst(without.dv, some.dv) == 0


def test_case_55_max_seqlen_as_scalar_array_or_too_small() -> None:
    drawn = packed([5, 9], [20, 7])
    for value in (9, np.array(9), np.int32(9), torch.tensor(9)):
        attend(drawn.q, drawn.k, drawn.v, max_seqlen_q=value, **drawn.options)
    with pytest.raises(ValueError, match="max_seqlen_k must be at least 20; got 19"):
        attend(drawn.q, drawn.k, drawn.v, max_seqlen_k=19, **drawn.options)


@pytest.mark.parametrize(("name", "drop"), [("e4m3", 0.9), ("e4m3", 0.5), ("fp16", 0.999)])
def test_dropout_does_not_saturate_a_narrow_type(name, drop) -> None:
    _, k, v = arrays((1, 4, 64, 1, 1, 16, 16), 0, np.float32)
    inputs = [round_to(x, name) for x in (np.zeros((1, 4, 1, 16), np.float32), k, np.ones_like(v))]
    options = {"dropout_p": drop, "dropout_seed": 1}
    out = fa4.flash_attn_func(*inputs, **options).astype(np.float64)
    truth = fa4.flash_attn_func(*inputs, impl="oracle", **options)
    assert truth.max() > 0 and worst(out, truth) <= 2.0**-8 * truth.max()


@BOTH
def test_nan_in_a_query_without_keys_stays_in_its_row(impl) -> None:
    q, k, v = arrays((1, 30, 10, 2, 1, 8, 8))
    out, lse = attend(q, k, v, causal=True, impl="oracle")
    dout = np.ones(out.shape)
    options = {"causal": True, "config": (small_tiles(), fa4.BackwardConfig(tile_m=10, tile_n=8))}
    clean = fa4.flash_attn_backward(dout, q, k, v, out, lse, impl=impl, **options)
    q[:, :20], dout[:, :20] = np.nan, np.nan
    grads = fa4.flash_attn_backward(dout, q, k, v, out, lse, impl=impl, **options)
    assert worst(grads.dk, clean.dk) <= EXACT and worst(grads.dv, clean.dv) <= EXACT


@BOTH
@pytest.mark.parametrize("which", ["k", "v"])
def test_nan_at_a_key_that_one_head_does_not_see(impl, which) -> None:
    q, k, v = arrays((1, 6, 20, 4, 2, 8, 8))
    options = {"mask_mod": lambda b, h, i, j, *_: (j != 7) | (h >= 2) | (i < 0)}
    out, lse = attend(q, k, v, impl="oracle", **options)
    clean = fa4.flash_attn_backward(out, q, k, v, out, lse, impl=impl, **options)
    {"k": k, "v": v}[which][0, 7, 0] = np.nan
    bad = {"k": k, "v": v}
    got, _ = attend(q, bad["k"], bad["v"], impl=impl, **options)
    assert worst(got, out) <= EXACT
    grads = fa4.flash_attn_backward(out, q, k, v, out, lse, impl=impl, **options)
    assert worst(grads.dq, clean.dq) <= EXACT


def test_a_gradient_beyond_fp16_is_infinite_and_silent() -> None:
    q = np.full((1, 1, 1, 8), 60000, np.float16)
    k = np.full((1, 2, 1, 8), 1e-6, np.float16)
    v = np.full((1, 2, 1, 8), 1000, np.float16)
    k[0, 1], v[0, 1] = 0, -1000
    out, lse = fa4.flash_attn_func(q, k, v, return_lse=True)
    grads = fa4.flash_attn_backward(np.ones_like(out), q, k, v, out, lse)
    assert np.isinf(grads.dk).any() and not np.isnan(grads.dk).any()
