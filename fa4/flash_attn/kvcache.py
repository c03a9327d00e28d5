"""flash_attn 2's attention with a cache of keys and values, for decoding.

    k_cache, v_cache    (B_cache, S_cache, Hk, dim), or (pages, page_size, Hk, dim) with
                        block_table, of any page size
    k, v                (B, S_new, Hk, dim), written into the cache from cache_seqlens on, then seen
    rotary_cos, _sin    (S_ro, d_rotary / 2): k is turned by its place in the cache, q too if causal
                        or with a window, else all of q by the place cache_seqlens; needs k and v
    rotary_interleaved  turn dimensions 0 and 1, 2 and 3, ...; else the first half of d_rotary with
                        its second half
    cache_seqlens       int or (B,): where the sequences in the cache end; None: the whole cache
    cache_batch_idx     (B,) the cache's entry of each sequence
    cache_leftpad       (B,) where the sequences in the cache begin
    block_table         (B, pages) the pages of each sequence
    num_splits          parts of the keys computed apart; 0: chosen

The others are those of `fa4.flash_attn.flash_attn_func`. The caches are updated in place, outside
of autograd; gradients reach q, k, v and the caches as they were given. Source of names, order,
defaults and rules: the README of flash-attention, "How to use FlashAttention".
"""

from __future__ import annotations

from typing import Any

from fa4.dropin.attend import attend
from fa4.flash_attn.plain import Window, cap_and_bias, open_window


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    impl: str = "auto",
) -> Any:
    """out (B, Sq, Hq, dv) of q (B, Sq, Hq, d) against a cache; torch tensors, arguments as above.

    Returns out, or (out, lse) with return_softmax_lse; lse is (B, Hq, Sq). Raises ValueError, one
    line, for arguments that do not go together and for a cache that is too small.
    """
    _check(k, v, (rotary_cos, rotary_sin), cache_seqlens)
    cache = _Cache(q, k_cache, cache_batch_idx, cache_leftpad, block_table)
    stop = start = cache.lengths(cache_seqlens)
    window = open_window(window_size)
    if rotary_cos is not None:
        turn = _Rotary(rotary_cos, rotary_sin, rotary_interleaved)
        at_once = not causal and window == (None, None)
        q = turn(q, cache.positions(start, q.shape[1], at_once))
        k = turn(k, cache.positions(start, k.shape[1]))
    if k is not None:
        where = cache.places(cache.positions(start, k.shape[1]))
        k_cache, v_cache = _write(k_cache, where, k), _write(v_cache, where, v)
        stop = start + k.shape[1]
    keys, values, options = cache.select(k_cache, v_cache, stop)
    capped, bias = cap_and_bias(alibi_slopes, softcap, q.shape[0], q.shape[2])
    options |= capped | {"softmax_scale": softmax_scale, "causal": causal, "window_size": window}
    options |= {"num_splits": max(num_splits, 0)}
    tensors = q, keys, values
    return attend(tensors, options, bias, varlen=True, impl=impl, return_lse=return_softmax_lse)


class _Rotary:
    """Turns the first d_rotary dimensions by rows of the tables cos and sin (S_ro, d_rotary / 2).

    In float32 (float64 for float64). Source: Su et al., "RoFormer", 2021, equation 34.
    """

    def __init__(self, cos: Any, sin: Any, interleaved: bool) -> None:
        self.tables, self.interleaved = (cos, sin), interleaved

    def __call__(self, x: Any, positions: Any) -> Any:
        """x (B, S, H, d) at `positions` (B, S), in the type of x."""
        import torch

        _check_positions(positions, len(self.tables[0]), "rotary_cos has rows for {} positions")
        wide = torch.promote_types(x.dtype, torch.float32)
        width = 2 * self.tables[0].shape[1]
        turned, rest = x[..., :width].to(wide), x[..., width:]
        cos, sin = (table[positions].to(wide)[:, :, None, :] for table in self.tables)
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            both = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
        else:
            a, b = turned.chunk(2, dim=-1)
            both = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
        return torch.cat([both.to(x.dtype), rest], dim=-1)


def _check(k: Any, v: Any, rotary: tuple[Any, Any], cache_seqlens: Any) -> None:
    """ValueError for arguments that do not go together."""
    if (k is None) != (v is None):
        raise ValueError("k and v go together; got one of them")
    if (rotary[0] is None) != (rotary[1] is None):
        raise ValueError("rotary_cos and rotary_sin go together; got one of them")
    if rotary[0] is not None and k is None:
        raise ValueError("rotary_cos and rotary_sin need k and v, new keys and values; got None")
    if k is not None and cache_seqlens is None:
        raise ValueError("k and v need cache_seqlens, where they are written; got None")


class _Cache:
    """Where the sequences of a batch lie in a cache."""

    def __init__(self, q: Any, k_cache: Any, entries: Any, leftpad: Any, table: Any) -> None:
        import torch

        if table is not None and (entries is not None or leftpad is not None):
            given = "cache_batch_idx" if entries is not None else "cache_leftpad"
            raise ValueError(f"block_table and {given} exclude each other; got both")
        self.batch, self.device = q.shape[0], q.device
        self.page_size = k_cache.shape[1]
        self.leftpad, self.is_whole = leftpad, table is None and entries is None
        if entries is None:
            entries = torch.arange(self.batch, device=self.device)
        # A cache without pages is one with a page for each entry.
        self.table = entries.long()[:, None] if table is None else table.long()
        self.capacity = self.page_size * self.table.shape[1]

    def lengths(self, cache_seqlens: Any) -> Any:
        """(B,) int64: where the sequences end."""
        import torch

        end = self.capacity if cache_seqlens is None else cache_seqlens
        lengths = torch.as_tensor(end, device=self.device).long()
        if lengths.dim() and tuple(lengths.shape) != (self.batch,):
            raise ValueError(
                f"cache_seqlens must be an int or ({self.batch},); got {tuple(lengths.shape)}"
            )
        return lengths.expand(self.batch)

    def positions(self, start: Any, count: int, at_once: bool = False) -> Any:
        """(B, count): the places from `start` (B,) on; at_once: `start` for each of them."""
        import torch

        steps = torch.arange(count, device=self.device)
        return start[:, None] + (0 * steps if at_once else steps)

    def places(self, positions: Any) -> tuple[Any, Any]:
        """(page, slot) of each position (B, S); ValueError beyond the cache, if on the CPU."""
        _check_positions(positions, self.capacity, "a sequence in the cache has room for {} keys")
        page = self.table.gather(1, positions // self.page_size)
        return page, positions % self.page_size

    def select(self, k_cache: Any, v_cache: Any, stop: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Keys, values and how they lie, as options of `fa4.flash_attn_varlen_func`."""
        if self.leftpad is not None:
            begin = self.leftpad.long()
            count = self.capacity
            where = self.places(self.positions(begin, count).clamp(max=count - 1))
            return k_cache[where], v_cache[where], {"seqused_k": stop - begin}
        if self.is_whole:
            return k_cache, v_cache, {"seqused_k": stop}
        return k_cache, v_cache, {"seqused_k": stop, "page_table": self.table}


def _check_positions(positions: Any, count: int, rule: str) -> None:
    """ValueError for a position that is not in [0, count); a GPU's are not looked at."""
    if positions.device.type != "cpu" or not positions.numel():
        return
    for position in (int(positions.min()), int(positions.max())):
        if not 0 <= position < count:
            raise ValueError(f"{rule.format(count)}; got position {position}")


def _write(cache: Any, where: tuple[Any, Any], new: Any) -> Any:
    """Write into the cache in place. Returns the cache; for gradients, what it became."""
    import torch

    whole = cache
    if torch.is_grad_enabled() and (new.requires_grad or cache.requires_grad):
        whole = cache.index_put(where, new)
    with torch.no_grad():
        cache[where] = new
    return whole
