"""Faults of strides, slack, pages, block lists and sizes beyond a warp or a tile."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.testing.planted.calls import Call
from tests.testing.planted.fault import Fault, Method
from tests.testing.planted.gradients import GradientKernel as Honest
from tests.testing.planted.gradients import Gradients
from tests.testing.planted.kernel import Place

WARP = 32


def contiguous(x: np.ndarray) -> np.ndarray:
    """What lies behind the first element, as if x were contiguous."""
    base = x.base if isinstance(x.base, np.ndarray) else x
    start = (x.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // x.itemsize
    return base.reshape(-1)[(start + np.arange(x.size)) % base.size].reshape(x.shape)


def _ignores_strides(*names: str, layout: str | None = None) -> dict[str, Method]:
    def init(call: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, options: Any) -> None:
        Call.__init__(call, q, k, v, options)
        if layout in (None, options.layout):
            for name in names:
                setattr(call, name, contiguous(getattr(call, name)))

    return {"__init__": init}


def _dout_as_contiguous(call: Call, dout: np.ndarray, *rest: Any) -> Any:
    return Call.backward(call, contiguous(dout), *rest)


def _stride_of_0_is_next_row(call: Any, q: Any, k: Any, v: Any, options: Any) -> None:
    Call.__init__(call, q, k, v, options)
    if k.strides[-2] == 0 and k.shape[-2] > 1:
        call.k = np.roll(k, 1, axis=-3) if k.shape[-3] > 1 else 2 * k


def _last_rows_of_buffer(call: Call, b: int) -> tuple[int, int]:
    first, count = Call.row_span(call, b)
    last = call.options.layout == "packed" and b == call.sequences()[-1]
    used = call.options.seqused_q is not None
    return first, call.q.shape[0] - first if last and not used else count


def _last_keys_of_buffer(call: Call, b: int) -> tuple[int, int]:
    first, count = Call.key_span(call, b)
    last = call.options.layout == "packed" and b == call.sequences()[-1]
    used = call.options.seqused_k is not None
    return first, call.k.shape[0] - first if last and not used else count


def _longest_is_max_seqlen(call: Call, b: int) -> tuple[int, int]:
    first, count = Call.key_span(call, b)
    offsets, most = call.options.cu_seqlens_k, call.options.max_seqlen_k
    if offsets is None or most is None or count < np.diff(offsets).max():
        return first, count
    return first, min(most, call.k.shape[0] - first)


def _seqused_ignored(call: Call, b: int) -> tuple[int, int]:
    offsets = call.options.cu_seqlens_k
    if offsets is None:
        return Call.key_span(call, b)
    return int(offsets[b]), int(offsets[b + 1] - offsets[b])


def _rows_at_room_of_keys(call: Call, b: int) -> tuple[int, int]:
    first, count = Call.row_span(call, b)
    offsets, used = call.options.cu_seqlens_q, call.options.seqused_q
    return (int(used[:b].sum()), count) if offsets is not None and used is not None else (
        first, count,
    )  # fmt: skip


def _power_of_2(call: Call, b: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    assert call.options.page_table is not None
    keys, shift = np.arange(count), call.k.shape[1].bit_length() - 1
    pages = np.minimum(keys >> shift, call.options.page_table.shape[1] - 1)
    found = call.options.page_table[b][pages]
    return np.clip(found, 0, len(call.k) - 1), keys & (2**shift - 1)


def _pages_to_128(call: Call, b: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    pages, slots = Call.pages(call, b, count)
    return pages, slots % 128


def _last_writes(call: Call, total: np.ndarray, keys: Any, part: np.ndarray) -> None:
    total[keys] = part


def _heads_wrap(kernel: Any, cols: slice) -> np.ndarray:
    return (np.arange(kernel.heads) % WARP) // kernel.group


def _batch_wraps(call: Call, place: Place) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, k, v = Call.gather(call, place)
    beyond = call.options.layout == "dense" and place.batch >= WARP
    return q, k, call.v[place.batch - WARP] if beyond else v


def _offsets_of_a_warp(call: Call, b: int) -> tuple[int, int]:
    first, count = Call.key_span(call, b)
    offsets = call.options.cu_seqlens_k
    return (first, count) if offsets is None or b < WARP else (
        min(int(offsets[WARP - 1]), call.k.shape[0] - count), count,
    )  # fmt: skip


def _backward(change: Any) -> dict[str, Method]:
    """The gradients of a sequence go through `change(kernel, gradients)`."""

    def backward(kernel: Any, *arrays: np.ndarray) -> Gradients:
        return change(kernel, Honest.backward(kernel, *arrays))

    return {"backward": backward}


def _heads_beyond_lost(kernel: Any, found: Gradients) -> Gradients:
    found.dq[:, WARP:] = 0
    return found


def _keys_beyond_4_tiles(kernel: Any, found: Gradients) -> Gradients:
    if kernel.rows > 128 and kernel.keys > 512:
        found.dk[512:] = found.dk[512:] * 0.5
    return found


def _second_row_tile(kernel: Any, found: Gradients) -> Gradients:
    if kernel.keys > 512:
        found.dq[128:] = 0
    return found


def _last_channel_lost(kernel: Any, found: Gradients) -> Gradients:
    if kernel.dim % 8:
        found.dk[..., kernel.dim // 8 * 8 :] = 0
    return found


def _vectors_of_8(kernel: Any, k: np.ndarray) -> np.ndarray:
    whole = kernel.dim // 8 * 8 if kernel.dim > 8 else kernel.dim
    return kernel.wide_q[..., :whole] @ k[..., :whole].transpose(0, 2, 1)


def _seed_of_32_bits(kernel: Any, cols: slice) -> np.ndarray:
    options = kernel.options
    object.__setattr__(options, "dropout_seed", options.dropout_seed & 0xFFFFFFFF)
    return Honest.dropout(kernel, cols)


def _first_head_alone_listed(kernel: Any, counts: Any, indices: Any, cols: slice) -> np.ndarray:
    listed = Honest.listed(kernel, counts, indices, cols)
    if counts is not None and counts.shape[1] == 1:
        listed[1:] = False
    return listed


def _row_block_of_next(kernel: Any, counts: Any, indices: Any, cols: slice) -> np.ndarray:
    if counts is None or counts.sum():
        return Honest.listed(kernel, counts, indices, cols)
    return np.ones((kernel.heads, kernel.rows, cols.stop - cols.start), bool)


LAYOUT = "layout"
_STRIDES = (
    Fault("k_strides_ignored", LAYOUT, "K is read as if it were contiguous", ("strides", "strided"),
          call=_ignores_strides("k")),
    Fault("q_strides_ignored", LAYOUT, "q is read as if it were contiguous", ("strides", "strided"),
          call=_ignores_strides("q")),
    Fault("packed_strides_ignored", LAYOUT, "packed q, k, v are read as if they were contiguous",
          ("strides",), call=_ignores_strides("q", "k", "v", layout="packed")),
    Fault("paged_strides_ignored", LAYOUT, "pages are read as if they were contiguous",
          ("strides",), call=_ignores_strides("k", "v", layout="paged")),
    Fault("dout_strides_ignored", LAYOUT, "dO is read as if it were contiguous",
          ("gradients strides",), call={"backward": _dout_as_contiguous}),
    Fault("stride_of_0_is_next_row", LAYOUT, "where KV heads have a stride of 0, K is a row off",
          ("strides expanded",), call={"__init__": _stride_of_0_is_next_row}),
)  # fmt: skip
_SLACK = (
    Fault("last_rows_of_buffer", LAYOUT, "the last packed sequence has all rows of the buffer",
          ("slack buffer", "padded"), call={"row_span": _last_rows_of_buffer}),
    Fault("last_keys_of_buffer", LAYOUT, "the last packed sequence has all keys of the buffer",
          ("slack buffer", "padded"), call={"key_span": _last_keys_of_buffer}),
    Fault("longest_is_max_seqlen", LAYOUT, "the longest sequence has max_seqlen_k keys",
          ("slack max_seqlen",), call={"key_span": _longest_is_max_seqlen}),
    Fault("seqused_ignored_if_packed", LAYOUT, "with cu_seqlens_k, seqused_k is ignored",
          ("slack seqused",), call={"key_span": _seqused_ignored}),
    Fault("rows_without_their_room", LAYOUT, "with seqused_q, rows lie one behind another",
          ("slack seqused",), call={"row_span": _rows_at_room_of_keys}),
)  # fmt: skip
_PAGES = (
    Fault("pages_of_powers_of_2", LAYOUT, "a page holds 2^n keys", ("page",),
          call={"pages": _power_of_2}),
    Fault("pages_to_128", LAYOUT, "slots beyond 128 of a page wrap", ("page",),
          call={"pages": _pages_to_128}),
    Fault("shared_pages_overwritten", LAYOUT, "dK and dV of a page are those of its last sequence",
          ("gradients pages shared",), call={"add_keys": _last_writes}),
)  # fmt: skip
_SIZES = (
    Fault("heads_wrap_at_32", LAYOUT, "query head 32 reads the KV head of head 0", ("many heads",),
          {"kv_heads": _heads_wrap}),
    Fault("dq_of_32_heads", LAYOUT, "dQ of heads beyond 32 is 0", ("gradients many heads",),
          _backward(_heads_beyond_lost)),
    Fault("batch_wraps_at_32", LAYOUT, "batch entry 32 reads V of entry 0", ("many batch",),
          call={"gather": _batch_wraps}),
    Fault("offsets_of_32_sequences", LAYOUT, "keys of sequences beyond 32 start at one offset",
          ("many sequences",), call={"key_span": _offsets_of_a_warp}),
    Fault("dk_beyond_4_tiles", LAYOUT, "beyond 512 keys, more than a tile of rows halve dK",
          ("gradients rows keys",), _backward(_keys_beyond_4_tiles)),
    Fault("dq_of_second_row_tile", LAYOUT, "beyond 512 keys, dQ of the second tile of rows is 0",
          ("gradients rows keys",), _backward(_second_row_tile)),
    Fault("dk_of_vectors_of_8", LAYOUT, "dK lacks the channels beyond a multiple of 8",
          ("gradients head_dim odd",), _backward(_last_channel_lost)),
    Fault("q_in_vectors_of_8", LAYOUT, "scores lack the channels beyond a multiple of 8",
          ("head_dim odd",), {"products": _vectors_of_8}),
    Fault("seed_of_32_bits", LAYOUT, "dropout's seed loses its upper half", ("dropout seeds",),
          {"dropout": _seed_of_32_bits}),
    Fault("broadcast_lists_of_first_head", LAYOUT, "block lists for all heads count for the first",
          ("block lists",), {"listed": _first_head_alone_listed}),
    Fault("empty_lists_are_all", LAYOUT, "block lists without an entry skip nothing",
          ("block",), {"listed": _row_block_of_next}),
)  # fmt: skip
LAYOUT_FAULTS = (*_STRIDES, *_SLACK, *_PAGES, *_SIZES)
