"""Faults of length, of element type, of accumulation and of rounding."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tests.testing.planted.fault import EVERYWHERE, ROUNDING, Fault, is_split, replaced
from tests.testing.planted.gradients import GradientKernel as Honest

SIXTEEN_BITS = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}


def truncated(x: np.ndarray, dtype: Any) -> np.ndarray:
    """x in a 16-bit type, rounded towards zero."""
    near = x.astype(dtype)
    beyond = np.abs(near.astype(x.dtype)) > np.abs(x)
    return (near.view(np.uint16) - beyond).view(dtype)


def _all_but_the_last(kernel: Any) -> list[slice]:
    tiles = Honest.tiles(kernel)
    return tiles[:-1] if len(tiles) > 1 else tiles


def _without_tail_of_long(kernel: Any) -> list[slice]:
    return _all_but_the_last(kernel) if kernel.keys > 513 else Honest.tiles(kernel)


def _without_tail_beyond_1024(kernel: Any) -> list[slice]:
    tiles = Honest.tiles(kernel)
    whole = kernel.keys % kernel.tile == 0
    return tiles if whole or kernel.keys <= 1024 else _all_but_the_last(kernel)


def _stale_top(kernel: Any, top: np.ndarray, scores: np.ndarray, cols: slice) -> np.ndarray:
    return top if cols.start >= 1024 else Honest.new_top(kernel, top, scores, cols)


def _not_rescaled_from(first: int) -> dict[str, Any]:
    def rescale(kernel: Any, out: np.ndarray, alpha: np.ndarray, cols: slice) -> np.ndarray:
        return out if cols.start >= first else Honest.rescale(kernel, out, alpha, cols)

    return {"rescale": rescale}


def _keys_wrap(kernel: Any, cols: slice) -> np.ndarray:
    keys, rows = np.arange(cols.start, cols.stop) % 1024, np.arange(kernel.rows)
    return keys - rows[:, None] - kernel.diagonal()


def _rows_wrap(kernel: Any, cols: slice) -> np.ndarray:
    keys, rows = np.arange(cols.start, cols.stop), np.arange(kernel.rows) % 256
    return keys - rows[:, None] - kernel.diagonal()


def _score_keys_wrap(kernel: Any, cols: slice) -> tuple[Any, ...]:
    grid = kernel.grid(cols)
    return (*grid[:3], grid[3] % 1024, grid[4])


LENGTH = "length-dependent"
LENGTH_FAULTS = (
    Fault(
        "drops_last_tile", LENGTH, "the last of several tiles is left out", EVERYWHERE,
        {"tiles": _all_but_the_last},
    ),
    Fault(
        "drops_last_tile_beyond_513", LENGTH, "the last tile is left out beyond 513 keys",
        EVERYWHERE, {"tiles": _without_tail_of_long},
    ),
    Fault(
        "drops_ragged_tile_beyond_1024", LENGTH, "a last tile that is not full is left out beyond "
        "1,024 keys", EVERYWHERE, {"tiles": _without_tail_beyond_1024},
    ),
    Fault(
        "forgets_rescale", LENGTH, "O is not rescaled when the maximum rises",
        (*EVERYWHERE, "values", "permutation"), _not_rescaled_from(0),
    ),
    Fault(
        "forgets_rescale_beyond_8_tiles", LENGTH, "O is not rescaled from the ninth tile on",
        (*EVERYWHERE, "values", "permutation"), _not_rescaled_from(1024),
    ),
    Fault(
        "stale_maximum_beyond_8_tiles", LENGTH, "the maximum is not updated from the ninth tile on",
        (*EVERYWHERE, "values"), {"new_top": _stale_top},
    ),
    Fault(
        "mask_key_wraps_at_1024", LENGTH, "masks see the key modulo 1,024", ("causal", "window"),
        {"distance": _keys_wrap},
    ),
    Fault(
        "mask_row_wraps_at_256", LENGTH, "masks see the row modulo 256", ("causal", "window"),
        {"distance": _rows_wrap},
    ),
    Fault(
        "score_mod_key_wraps_at_1024", LENGTH, "score_mod sees the key modulo 1,024",
        ("score_mod",), {"score_grid": _score_keys_wrap},
    ),
    Fault(
        "splits_beyond_8_lost", LENGTH, "no more than eight splits are combined", ("split",),
        {
            "splits": lambda x: Honest.splits(x)[:8] if is_split(x) else Honest.splits(x),
        },
    ),
)  # fmt: skip


def _operand_of(dtype: Any, change: Any) -> dict[str, Any]:
    """Inputs of one element type go through `change` before the products."""

    def operand(kernel: Any, x: np.ndarray) -> np.ndarray:
        wide = Honest.operand(kernel, x)
        return change(wide).astype(kernel.work) if kernel.dtype == dtype else wide

    return {"operand": operand}


def _tf32(x: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _scores_in_fp16(kernel: Any, k: np.ndarray) -> np.ndarray:
    products = Honest.products(kernel, k)
    if kernel.dtype != np.float16:
        return products
    return products.astype(np.float16).astype(kernel.work)


def _scale_in_q(kernel: Any, k: np.ndarray) -> np.ndarray:
    if kernel.dtype.itemsize != 2:
        return Honest.scaled(kernel, k)
    q = kernel.wide_q * kernel.work.type(kernel.scale())
    return q.astype(kernel.dtype).astype(kernel.work) @ k.transpose(0, 2, 1)


def _quadratic_exp(kernel: Any, x: np.ndarray) -> np.ndarray:
    if kernel.dtype == np.float64:
        return Honest.exp(kernel, x)
    powers = np.maximum(x * kernel.work.type(np.log2(np.e)), -126)
    whole = np.floor(powers)
    part = powers - whole
    # Least squares in relative error on [0, 1): at most 0.27% off.
    bent = kernel.work.type(1.0027448) + part * (
        kernel.work.type(0.6561071) + part * kernel.work.type(0.3356520)
    )
    return np.where(np.isneginf(x), 0, np.ldexp(bent, whole.astype(np.int32)))


TYPE = "dtype-dependent"
TYPE_FAULTS = (
    Fault(
        "fp32_through_bf16", TYPE, "fp32 inputs are multiplied as bf16", EVERYWHERE,
        _operand_of(np.float32, lambda x: x.astype(ml_dtypes.bfloat16)),
    ),
    Fault(
        "fp32_through_tf32", TYPE, "fp32 inputs are multiplied as TF32", EVERYWHERE,
        _operand_of(np.float32, _tf32),
    ),
    Fault(
        "fp64_through_fp32", TYPE, "fp64 inputs are multiplied as fp32", EVERYWHERE,
        _operand_of(np.float64, lambda x: x.astype(np.float32)),
    ),
    Fault(
        "p_of_fp32_in_bf16", TYPE, "P of fp32 inputs is rounded to bf16", EVERYWHERE,
        {
            "rounded_p": lambda x, p: p.astype(ml_dtypes.bfloat16).astype(x.work)
            if x.dtype == np.float32 else Honest.rounded_p(x, p)
        },
    ),
    Fault(
        "products_in_fp16", TYPE, "unscaled products of fp16 inputs are kept in fp16: they "
        "overflow, and lose bits", (*EVERYWHERE, *ROUNDING, "values"),
        {"products": _scores_in_fp16},
    ),
    Fault(
        "causal_lost_in_fp64", TYPE, "fp64 inputs are not masked by causal", ("causal",),
        replaced(
            "sides", lambda x: x.dtype == np.float64 and x.options.causal,
            lambda x, sides: (sides[0], None),
        ),
    ),
)  # fmt: skip


def _partial_sums(dtype: Any, keys: int) -> dict[str, Any]:
    """O in the element type after every `keys` keys."""

    def accumulate(kernel: Any, out: np.ndarray, weights: np.ndarray, v: np.ndarray) -> np.ndarray:
        if kernel.dtype != dtype:
            return Honest.accumulate(kernel, out, weights, v)
        for start in range(0, v.shape[1], keys):
            span = slice(start, start + keys)
            out = out + weights[..., span] @ v[:, span]
            out = out.astype(dtype).astype(kernel.work)
        return out

    return {"accumulate": accumulate}


def _row_sum_in(dtype: Any) -> dict[str, Any]:
    def row_sum(kernel: Any, p: np.ndarray, total: np.ndarray) -> np.ndarray:
        if kernel.dtype != dtype:
            return Honest.row_sum(kernel, p, total)
        for start in range(0, p.shape[-1], 8):
            total = total + p[..., start : start + 8].sum(axis=-1)
            total = total.astype(dtype).astype(kernel.work)
        return total

    return {"row_sum": row_sum}


def _result_of(dtype: Any, method: str) -> dict[str, Any]:
    """Truncate what `method` rounds."""
    honest = getattr(Honest, method)

    def wrong(kernel: Any, x: np.ndarray) -> np.ndarray:
        if kernel.dtype != dtype:
            return honest(kernel, x)
        return truncated(x, dtype).astype(honest(kernel, x[:0]).dtype)

    return {method: wrong}


def _sixteen_bit_faults() -> list[Fault]:
    faults = []
    for name, dtype in SIXTEEN_BITS.items():
        faults += [
            Fault(
                f"o_summed_in_{name}_every_{keys}", "accumulation",
                f"O of {name} inputs is kept in {name} after every {keys} keys", ROUNDING,
                _partial_sums(dtype, keys),
            )
            for keys in (8, 64)
        ]  # fmt: skip
        faults += [
            Fault(
                f"row_sum_in_{name}", "accumulation",
                f"the row sum of {name} inputs is kept in {name}", (*ROUNDING, "lse"),
                _row_sum_in(dtype),
            ),
            Fault(
                f"o_truncated_to_{name}", "rounding", f"O is cut off to {name}, not rounded",
                ROUNDING, _result_of(dtype, "rounded_out"),
            ),
            Fault(
                f"p_truncated_to_{name}", "rounding", f"P is cut off to {name}, not rounded",
                ROUNDING, _result_of(dtype, "rounded_p"),
            ),
        ]  # fmt: skip
    return faults


NUMBER_FAULTS = (
    *LENGTH_FAULTS,
    *TYPE_FAULTS,
    *_sixteen_bit_faults(),
    Fault(
        "scale_in_rounded_q", "rounding", "q is scaled, then rounded to its 16-bit type",
        (*ROUNDING, "scale"), {"scaled": _scale_in_q},
    ),
    Fault(
        "quadratic_exponential", "rounding", "exponentials are a quadratic polynomial, 0.27% off",
        (*ROUNDING, *EVERYWHERE, "lse"), {"exp": _quadratic_exp},
    ),
)  # fmt: skip
