"""The Hopper forward kernel on 8-bit operands, in the emulator: right, and what is refused.

The tensor core keeps 14 bits of such sums, and P is rounded to 8 bits: results are held to the
oracle on the same quantised inputs by their root mean square error, not by the kit's budgets.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cutlass")

import fa4
from fa4.backends import emulator_sm90
from fa4.call.checked import make_call
from fa4.compiled.support import ForwardCall, NotSupported
from fa4.compiled.variants import choose_sm90_spec, tuned_warpgroup_spec
from fa4.config import ForwardConfig
from fa4.emulator.host.session import Session
from fa4.sm90.forward.narrow import in_column_pairs, quadruples
from fa4.sm90.forward.spec import WarpgroupSpec
from lab.hardware.warpgroup_fp8 import measure
from tests.sm90.forward_kernel import build

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
# Relative root mean square errors: P's rounding, with room for that of sums; of LSE, the largest.
RMS = {E4M3: 0.032, E5M2: 0.064}
LSE_ERROR = 2e-3
SIZES = {"batch": 1, "rows": 130, "keys": 200, "heads": 2, "heads_k": 1, "d": 64, "dv": 64}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"d": 128, "dv": 128},
    "causal": {"causal": True, "rows": 200, "keys": 330, "heads": 4, "heads_k": 2},
    "window": {"window_size": (50, 20), "keys": 130, "descale": "v"},
    "factors": {"descale": "qkv", "batch": 2, "heads": 4, "heads_k": 2, "causal": True},
    "packed heads": {"descale": "qk", "heads": 3, "heads_k": 1, "rows": 70},
    "softcap": {"softcap": 5.0, "descale": "q", "d": 96, "dv": 48},
    "sink": {"learnable_sink": np.array([0.5, 2.0], np.float32), "descale": "k"},
    "wide": {"d": 256, "dv": 256, "rows": 70},
    "e5m2": {"dtype": E5M2, "descale": "v"},
}


def draw(dtype: Any, batch: int, rows: int, keys: int, heads: int, heads_k: int, d: int,
         dv: int) -> list[np.ndarray]:  # fmt: skip
    """q, k, v of random normal values, rounded."""
    rng = np.random.default_rng(0)
    shapes = ((batch, rows, heads, d), (batch, keys, heads_k, d), (batch, keys, heads_k, dv))
    return [rng.standard_normal(shape).astype(np.float32).astype(dtype) for shape in shapes]


def factors(letters: str, batch: int, heads_k: int) -> dict[str, np.ndarray]:
    """Descales of some of q, k and v, different in every entry."""
    rng = np.random.default_rng(1)
    return {
        f"{x}_descale": rng.uniform(0.5, 2.0, (batch, heads_k)).astype(np.float32) for x in letters
    }


def make_functions() -> dict[str, dict[str, Any]]:
    """By name: options with a function of the kernel's, and the same for NumPy."""
    from tests.sm90.narrow_functions import biased, listed

    rng = np.random.default_rng(2)
    bias = (rng.integers(-8, 9, (2, 200)) / 8).astype(np.float32)
    documents = np.sort(rng.integers(0, 4, 200)).astype(np.int32)
    return {
        "score_mod": {"kernel": biased, "aux": bias,
                      "plain": lambda s, b, h, i, j, info, aux: s + aux[0][h, j]},
        "mask_mod": {"kernel": listed, "aux": documents,
                     "plain": lambda b, h, i, j, info, aux: aux[0][i] == aux[0][j]},
    }  # fmt: skip


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["score_mod", "mask_mod"])
def test_functions_of_the_caller(name: str, dim: int) -> None:
    """A bias per head and key, documents that see themselves; without them it is another O."""
    given = make_functions()[name]
    arrays = draw(E4M3, **(SIZES | {"d": dim, "dv": dim}))
    options = {name: given["kernel"], "aux_tensors": [given["aux"]]}
    out = fa4.flash_attn_func(*arrays, **options, impl="emulator_sm90")
    wide = [x.astype(np.float32) for x in arrays]
    wanted = fa4.flash_attn_func(
        *wide, **{name: given["plain"]}, aux_tensors=[given["aux"]], impl="oracle"
    )
    plain = fa4.flash_attn_func(*wide, impl="oracle")
    assert relative_rms(out, wanted) < RMS[E4M3] < relative_rms(out, plain)


def relative_rms(found: np.ndarray, wanted: np.ndarray) -> float:
    """Root mean square of the difference, of the wanted values' own."""
    difference = found.astype(np.float64) - wanted
    return float(np.sqrt((difference**2).mean() / (wanted**2).mean()))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_close_to_the_oracle_under_a_random_schedule(name: str) -> None:
    """O in bf16 and LSE; a factor that is left out is seen; findings raise."""
    case = {**SIZES, "dtype": E4M3, "descale": "", **CASES[name]}
    sizes = {key: case.pop(key) for key in SIZES}
    dtype, letters = case.pop("dtype"), case.pop("descale")
    arrays = draw(dtype, **sizes)
    given = factors(letters, sizes["batch"], sizes["heads_k"])
    call = make_call(*arrays, {**case, **given}, varlen=False)
    out, lse, _ = emulator_sm90.run(call, schedule="random", seed=len(name))
    exact, exact_lse = fa4.flash_attn_func(*arrays, **case, **given, impl="oracle", return_lse=True)
    assert out.dtype == ml_dtypes.bfloat16
    assert relative_rms(out, exact) < RMS[dtype]
    np.testing.assert_allclose(lse, exact_lse, atol=LSE_ERROR)
    if letters:
        fewer = {key: value for key, value in given.items() if key[0] != letters[-1]}
        wrong = fa4.flash_attn_func(*arrays, **case, **fewer, impl="oracle")
        assert relative_rms(out, wrong) > RMS[dtype]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_each_row_of_v_comes_back() -> None:
    """Where each query sees one key alone, O is its row of V: no key, no column is confused."""
    keys, d = 96, 128
    q = np.zeros((1, keys, 1, d), np.float32)
    q[0, np.arange(keys), 0, np.arange(keys)] = 448.0
    v = draw(E4M3, 1, 1, keys, 1, 1, d, d)[2]
    out = fa4.flash_attn_func(q.astype(E4M3), q.astype(E4M3), v, impl="emulator_sm90")
    np.testing.assert_array_equal(out.astype(np.float32), v.astype(np.float32))
    assert (out.astype(np.float32)[:, 1:] != v.astype(np.float32)[:, :-1]).any()


def test_packed_sequences() -> None:
    """Empty and short ones, factors of each; rows of no sequence hold zeros."""
    q, k, v = (x[0] for x in draw(E4M3, 1, 60, 150, 2, 1, 64, 64))
    options = {
        "cu_seqlens_q": np.array([0, 10, 10, 50]), "cu_seqlens_k": np.array([0, 20, 90, 140]),
        "seqused_k": np.array([20, 3, 40]), "causal": True, "return_lse": True,
        **factors("qkv", 3, 1),
    }  # fmt: skip
    ours, lse = fa4.flash_attn_varlen_func(q, k, v, impl="emulator_sm90", **options)
    exact, exact_lse = fa4.flash_attn_varlen_func(q, k, v, impl="oracle", **options)
    assert relative_rms(ours[:50], exact[:50]) < RMS[E4M3] and not ours[50:].any()
    np.testing.assert_allclose(lse[:, :50], exact_lse[:, :50], atol=LSE_ERROR)


@pytest.mark.parametrize(
    "choices",
    [
        {"consumers": 3, "tile_n": 96, "promote": 4, "ahead": True, "ping_pong": False},
        {"consumers": 3, "tile_n": 128, "overlap": False, "ping_pong": True},
        {"consumers": 2, "tile_n": 224, "ahead": True},
        {"head_dim": 208, "head_dim_v": 256, "promote": 3},  # O has no room, nor what is held
        {"head_dim": 256, "head_dim_v": 208, "ahead": True},
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_other_tiles(choices: dict[str, Any]) -> None:
    """Pipelines that are not the tuned one; promoted sums are nearer the oracle."""
    numerics = ForwardConfig(rescale_threshold_log2=0.0, p_offset_log2=8.0)
    given = {"head_dim": 128, "head_dim_v": 128, "dtype": "e4m3", "numerics": numerics, **choices}
    spec = WarpgroupSpec(**given)
    run, (d, dv) = build(spec), spec.dims
    q, k, v = draw(E4M3, 1, 40, 900, 1, 1, d, dv)
    v = (v.astype(np.float32) + 1).astype(E4M3)  # sums of one sign
    out = np.full((1, 40, 1, dv), 2.0**20, ml_dtypes.bfloat16)  # more than sums of P in 8 bits
    lse = np.full((1, 1, 40), 7.0, np.float32)
    nones = (None,) * 3
    session = Session(None, (), {})
    session.call(run.compiled, (q, k, v, out, lse, d**-0.5, *nones, 40, *(None,) * 6, 2,
                                *nones), {})  # fmt: skip
    exact = fa4.flash_attn_func(q, k, v, impl="oracle")
    error = relative_rms(out, exact)
    assert error < (0.004 if choices.get("promote") else 0.02)
    assert choices.get("promote") or error > 0.004


def test_words_hold_what_transposed_values_follow() -> None:
    """Keys of a thread's operand words, and columns of its part of O, by the fragment's layout."""
    columns = [element // 4 * 8 + element % 2 for element in range(16)]  # of lane 0 of a quad
    keys = quadruples(columns)
    assert keys == [[0, 1, 8, 9]] * 2 + [[16, 17, 24, 25]] * 2
    # V^T's row 16 c + r is column 2 r for r < 8, then 2 (r - 8) + 1.
    of_row = [16 * (c // 16) + (2 * (c % 16) if c % 16 < 8 else 2 * (c % 16 - 8) + 1)
              for c in range(32)]  # fmt: skip
    held = in_column_pairs([of_row[c] for c in columns])
    assert held == [0, 1, 2, 3] * 2 + [16, 17, 18, 19] * 2


CALL = ForwardCall(
    dtype="e4m3", head_dim=128, head_dim_v=128, heads_q=8, heads_k=2, batch=2, rows_q=4096,
    rows_k=4096,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "feature", "message"),
    [
        ({"head_dim": 72}, "fp8", r"multiples of 16.*got \(d, dv\) = \(72, 128\)"),
        ({"dtype": "bf16", "descale": "qk"}, "fp8", "got factors of qk in bf16"),
        ({"num_splits": 2}, "fp8", "got num_splits = 2"),
        ({"paged": True}, "page_table", "not in pages"),
    ],
)
def test_what_is_refused(change: dict[str, Any], feature: str, message: str) -> None:
    """One line with the reason, nothing launched."""
    with pytest.raises(NotSupported, match=message) as found:
        choose_sm90_spec(replace(CALL, **change))
    assert found.value.feature == feature and "\n" not in str(found.value)


def test_specs_of_calls() -> None:
    """8-bit specs have P's offset, factors and no more turns than registers allow."""
    spec = choose_sm90_spec(replace(CALL, descale="v"))
    assert (spec.dtype, spec.out_dtype, spec.descale, spec.element_bytes) == (
        "e4m3",
        "bf16",
        "v",
        1,
    )
    assert spec.numerics.p_offset_log2 + spec.numerics.rescale_threshold_log2 <= 8.8
    with pytest.raises(ValueError, match="descale needs dtype e4m3 or e5m2; got bf16"):
        WarpgroupSpec(head_dim=64, head_dim_v=64, descale="q")
    with pytest.raises(ValueError, match="head_dim must be a multiple of 16; got 72"):
        tuned_warpgroup_spec(72, 64, dtype="e4m3")
    with pytest.raises(ValueError, match="tile_n must be a multiple of 32; got 80"):
        WarpgroupSpec(head_dim=64, head_dim_v=64, dtype="e4m3", tile_n=80)
    with pytest.raises(ValueError, match="p_source must be registers with 8-bit types; got 'smem'"):
        WarpgroupSpec(head_dim=64, head_dim_v=64, dtype="e4m3", p_source="smem")
    large = ForwardConfig(rescale_threshold_log2=4.0, p_offset_log2=8.0)
    with pytest.raises(ValueError, match="p_offset_log2"):
        WarpgroupSpec(head_dim=64, head_dim_v=64, dtype="e4m3", numerics=large)


def test_sums_are_promoted_where_keys_are_many() -> None:
    """By the keys of a sequence, whatever the mask and head dim."""
    for change in ({}, {"window": (None, 0)}, {"head_dim": 256, "head_dim_v": 256}):
        for keys, promoted in ((16384, False), (16385, True)):
            call = replace(CALL, rows_q=keys, rows_k=keys, **change)
            assert bool(choose_sm90_spec(call).promote) is promoted
    assert not choose_sm90_spec(replace(CALL, dtype="bf16", rows_k=1 << 20)).promote


def test_measured_variants_have_plans() -> None:
    """Every variant is a kernel that fits the machine, and is timed with some problem."""
    plan = json.loads((Path(measure.__file__).parent / "variants.json").read_text())
    timed = {(one["head_dim"], one["causal"]) for one in plan["problems"]}
    for name, fields in plan["variants"].items():
        spec = measure.make_spec(fields)
        assert spec.plan.name and (spec.head_dim, spec.causal) in timed, name


def test_measured_kernels_are_handed_their_own_factors() -> None:
    """Kernels with and without factors are timed on the same tensors."""
    spec = choose_sm90_spec(replace(CALL, descale="qv"))
    assert measure.of_spec(spec, ["q", "k", "v"]) == ["q", None, "v"]
    assert measure.of_spec(choose_sm90_spec(CALL), ["q", "k", "v"]) == [None] * 3


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ones((1, 3), np.float32), r"v_descale must be \(batch, heads_k\) = \(1, 1\)"),
        (np.zeros((1, 1), np.float32), "v_descale must be finite and positive; got 0.0"),
    ],
)
def test_wrong_factors(value: np.ndarray, message: str) -> None:
    """Shapes and signs, in one line."""
    arrays = draw(E4M3, 1, 8, 8, 2, 1, 64, 64)
    with pytest.raises(ValueError, match=message):
        fa4.flash_attn_func(*arrays, v_descale=value, impl="emulator_sm90")
