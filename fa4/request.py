"""Checked requests: from the keywords of `flash_attn_func` to what the back ends take.

Every rule that a caller can break is checked here, before anything is computed, with one message
that names the argument, the value and what is allowed.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fa4.arrays import to_numpy
from fa4.config import BackwardConfig, ForwardConfig, normalize_window, require, require_int
from fa4.dtypes import dtype_name
from fa4.reference.sequences import Packing
from fa4.reference.spec import Attention, BlockSparseTensors, Descale, Dropout

DENSE_DEFAULTS: dict[str, Any] = {
    "softmax_scale": None,
    "causal": False,
    "window_size": (None, None),
    "learnable_sink": None,
    "softcap": 0.0,
    "num_splits": 1,
    "pack_gqa": None,
    "deterministic": True,
    "score_mod": None,
    "score_mod_bwd": None,
    "mask_mod": None,
    "aux_tensors": None,
    "block_sparse_tensors": None,
    "dropout_p": 0.0,
    "dropout_seed": 0,
    "q_descale": None,
    "k_descale": None,
    "v_descale": None,
    "config": None,
}
VARLEN_DEFAULTS: dict[str, Any] = DENSE_DEFAULTS | {
    "cu_seqlens_q": None,
    "cu_seqlens_k": None,
    "max_seqlen_q": None,
    "max_seqlen_k": None,
    "seqused_q": None,
    "seqused_k": None,
    "page_table": None,
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """Validated inputs of one call, as NumPy arrays and frozen descriptions."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    spec: Attention
    packing: Packing
    forward_config: ForwardConfig
    backward_config: BackwardConfig

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(B, Hq, Sq), or (Hq, total) for packed q."""
        *batch, rows, heads, _ = self.q.shape
        return (*batch, heads, rows)

    @property
    def keywords(self) -> dict[str, Any]:
        """What is computed, as keywords of `flash_attn_varlen_func`, without choices of how."""
        return vars(self.packing) | self.spec.keywords


def build_request(q: Any, k: Any, v: Any, options: dict[str, Any], *, varlen: bool) -> Request:
    """Check inputs and options; raises ValueError or TypeError with one clear line."""
    allowed = VARLEN_DEFAULTS if varlen else DENSE_DEFAULTS
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}; allowed are {', '.join(allowed)}")
    given = allowed | options
    q, k, v = (to_numpy(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    packing = _read_packing(given) if varlen else Packing()
    dtype = _check_tensors(q, k, v, packing, varlen=varlen)
    if varlen:
        _check_packing(q, k, packing)
        _check_max_seqlens(given, packing)
    batch = _batch_size(q, packing)
    spec = _build_spec(given, q, k, batch)
    if spec.block_sparse is not None:
        _check_block_sparse(spec.block_sparse, q, k, batch)
    forward_config, backward_config = _choose_configs(given, dtype, q.shape[-1])
    return Request(
        q=q,
        k=k,
        v=v,
        spec=spec,
        packing=packing,
        forward_config=forward_config,
        backward_config=backward_config,
    )


def _check_tensors(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, packing: Packing, *, varlen: bool
) -> str:
    """Ranks, head counts, sizes and element types; returns the element type's name."""
    packed = packing.cu_seqlens_q is not None, packing.cu_seqlens_k is not None
    for x in (q, k, v):
        dtype_name(x.dtype)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k, v must share one dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    check_shapes((q.shape, k.shape, v.shape), packed, varlen=varlen)
    return dtype_name(q.dtype)


def check_shapes(
    shapes: tuple[tuple[int, ...], ...], packed: tuple[bool, bool], *, varlen: bool
) -> None:
    """Ranks, head counts and sizes of q, k and v. packed: are q, and k and v, packed tensors?

    Raises ValueError with one line.
    """
    q, k, v = shapes
    for name, shape, is_packed in (("q", q, packed[0]), ("k", k, packed[1]), ("v", v, packed[1])):
        rank, layout = (3, "(total, heads, dim)") if is_packed else (4, "(B, S, heads, dim)")
        if len(shape) != rank:
            raise ValueError(f"{name} must have rank {rank}, {layout}; got shape {shape}")
    if k[:-1] != v[:-1]:
        raise ValueError(f"k and v must agree but for head_dim; got {k} and {v}")
    if q[-1] != k[-1]:
        raise ValueError(f"q and k must share head_dim; got {q[-1]} and {k[-1]}")
    for name, shape in (("q", q), ("k", k), ("v", v)):
        if shape[-1] == 0 or shape[-2] == 0:
            raise ValueError(f"{name} must have at least one head and head_dim 1; got {shape}")
    if q[-2] % k[-2]:
        raise ValueError(
            f"the heads of q must be a multiple of those of k; got {q[-2]} and {k[-2]}"
        )
    if not varlen and q[0] != k[0]:
        raise ValueError(f"q and k must share the batch size; got {q[0]} and {k[0]}")


def _int_array(name: str, value: Any, ndim: int) -> np.ndarray | None:
    if value is None:
        return None
    array = to_numpy(name, value)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers; got dtype {array.dtype}")
    if array.ndim != ndim:
        raise ValueError(f"{name} must have rank {ndim}; got shape {array.shape}")
    return array.astype(np.int64)


def _read_packing(given: dict[str, Any]) -> Packing:
    vectors = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    fields = {name: _int_array(name, given[name], 1) for name in vectors}
    packing = Packing(page_table=_int_array("page_table", given["page_table"], 2), **fields)
    if packing.page_table is not None and packing.cu_seqlens_k is not None:
        raise ValueError("page_table and cu_seqlens_k exclude each other; got both")
    if packing.page_table is not None and packing.seqused_k is None:
        raise ValueError("page_table needs seqused_k, the length of each sequence; got None")
    return packing


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
    if len(allocated_k) != batch:
        raise ValueError(f"q has {batch} sequences, k has {len(allocated_k)}: they must agree")
    for name, used, allocated in (
        ("seqused_q", packing.seqused_q, allocated_q),
        ("seqused_k", packing.seqused_k, allocated_k),
    ):
        if used is None:
            continue
        if len(used) != batch:
            raise ValueError(f"{name} must have {batch} entries; got {len(used)}")
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


def _check_max_seqlens(given: dict[str, Any], packing: Packing) -> None:
    """max_seqlen_* may be an int or a 0-d array; below a true length it is an error."""
    for name, offsets in (
        ("max_seqlen_q", packing.cu_seqlens_q),
        ("max_seqlen_k", packing.cu_seqlens_k),
    ):
        if given[name] is None or offsets is None:
            continue
        longest = int(np.diff(offsets).max(initial=0))
        value = as_int(name, given[name])
        require(value >= longest, f"{name} must be at least {longest}", value)


def _build_spec(given: dict[str, Any], q: np.ndarray, k: np.ndarray, batch: int) -> Attention:
    scale = given["softmax_scale"]
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else as_float("softmax_scale", scale)
    sink = given["learnable_sink"]
    if sink is not None:
        sink = to_numpy("learnable_sink", sink).astype(np.float64)
        if sink.shape != (q.shape[-2],):
            raise ValueError(f"learnable_sink must be ({q.shape[-2]},); got shape {sink.shape}")
    for name in ("score_mod", "score_mod_bwd", "mask_mod"):
        if given[name] is not None and not callable(given[name]):
            raise TypeError(f"{name} must be callable; got {given[name]!r}")
    if given["pack_gqa"] not in (None, True, False):
        raise TypeError(f"pack_gqa must be True, False or None; got {given['pack_gqa']!r}")
    sparse = given["block_sparse_tensors"]
    return Attention(
        softmax_scale=scale,
        window=normalize_window(given["window_size"], bool(given["causal"])),
        softcap=as_float("softcap", given["softcap"]),
        sink=sink,
        score_mod=given["score_mod"],
        score_mod_bwd=given["score_mod_bwd"],
        mask_mod=given["mask_mod"],
        aux_tensors=given["aux_tensors"],
        block_sparse=None if sparse is None else _read_block_sparse(sparse),
        dropout=Dropout(
            probability=as_float("dropout_p", given["dropout_p"]),
            seed=as_int("dropout_seed", given["dropout_seed"]),
        ),
        descale=_read_descales(given, dtype_name(q.dtype), (batch, k.shape[-2])),
    )


def as_float(name: str, value: Any) -> float:
    """A number, of whatever type can be one; TypeError naming the argument otherwise."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number; got {value!r}") from None


def as_int(name: str, value: Any) -> int:
    """Python and NumPy integers and 0-d integer tensors, but not bools."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer; got {value!r}") from None


def _read_descales(given: dict[str, Any], dtype: str, shape: tuple[int, int]) -> Descale:
    factors: list[np.ndarray | None] = []
    for name in ("q_descale", "k_descale", "v_descale"):
        if given[name] is None:
            factors.append(None)
            continue
        factor = to_numpy(name, given[name])
        if dtype not in ("e4m3", "e5m2"):
            raise ValueError(f"{name} applies to FP8 inputs only; q, k, v are {dtype}")
        if factor.shape != shape:
            raise ValueError(f"{name} must be (batch, heads_k) = {shape}; got {factor.shape}")
        if not (np.isfinite(factor) & (factor > 0)).all():
            raise ValueError(f"{name} must be finite and positive; got {factor.min()}")
        factors.append(factor)
    return Descale(*factors)


def _read_block_sparse(sparse: Any) -> BlockSparseTensors:
    """Accept any object with the five fields of BlockSparseTensors."""
    arrays: dict[str, np.ndarray | None] = {}
    for name, ndim in (("mask_block_cnt", 3), ("mask_block_idx", 4),
                       ("full_block_cnt", 3), ("full_block_idx", 4)):  # fmt: skip
        arrays[name] = _int_array(name, getattr(sparse, name, None), ndim)
    if arrays["mask_block_cnt"] is None or arrays["mask_block_idx"] is None:
        raise ValueError("block_sparse_tensors needs mask_block_cnt and mask_block_idx; got None")
    if (arrays["full_block_cnt"] is None) != (arrays["full_block_idx"] is None):
        raise ValueError("full_block_cnt and full_block_idx go together; got one of them")
    size = tuple(int(n) for n in sparse.block_size)
    for name, value in zip(("block_size rows", "block_size columns"), size, strict=True):
        require_int(name, value, 1)
    return BlockSparseTensors(**arrays, block_size=size)  # type: ignore[arg-type]


def _check_block_sparse(
    sparse: BlockSparseTensors, q: np.ndarray, k: np.ndarray, batch: int
) -> None:
    """Shapes cover every block, counts fit, indices lie in range."""
    seqlen_q, seqlen_k = q.shape[-3], k.shape[-3]
    blocks_q = -(-seqlen_q // sparse.block_size[0])
    blocks_k = -(-seqlen_k // sparse.block_size[1])
    for kind in ("mask", "full"):
        counts, indices = getattr(sparse, f"{kind}_block_cnt"), getattr(sparse, f"{kind}_block_idx")
        if counts is None:
            continue
        expected = f"({batch} or 1, {q.shape[-2]} or 1, {blocks_q})"
        good = counts.shape[0] in (1, batch) and counts.shape[1] in (1, q.shape[-2])
        if not good or counts.shape[2] != blocks_q:
            raise ValueError(f"{kind}_block_cnt must be {expected}; got {counts.shape}")
        if indices.shape[:3] != counts.shape or indices.shape[3] < blocks_k:
            raise ValueError(
                f"{kind}_block_idx must be {counts.shape} + (at least {blocks_k},); "
                f"got {indices.shape}"
            )
        if (counts < 0).any() or (counts > blocks_k).any():
            raise ValueError(f"{kind}_block_cnt must be in [0, {blocks_k}]; got {counts.max()}")
        listed = np.arange(indices.shape[3]) < counts[..., None]
        wrong = listed & ((indices < 0) | (indices >= blocks_k))
        if wrong.any():
            value = indices[wrong][0]
            raise ValueError(f"{kind}_block_idx must be in [0, {blocks_k}); got {value}")


def _choose_configs(
    given: dict[str, Any], dtype: str, head_dim: int
) -> tuple[ForwardConfig, BackwardConfig]:
    """`config` may be a ForwardConfig, a BackwardConfig, or a pair of both."""
    causal = normalize_window(given["window_size"], bool(given["causal"]))[1] == 0
    forward = ForwardConfig.tuned(dtype, head_dim, causal)
    backward = BackwardConfig() if given["deterministic"] else BackwardConfig(dq_order="random")
    configs = given["config"] if isinstance(given["config"], tuple) else (given["config"],)
    for config in configs:
        if isinstance(config, ForwardConfig):
            forward = config
        elif isinstance(config, BackwardConfig):
            backward = config
        elif config is not None:
            raise TypeError(f"config must be a ForwardConfig or BackwardConfig; got {config!r}")
    num_splits = as_int("num_splits", given["num_splits"])
    require_int("num_splits", num_splits, 1, 256)
    if num_splits > 1:
        forward = replace(forward, num_splits=num_splits)
    forward.check_dtype(dtype)
    return forward, backward
