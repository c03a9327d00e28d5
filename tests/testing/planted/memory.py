"""Faults of batch entries, of memory between calls, of packed offsets, and of behaviour."""

from __future__ import annotations

import numpy as np

from tests.testing.planted.calls import Call
from tests.testing.planted.fault import EVERYWHERE, MEMORY, Fault
from tests.testing.planted.kernel import Place


def _third_reads_first(call: Call, place: Place) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, k, v = Call.gather(call, place)
    third = call.options.layout == "dense" and place.batch == 2
    return q, k, (call.v[0] if third else v)


def _scales_q_in_place(call: Call) -> tuple[np.ndarray, np.ndarray]:
    results = Call.forward(call)
    kernel_scale = call.q.shape[-1] ** -0.5
    call.q[...] = (call.q * call.q.dtype.type(kernel_scale)).astype(call.q.dtype)
    return results


def _one_workspace(call: Call) -> tuple[np.ndarray, np.ndarray]:
    key = call.q.shape, call.v.shape, call.q.dtype
    kept = type(call).__dict__.get("workspace")
    if kept is None or kept[0] != key:
        kept = key, Call.buffers(call)
        type(call).workspace = kept  # type: ignore[attr-defined]
    out, lse = kept[1]
    out[...], lse[...] = 0, -np.inf
    return out, lse


def _keys_of_last_call(call: Call) -> tuple[np.ndarray, np.ndarray]:
    last = type(call).__dict__.get("last_keys")
    type(call).last_keys = call.k.copy()  # type: ignore[attr-defined]
    if last is not None and last.shape == call.k.shape and last.dtype == call.k.dtype:
        call.k = last
    return Call.forward(call)


ALIASING = "batch and head aliasing"
ALIASING_FAULTS = (
    Fault(
        "third_entry_reads_first_values", ALIASING, "the third batch entry reads the first's V",
        (*EVERYWHERE, "batch"), call={"gather": _third_reads_first},
    ),
    Fault(
        "scales_q_in_place", ALIASING, "q is overwritten with scaled q", (*MEMORY, "strided"),
        call={"forward": _scales_q_in_place},
    ),
    Fault(
        "one_workspace", ALIASING, "a second call of the same shape overwrites the first's results",
        MEMORY, call={"buffers": _one_workspace},
    ),
    Fault(
        "keys_of_last_call", ALIASING, "K of the call before is used if it has the same shape",
        (*MEMORY, *EVERYWHERE, "permutation"), call={"forward": _keys_of_last_call},
    ),
)  # fmt: skip


def _keys_at_query_offsets(call: Call, b: int) -> tuple[int, int]:
    first, count = Call.key_span(call, b)
    if call.options.cu_seqlens_k is None or call.options.cu_seqlens_q is None:
        return first, count
    return min(int(call.options.cu_seqlens_q[b]), call.k.shape[0] - count), count


def _all_room_of_last(call: Call, b: int) -> tuple[int, int]:
    first, count = Call.key_span(call, b)
    last = call.options.layout == "padded" and b == call.sequences()[-1]
    return first, call.k.shape[1] if last else count


def _empty_shifts_next(call: Call, b: int) -> tuple[int, int]:
    offsets = call.options.cu_seqlens_q
    if offsets is None or call.options.cu_seqlens_k is None:
        return Call.key_span(call, b)
    before = int((np.diff(offsets)[:b] > 0).sum())
    return Call.key_span(call, before)


def _fourth_reads_third(call: Call, b: int) -> tuple[int, int]:
    packed = call.options.cu_seqlens_k is not None
    return Call.key_span(call, 2 if packed and b == 3 else b)


def _page_too_many(call: Call, b: int) -> tuple[int, int]:
    first, count = Call.key_span(call, b)
    table = call.options.page_table
    if table is None or not count or count % call.k.shape[1]:
        return first, count
    return first, count + 1


def _clipped_pages(call: Call, b: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    pages, slots = Call.pages(call, b, count)
    return np.clip(pages, 0, len(call.k) - 1), slots


def _values_of_first_row(call: Call, place: Place) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, k, v = Call.gather(call, place)
    table = call.options.page_table
    if table is None or len(k) <= call.k.shape[1] or place.batch == 0:
        return q, k, v
    pages = np.array(place.keys[0])
    pages[call.k.shape[1] :] = table[0][np.arange(call.k.shape[1], len(k)) // call.k.shape[1]]
    return q, k, call.v[np.clip(pages, 0, len(call.v) - 1), place.keys[1]]


def _unused_slots(call: Call, place: Place) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, k, v = Call.gather(call, place)
    size = call.k.shape[1]
    if call.options.page_table is None or len(k) % size == 0:
        return q, k, v
    # P of the unused slots is 0, and 0 * NaN is NaN.
    rest = 0 * call.v[place.keys[0][-1], len(k) % size :].astype(np.float32)
    v = v.copy()
    v[0] += rest.sum(axis=0).astype(v.dtype)
    return q, k, v


def _rows_from_keys(call: Call, b: int) -> tuple[int, int]:
    first, count = Call.row_span(call, b)
    used = call.options.seqused_k
    if call.options.layout != "padded" or used is None:
        return first, count
    return first, min(count, int(used[b]))


OFFSETS = "varlen offsets"
OFFSET_FAULTS = (
    Fault(
        "keys_at_query_offsets", OFFSETS, "keys of packed sequences start at cu_seqlens_q",
        ("varlen", "packed"), call={"key_span": _keys_at_query_offsets},
    ),
    Fault(
        "all_room_of_last_sequence", OFFSETS, "the last padded sequence has all keys of its room",
        ("seqused", "padding", "padded"), call={"key_span": _all_room_of_last},
    ),
    Fault(
        "rows_bounded_by_keys", OFFSETS, "rows of padded sequences beyond seqused_k are left out",
        ("seqused", "padding", "padded"), call={"row_span": _rows_from_keys},
    ),
    Fault(
        "empty_sequence_shifts_next", OFFSETS, "after a sequence without rows, keys are those of "
        "the one before", ("varlen", "packed"), call={"key_span": _empty_shifts_next},
    ),
    Fault(
        "fourth_sequence_reads_third", OFFSETS, "the fourth packed sequence has the third's keys",
        ("varlen", "packed"), call={"key_span": _fourth_reads_third},
    ),
    Fault(
        "key_beyond_full_page", OFFSETS, "where the last page is full, one key more is read",
        ("paged",), call={"key_span": _page_too_many, "pages": _clipped_pages},
    ),
    Fault(
        "page_table_row_of_first", OFFSETS, "V beyond the first page is that of sequence 0",
        ("paged",), call={"gather": _values_of_first_row},
    ),
    Fault(
        "reads_unused_slots", OFFSETS, "NaN in the unused slots of a page reaches O", ("paged",),
        call={"gather": _unused_slots},
    ),
)  # fmt: skip


def _exits(call: Call) -> tuple[np.ndarray, np.ndarray]:
    if call.v.shape[-1] > call.q.shape[-1]:
        raise SystemExit(7)
    return Call.forward(call)


def _every_third_call(call: Call) -> tuple[np.ndarray, np.ndarray]:
    count = getattr(type(call), "calls", 0) + 1
    type(call).calls = count  # type: ignore[attr-defined]
    out, lse = Call.forward(call)
    if count % 3 == 0 and out.size:
        out[..., -1] = (out[..., -1].astype(np.float64) * 1.25).astype(out.dtype)
    return out, lse


def _refuses_a_mask(call: Call) -> tuple[np.ndarray, np.ndarray]:
    if call.options.causal and call.options.is_windowed:
        raise KeyError("window_size_left")
    return Call.forward(call)


BEHAVIOUR = "behaviour"
BEHAVIOUR_FAULTS = (
    Fault(
        "exits", BEHAVIOUR, "SystemExit(7) where head_dim_v is above head_dim", EVERYWHERE,
        call={"forward": _exits},
    ),
    Fault(
        "every_third_call", BEHAVIOUR, "every third call errs by a quarter in the last channel",
        (*MEMORY, *EVERYWHERE), call={"forward": _every_third_call},
    ),
    Fault(
        "key_error_with_causal_window", BEHAVIOUR, "KeyError for causal with a window",
        ("causal window", "cache window"), call={"forward": _refuses_a_mask},
    ),
)  # fmt: skip
