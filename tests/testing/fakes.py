"""Stand-ins with the signatures and conventions of other libraries, computing in float64 on a CPU.

Written from the libraries' documentation and signatures, so that an adapter's mapping of arguments
and results can be tested where the library cannot run. Each refuses what it does not know.
"""

from __future__ import annotations

import math
from itertools import pairwise
from types import ModuleType
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


def flash_attn_2() -> dict[str, ModuleType]:
    """Module flash_attn of version 2.8."""
    module = ModuleType("flash_attn")

    def finish(result: Any, wanted: bool) -> Any:
        out, lse = result
        lse = lse.detach().masked_fill(lse.isneginf(), math.inf)
        return (out, lse, None) if wanted else out

    def flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
        softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        assert q.dtype in (torch.float16, torch.bfloat16) and v.shape == k.shape
        rest = (sides(window_size, causal), softmax_scale, softcap)
        return finish(dense(q, k, v, *rest), return_attn_probs)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        assert (
            max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
        )
        rest = (sides(window_size, causal), softmax_scale, softcap)
        return finish(packed(q, k, v, cu_seqlens_q, cu_seqlens_k, *rest), return_attn_probs)

    module.flash_attn_func = flash_attn_func
    module.flash_attn_varlen_func = flash_attn_varlen_func
    return {"flash_attn": module}


def flash_attn_3() -> dict[str, ModuleType]:
    """Module flash_attn_interface."""
    module = ModuleType("flash_attn_interface")

    def finish(result: Any, wanted: bool) -> Any:
        return (result[0], result[1].detach()) if wanted else result[0]

    def flash_attn_func(
        q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
        v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
        pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        if v.shape[-1] > 256:
            raise RuntimeError("FlashAttention forward only supports head dimension at most 256")
        rest = (sides(window_size, causal), softmax_scale, softcap)
        return finish(dense(q, k, v, *rest), return_attn_probs)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
        seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
        v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
        pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        rest = (sides(window_size, causal), softmax_scale, softcap)
        if cu_seqlens_q is not None:
            assert max_seqlen_q == cu_seqlens_q.diff().max()
            return finish(packed(q, k, v, cu_seqlens_q, cu_seqlens_k, *rest), return_attn_probs)
        assert (max_seqlen_q, max_seqlen_k) == (q.shape[1], k.shape[1])
        return finish(padded(q, k, v, seqused_q, seqused_k, *rest), return_attn_probs)

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
        cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
        cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
        q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        keys, offsets = gather(k_cache, page_table, cache_seqlens)
        values, _ = gather(v_cache, page_table, cache_seqlens)
        rest = (sides(window_size, causal), softmax_scale, softcap)
        return finish(packed(q, keys, values, cu_seqlens_q, offsets, *rest), return_softmax_lse)

    module.flash_attn_func = flash_attn_func
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return {"flash_attn_interface": module}


def flash_attn_4() -> dict[str, ModuleType]:
    """Module flash_attn.cute.interface of 4.0.0b36; its LSE has a gradient."""
    module = ModuleType("flash_attn.cute.interface")

    def window(window_size: Any, causal: bool) -> Any:
        return window_size[0], 0 if causal else window_size[1]

    def flash_attn_func(
        q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False,
        window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
        deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None,
        aux_scalars=None, block_sparse_tensors=None, block_sparse_tensors_bwd=None,
        return_lse=False, gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
    ):  # fmt: skip
        assert num_splits == 1, "SplitKV not supported on SM 9.0"
        rest = (window(window_size, causal), softmax_scale, softcap, learnable_sink)
        out, lse = dense(q, k, v, *rest)
        return out, lse if return_lse else None

    def flash_attn_varlen_func(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
        max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None,
        gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
        window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
        deterministic=False, return_lse=False,
    ):  # fmt: skip
        rest = (window(window_size, causal), softmax_scale, softcap, learnable_sink)
        if cu_seqlens_q is None:
            out, lse = padded(q, k, v, seqused_q, seqused_k, *rest)
            return out, lse if return_lse else None
        if page_table is not None:
            (k, cu_seqlens_k), (v, _) = (gather(x, page_table, seqused_k) for x in (k, v))
        out, lse = packed(q, k, v, cu_seqlens_q, cu_seqlens_k, *rest)
        return out, lse if return_lse else None

    module.flash_attn_func = flash_attn_func
    module.flash_attn_varlen_func = flash_attn_varlen_func
    return {
        "flash_attn": ModuleType("flash_attn"),
        "flash_attn.cute": ModuleType("flash_attn.cute"),
        "flash_attn.cute.interface": module,
    }


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

    def single_prefill_with_kv_cache(
        q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None,
        packed_custom_mask=None, causal=False, kv_layout="NHD", pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, backend="auto", return_lse=False,
    ):  # fmt: skip
        keep = custom_mask if custom_mask is not None else left_window(window_left, causal)
        return base_2(compute(q, k, v, keep, sm_scale, logits_soft_cap or 0.0), return_lse)

    module.single_prefill_with_kv_cache = single_prefill_with_kv_cache
    module.BatchPrefillWithRaggedKVCacheWrapper = Ragged
    module.BatchPrefillWithPagedKVCacheWrapper = Paged
    return {"flashinfer": module}
