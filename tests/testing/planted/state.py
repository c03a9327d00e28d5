"""Faults of memory and state: what a call writes to, keeps for the next, and leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tests.testing.planted.calls import Call
from tests.testing.planted.fault import Fault, Method
from tests.testing.planted.gradients import GradientKernel as Honest


def _kept(*names: str) -> dict[str, Method]:
    """Options of the first call of these shapes are used in all later ones."""

    def init(call: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, options: Any) -> None:
        cache = type(call).__dict__.get("cache")
        if cache is None:
            cache = {}
            type(call).cache = cache
        given = {name: getattr(options, name) for name in names}
        on = tuple(value is not None for value in given.values())
        key = q.shape, k.shape, v.shape, q.dtype, on
        Call.__init__(call, q, k, v, replace(options, **cache.setdefault(key, given)))

    return {"__init__": init}


def _kept_scale_backward(call: Call, *saved: Any) -> Any:
    cache = type(call).__dict__.get("cache", {})
    type(call).cache = cache  # type: ignore[attr-defined]
    scale = call.options.softmax_scale
    first = cache.setdefault((call.q.shape, call.k.shape, call.q.dtype, scale is None), scale)
    call.options = replace(call.options, softmax_scale=first)
    return Call.backward(call, *saved)


def _kept_strides(call: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, options: Any) -> None:
    Call.__init__(call, q, k, v, options)
    cache = type(call).__dict__.get("cache", {})
    type(call).cache = cache
    first = cache.setdefault((k.shape, k.dtype), k.strides)
    base = k.base
    if first != k.strides and isinstance(base, np.ndarray):
        start = k.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        steps = zip(np.indices(k.shape).reshape(k.ndim, -1), first, strict=True)
        flat = (start + sum(index * step for index, step in steps)) // k.itemsize
        call.k = base.reshape(-1)[flat % base.size].reshape(k.shape)


def _kept_dtype(call: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, options: Any) -> None:
    Call.__init__(call, q, k, v, options)
    cache = type(call).__dict__.get("cache", {})
    type(call).cache = cache
    first = cache.setdefault((q.shape, k.shape, q.dtype.itemsize), q.dtype)
    if first != q.dtype and q.dtype.itemsize == 2:
        call.v = np.array(v).view(first).astype(np.float32).astype(q.dtype)


def _kept_keys(call: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, options: Any) -> None:
    Call.__init__(call, q, k, v, options)
    cache = type(call).__dict__.get("cache", {})
    type(call).cache = cache
    call.k = cache.setdefault((k.shape, k.dtype, options.layout), k.copy())


def _scales_q_if(condition: Callable[[Call], bool]) -> Method:
    def forward(call: Call) -> Any:
        results = Call.forward(call)
        if condition(call):
            call.q[...] = (call.q * call.q.dtype.type(0.5)).astype(call.q.dtype)
        return results

    return forward


def _scales_dout(call: Call, dout: np.ndarray, *rest: Any) -> Any:
    results = Call.backward(call, dout, *rest)
    if call.options.layout == "packed":
        dout[...] = 0
    return results


def _overwrites_out(call: Call, dout: np.ndarray, out: np.ndarray, *rest: Any) -> Any:
    results = Call.backward(call, dout, out, *rest)
    out[..., 0] = 0  # D is kept in the first channel
    return results


def _writes_behind(call: Call) -> Any:
    results = Call.forward(call)
    base = call.q.base
    if isinstance(base, np.ndarray) and call.q.flags.c_contiguous and call.q.shape[-3] % 64:
        start = call.q.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        base.reshape(-1)[start // call.q.itemsize + call.q.size] = 0  # the tile's next row
    return results


def _one_gradient_buffer(call: Call, work: Any) -> list[np.ndarray]:
    key = call.q.shape, call.k.shape, call.v.shape, work
    cache = type(call).__dict__.get("cache", {})
    type(call).cache = cache  # type: ignore[attr-defined]
    if key not in cache:
        cache[key] = Call.gradient_buffers(call, work)
    for x in cache[key]:
        x[...] = 0
    return list(cache[key])


def _same_arrays(call: Call, name: str, gradient: np.ndarray) -> np.ndarray:
    return gradient if gradient.dtype == call.q.dtype else Call.rounded(call, name, gradient)


def _never_zeroed(call: Call, work: Any) -> list[np.ndarray]:
    key = call.q.shape, call.k.shape, call.v.shape, work
    cache = type(call).__dict__.get("cache", {})
    type(call).cache = cache  # type: ignore[attr-defined]
    return list(cache.setdefault(key, Call.gradient_buffers(call, work)))


def _nan_in_padding(call: Call, work: Any) -> list[np.ndarray]:
    found = Call.gradient_buffers(call, work)
    for b in call.sequences():
        place = call.place(b)
        kept = [(found[0], place.rows), (found[1], place.keys), (found[2], place.keys)]
        for x, at in kept:
            x[at] = 1
    for x in found:
        x[...] = np.where(x == 1, 0, np.nan)
    return found


def _garbage_in_dk_padding(call: Call, work: Any) -> list[np.ndarray]:
    found = _nan_in_padding(call, work)
    return [np.zeros_like(found[0]), *(np.where(np.isnan(x), 1e-3, x) for x in found[1:])]


def _out_uninitialised(call: Call) -> tuple[np.ndarray, np.ndarray]:
    out, lse = Call.buffers(call)
    if call.options.layout in ("padded", "packed"):
        out[...] = np.nan
    return out, lse


_SCRATCH: dict[Any, tuple[np.ndarray, np.ndarray]] = {}


def _scratch_of_module(call: Call) -> tuple[np.ndarray, np.ndarray]:
    key = call.q.shape, call.v.shape, call.q.dtype
    out, lse = _SCRATCH.setdefault(key, Call.buffers(call))
    out[...], lse[...] = 0, -np.inf
    return out, lse


def _copied_from_scratch(call: Call) -> Any:
    return tuple(x.copy() for x in Call.forward(call))


def _drops_nan(kernel: Any, k: np.ndarray) -> np.ndarray:
    return np.nan_to_num(Honest.products(kernel, k), nan=-np.inf, posinf=np.inf, neginf=-np.inf)


def _drops_nan_of_v(kernel: Any, cols: slice, keep: np.ndarray) -> Any:
    k, v = Honest.keys_and_values(kernel, cols, keep)
    return k, np.where(np.isnan(v), kernel.work.type(0), v)


def _aliases_v(call: Call) -> Any:
    out, lse = Call.forward(call)
    single = call.options.layout == "dense" and call.k.shape[1] == 1
    plain = call.q.shape[2] == call.k.shape[2] and call.q.shape[1] == 1 and not call.options.causal
    options = (call.options.learnable_sink, call.options.mask_mod, call.options.score_mod)
    trivial = all(x is None for x in options) and not call.options.dropout_p
    return (call.v if single and plain and trivial else out), lse


STATE = "state"
_CACHED = (
    Fault("keeps_window", STATE, "the window of the first call of a shape",
          ("cached window", "window"), call=_kept("window_size")),
    Fault("keeps_causal", STATE, "causal or not is decided by the first call of a shape",
          ("cached causal", "causal"), call=_kept("causal")),
    Fault("keeps_scale", STATE, "the softmax_scale of the first call of a shape",
          ("cached scale",), call=_kept("softmax_scale")),
    Fault("keeps_scale_backward", STATE, "the softmax_scale of a shape's first call, in gradients",
          ("cached scale",), call={"backward": _kept_scale_backward}),
    Fault("keeps_softcap", STATE, "the softcap of the first call of a shape",
          ("cached softcap", "softcap"), call=_kept("softcap")),
    Fault("keeps_sink", STATE, "the sink of the first call of a shape", ("cached sink",),
          call=_kept("learnable_sink")),
    Fault("keeps_score_mod", STATE, "the score_mod of the first call of a shape",
          ("cached score_mod",), call=_kept("score_mod")),
    Fault("keeps_mask_mod", STATE, "the mask_mod of the first call of a shape",
          ("cached mask_mod",), call=_kept("mask_mod")),
    Fault("keeps_seed", STATE, "the dropout_seed of the first call of a shape",
          ("cached seed", "dropout seeds"),
          call=_kept("dropout_seed")),
    Fault("keeps_offsets", STATE, "the cu_seqlens of the first call of a shape",
          ("cached lengths", "repeated", "varlen"), call=_kept("cu_seqlens_q", "cu_seqlens_k")),
    Fault("keeps_used_lengths", STATE, "the seqused of the first call of a shape",
          ("cached seqused",), call=_kept("seqused_q", "seqused_k")),
    Fault("keeps_page_table", STATE, "the page_table of the first call of a shape",
          ("cached pages", "repeated"), call=_kept("page_table")),
    Fault("keeps_strides", STATE, "the strides of the first call of a shape",
          ("cached strides", "strides"), call={"__init__": _kept_strides}),
    Fault("keeps_dtype", STATE, "the 16-bit type of the first call of a shape", ("cached dtype",),
          call={"__init__": _kept_dtype}),
    Fault("keeps_keys", STATE, "K of the first call of a shape",
          ("cached values", "repeated", "plain"), call={"__init__": _kept_keys}),
)  # fmt: skip
_WRITES = (
    Fault("scales_packed_q", STATE, "packed q is overwritten", ("inputs unchanged",),
          call={"forward": _scales_q_if(lambda call: call.options.layout == "packed")}),
    Fault("scales_paged_q", STATE, "q is overwritten where K has pages", ("inputs unchanged",),
          call={"forward": _scales_q_if(lambda call: call.options.layout == "paged")}),
    Fault("overwrites_packed_dout", STATE, "packed dO is overwritten",
          ("gradient inputs unchanged",), call={"backward": _scales_dout}),
    Fault("overwrites_saved_out", STATE, "the saved O is overwritten",
          ("gradient inputs unchanged",), call={"backward": _overwrites_out}),
    Fault("writes_behind_q", STATE, "a row too many of q is written", ("inputs unchanged",),
          call={"forward": _writes_behind}),
    Fault("result_is_v", STATE, "with one key and one row, the result is V itself",
          ("inputs unchanged", "repeated", "plain"), call={"forward": _aliases_v}),
)  # fmt: skip
_LEFT = (
    Fault("one_gradient_buffer", STATE, "a second backward pass overwrites the first's gradients",
          ("repeated gradients",),
          call={"gradient_buffers": _one_gradient_buffer, "rounded": _same_arrays}),
    Fault("gradients_never_zeroed", STATE, "gradients add up over calls of a shape",
          ("repeated gradients", "cached"), call={"gradient_buffers": _never_zeroed}),
    Fault("nan_in_padded_gradients", STATE, "rows that no sequence uses have NaN gradients",
          ("padded gradients",), call={"gradient_buffers": _nan_in_padding}),
    Fault("garbage_in_padded_dk", STATE, "keys that no sequence uses have gradients",
          ("padded gradients",), call={"gradient_buffers": _garbage_in_dk_padding}),
    Fault("nan_in_padded_out", STATE, "rows that no sequence uses hold NaN", ("padded outputs",),
          call={"buffers": _out_uninitialised}),
    Fault("scratch_of_module", STATE, "threads share the memory in which O is put together",
          ("thread",), call={"buffers": _scratch_of_module, "forward": _copied_from_scratch}),
    Fault("nan_of_scores_dropped", STATE, "a NaN score counts as -inf", ("visible nan",),
          {"products": _drops_nan}),
    Fault("nan_of_v_dropped", STATE, "NaN in V counts as 0", ("visible nan",),
          {"keys_and_values": _drops_nan_of_v}),
)  # fmt: skip
STATE_FAULTS = (*_CACHED, *_WRITES, *_LEFT)
