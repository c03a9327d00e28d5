"""Every generation computes attention: against the oracle, in both directions, with all features.

`matches_oracle` and `same_dropout` are the checks; the last tests plant faults that they must find.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.config import BackwardConfig, ForwardConfig
from fa4.dtypes import numpy_dtype, round_to
from fa4.oracle import attend_batch, differentiate_batch
from fa4.reference import (
    Attention,
    BlockSparseTensors,
    Descale,
    Dropout,
    Packing,
    SavedForward,
)
from fa4.reference.generations import (
    GENERATIONS,
    Flash1Config,
    Flash2Config,
    Flash3Config,
    Flash3Fp8Config,
    StandardConfig,
    flash2,
    flash3,
    run_generation,
    run_generation_backward,
)
from fa4.reference.generations.common import SequenceTiles
from fa4.reference.tiles import TileMasks

EXACT = [name for name in GENERATIONS if name != "fa3-fp8"]
TOLERANCE = 1e-12  # float64 sums of some hundred terms of size 1 to 10

# Tiles small enough that every problem below has several.
SMALL: dict[str, Any] = {
    "standard": StandardConfig(),
    "fa1": Flash1Config(sram_bytes=4096),
    "fa2": Flash2Config(tile_m=16, tile_n=8),
    "fa3": Flash3Config(tile_m=16, tile_n=8),
    "fa4": ForwardConfig(tile_m=8, tile_n=8),
}
SMALL_BACKWARD = SMALL | {"fa4": BackwardConfig(tile_m=8, tile_n=8)}


def draw_tensors(
    seed: int, seqlens: tuple[int, int], heads: tuple[int, int], dims: tuple[int, int] = (8, 4)
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v of batch 2 with scores large enough for maxima to move."""
    rng = np.random.default_rng(seed)
    (seqlen_q, seqlen_k), (heads_q, heads_k), (d, dv) = seqlens, heads, dims
    q = 2.0 * rng.standard_normal((2, seqlen_q, heads_q, d))
    k = rng.standard_normal((2, seqlen_k, heads_k, d))
    return q, k, rng.standard_normal((2, seqlen_k, heads_k, dv))


@st.composite
def problems(draw: st.DrawFn) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], Attention]:
    """Shapes with GQA and Sk != Sq; causal, window, sink, softcap, dropout in any combination."""
    heads_k, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    seed = draw(st.integers(0, 2**32))
    seqlens = draw(st.tuples(st.integers(1, 60), st.integers(1, 60)))
    tensors = draw_tensors(seed, seqlens, (heads_k * group, heads_k))
    windows = st.sampled_from([(None, None), (None, 0), (7, 0), (3, 5), (None, -2), (-2, 9)])
    sink = np.random.default_rng(seed + 1).standard_normal(heads_k * group)
    dropout = Dropout(probability=draw(st.sampled_from([0.0, 0.25, 0.5])), seed=seed)
    spec = Attention(
        softmax_scale=draw(st.sampled_from([8**-0.5, 1.0, -0.3])),
        window=draw(windows),
        softcap=draw(st.sampled_from([0.0, 4.0])),
        sink=draw(st.sampled_from([None, sink])),
        dropout=dropout,
    )
    return tensors, spec


def matches_oracle(name: str, tensors: tuple[np.ndarray, ...], spec: Attention) -> None:
    """Forward and backward of one generation, float64, small tiles."""
    q, k, v = tensors
    oracle_out, oracle_lse = attend_batch(q, k, v, spec.keywords)
    result = run_generation(name, q, k, v, spec, config=SMALL[name])
    np.testing.assert_allclose(result.out, oracle_out, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(result.lse, oracle_lse, rtol=0, atol=TOLERANCE)
    rng = np.random.default_rng(q.size)
    dout, dlse = rng.standard_normal(oracle_out.shape), rng.standard_normal(oracle_lse.shape)
    dlse[np.isneginf(oracle_lse)] = 0.0
    saved = SavedForward(out=result.out, lse=result.lse, dout=dout, dlse=dlse)
    expected = differentiate_batch((q, k, v), dout, dlse, spec.keywords)
    config = SMALL_BACKWARD[name]
    gradients = run_generation_backward(name, (q, k, v), saved, spec, config=config)
    for field in ("dq", "dk", "dv"):
        got, wanted = getattr(gradients, field), getattr(expected, field)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=10 * TOLERANCE, err_msg=field)
    if spec.sink is not None:
        np.testing.assert_allclose(gradients.dsink, expected.dsink, atol=10 * TOLERANCE)


@settings(max_examples=25, database=None)
@given(problem=problems())
def test_every_generation_is_exact(problem: tuple[Any, Attention]) -> None:
    """The oracle's out, LSE and gradients in float64, whatever the features."""
    for name in EXACT:
        matches_oracle(name, *problem)


@pytest.mark.parametrize("name", EXACT)
def test_callbacks(name: str) -> None:
    """score_mod with its derivative, and a mask_mod, which hides whole tiles and whole rows."""
    tensors = draw_tensors(5, (33, 47), (4, 2))
    spec = Attention(
        softmax_scale=0.4,
        score_mod=lambda s, b, h, i, j, info, aux: s * aux[h] + 0.01 * (i - j),
        score_mod_bwd=lambda g, s, b, h, i, j, info, aux: g * aux[h],
        mask_mod=lambda b, h, i, j, info, aux: (i // 9 + j // 20 + h) % 3 > 0,
        aux_tensors=np.array([0.5, 1.0, -1.0, 2.0]),
    )
    matches_oracle(name, tensors, spec)


@pytest.mark.parametrize("name", EXACT)
def test_block_sparse(name: str) -> None:
    """Blocks in neither list count for nothing; full blocks ignore mask_mod."""
    rng = np.random.default_rng(3)
    state = rng.integers(0, 3, (1, 2, 4, 5))  # of (B, H, q_blocks, kv_blocks); 0 is skipped
    lists = []
    for kind in (1, 2):
        counts = (state == kind).sum(axis=-1).astype(np.int32)
        order = np.argsort(state != kind, axis=-1, kind="stable").astype(np.int32)
        lists += [counts, order]
    spec = Attention(
        softmax_scale=0.5,
        mask_mod=lambda b, h, i, j, info, aux: (i + j) % 3 != 0,
        block_sparse=BlockSparseTensors(*lists, block_size=(12, 10)),
    )
    matches_oracle(name, draw_tensors(4, (45, 47), (2, 1)), spec)


@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.parametrize("seqlens", [(0, 5), (5, 0)])
def test_empty_sequences(name: str, seqlens: tuple[int, int]) -> None:
    """No queries give empty results; no keys give out 0 and LSE -inf."""
    q, k, v = draw_tensors(0, seqlens, (2, 1))
    spec = Attention(softmax_scale=1.0)
    result = run_generation(name, q, k, v, spec)
    assert result.out.shape == (2, seqlens[0], 2, 4) and not result.out.any()
    assert np.isneginf(result.lse).all()
    if name in EXACT:
        saved = SavedForward(out=result.out, lse=result.lse, dout=np.ones_like(result.out))
        gradients = run_generation_backward(name, (q, k, v), saved, spec)
        assert not any(x.any() for x in (gradients.dq, gradients.dk, gradients.dv))


@pytest.mark.parametrize("name", GENERATIONS)
def test_packed_sequences(name: str) -> None:
    """cu_seqlens gives each sequence what it gets alone."""
    rng = np.random.default_rng(8)
    lengths = (30, 1, 70)
    q, k, v = (rng.standard_normal((sum(lengths), 2, 8)) for _ in range(3))
    offsets = np.cumsum([0, *lengths])
    spec = Attention(softmax_scale=0.3, window=(None, 0))
    packing = Packing(cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    packed = run_generation(name, q, k, v, spec, packing=packing)
    for start, stop in pairwise(offsets):
        alone = run_generation(name, *(x[None, start:stop] for x in (q, k, v)), spec)
        np.testing.assert_array_equal(packed.out[start:stop], alone.out[0])
        np.testing.assert_array_equal(packed.lse[:, start:stop], alone.lse[0])


def plain_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, dtype: str):
    """(out, dq, dk, dv) of one causal head in low precision: every matrix rounded to `dtype`."""

    def rounded(x: np.ndarray) -> np.ndarray:
        return round_to(x.astype(np.float32), dtype).astype(np.float32)

    q, k, v, dout = (x.astype(np.float32) for x in (q, k, v, dout))
    scale = np.float32(q.shape[-1] ** -0.5)
    hidden = np.triu(np.ones((len(q), len(k)), bool), 1 + len(k) - len(q))
    s = np.where(hidden, -np.inf, rounded(q @ k.T * scale))
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p = rounded(p / p.sum(axis=-1, keepdims=True))
    dp = rounded(dout @ v.T)
    ds = rounded(p * (dp - (p * dp).sum(axis=-1, keepdims=True)))
    products = (p @ v, ds @ k * scale, ds.T @ q * scale, p.T @ dout)
    return tuple(rounded(x) for x in products)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", EXACT)
def test_low_precision(name: str, dtype: str) -> None:
    """Errors at most twice those of plain low-precision attention, plus a rounding band."""
    rng = np.random.default_rng(11)
    shapes = ((1, 200, 1, 32), (1, 300, 1, 32), (1, 300, 1, 32), (1, 200, 1, 32))
    q, k, v, dout = (round_to(rng.standard_normal(shape), dtype) for shape in shapes)
    spec = Attention(softmax_scale=32**-0.5, window=(None, 0))
    plain = plain_attention(*(x[0, :, 0] for x in (q, k, v, dout)), dtype)
    result = run_generation(name, q, k, v, spec)
    assert result.out.dtype == numpy_dtype(dtype) and result.lse.dtype == np.float32
    saved = SavedForward(out=result.out, lse=result.lse, dout=dout)
    grads = run_generation_backward(name, (q, k, v), saved, spec)
    exact = differentiate_batch((q, k, v), dout, None, spec.keywords)
    exact_out, _ = attend_batch(q, k, v, spec.keywords)
    triples = zip(
        plain,
        (result.out, grads.dq, grads.dk, grads.dv),
        (exact_out, exact.dq, exact.dk, exact.dv),
        strict=True,
    )
    for low, got, reference in triples:
        reference, number = reference[0, :, 0], numpy_dtype(dtype).type
        band = (reference.astype(number) + number(0.3) - number(0.3)).astype(float) - reference
        limit = 2 * np.abs(low - reference).max() + 2 * np.abs(band).max()
        assert np.abs(got[0, :, 0].astype(float) - reference).max() <= limit


def dropout_masks(name: str, forward: Attention, backward: Attention) -> tuple[Any, Any]:
    """Kept pairs (B, H, Sq, Sk) as the forward and the backward pass see them.

    With V = I, out is dropout(P); with dO = I, dV is its transpose.
    """
    size = 40
    q, k, _ = draw_tensors(2, (size, size), (1, 1))
    v = np.broadcast_to(np.eye(size)[None, :, None], (2, size, 1, size)).copy()
    result = run_generation(name, q, k, v, forward, config=SMALL[name])
    saved = SavedForward(out=result.out, lse=result.lse, dout=v)
    config = SMALL_BACKWARD[name]
    grads = run_generation_backward(name, (q, k, v), saved, backward, config=config)
    kept = result.out.transpose(0, 2, 1, 3) != 0
    return kept, grads.dv.transpose(0, 2, 3, 1) != 0


@pytest.mark.parametrize("name", EXACT)
def test_dropout_is_replayed(name: str) -> None:
    """Backward drops exactly what forward dropped; another seed drops something else."""
    specs = [
        Attention(softmax_scale=0.3, dropout=Dropout(probability=0.4, seed=seed)) for seed in (1, 2)
    ]
    forward, backward = dropout_masks(name, specs[0], specs[0])
    np.testing.assert_array_equal(forward, backward)
    assert 0.5 < forward.mean() < 0.7
    forward, other = dropout_masks(name, specs[0], specs[1])
    assert (forward != other).mean() > 0.3


def test_row_blocks_are_independent() -> None:
    """FA2's work tiles cover every head and row once, and each can run alone."""
    q, k, v = draw_tensors(6, (45, 50), (2, 2))
    spec, config = Attention(softmax_scale=0.4, window=(None, 0)), SMALL["fa2"]
    tiles = flash2.work_tiles(2, 45, config)
    covered = [(item.head, row) for item in tiles for row in item.tile.indices]
    assert sorted(covered) == [(head, row) for head in range(2) for row in range(45)]
    assert len(flash2.backward_work_tiles(2, 50, config)) == 2 * 7
    whole = run_generation("fa2", q, k, v, spec, config=config)
    sequence = flash2.Sequence(0, *(x[0].transpose(1, 0, 2) for x in (q, k, v)))
    for item in reversed(tiles):
        kernel = flash2.Flash2Forward(sequence, spec, config)
        with np.errstate(invalid="ignore"):
            part = kernel.row_block(item.tile)
        expected = whole.out[0, item.tile.slice, item.head]
        np.testing.assert_array_equal(part.out[item.head], expected)


def test_fa3_pipeline_order() -> None:
    """Algorithm 2 per warpgroup; one warpgroup's products run during the other's softmax."""
    slots = flash3.ping_pong(4)
    for slot in slots:
        busy = [phase[0].stage == "softmax" for _, phase in slot]
        assert len(set(busy)) == len(busy)
    for warpgroup in range(2):
        ops = [op for slot in slots for index, phase in slot if index == warpgroup for op in phase]
        order = {op: position for position, op in enumerate(ops)}
        assert len(order) == len(ops) == 12
        for tile in range(1, 4):
            chain = [("scores", tile), ("values", tile - 1), ("softmax", tile), ("values", tile)]
            positions = [order[flash3.Op(*op)] for op in chain]
            assert positions == sorted(positions)
    assert flash3.ping_pong(0) == []


def test_fa3_is_fa2_up_to_rounding() -> None:
    """The pipeline reorders operations between rows and tiles, not within a row."""
    q, k, v = draw_tensors(7, (170, 190), (2, 1))
    spec = Attention(softmax_scale=1.0, window=(50, 3))
    configs = {"fa2": Flash2Config(tile_m=64, tile_n=16), "fa3": Flash3Config(tile_m=64, tile_n=16)}
    second, third = (run_generation(n, q, k, v, spec, config=c) for n, c in configs.items())
    np.testing.assert_allclose(third.out, second.out, rtol=0, atol=1e-14)
    assert third.counters.rescales_done == second.counters.rescales_done


def test_refusals() -> None:
    """What a generation cannot do, in one line that says so."""
    q, k, v = draw_tensors(0, (8, 8), (1, 1))
    spec = Attention(softmax_scale=1.0)
    with pytest.raises(ValueError, match="generation must be one of standard, fa1"):
        run_generation("fa5", q, k, v, spec)
    with pytest.raises(ValueError, match="fa3-fp8 has no backward pass"):
        saved = SavedForward(out=v, lse=np.zeros((2, 1, 8)), dout=v)
        run_generation_backward("fa3-fp8", (q, k, v), saved, spec)
    with pytest.raises(ValueError, match="no dropout"):
        dropping = Attention(softmax_scale=1.0, dropout=Dropout(probability=0.5))
        run_generation("fa3-fp8", q, k, v, dropping)
    with pytest.raises(ValueError, match="sram_bytes must hold one row each"):
        run_generation("fa1", q, k, v, spec, sram_bytes=64)
    with pytest.raises(ValueError, match=r"sram_bytes must be at least \d+"):
        run_generation("fa2", q, k, v, spec, sram_bytes=64)
    with pytest.raises(TypeError, match="config of fa2 must be a Flash2Config"):
        run_generation("fa2", q, k, v, spec, config=Flash3Config())
    with pytest.raises(ValueError, match="tile_m must be even"):
        Flash3Config(tile_m=3)
    with pytest.raises(ValueError, match="scales must be one of"):
        Flash3Fp8Config(scales="row")
    with pytest.raises(ValueError, match="p_offset_log2 must be below"):
        Flash3Fp8Config(p_offset_log2=9.0)
    with pytest.raises(ValueError, match="dtype must be one of"):
        StandardConfig(stored_dtype="int8")
    small = tuple(x.astype(numpy_dtype("e4m3")) for x in (q, k, v))
    for name in ("standard", "fa1", "fa2", "fa3", "fa3-fp8"):
        with pytest.raises(ValueError, match="only fa4 takes FP8"):
            run_generation(name, *small, spec)
        scaled = Attention(softmax_scale=1.0, descale=Descale(q=np.ones((2, 1))))
        with pytest.raises(ValueError, match="descales undo"):
            run_generation(name, q, k, v, scaled)


# Planted faults: each check above must be able to fail.


def without_rescale(step: Any) -> Any:
    """online_step whose alpha gets lost."""
    return lambda *arguments: step(*arguments)._replace(alpha=None)


def test_lost_rescale_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """O must be rescaled when the maximum moves."""
    for module, name in ((flash2, "fa2"), (flash3, "fa3")):
        monkeypatch.setattr(module, "online_step", without_rescale(module.online_step))
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            matches_oracle(name, draw_tensors(1, (20, 60), (1, 1)), Attention(softmax_scale=1.0))


@pytest.mark.parametrize("name", ["standard", "fa1", "fa2", "fa3"])
def test_wrong_probabilities_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of 1e-10 in P V is beyond the tolerance."""
    original = SequenceTiles.weighted_values
    monkeypatch.setattr(
        SequenceTiles, "weighted_values", lambda *given: original(*given) * (1 + 1e-10)
    )
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        matches_oracle(name, draw_tensors(1, (20, 60), (1, 1)), Attention(softmax_scale=1.0))


@pytest.mark.parametrize(("name", "field"), [("fa1", "Not equal"), ("fa2", "dq"), ("fa3", "dq")])
def test_lost_tile_is_found(name: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A K/V-outer loop that misses the last Q tile: FA1's forward, the others' backward."""
    original = TileMasks.q_tiles
    monkeypatch.setattr(TileMasks, "q_tiles", lambda *given: original(*given)[:-1])
    with pytest.raises(AssertionError, match=field):
        matches_oracle(name, draw_tensors(1, (20, 60), (1, 1)), Attention(softmax_scale=1.0))
