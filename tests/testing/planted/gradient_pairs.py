"""Faults of gradients where two features meet, of values, and of sums over a group's heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tests.testing.planted.calls import Call
from tests.testing.planted.fault import Fault, Method, is_grouped, is_windowed, laid_out, replaced
from tests.testing.planted.gradients import GradientKernel as Honest
from tests.testing.planted.gradients import Gradients, Saved
from tests.testing.planted.kernel import finite
from tests.testing.planted.numbers import truncated

Condition = Callable[[Any], bool]
packed, padded, paged = laid_out("packed"), laid_out("padded"), laid_out("paged")


def causal(kernel: Any) -> bool:
    """Is the causal mask asked for?"""
    return bool(kernel.options.causal)


def capped(kernel: Any) -> bool:
    """Is there a softcap?"""
    return bool(kernel.softcap())


def masked(kernel: Any) -> bool:
    """Is there a mask_mod?"""
    return kernel.options.mask_mod is not None


def scaled(kernel: Any) -> bool:
    """Is a softmax_scale given?"""
    return kernel.options.softmax_scale is not None


def has_dlse(kernel: Any, saved: Saved) -> bool:
    """Is there a gradient of the LSE?"""
    return bool(np.any(saved.dlse))


def _both(*conditions: Condition) -> Condition:
    return lambda kernel: all(condition(kernel) for condition in conditions)


def _gradient(name: str, condition: Condition, change: Callable[..., Any]) -> dict[str, Method]:
    """dq, dk or dv, (S, H, D), goes through `change` where the condition holds."""

    def backward(kernel: Any, *arrays: np.ndarray) -> Gradients:
        found = Honest.backward(kernel, *arrays)
        if not condition(kernel):
            return found
        return found._replace(**{name: change(kernel, getattr(found, name))})

    return {"backward": backward}


def _halved(kernel: Any, x: np.ndarray) -> np.ndarray:
    return x * 0.5


def _one_row_off(kernel: Any, x: np.ndarray) -> np.ndarray:
    return np.roll(x, 1, axis=0)


def _first_head_of_group(method: str, condition: Condition) -> dict[str, Method]:
    honest = getattr(Honest, method)

    def fold(kernel: Any, x: np.ndarray) -> np.ndarray:
        return x[:: kernel.group] if condition(kernel) else honest(kernel, x)

    return {method: fold}


def _dlse_lost(condition: Condition) -> dict[str, Method]:
    def row_dot(kernel: Any, saved: Saved) -> np.ndarray:
        found = Honest.row_dot(kernel, saved)
        return found + saved.dlse if condition(kernel) else found

    return {"row_dot": row_dot}


def _dlse_of_first_head(kernel: Any, saved: Saved) -> np.ndarray:
    shared = np.repeat(saved.dlse[:: kernel.group], kernel.group, axis=0)
    return Honest.row_dot(kernel, saved) + saved.dlse - shared


def _sink_gradient_lost(condition: Condition) -> dict[str, Method]:
    def sink_gradient(kernel: Any, saved: Saved, row_dot: np.ndarray) -> Any:
        found = Honest.sink_gradient(kernel, saved, row_dot)
        return found if found is None or not condition(kernel) else found * 0.5

    return {"sink_gradient": sink_gradient}


def _mask_of_kv_head(kernel: Any, cols: slice) -> tuple[Any, ...]:
    grid = kernel.grid(cols)
    return (grid[0], grid[1] // kernel.group, *grid[2:]) if kernel.is_backward else grid


def _behind_an_empty_one(call: Call, dout: np.ndarray, *rest: Any) -> Any:
    dq, *others = Call.backward(call, dout, *rest)
    offsets = call.options.cu_seqlens_q
    if offsets is not None:
        empty = np.diff(offsets) == 0
        for b in np.flatnonzero(np.cumsum(empty) - empty):
            dq[offsets[b] : offsets[b + 1]] = 0
    return (dq, *others)


PAIRS = "gradients where features meet"
_MASKED = (
    Fault("dq_causal_varlen", PAIRS, "dQ of packed causal sequences is a row off",
          ("gradients causal varlen",), _gradient("dq", _both(causal, packed), _one_row_off)),
    Fault("dk_causal_gqa", PAIRS, "dK of causal grouped heads is that of the first",
          ("gradients causal gqa",), _first_head_of_group("fold_dk", _both(causal, is_grouped))),
    Fault("dq_causal_paged", PAIRS, "dQ of causal paged sequences is halved",
          ("gradients causal paged",), _gradient("dq", _both(causal, paged), _halved)),
    Fault("gradients_window_varlen", PAIRS, "the backward pass of packed windows is top-left",
          ("gradients window varlen",),
          replaced("diagonal", lambda x: x.is_backward and is_windowed(x) and packed(x),
                   lambda kernel, answer: answer + 1)),
    Fault("dv_window_seqused", PAIRS, "dV of padded sequences in windows is halved",
          ("gradients window seqused",), _gradient("dv", _both(is_windowed, padded), _halved)),
    Fault("dk_window_paged", PAIRS, "dK of paged sequences in windows is halved",
          ("gradients window paged",), _gradient("dk", _both(is_windowed, paged), _halved)),
    Fault("mask_of_kv_head_in_gradients", PAIRS, "the backward pass gives mask_mod the KV head",
          ("gradients mask_mod gqa",), {"mask_grid": _mask_of_kv_head}),
    Fault("dq_mask_mod_varlen", PAIRS, "dQ of packed sequences with mask_mod is halved",
          ("gradients mask_mod varlen",), _gradient("dq", _both(masked, packed), _halved)),
)  # fmt: skip
_OTHERS = (
    Fault("dv_gqa_varlen", PAIRS, "dV of packed grouped heads is that of the first",
          ("gradients gqa varlen",), _first_head_of_group("fold_dv", _both(is_grouped, packed))),
    Fault("dk_gqa_of_odd_groups", PAIRS, "groups of 5, 6 and 7 heads lose some in dK",
          ("gradients gqa",), _first_head_of_group("fold_dk", lambda x: x.group in (5, 6, 7))),
    Fault("dk_gqa_paged", PAIRS, "dK of pages and grouped heads is that of the first",
          ("gradients gqa paged",), _first_head_of_group("fold_dk", _both(is_grouped, paged))),
    Fault("dq_scale_softcap", PAIRS, "with a softcap dQ has the default scale",
          ("gradients softmax_scale softcap",),
          replaced("scale_of_dq", _both(capped, scaled), lambda kernel, answer: kernel.dim**-0.5)),
    Fault("dk_negative_scale", PAIRS, "dK has the size of the scale, not its sign",
          ("gradients scale_sign",),
          replaced("scale_of_dk", lambda kernel: kernel.scale() < 0,
                   lambda kernel, answer: -answer)),
    Fault("dsink_gqa", PAIRS, "dsink of grouped heads is halved",
          ("gradients sink gqa", "gradients gqa sink"), _sink_gradient_lost(is_grouped)),
    Fault("dsink_causal", PAIRS, "dsink under the causal mask is halved",
          ("gradients causal sink",), _sink_gradient_lost(causal)),
    Fault("dlse_of_first_head", PAIRS, "grouped heads share dLSE", ("gradients gqa",),
          {"row_dot": _dlse_of_first_head}),
    Fault("dlse_lost_if_causal", PAIRS, "dLSE is ignored under the causal mask",
          ("gradients causal",), _dlse_lost(causal)),
    Fault("dlse_lost_if_packed", PAIRS, "dLSE of packed sequences is ignored",
          ("gradients varlen",), _dlse_lost(packed)),
    Fault("dlse_lost_if_capped", PAIRS, "dLSE is ignored with a softcap", ("gradients softcap",),
          _dlse_lost(capped)),
    Fault("dq_behind_an_empty_one", PAIRS, "packed sequences behind one without rows have no dQ",
          ("gradients varlen",), call={"backward": _behind_an_empty_one}),
)  # fmt: skip


def _overflows_below(kernel: Any, scores: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """exp(-LSE) in float32 is infinite for an LSE below -88.7, and 0 times that is NaN."""
    with np.errstate(all="ignore"):
        found = np.exp(scores - finite(lse)[..., None])
        ragged = kernel.keys % 128 == 64 or kernel.keys > 128
        lost = np.isinf(np.exp(-finite(lse).astype(np.float32))) & ragged
    return np.where(lost[..., None], np.nan, found)


def _residual_ignored(call: Call, dout: np.ndarray, out: np.ndarray, *rest: Any) -> Any:
    return Call.backward(call, dout, out.astype(call.q.dtype), *rest)


VALUES = "values in gradients"
_VALUES = (
    Fault("exp_of_minus_lse", VALUES, "gradients are NaN where exp(-LSE) overflows",
          ("gradients values low", "gradients"), {"probabilities": _overflows_below}),
    Fault("residual_ignored", VALUES, "D is that of a rounded O", ("gradients common_mean",),
          call={"backward": _residual_ignored}),
)  # fmt: skip


def _summed(kernel: Any, x: np.ndarray, cast: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    heads = x.reshape(kernel.heads_k, kernel.group, *x.shape[1:])
    if kernel.dtype.itemsize != 2 or kernel.group == 1:
        return heads.sum(axis=1)
    total = cast(heads[:, 0])
    for n in range(1, kernel.group):
        total = cast(total + cast(heads[:, n]))
    return total


def _in_16_bits(kernel: Any, x: np.ndarray) -> np.ndarray:
    scale = kernel.work.type(1)
    return _summed(kernel, x, lambda y: (y * scale).astype(kernel.dtype).astype(kernel.work))


def _cut_to_16_bits(kernel: Any, x: np.ndarray) -> np.ndarray:
    return _summed(kernel, x, lambda y: truncated(y, kernel.dtype).astype(kernel.work))


def _of_type(fold: Callable[..., Any], dtype: Any, method: str) -> dict[str, Method]:
    honest = getattr(Honest, method)

    def chosen(kernel: Any, x: np.ndarray) -> np.ndarray:
        return (fold if kernel.dtype == dtype else honest)(kernel, x)

    return {method: chosen}


GROUPS = "sums over groups"
_BF16, _FP16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
_NAMED = ("gradients gqa",)
_GROUPS = (
    Fault("dk_group_in_16_bits", GROUPS, "dK of a group is summed in 16 bits", _NAMED,
          {"fold_dk": _in_16_bits}),
    Fault("dv_group_in_16_bits", GROUPS, "dV of a group is summed in 16 bits", _NAMED,
          {"fold_dv": _in_16_bits}),
    Fault("dk_group_in_bf16", GROUPS, "dK of a group is summed in bf16", _NAMED,
          _of_type(_in_16_bits, _BF16, "fold_dk")),
    Fault("dv_group_in_fp16", GROUPS, "dV of a group is summed in fp16", _NAMED,
          _of_type(_in_16_bits, _FP16, "fold_dv")),
    Fault("dk_group_truncated", GROUPS, "dK is cut off after every head of a group", _NAMED,
          {"fold_dk": _cut_to_16_bits}),
    Fault("dv_group_truncated", GROUPS, "dV is cut off after every head of a group", _NAMED,
          {"fold_dv": _cut_to_16_bits}),
)  # fmt: skip
GRADIENT_PAIR_FAULTS = (*_MASKED, *_OTHERS, *_VALUES, *_GROUPS)
