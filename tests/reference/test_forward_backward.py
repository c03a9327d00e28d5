"""The tiled algorithms against the oracle, and the oracle against independent derivatives."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fa4
from fa4.dtypes import round_to
from fa4.reference import Attention, SavedForward, attention_backward, attention_forward
from fa4.reference import backward as backward_module
from fa4.reference import forward as forward_module
from tests.reference.support import (
    EXACT,
    Drawn,
    arrays,
    assert_exact,
    finite_max,
    problems,
    small_tiles,
    worst,
)

backward_exchange = backward_module.exchange_ds
SHAPE = (2, 37, 53, 4, 2, 16, 8)


@settings(max_examples=120)
@given(problems())
def test_tiled_equals_oracle_for_any_combination_of_features(drawn: Drawn) -> None:
    assert_exact(drawn)


@settings(max_examples=40)
@given(
    problems(),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([0.0, 1.0, 4.0, 8.0, 100.0]),
    st.sampled_from([1, 32]),
)
def test_no_tile_size_threshold_or_warp_vote_changes_the_result(
    drawn: Drawn, tile_m: int, tile_n: int, tau: float, rows: int
) -> None:
    config = fa4.ForwardConfig(
        tile_m=tile_m, tile_n=tile_n, rescale_threshold_log2=tau, rescale_rows=rows
    )
    assert_exact(drawn, config, fa4.BackwardConfig(tile_m=tile_m, tile_n=tile_n))


@settings(max_examples=40)
@given(problems(), st.sampled_from(["ascending", "descending", "random"]), st.integers(1, 2))
def test_order_and_cta_pairs_do_not_change_gradients(drawn: Drawn, order: str, pair: int) -> None:
    config = fa4.BackwardConfig(tile_m=8, tile_n=8, dq_order=order, cta_group=pair, seed=5)
    assert_exact(drawn, small_tiles(), config)


def torch_attention(q, k, v, sink, *, causal, softcap):
    """Independent of this package: dense torch in float64, heads repeated, bottom-right mask."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(
            scores.shape[-1] - scores.shape[-2]
        )
        scores = scores.masked_fill(~visible, -torch.inf)
    column = sink[None, :, None, None].expand(*scores.shape[:-1], 1)
    full = torch.cat([scores, column], dim=-1)
    out = torch.softmax(full, dim=-1)[..., :-1] @ v
    return out.transpose(1, 2), torch.logsumexp(full, dim=-1)


@settings(max_examples=20)
@given(
    st.booleans(),
    st.sampled_from([0.0, 2.0]),
    st.sampled_from([SHAPE, (1, 9, 5, 3, 1, 4, 6), (1, 1, 20, 2, 2, 8, 8)]),
    st.integers(0, 99),
)
def test_oracle_gradients_equal_torch_autograd(causal, softcap, shape, seed) -> None:
    inputs = arrays(shape, seed)
    sink = np.random.default_rng(seed).standard_normal(shape[3])
    leaves = [torch.tensor(x, requires_grad=True) for x in (*inputs, sink)]
    expected, expected_lse = torch_attention(*leaves, causal=causal, softcap=softcap)
    dout, dlse = torch.randn_like(expected), torch.randn_like(expected_lse)
    truth = torch.autograd.grad((expected * dout).sum() + (expected_lse * dlse).sum(), leaves)
    options = {"causal": causal, "softcap": softcap, "learnable_sink": sink}
    out, lse = fa4.flash_attn_func(*inputs, impl="oracle", return_lse=True, **options)
    assert worst(out, expected.detach()) <= EXACT
    assert worst(lse, expected_lse.detach()) <= EXACT
    grads = fa4.flash_attn_backward(
        dout.numpy(), *inputs, out, lse, dlse=dlse.numpy(), impl="oracle", **options
    )
    for got, wanted in zip(grads, truth, strict=True):
        assert worst(got, wanted) <= EXACT * max(1.0, finite_max(wanted.numpy()))


@settings(max_examples=10)
@given(st.integers(0, 99), st.sampled_from([0, 1, 2]))
def test_oracle_gradients_equal_finite_differences_with_mods_and_dropout(seed, which) -> None:
    from tests.reference.support import keep_two_of_three, tilt, tilt_backward

    inputs = list(arrays((1, 5, 7, 2, 1, 3, 4), seed))
    options = {"score_mod": tilt, "score_mod_bwd": tilt_backward, "mask_mod": keep_two_of_three,
               "dropout_p": 0.3, "dropout_seed": seed}  # fmt: skip
    rng = np.random.default_rng(seed + 1)
    dout, direction = rng.standard_normal((1, 5, 2, 4)), rng.standard_normal(inputs[which].shape)

    def value(step: float) -> float:
        moved = list(inputs)
        moved[which] = moved[which] + step * direction
        return float((fa4.flash_attn_func(*moved, impl="oracle", **options) * dout).sum())

    out, lse = fa4.flash_attn_func(*inputs, impl="oracle", return_lse=True, **options)
    grads = fa4.flash_attn_backward(dout, *inputs, out, lse, impl="oracle", **options)
    step = 1e-5  # central difference: error step^2 = 1e-10 plus cancellation 1e-16 / step = 1e-11
    numeric = (value(step) - value(-step)) / (2 * step)
    assert numeric == pytest.approx(float((grads[which] * direction).sum()), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("fault", ["mask", "rescale", "last tile", "sum of rounded P"])
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = arrays((1, 40, 64, 2, 1, 16, 16), 3, scale=20.0)
    drawn = Drawn(q, k, v, {"causal": True})
    assert_exact(drawn)
    run = forward_module._SequenceForward
    if fault == "mask":
        monkeypatch.setattr(forward_module.TileMasks, "visible", lambda *_: None)
    elif fault == "rescale":
        honest = forward_module.online_step
        monkeypatch.setattr(
            forward_module, "online_step", lambda *a: honest(*a)._replace(alpha=None)
        )
    elif fault == "last tile":
        honest_tiles = forward_module.TileMasks.kv_tiles
        monkeypatch.setattr(forward_module.TileMasks, "kv_tiles", lambda *a: honest_tiles(*a)[1:])
    else:
        monkeypatch.setattr(
            run, "product_operand", lambda self, p, rows, cols: p.astype(np.float32)
        )
    with pytest.raises(AssertionError):
        assert_exact(drawn)


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_the_exchange_of_ds(rows: int) -> None:
    """Each CTA has half of the rows, the first one more of an odd number, with all keys."""
    whole = np.arange(2.0 * rows * 7).reshape(2, rows, 7)
    first, second = backward_exchange((whole[..., :4], whole[..., 4:]))
    assert np.array_equal(first, whole[:, : (rows + 1) // 2])
    assert np.array_equal(second, whole[:, (rows + 1) // 2 :])


@pytest.mark.parametrize("fault", ["no D", "no exchange", "no scale"])
def test_a_planted_backward_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = arrays(SHAPE, 3)
    configs = (small_tiles(), fa4.BackwardConfig(tile_m=8, tile_n=16, cta_group=2))
    drawn = Drawn(q, k, v, {})
    assert_exact(drawn, *configs)
    run = backward_module._SequenceBackward
    if fault == "no D":
        monkeypatch.setattr(run, "_preprocess", lambda self: np.zeros(self.up.lse.shape))
    elif fault == "no exchange":
        monkeypatch.setattr(
            backward_module,
            "exchange_ds",
            lambda halves: backward_exchange(halves)[::-1],
        )
    else:
        monkeypatch.setattr(run, "probabilities", lambda self, scores, rows: np.exp2(scores))
    with pytest.raises(AssertionError):
        assert_exact(drawn, *configs)


def test_deterministic_order_is_bitwise_and_random_order_is_not() -> None:
    q, k, v = arrays((1, 64, 96, 4, 2, 16, 16), 1, np.float32)
    out, lse = fa4.flash_attn_func(q, k, v, return_lse=True)
    dout = np.random.default_rng(0).standard_normal(out.shape).astype(np.float32)

    def dq(order: str, seed: int = 0) -> np.ndarray:
        config = fa4.BackwardConfig(tile_m=16, tile_n=8, dq_order=order, seed=seed)
        return fa4.flash_attn_backward(dout, q, k, v, out, lse, config=config).dq

    assert all((dq("ascending") == dq("ascending")).all() for _ in range(20))
    assert (dq("ascending") != dq("descending")).any()
    assert any((dq("random", 0) != dq("random", seed)).any() for seed in range(1, 5))
    assert (dq("random", 3) == dq("random", 3)).all()


def test_key_tiles_reach_dq_in_their_order() -> None:
    """Bit for bit the float32 sum of what each gives alone: with Q = 0 no score hangs on K."""
    q, k, v = arrays((1, 16, 96, 1, 1, 16, 16), 1, np.float32)
    q = np.zeros_like(q)
    dout = np.random.default_rng(0).standard_normal((1, 16, 1, 16)).astype(np.float32)
    out, lse = fa4.flash_attn_func(q, k, v, return_lse=True)

    def dq(k: np.ndarray, order: str) -> np.ndarray:
        config = fa4.BackwardConfig(tile_m=16, tile_n=8, dq_order=order)
        return fa4.flash_attn_backward(dout, q, k, v, out, lse, config=config).dq

    tiles = np.arange(96).reshape(12, 8)
    alone = [np.where(np.isin(np.arange(96), tile)[:, None, None], k, 0) for tile in tiles]
    parts = [dq(keys, "ascending") for keys in alone]
    up, down = (functools.reduce(np.add, some) for some in (parts, parts[::-1]))
    assert (up != down).any()
    assert (dq(k, "ascending") == up).all() and (dq(k, "descending") == down).all()


def test_counters_count_what_the_shapes_say() -> None:
    q, k, v = arrays((1, 512, 512, 2, 1, 64, 32), 0, np.float32)
    spec = Attention(softmax_scale=0.125)
    result = attention_forward(q, k, v, spec, config=fa4.ForwardConfig())
    pairs, count = 2 * 512 * 512, result.counters
    assert count.exps == pairs
    assert count.matmul_flops == 2 * pairs * (64 + 32)
    assert count.rescales_done + count.rescales_skipped == 2 * 16 * 3  # heads, warps, later tiles
    blocks = 2  # of 256 query rows; each reads all of K and V once
    assert count.hbm_read_bytes == 4 * (q.size + blocks * (k.size + v.size))
    assert count.hbm_write_bytes == 4 * result.out.size + 4 * result.lse.size
    saved = SavedForward(out=result.out, lse=result.lse, dout=result.out)
    single, pair = (
        attention_backward((q, k, v), saved, spec, config=fa4.BackwardConfig(cta_group=n)).counters
        for n in (1, 2)
    )
    assert single.matmul_flops == 2 * pairs * (3 * 64 + 2 * 32)
    dq_bytes = q.size * 4
    assert single.hbm_write_bytes - pair.hbm_write_bytes == 2 * dq_bytes  # 4 CTAs -> 2 pairs


def test_emulated_share_is_that_of_the_tuning_table() -> None:
    import ml_dtypes

    q, k, v = arrays((1, 128, 256, 1, 1, 128, 128), 0, ml_dtypes.bfloat16)
    config = fa4.ForwardConfig.tuned("bf16", 128, causal=False)
    counters = attention_forward(q, k, v, Attention(softmax_scale=0.1), config=config).counters
    assert counters.emulated_share == 0.1875


def test_conditional_rescaling_skips_most_rescales_and_none_below_a_rising_ramp() -> None:
    q, k, v = arrays((1, 128, 2048, 1, 1, 64, 64), 0, np.float32)
    spec = Attention(softmax_scale=1.0 / 8)
    rates = [
        attention_forward(
            q, k, v, spec, config=fa4.ForwardConfig(rescale_threshold_log2=tau)
        ).counters.rescale_rate
        for tau in (0.0, 8.0)
    ]
    assert rates[1] < rates[0] / 10
    ramp = np.linspace(400.0, 0.0, 2048)[None, :, None, None] * np.ones((1, 1, 1, 64))
    q[:] = 1.0 / 8  # scores then rise by about 36 log2 units per tile, visited in descending order
    rising = attention_forward(q, ramp.astype(np.float32), v, spec, config=fa4.ForwardConfig())
    assert rising.counters.rescales_skipped == 0


def test_no_tiled_function_holds_a_score_matrix() -> None:
    import tracemalloc

    peaks = {}
    for seqlen in (1024, 2048):
        q, k, v = arrays((1, seqlen, seqlen, 1, 1, 32, 32), 0, np.float32)
        config = (fa4.ForwardConfig(), fa4.BackwardConfig())
        tracemalloc.start()
        out, lse = fa4.flash_attn_func(q, k, v, config=config, return_lse=True)
        fa4.flash_attn_backward(out, q, k, v, out, lse, config=config)
        peaks[seqlen] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[2048] < 2.2 * peaks[1024]
    assert peaks[2048] < 2048 * 2048 * 4  # one float32 score matrix


def test_the_second_product_takes_p_in_the_input_type() -> None:
    """508 keys of weight 0.5018 beside 4 of weight 1, one in each tile: in bf16 they weigh 0.5.

    V is ones, so that O is the sum of the rounded weights over the sum of the weights as they are.
    """
    import ml_dtypes

    q, k, v = np.zeros((3, 1, 512, 1, 8), ml_dtypes.bfloat16)
    q[..., 0], v[:], k[0, :, 0, 0] = 1, 1, -1
    k[0, ::128] = 0
    spec = Attention(softmax_scale=0.6894)
    weight = np.exp(-0.6894)
    assert round_to(np.array(weight), "bf16") == 0.5 < weight
    low, high = (
        attention_forward(*(x.astype(dtype) for x in (q[:, :1], k, v)), spec,
                          config=fa4.ForwardConfig()).out.astype(np.float64)
        for dtype in (ml_dtypes.bfloat16, np.float32)
    )  # fmt: skip
    assert (low == 1 - 2**-8).all()  # the bf16 nearest to 258 / (4 + 508 weight) = 0.9963
    np.testing.assert_allclose(high, 1, rtol=1e-6)
