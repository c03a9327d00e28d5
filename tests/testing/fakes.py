"""Stand-ins with the signatures and conventions of other libraries, computing in float64 on a CPU.

Written from the libraries' documentation and signatures, so that an adapter's mapping of arguments
and results can be tested where the library cannot run. Each refuses what it does not know.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def compute(
    q: Any, k: Any, v: Any, window: Any, scale: Any = None, softcap: Any = 0.0, sink: Any = None
) -> tuple[Any, Any]:
    """out (S, H, D) and natural LSE (H, S) of one sequence; window sides None for unbounded.

    `window` may be a boolean mask (rows, keys) instead.
    """
    group = q.shape[1] // k.shape[1]
    heads = (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    wide_q, wide_k, wide_v = (x.double().transpose(0, 1) for x in heads)
    scores = wide_q @ wide_k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    rows, keys = scores.shape[-2:]
    if isinstance(window, torch.Tensor):
        keep = window
    else:
        distance = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
        keep = torch.ones(rows, keys, dtype=torch.bool)
        if window[0] is not None:
            keep &= distance >= -window[0]
        if window[1] is not None:
            keep &= distance <= window[1]
    logits = torch.where(keep, scores, -math.inf)
    if sink is not None:
        extra = sink.double()[:, None, None].expand(-1, rows, 1)
        logits = torch.cat([logits, extra], dim=-1)
    seen = ~logits.isneginf().all(-1)
    safe = torch.where(seen[..., None], logits, 0.0)
    p = torch.where(seen[..., None], safe.softmax(-1), 0.0)[..., :keys]
    out = (p @ torch.where(keep.any(0)[:, None], wide_v, 0.0)).transpose(0, 1).to(q.dtype)
    return out, torch.where(seen, safe.logsumexp(-1), -math.inf).to(
        torch.promote_types(q.dtype, torch.float32)
    )


def dense(q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
    """Batches of `compute`."""
    parts = [compute(*each, *rest) for each in zip(q, k, v, strict=True)]
    return torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])


def packed(q: Any, k: Any, v: Any, offsets_q: Any, offsets_k: Any, *rest: Any) -> tuple[Any, Any]:
    """Packed sequences of `compute`: out (total, H, D), lse (H, total)."""
    spans = zip(pairwise(offsets_q.tolist()), pairwise(offsets_k.tolist()), strict=True)
    parts = [compute(q[a:b], k[c:d], v[c:d], *rest) for (a, b), (c, d) in spans]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], dim=1)


def padded(q: Any, k: Any, v: Any, used_q: Any, used_k: Any, *rest: Any) -> tuple[Any, Any]:
    """`compute` on the used rows of each batch entry; zeros elsewhere."""
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = torch.zeros(q.shape[0], q.shape[2], q.shape[1])
    for b, (rows, keys) in enumerate(zip(used_q.tolist(), used_k.tolist(), strict=True)):
        out[b, :rows], lse[b, :, :rows] = compute(q[b, :rows], k[b, :keys], v[b, :keys], *rest)
    return out, lse


def gather(x: Any, table: Any, used: Any) -> tuple[Any, Any]:
    """(packed rows, offsets) of a paged tensor."""
    size = x.shape[1]
    rows = []
    for pages, count in zip(table, used.tolist(), strict=True):
        place = torch.arange(count)
        rows.append(x[pages[place // size].long(), place % size])
    return torch.cat(rows), torch.nn.functional.pad(used.cumsum(0), (1, 0))


def sides(window: tuple[int, int], causal: bool) -> tuple[Any, Any]:
    """FlashAttention 2's and 3's window, where -1 is unbounded and causal makes the right 0."""
    assert all(isinstance(side, int) and side >= -1 for side in window), window
    left, right = (None if side == -1 else side for side in window)
    return left, 0 if causal else right


# What options are where a library gives them no value of None.
VALUES = {"causal": False, "softcap": 0.0}


def accepts(by_place: str, by_name: str, **values: Any) -> Callable[..., Callable[..., Any]]:
    """A function of one namespace takes what a library's takes, and nothing else.

    by_place: names that may come in this order or by name, and must. by_name: options, which are
    None without a value here or in VALUES. A call with any other name is a TypeError.
    """
    kinds, known = inspect.Parameter, VALUES | values
    needed = [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in by_place.split()]
    options = [kinds(name, kinds.KEYWORD_ONLY, default=known.get(name)) for name in by_name.split()]
    signature = inspect.Signature([*needed, *options])

    def change(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            bound = signature.bind(*given, **named)
            bound.apply_defaults()
            return function(SimpleNamespace(**bound.arguments))

        return call

    return change


def settings(a: Any) -> tuple[Any, ...]:
    """Window, scale and softcap of a call of FlashAttention 2 or 3, as `compute` takes them."""
    return sides(a.window_size, a.causal), a.softmax_scale, a.softcap


def longest(offsets: Any) -> int:
    """Rows of the longest packed sequence."""
    return int(offsets.diff().max())


def as_module(name: str, *functions: tuple[str, Any]) -> ModuleType:
    """A module of these functions by name."""
    module = ModuleType(name)
    vars(module).update(functions)
    return module


def flash_attn_2() -> dict[str, ModuleType]:
    """Module flash_attn of version 2.8: an LSE without keys is +inf, and probabilities follow."""
    shared = "softmax_scale softcap causal window_size alibi_slopes dropout_p deterministic "
    shared += "return_attn_probs"

    def finish(a: Any, result: Any) -> Any:
        out, lse = result
        lse = lse.detach().masked_fill(lse.isneginf(), math.inf)
        return (out, lse, None) if a.return_attn_probs else out

    @accepts("q k v", shared, window_size=(-1, -1), dropout_p=0.0)
    def same_lengths(a: Any) -> Any:
        assert a.q.dtype in (torch.float16, torch.bfloat16) and a.v.shape == a.k.shape
        return finish(a, dense(a.q, a.k, a.v, *settings(a)))

    places = "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"

    @accepts(places, f"{shared} block_table", window_size=(-1, -1), dropout_p=0.0)
    def any_lengths(a: Any) -> Any:
        for side in "qk":
            offsets = getattr(a, f"cu_seqlens_{side}")
            assert getattr(a, f"max_seqlen_{side}") == longest(offsets), side
        spans = (a.cu_seqlens_q, a.cu_seqlens_k)
        return finish(a, packed(a.q, a.k, a.v, *spans, *settings(a)))

    functions = (("flash_attn_func", same_lengths), ("flash_attn_varlen_func", any_lengths))
    return {"flash_attn": as_module("flash_attn", *functions)}


def flash_attn_3() -> dict[str, ModuleType]:
    """Module flash_attn_interface: head dims up to 256, pages through the call for caches."""
    fp8 = "".join(f" {name}_descale" for name in "qkv")
    shared = "softmax_scale softcap causal window_size attention_chunk num_splits pack_gqa"
    shared += f" sm_margin qv{fp8}"
    unbounded = {"window_size": (-1, -1)}

    def finish(result: Any, wanted: bool) -> Any:
        return (result[0], result[1].detach()) if wanted else result[0]

    @accepts("q k v", f"{shared} deterministic return_attn_probs", **unbounded)
    def same_lengths(a: Any) -> Any:
        if a.v.shape[-1] > 256:
            raise RuntimeError(f"head dimension {a.v.shape[-1]}: at most 256")
        return finish(dense(a.q, a.k, a.v, *settings(a)), a.return_attn_probs)

    places = "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    more = "seqused_k seqused_q deterministic return_attn_probs"

    @accepts(places, f"{shared} {more}", **unbounded)
    def any_lengths(a: Any) -> Any:
        if a.cu_seqlens_q is not None:
            assert a.max_seqlen_q == longest(a.cu_seqlens_q)
            spans = (a.cu_seqlens_q, a.cu_seqlens_k)
            result = packed(a.q, a.k, a.v, *spans, *settings(a))
        else:
            assert (a.max_seqlen_q, a.max_seqlen_k) == (a.q.shape[1], a.k.shape[1])
            result = padded(a.q, a.k, a.v, a.seqused_q, a.seqused_k, *settings(a))
        return finish(result, a.return_attn_probs)

    cached = "page_table cache_seqlens cu_seqlens_q max_seqlen_q return_softmax_lse"

    @accepts("q k_cache v_cache", f"{cached} {shared}", **unbounded)
    def from_cache(a: Any) -> Any:
        keys, offsets = gather(a.k_cache, a.page_table, a.cache_seqlens)
        values, _ = gather(a.v_cache, a.page_table, a.cache_seqlens)
        result = packed(a.q, keys, values, a.cu_seqlens_q, offsets, *settings(a))
        return finish(result, a.return_softmax_lse)

    name = "flash_attn_interface"
    functions = (
        ("flash_attn_func", same_lengths),
        ("flash_attn_varlen_func", any_lengths),
        ("flash_attn_with_kvcache", from_cache),
    )
    return {name: as_module(name, *functions)}


def flash_attn_4() -> dict[str, ModuleType]:
    """Module flash_attn.cute.interface of 4.0.0b36; its LSE has a gradient."""
    shared = "softmax_scale softcap causal window_size learnable_sink num_splits pack_gqa "
    shared += "deterministic return_lse qv gather_kv_indices"
    values = {"window_size": (None, None), "num_splits": 1}

    def rest(a: Any) -> tuple[Any, ...]:
        window = (a.window_size[0], 0 if a.causal else a.window_size[1])
        return window, a.softmax_scale, a.softcap, a.learnable_sink

    def finish(a: Any, result: Any) -> Any:
        return result[0], result[1] if a.return_lse else None

    mods = "score_mod score_mod_bwd mask_mod aux_tensors block_sparse_tensors"

    @accepts("q k v", f"{shared} {mods}", **values)
    def same_lengths(a: Any) -> Any:
        assert a.num_splits == 1, "Hopper requires one split"
        return finish(a, dense(a.q, a.k, a.v, *rest(a)))

    lengths = " ".join(f"{name}_{side}" for name in ("cu_seqlens", "seqused", "max_seqlen")
                       for side in "qk")  # fmt: skip

    @accepts("q k v", f"{shared} {lengths} page_table", **values)
    def any_lengths(a: Any) -> Any:
        if a.cu_seqlens_q is None:
            return finish(a, padded(a.q, a.k, a.v, a.seqused_q, a.seqused_k, *rest(a)))
        k, v, offsets_k = a.k, a.v, a.cu_seqlens_k
        if a.page_table is not None:
            (k, offsets_k), (v, _) = (gather(x, a.page_table, a.seqused_k) for x in (k, v))
        return finish(a, packed(a.q, k, v, a.cu_seqlens_q, offsets_k, *rest(a)))

    name = "flash_attn.cute.interface"
    functions = (("flash_attn_func", same_lengths), ("flash_attn_varlen_func", any_lengths))
    parents = {name: ModuleType(name) for name in ("flash_attn", "flash_attn.cute")}
    return parents | {name: as_module(name, *functions)}


class LowerTriangularFromBottomRightMask:
    window = (None, 0)


class LocalAttentionFromBottomRightMask:
    def __init__(self, window_left, window_right):
        assert window_left >= 0 and window_right >= 0
        self.window = (window_left, window_right)


class BlockDiagonalMask:
    window = (None, None)

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen=None):
        self = cls()
        self.offsets = [
            torch.nn.functional.pad(torch.tensor(x).cumsum(0), (1, 0))
            for x in (q_seqlen, kv_seqlen)
        ]
        return self

    def make_causal_from_bottomright(self):
        self.window = (None, 0)
        return self

    def make_local_attention_from_bottomright(self, window_size):
        self.window = (window_size - 1, 0)
        return self


def xformers() -> dict[str, ModuleType]:
    """Module xformers.ops.fmha: bias classes, five axes for grouped heads, padded LSE."""
    module, bias = ModuleType("xformers.ops.fmha"), ModuleType("xformers.ops.fmha.attn_bias")

    def run(query, key, value, attn_bias, scale):
        grouped = query.dim() == 5
        if grouped:
            assert query.shape[2:4] == key.shape[2:4]
            query, key, value = (x.flatten(2, 3) for x in (query, key, value))
        assert query.shape[2] == key.shape[2]
        window = (None, None) if attn_bias is None else attn_bias.window
        if isinstance(attn_bias, BlockDiagonalMask):
            out, lse = packed(query[0], key[0], value[0], *attn_bias.offsets, window, scale)
            out, lse = out[None], lse[None]
        else:
            out, lse = dense(query, key, value, window, scale)
        lse = torch.nn.functional.pad(lse.detach(), (0, 5), value=math.nan)
        if grouped:
            heads = (key.shape[2] // 2, 2) if key.shape[2] % 2 == 0 else (1, key.shape[2])
            return out.unflatten(2, heads), lse.unflatten(1, heads)
        return out, lse

    def memory_efficient_attention(
        query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
    ):
        return run(query, key, value, attn_bias, scale)[0]

    def memory_efficient_attention_forward_requires_grad(
        query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
    ):
        return run(query, key, value, attn_bias, scale)

    for found in (LowerTriangularFromBottomRightMask, LocalAttentionFromBottomRightMask,
                  BlockDiagonalMask):  # fmt: skip
        setattr(bias, found.__name__, found)
    module.attn_bias = bias
    module.memory_efficient_attention = memory_efficient_attention
    module.memory_efficient_attention_forward_requires_grad = (
        memory_efficient_attention_forward_requires_grad
    )
    names = ("xformers", "xformers.ops")
    return {name: ModuleType(name) for name in names} | {"xformers.ops.fmha": module}


def base_2(result: Any, wanted: bool) -> Any:
    return (result[0], result[1].T / math.log(2.0)) if wanted else result[0]


def left_window(window_left: int, causal: bool) -> Any:
    return (None if window_left < 0 else window_left, 0 if causal else None)


class Ragged:
    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"

    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None,
        *, causal=False, window_left=-1, logits_soft_cap=None, sm_scale=None,
        q_data_type="float16",
    ):  # fmt: skip
        self.offsets = (qo_indptr, kv_indptr)
        self.sizes = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, q_data_type)
        self.rest = (left_window(window_left, causal), sm_scale, logits_soft_cap or 0.0)

    def run(self, q, k, v, return_lse=False):
        sizes = (q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], q.dtype)
        assert sizes == self.sizes
        return base_2(packed(q, k, v, *self.offsets, *self.rest), return_lse)


class Paged(Ragged):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
        num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, **options,
    ):  # fmt: skip
        counts = paged_kv_indptr.diff()
        used = torch.where(counts > 0, (counts - 1) * page_size + paged_kv_last_page_len, 0)
        self.place = torch.cat([torch.arange(int(n)) + 0 for n in used] or [torch.zeros(0)]).long()
        owner = torch.repeat_interleave(torch.arange(len(used)), used.long())
        first = paged_kv_indptr[:-1].long()[owner]
        self.page = paged_kv_indices.long()[first + self.place // page_size]
        self.place = self.place % page_size
        offsets = torch.nn.functional.pad(used.cumsum(0), (1, 0))
        heads = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)
        super().plan(qo_indptr, offsets, *heads, **options)

    def run(self, q, paged_kv_cache, return_lse=False):
        k, v = (x[self.page, self.place] for x in paged_kv_cache)
        return super().run(q, k, v, return_lse)


def flashinfer() -> dict[str, ModuleType]:
    """Module flashinfer 0.7: LSE to base 2, (rows, heads); pages by offsets and a flat list."""
    module = ModuleType("flashinfer")

    options = "custom_mask causal window_left sm_scale logits_soft_cap return_lse"

    @accepts("q k v", options, window_left=-1, return_lse=False)
    def one_sequence(a: Any) -> Any:
        seen = left_window(a.window_left, a.causal) if a.custom_mask is None else a.custom_mask
        result = compute(a.q, a.k, a.v, seen, a.sm_scale, a.logits_soft_cap or 0.0)
        return base_2(result, a.return_lse)

    module.single_prefill_with_kv_cache = one_sequence
    module.BatchPrefillWithRaggedKVCacheWrapper = Ragged
    module.BatchPrefillWithPagedKVCacheWrapper = Paged
    return {"flashinfer": module}
