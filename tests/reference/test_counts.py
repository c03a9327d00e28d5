"""What each algorithm reads, writes and computes, added up tensor by tensor from its pseudo-code.

The problem has no two equal sizes: another number of heads, rows, keys or bytes for each tensor, a
causal mask that hides tiles, remainders in every direction. Here the mask is a matrix and a tile is
visited if it has a visible pair; the kernels under test decide that from bounds of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import ml_dtypes
import numpy as np
import pytest

from fa4.config import BackwardConfig, Exp2Split, ForwardConfig
from fa4.dtypes import round_to
from fa4.reference import Attention, Counters, SavedForward
from fa4.reference.generations import (
    Flash1Config,
    Flash2Config,
    Flash3Config,
    Flash3Fp8Config,
    StandardConfig,
    run_generation,
    run_generation_backward,
)

HEADS, KV_HEADS, GROUP = 4, 2, 2
ROWS, KEYS = 100, 170
D, DV = 16, 24
ITEM, WORK = 2, 4  # bytes: bf16 inputs; float32 for what is accumulated, LSE, m, l and D
WARP_ROWS = 32
SCORE_FLOPS = 5  # scale, subtract, maximum, exponential, sum

VISIBLE = np.arange(KEYS)[None] <= np.arange(ROWS)[:, None] + KEYS - ROWS
Q, K, V, O = ROWS * D, KEYS * D, KEYS * DV, ROWS * DV  # elements of a head # noqa: E741
SPEC = Attention(softmax_scale=0.25, window=(None, 0))


def spans(length: int, tile: int) -> list[tuple[int, int]]:
    return [(start, min(start + tile, length)) for start in range(0, length, tile)]


def visited(tile_m: int, tile_n: int) -> Iterator[tuple[int, int, int]]:
    """(first row, rows, keys) of the tiles with a visible pair, row blocks outside."""
    for (top, bottom), (left, right) in product(spans(ROWS, tile_m), spans(KEYS, tile_n)):
        if VISIBLE[top:bottom, left:right].any():
            yield top, bottom - top, right - left


def warps(rows: int) -> int:
    return HEADS * -(-rows // WARP_ROWS)


def revisits(tiles: list[tuple[int, int, int]]) -> list[int]:
    """Rows of each visit but the first of a row block."""
    return [tile[1] for i, tile in enumerate(tiles) if tile[0] in [t[0] for t in tiles[:i]]]


def tensors(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = ((1, ROWS, HEADS, D), (1, KEYS, KV_HEADS, D), (1, KEYS, KV_HEADS, DV))
    q, k, v = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in shapes)
    return q, k, v


def forward(name: str, config: object) -> Counters:
    return run_generation(name, *tensors(), SPEC, config=config).counters


def backward(name: str, config: object) -> Counters:
    q, k, v = tensors()
    result = run_generation("fa2", q, k, v, SPEC)
    saved = SavedForward(out=result.out, lse=result.lse, dout=result.out)
    return run_generation_backward(name, (q, k, v), saved, SPEC, config=config).counters


def check(found: Counters, *, pairs: int, matmul: int, other: int, read: int, write: int) -> None:
    """matmul: multiply-adds per pair. The rest as in `Counters`."""
    assert found.exps == pairs
    assert found.matmul_flops == 2 * matmul * pairs
    assert found.other_flops == other
    assert found.hbm_read_bytes == read
    assert found.hbm_write_bytes == write


@pytest.mark.parametrize("stored_bytes", [2, 4])
def test_standard_forward(stored_bytes: int) -> None:
    """Three kernels: S = Q K^T; P = softmax(S) and the LSE; O = P V. Masked pairs count."""
    config = StandardConfig(stored_dtype={2: "bf16", 4: "fp32"}[stored_bytes])
    pairs = HEADS * ROWS * KEYS
    matrix = pairs * stored_bytes
    check(
        forward("standard", config), pairs=pairs, matmul=D + DV, other=SCORE_FLOPS * pairs,
        read=HEADS * (Q + K) * ITEM + matrix + matrix + HEADS * V * ITEM,
        write=matrix + (matrix + HEADS * ROWS * WORK) + HEADS * O * ITEM,
    )  # fmt: skip


def test_standard_backward() -> None:
    """dV = P^T dO; dP = dO V^T; dS from P and dP; dQ = dS K; dK = dS^T Q: four products."""
    found, pairs = backward("standard", StandardConfig()), HEADS * ROWS * KEYS
    matrix = pairs * ITEM
    heads = HEADS * ITEM
    assert found.exps == 0
    assert found.matmul_flops == 2 * (2 * D + 2 * DV) * pairs
    assert found.other_flops == SCORE_FLOPS * pairs
    reads = [
        matrix + heads * O,
        heads * (O + V),
        2 * matrix,
        matrix + heads * K,
        matrix + heads * Q,
    ]
    writes = [heads * V, matrix, matrix, heads * Q, heads * K]
    assert found.hbm_read_bytes == sum(reads) + heads * (K + V)  # dK, dV of each query head
    assert found.hbm_write_bytes == sum(writes) + heads * (K + V) // GROUP


FA1 = Flash1Config(sram_bytes=ITEM * 2 * (D + DV) * 24)  # 24 rows each of Q, K, V and O
FA1_TILES = (16, 24)  # no more rows than the head dim


def test_fa1_forward() -> None:
    """Columns outside: K, V once; a visit reads Q, O, m and l of the rows, and writes O, m, l."""
    assert FA1.block_sizes(D, DV, ITEM) == FA1_TILES
    tiles = list(visited(*FA1_TILES))
    state = sum(rows for _, rows, _ in tiles) * HEADS * (DV + 2) * WORK
    visits = HEADS * sum(rows for _, rows, _ in tiles)
    again = revisits(tiles)
    pairs = HEADS * sum(rows * keys for _, rows, keys in tiles)
    found = forward("fa1", FA1)
    # O: two factors, a sum and the division by l; a row: two exponentials, a maximum, m and l
    per_visit = 4 * DV + (2 + 1 + 2 + 1)
    check(
        found, pairs=pairs, matmul=D + DV,
        other=SCORE_FLOPS * pairs + visits * per_visit + HEADS * sum(again) * DV,
        read=HEADS * (K + V) * ITEM + visits * D * ITEM + state,
        write=HEADS * ROWS * (DV + 2) * WORK + state,
    )  # fmt: skip
    assert (found.rescales_done, found.rescales_skipped) == (sum(map(warps, again)), 0)


def test_fa1_backward() -> None:
    """dK, dV stay on chip; a visit reads Q, O, dO, dQ, l, m and writes dQ; D anew each time."""
    tiles = list(visited(*FA1_TILES))
    visits = HEADS * sum(rows for _, rows, _ in tiles)
    pairs = HEADS * sum(rows * keys for _, rows, keys in tiles)
    dq = visits * D * WORK
    shared = HEADS * (K + V) * ITEM
    check(
        backward("fa1", FA1), pairs=pairs, matmul=3 * D + 2 * DV,
        other=SCORE_FLOPS * pairs + visits * 2 * DV,
        read=shared + visits * ((D + 2 * DV) * ITEM + 2 * WORK) + dq + shared,
        write=HEADS * Q * WORK + shared + dq + shared // GROUP,
    )  # fmt: skip


@pytest.mark.parametrize(("tile_m", "tile_n"), [(64, 48), (48, 64)])
def test_fa2_forward(tile_m: int, tile_n: int) -> None:
    """Rows outside: Q once, O and LSE once, K and V of the visible tiles for each query head."""
    tiles = list(visited(tile_m, tile_n))
    pairs = HEADS * sum(rows * keys for _, rows, keys in tiles)
    again = revisits(tiles)
    found = forward("fa2", Flash2Config(tile_m=tile_m, tile_n=tile_n))
    check(
        found, pairs=pairs, matmul=D + DV,
        other=SCORE_FLOPS * pairs + HEADS * DV * (sum(again) + ROWS),
        read=HEADS * ITEM * (Q + sum(keys for *_, keys in tiles) * (D + DV)),
        write=HEADS * (O * ITEM + ROWS * WORK),
    )  # fmt: skip
    assert (found.rescales_done, found.rescales_skipped) == (sum(map(warps, again)), 0)


@pytest.mark.parametrize("name", ["fa2", "fa3"])
def test_fa2_and_fa3_backward(name: str) -> None:
    """D first, from O and dO; then dQ passes through memory in each visit, in float32."""
    tiles = list(visited(64, 48))
    pairs = HEADS * sum(rows * keys for _, rows, keys in tiles)
    visits = HEADS * sum(rows for _, rows, _ in tiles)
    shared, dq = HEADS * (K + V) * ITEM, HEADS * Q
    config = {"fa2": Flash2Config, "fa3": Flash3Config}[name](tile_m=64, tile_n=48)
    check(
        backward(name, config), pairs=pairs, matmul=3 * D + 2 * DV,
        other=SCORE_FLOPS * pairs + 2 * HEADS * O,
        read=2 * HEADS * O * ITEM + shared + visits * ((D + DV) * ITEM + 2 * WORK + D * WORK)
        + shared + dq * WORK,
        write=HEADS * ROWS * WORK + dq * WORK + shared + visits * D * WORK + shared // GROUP
        + dq * ITEM,
    )  # fmt: skip


def fa3_halves(tile_m: int, tile_n: int) -> list[int]:
    """Rows of each warpgroup, once per rescale: every tile that its CTA visits but the first."""
    found = []
    for top, rows, _ in visited(tile_m, tile_n):
        found += [(top, bottom - start) for start, bottom in spans(rows, tile_m // 2)]
    seen = {top: min(i for i, x in enumerate(found) if x[0] == top) for top, _ in found}
    halves = {top: len(spans(min(tile_m, ROWS - top), tile_m // 2)) for top in seen}
    return [rows for i, (top, rows) in enumerate(found) if i >= seen[top] + halves[top]]


@pytest.mark.parametrize("name", ["fa3", "fa3-fp8"])
def test_fa3_forward(name: str) -> None:
    """A CTA of two warpgroups, each with half of the rows, reads each KV tile once for both.

    FP8: Q, K and V are rotated (Q and K: signs, log2(16) = 4 additions, one scale), quantised once
    with a scale per tile, and have a byte each from there.
    """
    tile_m, tile_n = 64, 48
    tiles = list(visited(tile_m, tile_n))
    pairs = HEADS * sum(rows * keys for _, rows, keys in tiles)
    again = fa3_halves(tile_m, tile_n)
    item, extra, read, write = ITEM, 0, 0, 0
    config = Flash3Config(tile_m=tile_m, tile_n=tile_n)
    if name == "fa3-fp8":
        config = Flash3Fp8Config(tile_m=tile_m, tile_n=tile_n)
        item, extra = 1, (HEADS * Q + KV_HEADS * K) * (1 + 4 + 1)
        elements = HEADS * Q + KV_HEADS * (K + V)
        scales = HEADS * len(spans(ROWS, tile_m)) + 2 * KV_HEADS * len(spans(KEYS, tile_n))
        read, write = elements * ITEM, elements + 4 * scales
    found = forward(name, config)
    check(
        found, pairs=pairs, matmul=D + DV,
        other=SCORE_FLOPS * pairs + HEADS * DV * (sum(again) + ROWS) + extra,
        read=HEADS * item * (Q + sum(keys for *_, keys in tiles) * (D + DV)) + read,
        write=HEADS * (O * ITEM + ROWS * WORK) + write,
    )  # fmt: skip
    assert (found.rescales_done, found.rescales_skipped) == (sum(map(warps, again)), 0)


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_fa4_forward(splits: int) -> None:
    """The query heads of a KV head share its tiles; O and LSE of each split pass in float32."""
    config = ForwardConfig(
        tile_m=32, tile_n=48, q_tiles=2, num_splits=splits, rescale_threshold_log2=0.0,
        exp2=Exp2Split(frequency=4, residue=2),
    )  # fmt: skip
    tiles = list(visited(64, 48))
    pairs = HEADS * sum(rows * keys for _, rows, keys in tiles)
    found = forward("fa4", config)
    partial = splits * HEADS * ROWS * (DV + 1) * 4 if splits > 1 else 0
    check(
        found, pairs=pairs, matmul=D + DV,
        other=SCORE_FLOPS * pairs + found.rescales_done * WARP_ROWS * DV + HEADS * O * splits,
        read=splits * HEADS * Q * ITEM + partial
        + KV_HEADS * sum(keys for *_, keys in tiles) * (D + DV) * ITEM,
        write=HEADS * (O * ITEM + ROWS * WORK) + partial,
    )  # fmt: skip
    if splits == 1:
        again = sum(map(warps, revisits(tiles)))
        assert found.rescales_done + found.rescales_skipped == again
        assert 0 < found.rescales_done < again


@pytest.mark.parametrize("cta_group", [1, 2])
def test_fa4_backward(cta_group: int) -> None:
    """D first; then each CTA, or pair, reads Q, dO, LSE and D per KV tile and adds to dQ once."""
    config = BackwardConfig(tile_m=32, tile_n=48, cta_group=cta_group)
    pairs = visits = additions = 0
    columns = spans(KEYS, 48)
    for index in range(0, len(columns), cta_group):
        some = columns[index : index + cta_group]
        keys = sum(right - left for left, right in some)
        for top, bottom in spans(ROWS, 32):
            if VISIBLE[top:bottom, some[0][0] : some[-1][1]].any():
                pairs += HEADS * (bottom - top) * keys
                visits += HEADS * (bottom - top) * len(some)
                additions += HEADS * (bottom - top)
    dq, shared = HEADS * Q, HEADS * (K + V)
    check(
        backward("fa4", config), pairs=pairs, matmul=3 * D + 2 * DV,
        other=SCORE_FLOPS * pairs + 2 * HEADS * O,
        read=2 * HEADS * O * ITEM + visits * ((D + DV) * ITEM + 2 * WORK) + shared * ITEM
        + dq * WORK,
        write=HEADS * ROWS * WORK + additions * D * WORK + (dq + shared // GROUP) * ITEM,
    )  # fmt: skip


def test_emulated_exponentials_are_columns_of_the_tile() -> None:
    """Of every tile the same columns, in as many rows as it has."""
    split = Exp2Split(frequency=4, residue=2)
    config = ForwardConfig(tile_m=32, tile_n=96, q_tiles=2, exp2=split)
    columns = split.emulated_columns(96)
    assert 0 < sum(columns) < 96
    expected = sum(rows * sum(columns[:keys]) for _, rows, keys in visited(64, 96))
    assert forward("fa4", config).emulated_exps == HEADS * expected


def test_float32_has_no_polynomial() -> None:
    """Its exponentials are NumPy's, and its P is not rounded."""
    q, k, v = (round_to(x, "fp32") for x in tensors())
    counters = run_generation("fa4", q, k, v, SPEC).counters
    assert counters.emulated_exps == 0 and counters.emulated_share == 0.0 < counters.exps


def test_the_simulator_charges_what_the_algorithm_writes() -> None:
    """Partial results of splits, float32 O and LSE: the same bytes from both descriptions."""
    from fa4.config import ForwardPipeline, Problem
    from fa4.sim.predict import output_bytes, partial_bytes

    problem = Problem(
        batch=1, seqlen_q=ROWS, seqlen_k=KEYS, heads_q=HEADS, heads_k=KV_HEADS, head_dim=D,
        head_dim_v=DV, causal=True,
    )  # fmt: skip
    for splits in (1, 3):
        pipeline = ForwardPipeline(
            head_dim=D, head_dim_v=DV, numerics=ForwardConfig(num_splits=splits)
        )
        written = forward("fa4", ForwardConfig(num_splits=splits)).hbm_write_bytes
        assert output_bytes(problem, pipeline) + partial_bytes(problem, pipeline) == written
