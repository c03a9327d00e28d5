"""Faults of the gradients, each of dQ, dK, dV and dsink with its own; the forward is honest."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.testing.planted.calls import Call
from tests.testing.planted.fault import (
    Fault,
    is_windowed,
    lengths_differ,
    replaced,
)
from tests.testing.planted.gradients import GradientKernel as Honest
from tests.testing.planted.gradients import Saved
from tests.testing.planted.kernel import finite
from tests.testing.planted.numbers import SIXTEEN_BITS, truncated

DROPPED = np.ones((), np.float32)


def _first_of_group(kernel: Any, x: np.ndarray) -> np.ndarray:
    return x[:: kernel.group]


def _without_last_of_three(kernel: Any, x: np.ndarray) -> np.ndarray:
    grouped = x.reshape(kernel.heads_k, kernel.group, *x.shape[1:])
    return (grouped[:, :-1] if kernel.group >= 3 else grouped).sum(axis=1)


def _slope_at_capped(kernel: Any, grad: np.ndarray, scaled: np.ndarray, cols: slice) -> np.ndarray:
    at = kernel.bent(scaled, cols) if kernel.softcap() else scaled
    return Honest.chain(kernel, grad, at, cols)


def _no_slope_with_window(
    kernel: Any, grad: np.ndarray, scaled: np.ndarray, cols: slice
) -> np.ndarray:
    lost = kernel.softcap() and is_windowed(kernel)
    return grad if lost else Honest.chain(kernel, grad, scaled, cols)


def _no_slope_of_score_mod(
    kernel: Any, grad: np.ndarray, scaled: np.ndarray, cols: slice
) -> np.ndarray:
    return grad if kernel.score_mod() else Honest.chain(kernel, grad, scaled, cols)


def _batch_lost_in_slope(kernel: Any, cols: slice) -> tuple[Any, ...]:
    grid = kernel.grid(cols)
    return (0, *grid[1:]) if kernel.is_backward else grid


def _wrong_sign(kernel: Any, saved: Saved, row_dot: np.ndarray) -> Any:
    dsink = Honest.sink_gradient(kernel, saved, row_dot)
    return None if dsink is None else -dsink


def _of_kv_heads(kernel: Any, saved: Saved, row_dot: np.ndarray) -> Any:
    dsink = Honest.sink_gradient(kernel, saved, row_dot)
    if dsink is None:
        return None
    return np.repeat(dsink.reshape(kernel.heads_k, -1).mean(axis=1), kernel.group)


def _weighed_by_sink_alone(kernel: Any, saved: Saved, row_dot: np.ndarray) -> Any:
    sink = kernel.sink()
    if sink is None:
        return None
    return -(np.exp(sink) * row_dot).sum(axis=-1)


def _row_dot_of(change: Any) -> dict[str, Any]:
    return {"row_dot": lambda kernel, saved: (saved.dout * saved.out).sum(-1) + change(saved.dlse)}


def _nan_of_empty_rows(kernel: Any, scores: np.ndarray, lse: np.ndarray) -> np.ndarray:
    return np.exp(scores - lse[..., None])


def _sink_missing_in_p(kernel: Any, scores: np.ndarray, lse: np.ndarray) -> np.ndarray:
    sink = kernel.sink()
    if sink is None:
        return Honest.probabilities(kernel, scores, lse)
    rest = -np.expm1(np.minimum(sink - finite(lse), -1e-6))
    return np.exp(scores - (finite(lse) + np.log(rest))[..., None])


def _last_tile_lost(kernel: Any) -> list[slice]:
    tiles = Honest.gradient_tiles(kernel)
    return tiles[:-1] if is_windowed(kernel) and len(tiles) > 1 else tiles


def _summed_in_16_bits(kernel: Any, dq: np.ndarray, part: np.ndarray) -> np.ndarray:
    if kernel.dtype.itemsize != 2:
        return dq + part
    return (dq + part).astype(kernel.dtype).astype(kernel.work)


def _truncated(name: str, dtype: Any) -> dict[str, Any]:
    def rounded(call: Call, which: str, x: np.ndarray) -> np.ndarray:
        if which != name or call.q.dtype != dtype:
            return Call.rounded(call, which, x)
        return truncated(x, dtype)

    return {"rounded": rounded}


def _default_scale(kernel: Any) -> float:
    return kernel.dim**-0.5


GRADIENTS = "gradients"
_DQ_DK = (
    Fault(
        "dq_unscaled", GRADIENTS, "dQ lacks the scale", ("gradients",),
        {"scale_of_dq": lambda x: 1.0},
    ),
    Fault(
        "dq_of_default_scale", GRADIENTS, "dQ has the default scale whatever softmax_scale is",
        ("gradients",), {"scale_of_dq": _default_scale},
    ),
    Fault(
        "dq_truncated_to_bf16", GRADIENTS, "dQ is cut off to bf16, not rounded",
        ("gradients", "bias", "rms"), call=_truncated("dq", SIXTEEN_BITS["bf16"]),
    ),
    Fault(
        "dq_summed_in_16_bits", GRADIENTS, "dQ is kept in its 16-bit type after every tile",
        ("gradients", "rms"), {"add_dq": _summed_in_16_bits},
    ),
    Fault(
        "dk_unscaled", GRADIENTS, "dK lacks the scale", ("gradients",),
        {"scale_of_dk": lambda x: 1.0},
    ),
    Fault(
        "dk_of_first_head", GRADIENTS, "dK is that of the first head of each group",
        ("gradients gqa", "gradients"), {"fold_dk": _first_of_group},
    ),
    Fault(
        "dk_lost_under_window", GRADIENTS, "with a window the last tile has no dK, dV",
        ("gradients window", "gradients masked"), {"gradient_tiles": _last_tile_lost},
    ),
    Fault(
        "nan_gradient_of_empty_rows", GRADIENTS, "rows without a key have NaN gradients",
        ("gradients",), {"probabilities": _nan_of_empty_rows},
    ),
    Fault(
        "gradients_top_left", GRADIENTS, "the backward pass masks from the top left if Sq != Sk",
        ("gradients causal", "gradients window", "gradients masked"),
        replaced("diagonal", lambda x: x.is_backward and lengths_differ(x), 0),
    ),
)  # fmt: skip

_DV_AND_CHAIN = (
    Fault(
        "dv_without_last_of_three", GRADIENTS, "dV lacks the last head of a group of three or more",
        ("gradients gqa", "gradients"), {"fold_dv": _without_last_of_three},
    ),
    Fault(
        "dv_without_dropout", GRADIENTS, "dV is that of all probabilities", ("gradients dropout",),
        {"dropout_of_dv": lambda x, cols: DROPPED},
    ),
    Fault(
        "dp_without_dropout", GRADIENTS, "dP is that of all probabilities", ("gradients dropout",),
        {"dropout_of_dp": lambda x, cols: DROPPED},
    ),
    Fault(
        "dv_truncated_to_fp16", GRADIENTS, "dV is cut off to fp16, not rounded",
        ("gradients", "bias", "rms"), call=_truncated("dv", SIXTEEN_BITS["fp16"]),
    ),
    Fault(
        "softcap_slope_at_capped", GRADIENTS, "softcap's slope is taken at the capped score",
        ("gradients softcap",), {"chain": _slope_at_capped},
    ),
    Fault(
        "softcap_slope_lost_with_window", GRADIENTS, "with a window softcap has slope 1",
        ("gradients softcap window", "gradients softcap"), {"chain": _no_slope_with_window},
    ),
    Fault(
        "score_mod_slope_lost", GRADIENTS, "score_mod_bwd is not called", ("gradients score_mod",),
        {"chain": _no_slope_of_score_mod},
    ),
    Fault(
        "score_mod_slope_of_first_batch", GRADIENTS,
        "the backward pass gives score_mod and its derivative batch entry 0",
        ("gradients score_mod",), {"score_grid": _batch_lost_in_slope},
    ),
    Fault(
        "dlse_ignored", GRADIENTS, "the gradient of the LSE is ignored", ("gradients lse",),
        _row_dot_of(lambda dlse: 0),
    ),
    Fault(
        "dlse_with_wrong_sign", GRADIENTS, "the gradient of the LSE is added to D",
        ("gradients lse",), _row_dot_of(lambda dlse: dlse),
    ),
)  # fmt: skip

_DSINK = (
    Fault(
        "dsink_with_wrong_sign", GRADIENTS, "dsink has the wrong sign", ("gradients sink",),
        {"sink_gradient": _wrong_sign},
    ),
    Fault(
        "dsink_of_kv_heads", GRADIENTS, "grouped heads share the mean of their dsink",
        ("gradients sink", "gradients gqa"), {"sink_gradient": _of_kv_heads},
    ),
    Fault(
        "dsink_without_lse", GRADIENTS, "dsink weighs rows by exp(sink), not exp(sink - LSE)",
        ("gradients sink",), {"sink_gradient": _weighed_by_sink_alone},
    ),
    Fault(
        "dsink_of_last_sequence", GRADIENTS, "dsink is that of the last batch entry",
        ("gradients sink",), call={"add_dsink": lambda call, dsink, part: part},
    ),
    Fault(
        "sink_missing_in_p", GRADIENTS, "P of the backward pass is normalised without the sink",
        ("gradients sink",), {"probabilities": _sink_missing_in_p},
    ),
)  # fmt: skip

BACKWARD_FAULTS = (*_DQ_DK, *_DV_AND_CHAIN, *_DSINK)
