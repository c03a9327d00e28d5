"""Faults between calls on the same memory: what is kept by address, what pages are taken for."""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from tests.testing.planted.calls import Call
from tests.testing.planted.fault import Fault, Method
from tests.testing.planted.gradients import GradientKernel as Honest

SESSION = "calls that follow one another"


def _cache(call: Any) -> dict[Any, Any]:
    """What the back end keeps from call to call."""
    found = type(call).__dict__.get("kept")
    if found is None:
        found = type(call).kept = {}
    return found


_TOKENS: dict[int, tuple[Any, int]] = {}


def address(x: np.ndarray) -> tuple[Any, ...]:
    """Which memory an array is, as long as that lives: what a captured graph knows of it."""
    base = x if x.base is None else x.base
    known = _TOKENS.get(id(base))
    if known is None or known[0]() is not base:
        known = _TOKENS[id(base)] = (weakref.ref(base), next(_NUMBERS))
    return known[1], x.shape


_NUMBERS = count()


def _by_address(*names: str) -> dict[str, Method]:
    """Options that have the address of the first call's keep its values."""

    def init(call: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, options: Any) -> None:
        kept = _cache(call)
        given = {name: getattr(options, name) for name in names}
        for name, value in given.items():
            if value is not None:
                given[name] = kept.setdefault((name, address(value)), value.copy())
        Call.__init__(call, q, k, v, replace(options, **given))

    return {"__init__": init}


def _longest_of_first(call: Any, b: int) -> tuple[int, int]:
    """Tiles are planned for the longest keys of the first call."""
    first, count = Call.key_span(call, b)
    offsets = call.options.cu_seqlens_k
    if offsets is None:
        return first, count
    longest = _cache(call).setdefault(address(offsets), int(np.diff(offsets).max()))
    return first, min(count, longest)


def _used_grows(call: Any, b: int) -> tuple[int, int]:
    """Lengths may grow, and never shrink again."""
    first, count = Call.key_span(call, b)
    used = call.options.seqused_k
    if used is None:
        return first, count
    key = (b, address(used))
    _cache(call)[key] = max(count, _cache(call).get(key, 0))
    return first, min(_cache(call)[key], call.options.page_table.shape[1] * call.k.shape[1]
                      if call.options.page_table is not None else call.k.shape[-3])  # fmt: skip


def _table_rows(call: Any, b: int, count: int) -> Any:
    """Pages of a sequence are looked up again only where their number changes."""
    slot = Call.pages(call, b, count)[1]
    number = -(-count // call.k.shape[1])
    table = call.options.page_table
    kept = _cache(call).setdefault((b, address(table), number), table[b].copy())
    return kept[np.arange(count) // call.k.shape[1]], slot


def _converted_keys(call: Any, place: Any) -> Any:
    """K of a sequence is converted as it grows; what was converted is not looked at again."""
    q, k, v = Call.gather(call, place)
    if call.options.page_table is None:
        return q, k, v
    key = (place.batch, address(call.options.page_table))
    before = _cache(call).get(key)
    if before is not None and len(before) <= len(k):
        k = np.concatenate([before, k[len(before) :]])
    elif before is not None:
        k = before[: len(k)]
    if before is None or len(k) > len(before):
        _cache(call)[key] = k.copy()
    return q, k, v


def _converted_pages(call: Any, place: Any) -> Any:
    """V of full pages is converted once for each page number."""
    q, k, v = Call.gather(call, place)
    if call.options.page_table is None:
        return q, k, v
    size, v = call.k.shape[1], v.copy()
    for n in range(len(v) // size):
        key = (int(call.options.page_table[place.batch, n]), address(call.v))
        v[n * size : (n + 1) * size] = _cache(call).setdefault(
            key, v[n * size : (n + 1) * size].copy()
        )
    return q, k, v


def _prefix_once(call: Any, b: int, count: int) -> Any:
    """Where the first page is that of the sequence before, all of its pages are taken."""
    page, slot = Call.pages(call, b, count)
    table, size = call.options.page_table, call.k.shape[1]
    if b and count and table[b, 0] == table[b - 1, 0]:
        page = table[b - 1][np.arange(count) // size]
    return page, slot


def _window_page(call: Any, b: int, count: int) -> Any:
    """The page in which a window begins counts as gone."""
    page, slot = Call.pages(call, b, count)
    left = call.options.window_size[0]
    rows = call.row_span(b)[1]
    if call.options.is_windowed and left is not None and count > 3 * call.k.shape[1]:
        begin = max(0, count - rows - left)
        whole = begin // call.k.shape[1] * call.k.shape[1]
        page = page.copy()
        if begin:
            page[whole : whole + call.k.shape[1]] = 0
    return page, slot


def _last_page_kept(call: Any, place: Any) -> Any:
    """The page that was the last is read from a copy until it is full."""
    q, k, v = Call.gather(call, place)
    table, size = call.options.page_table, call.k.shape[1]
    full = 0 if table is None else len(k) // size * size
    if table is None or full == len(k):
        return q, k, v
    key = (int(table[place.batch, full // size]), len(k) - full, address(call.k))
    k = k.copy()
    k[full:] = _cache(call).setdefault(key, k[full:].copy())
    return q, k, v


def _first_page_kept(call: Any, b: int, count: int) -> Any:
    """The first page of a sequence never changes."""
    page, slot = Call.pages(call, b, count)
    table = call.options.page_table
    if count > call.k.shape[1]:
        first = _cache(call).setdefault((b, address(table)), int(table[b, 0]))
        page = page.copy()
        page[: call.k.shape[1]] = first
    return page, slot


def _chunk_diagonal(kernel: Any) -> int:
    """The second call of a prompt begins at a multiple of 16 rows."""
    if "begins" not in vars(kernel):
        before = type(kernel).__dict__.get("last_keys", 0)
        type(kernel).last_keys = kernel.keys
        kernel.begins = Honest.diagonal(kernel)
        is_dense = kernel.options.layout == "dense"
        if before and is_dense and kernel.rows + before == kernel.keys:
            kernel.begins = kernel.begins // 16 * 16
    return int(kernel.begins)


def _siblings(kernel: Any, cols: slice) -> np.ndarray:
    """In a mask of ancestors, the next draft is taken for one."""
    chosen = Honest.chosen(kernel, cols)
    name = getattr(kernel.options.mask_mod, "__name__", "")
    if not name.startswith("tree_mask"):
        return chosen
    keys = np.arange(cols.start, cols.stop)
    rows = np.arange(kernel.rows)[:, None]
    return chosen | (keys - (kernel.keys - kernel.rows) == rows + 1)[None]


def _split_by_batch(kernel: Any) -> Any:
    """The keys of a sequence are split by how many sequences there are."""
    offsets = kernel.options.cu_seqlens_q
    parts = 1 if offsets is None else len(offsets) - 1
    kernel.tile = 128 if parts == 1 else 48
    return Honest.tiles(kernel)


def _tile_by_rows(kernel: Any) -> Any:
    kernel.tile = 128 if kernel.rows > 64 else 40
    return Honest.tiles(kernel)


def _by_head(kernel: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A product whose rows do not depend on how many there are."""
    return np.einsum("hmk,hkn->hmn", a, b)


INVARIANT: dict[str, Method] = {
    "products": lambda kernel, k: _by_head(kernel, kernel.wide_q, k.transpose(0, 2, 1)),
    "accumulate": lambda kernel, out, weights, v: out + _by_head(kernel, weights, v),
}


def _fault(name: str, description: str, named_by: tuple[str, ...], **more: Any) -> Fault:
    return Fault(name, SESSION, description, named_by, **more)


SESSION_FAULTS = (
    _fault("cu_seqlens_by_address", "cu_seqlens of the first call with these tensors",
           ("replay cu_seqlens",), call=_by_address("cu_seqlens_k")),
    _fault("seqused_by_address", "seqused of the first call with these tensors",
           ("replay seqused",), call=_by_address("seqused_k", "seqused_q")),
    _fault("longest_of_first", "tiles for the longest keys of the first call",
           ("replay cu_seqlens",), call={"key_span": _longest_of_first}),
    _fault("lengths_only_grow", "a length that shrinks is the longer one",
           ("replay seqused", "cache"), call={"key_span": _used_grows}),
    _fault("table_by_address", "the page table of the first call with these tensors",
           ("cache append",), call=_by_address("page_table")),
    _fault("table_by_number", "pages are looked up where their number changes",
           ("cache move", "cache fork", "cache evict"), call={"pages": _table_rows}),
    _fault("keys_converted_once", "K that was taken back is used",
           ("cache truncate",), call={"gather": _converted_keys}),
    _fault("pages_converted_once", "V of a page is that of who had it before",
           ("cache free", "cache evict", "cache truncate", "cache move"),
           call={"gather": _converted_pages}),
    _fault("prefix_taken_whole", "sequences with the same first page have all pages in common",
           ("cache fork", "cache prefix", "pages shared"), call={"pages": _prefix_once}),
    _fault("window_page_gone", "the page in which a window begins counts as evicted",
           ("cache window", "window paged"), call={"pages": _window_page}),
    _fault("last_page_kept", "the last page of a sequence is read from a copy",
           ("cache",), call={"gather": _last_page_kept}),
    _fault("first_page_kept", "the first page of a sequence never changes",
           ("cache evict", "cache move"), call={"pages": _first_page_kept}),
    _fault("chunks_of_16", "a later chunk begins at a multiple of 16",
           ("chunked prefill",), kernel={"diagonal": _chunk_diagonal}),
    _fault("sibling_is_ancestor", "the next draft is seen, too", ("speculative tree",),
           kernel={"chosen": _siblings}),
    _fault("splits_by_batch", "tiles depend on the number of sequences",
           ("batch invariance",), kernel=INVARIANT | {"tiles": _split_by_batch},
           declares={"claims": {"batch_invariant"}}),
    _fault("tiles_by_rows", "tiles depend on the number of rows", ("chunk",),
           kernel=INVARIANT | {"tiles": _tile_by_rows},
           declares={"claims": {"chunk_invariant"}}),
)  # fmt: skip
