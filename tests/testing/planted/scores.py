"""Faults of the LSE, of the scale, and of the order in which scores are modified."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.testing.planted.fault import EVERYWHERE, Fault, is_split, replaced
from tests.testing.planted.gradients import GradientKernel as Honest
from tests.testing.planted.kernel import State, finite


def _lse_of(change: Any) -> dict[str, Any]:
    """lse = change(kernel, state, honest lse)."""
    return {"lse": lambda kernel, state: change(kernel, state, Honest.lse(kernel, state))}


def _lse_without_scale(kernel: Any, state: State, lse: np.ndarray) -> np.ndarray:
    if kernel.options.softmax_scale in (None, 0.0):
        return lse
    return lse + finite(state.top) * (kernel.work.type(1 / kernel.scale()) - 1)


def _lse_without_sink(kernel: Any) -> State:
    state = Honest.combined(kernel)
    kernel.total_of_sink = 0.0
    sink = kernel.sink()
    if sink is not None:
        kernel.total_of_sink = np.exp(sink - finite(state.top))
    return state


def _log_of_last_tile(kernel: Any, state: State, lse: np.ndarray) -> np.ndarray:
    return lse - finite(state.top) + finite(getattr(kernel, "tops_of_tile", state.top))


def _remember_top(kernel: Any, top: np.ndarray, scores: np.ndarray, cols: slice) -> np.ndarray:
    new = Honest.new_top(kernel, top, scores, cols)
    kernel.tops_of_tile = scores.max(axis=-1) if cols.start else new
    return new


def _largest_of_splits(kernel: Any, first: State, second: State) -> State:
    merged = Honest.merge(kernel, first, second)
    kernel.largest = np.maximum(
        getattr(kernel, "largest", Honest.lse(kernel, first)), Honest.lse(kernel, second)
    )
    return merged


def _sum_after_dropout(kernel: Any, p: np.ndarray, total: np.ndarray) -> np.ndarray:
    kernel.row = p
    return Honest.row_sum(kernel, p, total)


LSE = "LSE"
OF_LSE = ("lse", *EVERYWHERE, "kv_concatenation")
LSE_FAULTS = (
    Fault(
        "lse_base_2", LSE, "the LSE is a logarithm of base 2", OF_LSE,
        _lse_of(lambda x, state, lse: lse / np.log(2.0)),
    ),
    Fault(
        "lse_without_scale", LSE, "the maximum in the LSE is unscaled if softmax_scale is given",
        ("scale", "lse"), _lse_of(_lse_without_scale),
    ),
    Fault(
        "lse_without_sink", LSE, "the LSE leaves out the sink", ("sink", "lse"),
        {"combined": _lse_without_sink}
        | {
            "lse": lambda x, state: finite(state.top) + np.log(state.total - x.total_of_sink),
        },
    ),
    Fault(
        "lse_zero_for_empty_rows", LSE, "rows without a key have LSE 0",
        ("rows_without_keys", "empty", "causal", "window", "mask", "lse"),
        _lse_of(lambda x, state, lse: np.where(np.isneginf(lse), 0, lse)),
    ),
    Fault(
        "lse_of_last_tile", LSE, "the LSE adds the maximum of the last tile of several", OF_LSE,
        {"new_top": _remember_top} | _lse_of(
            lambda x, state, lse: lse if x.keys <= 128 else _log_of_last_tile(x, state, lse)
        ),
    ),
    Fault(
        "lse_rounded_to_bf16", LSE, "the LSE of bf16 inputs is rounded to bf16", OF_LSE,
        _lse_of(
            lambda x, state, lse: lse.astype(x.dtype).astype(x.work)
            if x.dtype.itemsize == 2 and x.dtype != np.float16 else lse
        ),
    ),
    Fault(
        "lse_of_largest_split", LSE, "the LSE is that of the split with the largest one",
        ("split",),
        {"merge": _largest_of_splits}
        | _lse_of(lambda x, state, lse: x.largest if is_split(x) and x.tiles() else lse),
    ),
    Fault(
        "sum_after_dropout", LSE, "dropped probabilities are missing in the row sum", ("dropout",),
        {
            "row_sum": _sum_after_dropout,
            "step": lambda x, state, cols: _without_dropped(x, state, cols),
        },
    ),
)  # fmt: skip


def _without_dropped(kernel: Any, state: State, cols: slice) -> State:
    stepped = Honest.step(kernel, state, cols)
    if not kernel.options.dropout_p:
        return stepped
    dropped = np.where(kernel.dropout(cols) == 0, kernel.row, 0).sum(axis=-1)
    return stepped._replace(total=stepped.total - dropped)


def _top_of_products(kernel: Any, top: np.ndarray, scores: np.ndarray, cols: slice) -> np.ndarray:
    if kernel.scale() >= 0:
        return Honest.new_top(kernel, top, scores, cols)
    lowest = np.where(np.isneginf(scores), np.inf, scores).min(axis=-1)
    return np.maximum(top, np.where(np.isposinf(lowest), -np.inf, lowest))


SCALE = "scale"
SCALE_FAULTS = (
    Fault(
        "unscaled", SCALE, "scores are not scaled", EVERYWHERE,
        replaced("scale", lambda x: True, 1.0),
    ),
    Fault(
        "scale_zero_is_default", SCALE, "softmax_scale 0 is taken for none", ("scale",),
        replaced("scale", lambda x: x.options.softmax_scale == 0, lambda x, _: x.dim**-0.5),
    ),
    Fault(
        "scale_of_value_dim", SCALE, "the default scale is that of head_dim_v", EVERYWHERE,
        replaced("scale", lambda x: x.options.softmax_scale is None, lambda x, _: x.dim_v**-0.5),
    ),
    Fault(
        "maximum_before_negative_scale", SCALE,
        "with a negative scale the subtracted maximum is that of the products, a minimum",
        ("scale",), {"new_top": _top_of_products},
    ),
    Fault(
        "scaled_twice_with_softcap", SCALE, "softcap divides scores that it scales once more",
        ("softcap",),
        {
            "bent": lambda x, scaled, cols: Honest.bent(
                x, scaled * x.work.type(x.scale()) if x.softcap() else scaled, cols
            )
        },
    ),
    Fault(
        "no_maximum", SCALE, "no maximum is subtracted", (*EVERYWHERE, "values"),
        {"new_top": lambda x, top, scores, cols: np.zeros_like(top)},
    ),
)  # fmt: skip


def _softcap_before_scale(kernel: Any, k: np.ndarray) -> np.ndarray:
    cap = Honest.softcap(kernel)
    if not cap:
        return Honest.scaled(kernel, k)
    return np.tanh(kernel.products(k) / kernel.work.type(cap)) * kernel.work.type(
        cap * kernel.scale()
    )


def _softcap_after_mask(kernel: Any, k: np.ndarray, keep: np.ndarray, cols: slice) -> np.ndarray:
    masked = np.where(keep, kernel.scaled(k), kernel.work.type(-np.inf))
    if kernel.softcap():
        return kernel.bent(masked, cols)
    return Honest.scores(kernel, k, keep, cols)


def _score_mod_before_scale(kernel: Any, scaled: np.ndarray, cols: slice) -> np.ndarray:
    if kernel.score_mod() is None or not kernel.scale():
        return Honest.bent(kernel, scaled, cols)
    scale = kernel.work.type(kernel.scale())
    return Honest.bent(kernel, scaled / scale, cols) * scale


def _score_mod_in_base_2(kernel: Any, scaled: np.ndarray, cols: slice) -> np.ndarray:
    if kernel.score_mod() is None:
        return Honest.bent(kernel, scaled, cols)
    base = kernel.work.type(np.log2(np.e))
    return Honest.bent(kernel, scaled * base, cols) / base


def _sink_of(change: Any) -> dict[str, Any]:
    return replaced("sink", lambda x: x.options.learnable_sink is not None, change)


ORDER = "modification order"
ORDER_FAULTS = (
    Fault(
        "softcap_before_scale", ORDER, "softcap bends the unscaled products", ("softcap",),
        {
            "scaled": _softcap_before_scale,
            "softcap": lambda x: 0.0,
        },
    ),
    Fault(
        "softcap_after_mask", ORDER, "softcap lifts masked scores from -inf to -cap",
        ("softcap",), {"scores": _softcap_after_mask},
    ),
    Fault(
        "softcap_without_factor", ORDER, "tanh is not multiplied by the cap", ("softcap",),
        {
            "bent": lambda x, scaled, cols: Honest.bent(x, scaled, cols)
            / x.work.type(x.softcap() or 1)
        },
    ),
    Fault(
        "score_mod_before_scale", ORDER, "score_mod sees unscaled scores", ("score_mod",),
        {"bent": _score_mod_before_scale},
    ),
    Fault(
        "score_mod_in_base_2", ORDER, "score_mod sees scores times log2(e)", ("score_mod",),
        {"bent": _score_mod_in_base_2},
    ),
    Fault(
        "sink_scaled", ORDER, "the sink's logit is scaled", ("sink",),
        _sink_of(lambda x, sink: sink * x.work.type(x.scale())),
    ),
    Fault(
        "sink_softcapped", ORDER, "the sink's logit goes through softcap", ("sink softcap",),
        _sink_of(
            lambda x, sink: x.softcap() * np.tanh(sink / x.softcap()) if x.softcap() else sink
        ),
    ),
    Fault(
        "sink_twice", ORDER, "the sink is counted twice", ("sink",),
        _sink_of(lambda x, sink: sink + x.work.type(np.log(2.0))),
    ),
)  # fmt: skip
