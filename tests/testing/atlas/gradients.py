"""Stand-ins for bugs of the backward pass, and of memory and shape."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.testing.atlas.masks import listed_as
from tests.testing.atlas.packed import Results
from tests.testing.atlas.stand_in import StandIn
from tests.testing.planted.calls import Call
from tests.testing.planted.gradients import GradientKernel as Honest
from tests.testing.planted.gradients import Gradients, Saved


def _overflowed(lse: np.ndarray) -> np.ndarray:
    """0 for each row, NaN where exp(0 - LSE), times the 0 of what is padded, overflows."""
    return np.exp(-lse.astype(np.float32)) * np.float32(0)


def _nan_of_padded_keys(kernel: Any, *arrays: np.ndarray) -> Gradients:
    found = Honest.backward(kernel, *arrays)
    masked = kernel.options.is_windowed or kernel.options.mask_mod is not None
    if not masked or kernel.keys % 128 != 64:
        return found
    return found._replace(dq=found.dq + _overflowed(arrays[2]).T[..., None])


def _nan_of_padded_rows(kernel: Any, *arrays: np.ndarray) -> Gradients:
    found = Honest.backward(kernel, *arrays)
    if kernel.rows != 1 or kernel.keys % 128 or not kernel.keys:
        return found
    wrong = _overflowed(arrays[2]).reshape(kernel.heads_k, kernel.group).sum(axis=1)[:, None]
    return found._replace(dk=found.dk + wrong, dv=found.dv + wrong)


def _nan_of_ragged_keys(kernel: Any, *arrays: np.ndarray) -> Gradients:
    found = Honest.backward(kernel, *arrays)
    if kernel.options.layout != "dense" or kernel.keys % 8 == 0:
        return found
    return Gradients(*(np.full_like(x, np.nan) for x in found[:3]), found.dsink)


def _nan_of_score_mod_at_end(kernel: Any, *arrays: np.ndarray) -> Gradients:
    found = Honest.backward(kernel, *arrays)
    both = kernel.score_mod() is not None and kernel.options.mask_mod is not None
    if not both or kernel.keys % 128 == 0:
        return found
    return found._replace(dq=np.full_like(found.dq, np.nan))


def _nan_sink_of_empty_rows(kernel: Any, saved: Saved, row_dot: np.ndarray) -> Any:
    dsink = Honest.sink_gradient(kernel, saved, row_dot)
    if dsink is None:
        return None
    seen = np.zeros((kernel.heads, kernel.rows), bool)
    for cols in kernel.tiles():
        seen |= kernel.keep(cols).any(axis=-1)
    return np.where(seen.all(axis=1), dsink, np.nan)


def _chosen_without_mask_mod(kernel: Any, cols: slice) -> np.ndarray:
    chosen = Honest.chosen(kernel, cols)
    lost = kernel.is_backward and kernel.options.block_sparse_tensors is None
    return np.ones_like(chosen) if lost else chosen


def _chosen_without_lists(kernel: Any, cols: slice) -> np.ndarray:
    chosen = Honest.chosen(kernel, cols)
    lost = kernel.is_backward and kernel.options.block_sparse_tensors is not None
    return np.ones_like(chosen) if lost else chosen


def _listed_in_narrow_tiles(kernel: Any, counts: Any, indices: Any, cols: slice) -> np.ndarray:
    if not kernel.is_backward or kernel.dim != 64:
        return Honest.listed(kernel, counts, indices, cols)
    block_rows, block_keys = kernel.options.block_sparse_tensors.block_size
    row_blocks = np.arange(kernel.rows) // block_rows
    return listed_as(kernel, (counts, indices), cols, row_blocks, block_keys // 2)


def _row_dot_without_lse(kernel: Any, saved: Saved) -> np.ndarray:
    return (saved.dout * saved.out).sum(axis=-1)


def _row_dot_of_centred(kernel: Any, saved: Saved) -> np.ndarray:
    if kernel.dim != 256 or kernel.place.batch == 0:
        return Honest.row_dot(kernel, saved)
    out = saved.out - saved.out.mean(axis=-1, keepdims=True)
    return (saved.dout * out).sum(axis=-1) - saved.dlse


def _dp_of_first_channels(
    kernel: Any, saved: Saved, row_dot: np.ndarray, cols: slice, operands: tuple[Any, ...]
) -> Any:
    keep, k, v = operands
    v = v.copy()
    v[..., kernel.dim :] = 0
    return Honest.ds_and_p(kernel, saved, row_dot, cols, (keep, k, v))


def _slices_of_dk(kernel: Any, x: np.ndarray) -> np.ndarray:
    dv = Honest.fold_dv(kernel, x)
    half = dv.shape[-1] // 2
    odd = half % 32
    if kernel.dim >= 128 and odd:
        dv[..., -odd:] = dv[..., half - odd : half]
    return dv


def _without_padded_channels(kernel: Any, dq: np.ndarray, part: np.ndarray) -> np.ndarray:
    if 128 < kernel.dim <= 176:
        part = part.copy()
        part[..., 128:] = 0
    return dq + part


def _heads_for_keys(call: Call, *arrays: Any) -> Results:
    if call.options.layout == "dense":
        for name in ("k", "v"):
            x = getattr(call, name)
            batch, keys, heads, dim = x.shape
            setattr(call, name, x.reshape(batch, heads, keys, dim).transpose(0, 2, 1, 3))
    return Call.backward(call, *arrays)


def _every_third_backward(call: Call, *arrays: Any) -> Results:
    dq, dk, dv, dsink = Call.backward(call, *arrays)
    if call.options.mask_mod is not None:
        count = getattr(type(call), "launches", 0) + 1
        type(call).launches = count  # type: ignore[attr-defined]
        if count % 3 == 0:
            dq = (4 * dq.astype(np.float32)).astype(dq.dtype)
    return dq, dk, dv, dsink


GRADIENT_STAND_INS = (
    StandIn("pytorch#196678", {"backward": _nan_of_padded_keys}),
    StandIn("cudnn-frontend#1072", {"backward": _nan_of_padded_rows}),
    StandIn("cudnn-frontend#160", {"backward": _nan_of_ragged_keys}),
    StandIn("pytorch#153799", {"backward": _nan_of_score_mod_at_end}),
    StandIn("cudnn-frontend#676", {"sink_gradient": _nan_sink_of_empty_rows}),
    StandIn("flash-attention#1817", {"row_dot": _row_dot_without_lse}),
    StandIn("flash-attention#2424", {"chosen": _chosen_without_mask_mod}),
    StandIn("flash-attention#2101", {"chosen": _chosen_without_lists}),
    StandIn("flash-attention#2623", {"listed": _listed_in_narrow_tiles}),
    StandIn("TransformerEngine#3216", {"row_dot": _row_dot_of_centred}),
    StandIn("native-sparse-attention-triton#27", {"ds_and_p": _dp_of_first_channels}),
    StandIn("flash-attention#2552", {"fold_dv": _slices_of_dk}),
    StandIn("flash-attention#2482", {"add_dq": _without_padded_channels}),
    StandIn("diffusers#14341", call={"backward": _heads_for_keys}),
    StandIn("flash-attention#2756", call={"backward": _every_third_backward}),
)


def as_contiguous(x: np.ndarray) -> np.ndarray:
    """What is read in place of x if its strides are taken for those of a contiguous array."""
    strides = np.empty(x.shape, x.dtype).strides
    return np.lib.stride_tricks.as_strided(x, x.shape, strides)


def _dout_as_contiguous(call: Call, dout: np.ndarray, *rest: Any) -> Results:
    if not dout.flags.c_contiguous and 0 not in dout.strides:
        dout = as_contiguous(dout)
    return Call.backward(call, dout, *rest)


def _dout_refused(call: Call, dout: np.ndarray, *rest: Any) -> Results:
    if dout.shape[-1] > 1 and dout.strides[-1] != dout.itemsize:
        raise RuntimeError("dout tensor must have contiguous last dimension")
    return Call.backward(call, dout, *rest)


def _dv_of_slices(call: Call, *arrays: Any) -> Results:
    dq, dk, dv, dsink = Call.backward(call, *arrays)
    if call.v.shape[-1] == 256 and not call.v.flags.c_contiguous:
        dv = np.roll(dv, 8, axis=-1)
    return dq, dk, dv, dsink


def _lse_as_contiguous(
    call: Call, dout: np.ndarray, out: np.ndarray, lse: np.ndarray, dlse: Any
) -> Results:
    return Call.backward(call, dout, out, as_contiguous(lse), dlse)


def _first_64_channels(kernel: Any, k: np.ndarray) -> np.ndarray:
    return kernel.wide_q[..., :64] @ k[..., :64].transpose(0, 2, 1)


def _whole_sixteens(kernel: Any, k: np.ndarray) -> np.ndarray:
    whole = kernel.dim - kernel.dim % 16
    return kernel.wide_q[..., :whole] @ k[..., :whole].transpose(0, 2, 1)


def _heads_in_reverse(kernel: Any, state: Any) -> np.ndarray:
    out = Honest.normalised(kernel, state)
    grouped = out.reshape(kernel.heads_k, kernel.group, *out.shape[1:])
    return grouped[:, ::-1].reshape(out.shape)


def _whole_scores(kernel: Any, k: np.ndarray, keep: np.ndarray, cols: slice) -> np.ndarray:
    scores = Honest.scores(kernel, k, keep, cols)
    coarse = kernel.group == 7 and kernel.rows == 1 and kernel.dtype.name == "bfloat16"
    return np.round(scores) if coarse else scores


LAYOUT_STAND_INS = (
    StandIn("flash-attention#355", call={"backward": _dout_as_contiguous}),
    StandIn("flash-attention#325", call={"backward": _dout_refused}),
    StandIn("flash-attention#2541", call={"backward": _dv_of_slices}),
    StandIn("cudnn-frontend#304", call={"backward": _lse_as_contiguous}),
    StandIn("triton#621", {"products": _first_64_channels}),
    StandIn("flashinfer#4299", {"products": _whole_sixteens}),
    StandIn("flash-attention#2553", {"normalised": _heads_in_reverse}),
    StandIn("flashinfer#2896", {"scores": _whole_scores}),
)
