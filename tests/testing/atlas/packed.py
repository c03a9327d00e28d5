"""Stand-ins for bugs of lengths and of pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.testing.atlas.stand_in import StandIn
from tests.testing.planted.calls import Call
from tests.testing.planted.fault import replaced
from tests.testing.planted.gradients import GradientKernel as Honest
from tests.testing.planted.gradients import Saved
from tests.testing.planted.kernel import Place, State

Results = tuple[Any, ...]


def is_packed(call: Any) -> bool:
    """cu_seqlens for rows and keys."""
    return call.options.layout == "packed"


def is_paged(call: Any) -> bool:
    """K and V in pages."""
    return call.options.layout == "paged"


def rows_of(call: Call) -> np.ndarray:
    """Rows of each packed sequence."""
    return np.diff(call.options.cu_seqlens_q)


def _raises(method: str, condition: Callable[[Call], bool], error: Exception) -> dict[str, Any]:
    """`method` of the call ends in an error where the condition holds."""
    honest = getattr(Call, method)

    def wrong(call: Call, *arguments: Any) -> Any:
        if condition(call):
            raise error
        return honest(call, *arguments)

    return {method: wrong}


def _unguarded(kernel: Any, scores: np.ndarray, lse: np.ndarray) -> np.ndarray:
    if not is_packed(kernel):
        return Honest.probabilities(kernel, scores, lse)
    return np.exp(scores - lse[..., None])


def _one_row_and_none(call: Call) -> bool:
    if not is_packed(call) or call.q.shape[-2] == call.k.shape[-2]:
        return False
    rows = rows_of(call)
    return rows.max(initial=0) == 1 and rows.min(initial=1) == 0


def _even_keys(call: Call, b: int) -> tuple[int, int]:
    first, count = Call.key_span(call, b)
    return first, count - count % 2 if is_packed(call) else count


def _whole_chunks(call: Call, b: int) -> tuple[int, int]:
    first, count = Call.row_span(call, b)
    return first, count - count % 4 if is_packed(call) else count


def _whole_cache(call: Call, b: int) -> tuple[int, int]:
    first, count = Call.key_span(call, b)
    return first, call.k.shape[1] if call.options.layout == "padded" else count


def _unwritten_gradients(call: Call, *arrays: Any) -> Results:
    dq, dk, dv, dsink = Call.backward(call, *arrays)
    if is_packed(call):
        dq[call.options.cu_seqlens_q[-1] :] = np.nan
        for x in (dk, dv):
            x[call.options.cu_seqlens_k[-1] :] = np.nan
    return dq, dk, dv, dsink


def _lse_of_first_heads(call: Call) -> Results:
    out, lse = Call.forward(call)
    group = call.q.shape[-2] // call.k.shape[-2]
    if is_packed(call):
        for b in call.sequences():
            first, count = call.row_span(b)
            if count == 1:
                lse[np.arange(len(lse)) % group > 0, first] = 0
    return out, lse


def _zero_gradients(call: Call, *arrays: Any) -> Results:
    dq, dk, dv, dsink = Call.backward(call, *arrays)
    if is_packed(call) and call.q.shape[-2] > 1:
        dq, dk, dv = (np.zeros_like(x) for x in (dq, dk, dv))
    return dq, dk, dv, dsink


def _without_row_dot(kernel: Any, saved: Saved) -> np.ndarray:
    return -saved.dlse if is_packed(kernel) else Honest.row_dot(kernel, saved)


def _lse_of_rows_by_heads(
    call: Call, dout: np.ndarray, out: np.ndarray, lse: np.ndarray, dlse: Any
) -> Results:
    if is_packed(call):
        lse = lse.reshape(lse.shape[::-1]).T
    return Call.backward(call, dout, out, lse, dlse)


PACKED_STAND_INS = (
    StandIn("flash-attention#443", {"probabilities": _unguarded}),
    StandIn(
        "flash-attention#2562",
        call=_raises(
            "backward",
            lambda x: is_packed(x) and x.q.shape[-1] == 256 and 0 in rows_of(x),
            RuntimeError("CUDA error: an illegal memory access was encountered"),
        ),
    ),
    StandIn(
        "flash-attention#1537",
        call=_raises("forward", _one_row_and_none, RuntimeError("shape is invalid for input")),
    ),
    StandIn(
        "flash-attention#2470",
        call=_raises(
            "forward", lambda x: x.options.layout == "dense" and not x.k.shape[1],
            ZeroDivisionError("integer division or modulo by zero"),
        ),
    ),
    StandIn(
        "flash-attention#2515",
        call=_raises(
            "forward", lambda x: not x.q.size, ZeroDivisionError("integer division by zero")
        ),
    ),
    StandIn("TransformerEngine#1930", call={"key_span": _even_keys}),
    StandIn("TransformerEngine#3331", call={"row_span": _whole_chunks}),
    StandIn("gpt-fast#233", call={"key_span": _whole_cache}),
    StandIn("pytorch#176793", call={"backward": _unwritten_gradients}),
    StandIn("cudnn-frontend#1083", call={"forward": _lse_of_first_heads}),
    StandIn("cudnn-frontend#462", call={"backward": _zero_gradients}),
    StandIn("TransformerEngine#3333", {"row_dot": _without_row_dot}),
    StandIn("ring-flash-attention#47", call={"backward": _lse_of_rows_by_heads}),
)  # fmt: skip


def _rest_of_last_page(call: Call, place: Place) -> tuple[np.ndarray, ...]:
    q, k, v = Call.gather(call, place)
    size = call.k.shape[1]
    if not is_paged(call) or len(k) % size == 0:
        return q, k, v
    return q, k, _times_zero(v, call.v[place.keys[0][-1], len(k) % size :])


def _rest_of_cache(call: Call, place: Place) -> tuple[np.ndarray, ...]:
    q, k, v = Call.gather(call, place)
    if call.options.layout != "padded" or not len(v):
        return q, k, v
    return q, k, _times_zero(v, call.v[place.batch, len(v) :])


def _times_zero(v: np.ndarray, unused: np.ndarray) -> np.ndarray:
    """V with what P = 0 makes of unused rows added: nothing, unless they hold NaN."""
    v = v.copy()
    v[0] += (0 * unused.astype(np.float32)).sum(axis=0).astype(v.dtype)
    return v


def _behind_the_table(call: Call, b: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    size, table = call.k.shape[1], call.options.page_table
    assert table is not None
    if count % size == 0:
        call.k[table[b][count // size]]  # the page behind the last: out of range
    return Call.pages(call, b, count)


def _unwritten_rows(call: Call) -> Results:
    out, lse = Call.forward(call)
    if is_paged(call):
        for b in call.sequences():
            first, count = call.row_span(b)
            if not call.key_span(b)[1]:
                out[first : first + count] = np.nan
    return out, lse


def _slots_below_128(call: Call, b: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    pages, slots = Call.pages(call, b, count)
    return pages, slots % 128


def _rows_without_address(call: Call, place: Place) -> tuple[np.ndarray, ...]:
    q, k, v = Call.gather(call, place)
    if is_paged(call) and q.shape[-1] > 128:
        k = np.where(np.arange(len(k))[:, None, None] % 128 >= 96, k.dtype.type(0), k)
    return q, k, v


def _wrong_threads(call: Call, place: Place) -> tuple[np.ndarray, ...]:
    q, k, v = Call.gather(call, place)
    dims = (q.shape[-1], v.shape[-1])
    if is_paged(call) and dims == (192, 128) and len(q) <= 128:
        v = np.roll(v, 1, axis=0)
    return q, k, v


def _further_splits_from_first_page(kernel: Any, cols: slice, keep: np.ndarray) -> Any:
    splits = kernel.splits()
    if is_paged(kernel) and len(splits) > 1 and cols.start >= splits[1][0].start:
        cols = slice(0, cols.stop - cols.start)
    return Honest.keys_and_values(kernel, cols, keep)


def nan_of_empty_parts(kernel: Any, first: State, second: State) -> State:
    """Two parts as one, -inf minus -inf included."""
    top = np.maximum(first.top, second.top)
    a, b = (np.exp(part.top - top) for part in (first, second))
    out = first.out * a[..., None] + second.out * b[..., None]
    return State(top, first.total * a + second.total * b, out)


def _merged_if_paged(kernel: Any) -> State:
    if not is_paged(kernel) or kernel.options.num_splits == 1 or kernel.tiles():
        return Honest.combined(kernel)
    return nan_of_empty_parts(kernel, kernel.start(), kernel.start())


def _ends_behind_first_tile(kernel: Any, cols: slice) -> np.ndarray:
    inside = Honest.band(kernel, cols)
    left, right = kernel.sides()
    if not is_paged(kernel) or left is None or right is not None or kernel.rows >= kernel.keys:
        return inside
    first = max(0, kernel.diagonal() - left)
    ended = np.arange(cols.start, cols.stop) >= first + left + 128
    return inside & ~(ended & (np.arange(kernel.rows)[:, None] < 128))


def _without_left(kernel: Any, sides: Any) -> Any:
    return None, sides[1]


PAGING_STAND_INS = (
    StandIn("flash-attention#2374", call={"gather": _rest_of_last_page}),
    StandIn("flash-attention#1745", call={"gather": _rest_of_cache}),
    StandIn("cudnn-frontend#964", call={"pages": _behind_the_table}),
    StandIn("flashinfer#3047", call={"forward": _unwritten_rows}),
    StandIn("flashinfer#4347", call={"pages": _slots_below_128}),
    StandIn("flash-attention#2745", call={"gather": _rows_without_address}),
    StandIn("flash-attention#2368", call={"gather": _wrong_threads}),
    StandIn("flash-attention#1217", {"keys_and_values": _further_splits_from_first_page}),
    StandIn("flashinfer#4051", {"combined": _merged_if_paged}),
    StandIn("flashinfer#4972", {"band": _ends_behind_first_tile}),
    StandIn("sglang#31501", replaced("sides", lambda x: is_paged(x) and x.rows > 1, _without_left)),
    StandIn(
        "mistral.rs#2094", replaced("sides", lambda x: is_paged(x) and x.rows == 1, _without_left)
    ),
)
