"""Faults of FP8: factors, the range of P, sums of too few bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.testing.planted.fault import Fault, Method
from tests.testing.planted.gradients import GradientKernel as Honest
from tests.testing.planted.kernel import SCALE_BLOCK, State, finite

FP8_CLASS = "FP8"
BLOCKS = {"numerics": {"fp8_scales": "block"}}


def _factors(change: Callable[[Any, str, np.ndarray], np.ndarray | None]) -> dict[str, Method]:
    """The (Hq, count) factors of rows or keys, changed; `change` gets the kernel and the letter."""

    def descale(kernel: Any, name: str, first: int, count: int) -> np.ndarray | None:
        table = Honest.descale(kernel, name, first, count)
        return table if table is None else change(kernel, name, table)

    return {"descale": descale}


def _next_head(kernel: Any, name: str, table: np.ndarray) -> np.ndarray:
    return np.roll(table, -kernel.group, axis=0) if name == "q" else table


def _by_query_head(kernel: Any, name: str, table: np.ndarray) -> np.ndarray:
    heads = np.arange(kernel.heads) % kernel.heads_k
    return table[heads * kernel.group] if name == "k" else table


def _first_of_batch(kernel: Any, name: str, first: int, count: int) -> np.ndarray | None:
    table = getattr(kernel.options, f"{name}_descale")
    if table is None or name != "v":
        return Honest.descale(kernel, name, first, count)
    return np.repeat(np.repeat(table[0], kernel.group)[:, None], count, axis=1)


def _k_for_v(kernel: Any, name: str, first: int, count: int) -> np.ndarray | None:
    return Honest.descale(kernel, "k" if name == "v" else name, first, count)


def _p_in_fp8(change: Callable[[Any, np.ndarray], np.ndarray]) -> dict[str, Method]:
    def rounded_p(kernel: Any, p: np.ndarray) -> np.ndarray:
        return change(kernel, p) if kernel.is_fp8 else Honest.rounded_p(kernel, p)

    return {"rounded_p": rounded_p}


def _saturated_by_dropout(kernel: Any, p: np.ndarray, cols: slice) -> np.ndarray:
    """Dropout's factor is part of what is rounded."""
    return kernel.rounded_p(p * kernel.dropout(cols))


def _offset(bits: int) -> dict[str, Method]:
    return {"p_offset_log2": lambda kernel: bits}


def _lazy(tau: float) -> dict[str, Method]:
    """The maximum is kept until it is exceeded by tau, as with P in 16 bits."""

    def new_top(kernel: Any, top: np.ndarray, scores: np.ndarray, cols: slice) -> np.ndarray:
        new = Honest.new_top(kernel, top, scores, cols)
        if not kernel.is_fp8:
            return new
        return np.where(new - finite(top) > tau * np.log(2.0), new, np.maximum(top, -1e30))

    def kept(kernel: Any, top: np.ndarray, scores: np.ndarray, cols: slice) -> np.ndarray:
        found = new_top(kernel, top, scores, cols).astype(kernel.work)
        return np.where(np.isneginf(top), Honest.new_top(kernel, top, scores, cols), found)

    return {"new_top": kept}


def _cut(x: np.ndarray, bits: int = 14) -> np.ndarray:
    """float32 of so many significant bits, cut off."""
    kept = np.uint32(2**32 - 2 ** (24 - bits))
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) & kept).view(np.float32)


def cut_sums(kernel: Any, out: np.ndarray, weights: np.ndarray, v: np.ndarray) -> np.ndarray:
    """O += P V with 32 keys at a time, in 14 bits."""
    if not kernel.is_fp8:
        return Honest.accumulate(kernel, out, weights, v)
    for start in range(0, weights.shape[-1], 32):
        part = slice(start, start + 32)
        out = _cut(out + weights[..., part] @ v[:, part])
    return out


def _truncated_out(kernel: Any, out: np.ndarray) -> np.ndarray:
    return Honest.rounded_out(kernel, _cut(out, 8) if kernel.is_fp8 else out)


def _truncated_p(kernel: Any, p: np.ndarray) -> np.ndarray:
    """Cut off to the three mantissa bits of e4m3, or the two of e5m2."""
    return _cut(p, 3 if kernel.dtype.name.endswith("e5m2") else 4)


def _offset_in_lse(kernel: Any, state: State) -> np.ndarray:
    shift = 8 * np.log(2.0) if kernel.is_fp8 else 0.0
    return (Honest.lse(kernel, state) + shift).astype(kernel.work)


def _small_sink(kernel: Any) -> np.ndarray | None:
    sink = Honest.sink(kernel)
    shift = kernel.work.type(8 * np.log(2.0))
    return sink - shift if sink is not None and kernel.is_fp8 else sink


def _factor_behind_softcap(kernel: Any, k: np.ndarray, keep: np.ndarray, cols: slice) -> Any:
    if not kernel.softcap():
        return Honest.scores(kernel, k, keep, cols)
    bent = kernel.bent(kernel.scaled(k), cols) * kernel.score_factor(cols)
    return np.where(keep, bent, kernel.work.type(-np.inf))


def _other_block(kernel: Any, name: str, first: int, count: int) -> np.ndarray | None:
    table = getattr(kernel.options, f"{name}_descale")
    if table is None or table.ndim < 3:
        return Honest.descale(kernel, name, first, count)
    heads = np.repeat(table[kernel.place.batch], kernel.group, axis=0)
    return np.repeat(np.repeat(heads[:, -1:], SCALE_BLOCK, axis=1)[:, :1], count, axis=1)


def _half_blocks(kernel: Any, name: str, first: int, count: int) -> np.ndarray | None:
    table = getattr(kernel.options, f"{name}_descale")
    if table is None or table.ndim < 3:
        return Honest.descale(kernel, name, first, count)
    heads = np.repeat(table[kernel.place.batch], kernel.group, axis=0)
    blocks = np.minimum((first + np.arange(count)) // 64, heads.shape[1] - 1)
    return heads[:, blocks]


def _bf16_scores(kernel: Any, k: np.ndarray) -> np.ndarray:
    products = Honest.products(kernel, k)
    return _cut(products, 8) if kernel.is_fp8 else products


def _fault(name: str, description: str, named_by: tuple[str, ...], **more: Any) -> Fault:
    return Fault(f"fp8_{name}", FP8_CLASS, description, named_by, **more)


FP8_FAULTS = (
    _fault("q_factor_of_next_head", "Q's factor is the next KV head's", ("fp8 q_descale",),
           kernel=_factors(_next_head)),
    _fault("k_factor_for_v", "V is multiplied by K's factor", ("fp8 k_descale", "fp8 v_descale"),
           kernel={"descale": _k_for_v}),
    _fault("v_factor_of_first_entry", "V's factor is that of batch entry 0", ("fp8 v_descale",),
           kernel={"descale": _first_of_batch}),
    _fault("v_factor_dropped", "V's factor is not read", ("fp8 v_descale",),
           kernel=_factors(lambda kernel, name, x: None if name == "v" else x)),
    _fault("q_factor_squared", "Q's factor counts twice", ("fp8 q_descale",),
           kernel=_factors(lambda kernel, name, x: x * x if name == "q" else x)),
    _fault("k_factor_by_query_head", "K's factor by query head, not by KV head",
           ("fp8 k_descale",), kernel=_factors(_by_query_head)),
    _fault("factor_behind_softcap", "factors are applied behind softcap", ("fp8 softcap",),
           kernel={"scores": _factor_behind_softcap}),
    _fault("p_without_offset", "P below 2^-9 is lost", ("small_p", "fp8 error_rms"),
           kernel=_offset(0)),
    _fault("p_saturates", "P bears 2^9 and saturates at 448", ("fp8",), kernel=_offset(9)),
    _fault("p_saturates_under_dropout", "P bears 2^8 and dropout's factor, and saturates",
           ("fp8 dropout",), kernel={"weights": _saturated_by_dropout}),
    _fault("p_saturates_late", "P of a maximum that rises by less than 2^4 saturates",
           ("fp8",), kernel=_lazy(4.0)),
    _fault("p_truncated", "P is cut off, not rounded", ("fp8 bias", "fp8 rms", "fp8 p_"),
           kernel=_p_in_fp8(_truncated_p)),
    _fault("sums_of_14_bits", "sums have 14 bits, which nobody declares", ("fp8 bias", "fp8 rms"),
           kernel={"accumulate": cut_sums}),
    _fault("out_truncated", "O is cut off, not rounded", ("fp8 bias", "fp8 rms"),
           kernel={"rounded_out": _truncated_out}),
    _fault("scores_of_8_bits", "scores are cut off to 8 bits", ("fp8",),
           kernel={"products": _bf16_scores}),
    _fault("lse_with_offset", "the LSE still has P's 2^8", ("fp8",),
           kernel={"lse": _offset_in_lse}),
    _fault("sink_without_offset", "the sink lacks P's 2^8", ("fp8 sink",),
           kernel={"sink": _small_sink}),
    _fault("last_block", "the factor of the last block for all", ("fp8 blocks",),
           kernel={"descale": _other_block}, declares=BLOCKS),
    _fault("blocks_of_64", "factors change every 64 rows, not 128", ("fp8 blocks",),
           kernel={"descale": _half_blocks}, declares=BLOCKS),
    _fault("p_in_fp8_undeclared", "P is declared to be bf16, and is FP8", ("fp8",),
           declares={"numerics": {"fp8_p": "bf16"}}),
)  # fmt: skip
