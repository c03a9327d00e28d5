"""A call as the NumPy back ends take it: arrays, lengths, features and choices, checked.

What a call's tensors hold (offsets, lengths, page indices, block lists, factors) is checked here,
with one line that names the argument, the value and what is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fa4.call.arrays import to_numpy
from fa4.call.call import Call
from fa4.config import BackwardConfig, ForwardConfig, require
from fa4.reference.sequences import Packing
from fa4.reference.spec import Attention, BlockSparseTensors, Descale, Dropout


@dataclass(frozen=True, kw_only=True)
class Request:
    """A checked call: NumPy arrays and frozen descriptions."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    spec: Attention
    packing: Packing
    forward_config: ForwardConfig
    backward_config: BackwardConfig

    @property
    def keywords(self) -> dict[str, Any]:
        """What is computed, as keywords of `flash_attn_varlen_func`, without choices of how."""
        return vars(self.packing) | self.spec.keywords


def make_request(call: Call) -> Request:
    """The request of a call; tensors elsewhere are copied to the CPU. Raises ValueError."""
    q, k, v = (to_numpy(name, x) for name, x in zip("qkv", call[:3], strict=True))
    packing = _read_packing(call)
    if call.varlen:
        _check_packing(q, k, packing)
        _check_max_seqlens(call, packing)
    if call.sparse_block:
        _check_block_lists(call)
    forward, backward = _choose_configs(call)
    return Request(
        q=q,
        k=k,
        v=v,
        spec=_read_features(call),
        packing=packing,
        forward_config=forward,
        backward_config=backward,
    )


def _integers(call: Call, name: str) -> np.ndarray | None:
    value = getattr(call, name)
    return None if value is None else to_numpy(name, value).astype(np.int64)


def _read_packing(call: Call) -> Packing:
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table")
    return Packing(**{name: _integers(call, name) for name in names})


def _batch_size(q: np.ndarray, packing: Packing) -> int:
    return q.shape[0] if packing.cu_seqlens_q is None else len(packing.cu_seqlens_q) - 1


def _check_offsets(name: str, offsets: np.ndarray, total: int) -> np.ndarray:
    """cu_seqlens: starts at 0, never falls, stays inside the tensor. Returns the lengths."""
    if len(offsets) == 0 or offsets[0] != 0:
        raise ValueError(f"{name} must start with 0; got {offsets[:4].tolist()}")
    lengths = np.diff(offsets)
    if (lengths < 0).any():
        at = int(np.argmax(lengths < 0))
        raise ValueError(
            f"{name} must not decrease; got {offsets[at]} then {offsets[at + 1]} at index {at + 1}"
        )
    if offsets[-1] > total:
        raise ValueError(f"{name} must end within the {total} rows; got {offsets[-1]}")
    return lengths


def _check_packing(q: np.ndarray, k: np.ndarray, packing: Packing) -> None:
    """Offsets, used lengths and page indices against the tensors."""
    batch = _batch_size(q, packing)
    allocated_q = np.full(batch, q.shape[1])
    if packing.cu_seqlens_q is not None:
        allocated_q = _check_offsets("cu_seqlens_q", packing.cu_seqlens_q, q.shape[0])
    if packing.page_table is not None:
        pages = packing.page_table
        allocated_k = np.full(len(pages), pages.shape[1] * k.shape[1])
    elif packing.cu_seqlens_k is not None:
        allocated_k = _check_offsets("cu_seqlens_k", packing.cu_seqlens_k, k.shape[0])
    else:
        allocated_k = np.full(k.shape[0], k.shape[1])
    for name, used, allocated in (
        ("seqused_q", packing.seqused_q, allocated_q),
        ("seqused_k", packing.seqused_k, allocated_k),
    ):
        if used is None:
            continue
        wrong = (used < 0) | (used > allocated)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ValueError(f"{name}[{at}] must be in [0, {allocated[at]}]; got {used[at]}")
    if packing.page_table is not None:
        _check_pages(packing, k.shape[0], k.shape[1])


def _check_pages(packing: Packing, num_pages: int, page_size: int) -> None:
    """Only the entries that a sequence uses must be valid; the rest may hold anything."""
    assert packing.page_table is not None and packing.seqused_k is not None
    for b, (row, used) in enumerate(zip(packing.page_table, packing.seqused_k, strict=True)):
        entries = row[: -(-int(used) // max(page_size, 1))]
        wrong = (entries < 0) | (entries >= num_pages)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ValueError(
                f"page_table[{b}, {at}] must be in [0, {num_pages}); got {entries[at]}"
            )


def _check_max_seqlens(call: Call, packing: Packing) -> None:
    """Where lengths are known, max_seqlen_* may not lie below one."""
    for name, offsets in (
        ("max_seqlen_q", packing.cu_seqlens_q),
        ("max_seqlen_k", packing.cu_seqlens_k),
    ):
        value = getattr(call, name)
        if value is None or offsets is None:
            continue
        longest = int(np.diff(offsets).max(initial=0))
        require(value >= longest, f"{name} must be at least {longest}", value)


def _read_features(call: Call) -> Attention:
    sink, mods = call.learnable_sink, call.extras
    lists = [_integers(call, f"{kind}_block_{part}")
             for kind in ("mask", "full") for part in ("cnt", "idx")]  # fmt: skip
    return Attention(
        softmax_scale=call.softmax_scale,
        window=call.window,
        softcap=call.softcap,
        sink=None if sink is None else to_numpy("learnable_sink", sink).astype(np.float64),
        score_mod=mods.score_mod,
        score_mod_bwd=mods.score_mod_bwd,
        mask_mod=mods.mask_mod,
        aux_tensors=[to_numpy("aux_tensors", x) for x in call.aux_tensors] or None,
        block_sparse=_block_sparse(call, lists),
        dropout=Dropout(probability=call.dropout_p, seed=call.dropout_seed or 0),
        descale=_read_descales(call),
    )


def _block_sparse(call: Call, lists: list[np.ndarray | None]) -> BlockSparseTensors | None:
    if not call.sparse_block:
        return None
    mask_counts, mask_indices, full_counts, full_indices = lists
    assert mask_counts is not None and mask_indices is not None
    rows, columns = call.sparse_block
    return BlockSparseTensors(mask_counts, mask_indices, full_counts, full_indices, (rows, columns))


def _read_descales(call: Call) -> Descale:
    factors: list[np.ndarray | None] = []
    for name in ("q_descale", "k_descale", "v_descale"):
        value = getattr(call, name)
        factor = None if value is None else to_numpy(name, value)
        if factor is not None and not (np.isfinite(factor) & (factor > 0)).all():
            raise ValueError(f"{name} must be finite and positive; got {factor.min()}")
        factors.append(factor)
    return Descale(*factors)


def _check_block_lists(call: Call) -> None:
    """Counts fit, indices lie in range."""
    blocks_k = -(-call.k.shape[-3] // call.sparse_block[1])
    for kind in ("mask", "full"):
        counts, indices = (_integers(call, f"{kind}_block_{part}") for part in ("cnt", "idx"))
        if counts is None or indices is None:
            continue
        if (counts < 0).any() or (counts > blocks_k).any():
            raise ValueError(f"{kind}_block_cnt must be in [0, {blocks_k}]; got {counts.max()}")
        listed = np.arange(indices.shape[3]) < counts[..., None]
        wrong = listed & ((indices < 0) | (indices >= blocks_k))
        if wrong.any():
            value = indices[wrong][0]
            raise ValueError(f"{kind}_block_idx must be in [0, {blocks_k}); got {value}")


def _choose_configs(call: Call) -> tuple[ForwardConfig, BackwardConfig]:
    """The given ones, else FlashAttention-4's choices."""
    forward, backward = call.extras.forward_config, call.extras.backward_config
    if forward is None:
        forward = ForwardConfig.tuned(call.dtype, call.q.shape[-1], call.window_right == 0)
    if call.num_splits > 1:
        forward = replace(forward, num_splits=call.num_splits)
    if backward is None:
        backward = BackwardConfig() if call.deterministic else BackwardConfig(dq_order="random")
    forward.check_dtype(call.dtype)
    return forward, backward
