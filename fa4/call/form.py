"""The form of a call, which is everything but what lies in its tensors, and the rules it obeys."""

from __future__ import annotations

from typing import Any

from fa4.call.arrays import element_type, is_torch
from fa4.call.call import FIRST_OPTION, Call, Form
from fa4.config import require_int
from fa4.reference.spec import Attention, Dropout

_INTEGERS = {
    "cu_seqlens_q": 1, "cu_seqlens_k": 1, "seqused_q": 1, "seqused_k": 1, "page_table": 2,
    "mask_block_cnt": 3, "mask_block_idx": 4, "full_block_cnt": 3, "full_block_idx": 4,
}  # fmt: skip
_MOST_FORMS = 4096
_forms: dict[tuple[Any, ...], Form] = {}


def with_form(call: Call) -> Call:
    """The call with its form. Raises TypeError or ValueError for what is wrong with it.

    What lies in the tensors is not looked at, and a form that passed once is not looked at again.
    """
    try:
        key = describe_form(call)
        form = _forms.get(key)
        if form is not None:
            return Call._make([*call[:-1], form])  # `_replace` takes twice the time
    except (TypeError, AttributeError):  # callables without a hash, sizes that are symbols
        key = None
    _check_tensors(call)
    _check_lengths(call)
    _check_factors(call)
    _check_options(call)
    if key is None:
        return call
    if len(_forms) >= _MOST_FORMS:
        _forms.clear()
    form = _forms[key] = Form()
    return call._replace(form=form)


def describe_form(call: Call) -> tuple[Any, ...]:
    """What two calls of one form have in common; without a hash if a callable has none."""
    tensors: tuple[Any, ...] = call[:FIRST_OPTION]
    q, k, v, *optional = tensors
    more = [x for x in optional if x is not None] + call.aux_tensors
    if hasattr(q, "stride"):  # torch
        places: tuple[Any, ...] = (q.stride(), k.stride(), v.stride(), q.device, k.device, v.device)
        rest: list[Any] = [(x.shape, x.dtype, x.stride(), x.device) for x in more]
    else:
        places = (q.strides, k.strides, v.strides)
        rest = [(x.shape, x.dtype, x.strides) for x in more]
    given = tuple([x is not None for x in optional]) if more else ()
    return (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, places, given, tuple(rest),
        tuple(call.sparse_block), call[FIRST_OPTION + 2 : -2],
    )  # fmt: skip


def _check_tensors(call: Call) -> None:
    """Element types, ranks, head counts, sizes and places."""
    types = [element_type(x) for x in call[:3]]
    if len(set(types)) > 1:
        raise TypeError(f"q, k, v must share one dtype; got {', '.join(types)}")
    q, k, v = (tuple(x.shape) for x in call[:3])
    packed = call.cu_seqlens_q is not None, call.cu_seqlens_k is not None
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
    if not call.varlen and q[0] != k[0]:
        raise ValueError(f"q and k must share the batch size; got {q[0]} and {k[0]}")
    if not is_torch(call.q):
        return
    for name, value in (*call._asdict().items(), *[("aux_tensors", x) for x in call.aux_tensors]):
        if is_torch(value) and value.device != call.q.device:
            raise ValueError(f"{name} must be on {call.q.device}, as q is; got {value.device}")


def _check_lengths(call: Call) -> None:
    """Types and shapes of offsets, lengths, pages and block lists."""
    for name, rank in _INTEGERS.items():
        value = getattr(call, name)
        if value is None:
            continue
        kind = str(value.dtype).removeprefix("torch.")
        if not kind.lstrip("<>=|").startswith(("int", "uint")):
            raise TypeError(f"{name} must hold integers; got dtype {kind}")
        if len(value.shape) != rank:
            raise ValueError(f"{name} must have rank {rank}; got shape {tuple(value.shape)}")
    if call.page_table is not None and call.cu_seqlens_k is not None:
        raise ValueError("page_table and cu_seqlens_k exclude each other; got both")
    if call.page_table is not None and call.seqused_k is None:
        raise ValueError("page_table needs seqused_k, the length of each sequence; got None")
    batch = call.batch
    if batch < 0 or call.batch_k < 0:
        raise ValueError("cu_seqlens must have at least one entry; got none")
    if call.batch_k != batch:
        raise ValueError(f"q has {batch} sequences, k has {call.batch_k}: they must agree")
    for name in ("seqused_q", "seqused_k"):
        used = getattr(call, name)
        if used is not None and len(used) != batch:
            raise ValueError(f"{name} must have {batch} entries; got {len(used)}")
    if call.sparse_block:
        _check_blocks(call)


def _check_blocks(call: Call) -> None:
    """Block lists cover every block."""
    rows, columns = call.sparse_block
    blocks_q, blocks_k = -(-call.q.shape[-3] // rows), -(-call.k.shape[-3] // columns)
    heads = call.q.shape[-2]
    for kind in ("mask", "full"):
        counts, indices = getattr(call, f"{kind}_block_cnt"), getattr(call, f"{kind}_block_idx")
        if counts is None:
            continue
        shape = tuple(counts.shape)
        good = shape[0] in (1, call.batch) and shape[1] in (1, heads) and shape[2] == blocks_q
        if not good:
            expected = f"({call.batch} or 1, {heads} or 1, {blocks_q})"
            raise ValueError(f"{kind}_block_cnt must be {expected}; got {shape}")
        found = tuple(indices.shape)
        if found[:3] != shape or found[3] < blocks_k:
            raise ValueError(
                f"{kind}_block_idx must be {shape} + (at least {blocks_k},); got {found}"
            )


def _check_factors(call: Call) -> None:
    """The sink, and the factors of FP8 inputs."""
    heads, heads_k = call.q.shape[-2], call.k.shape[-2]
    sink = call.learnable_sink
    if sink is not None and tuple(sink.shape) != (heads,):
        raise ValueError(f"learnable_sink must be ({heads},); got shape {tuple(sink.shape)}")
    for name in ("q_descale", "k_descale", "v_descale"):
        factor = getattr(call, name)
        if factor is None:
            continue
        if call.dtype not in ("e4m3", "e5m2"):
            raise ValueError(f"{name} applies to FP8 inputs only; q, k, v are {call.dtype}")
        if tuple(factor.shape) != (call.batch, heads_k):
            raise ValueError(
                f"{name} must be (batch, heads_k) = {(call.batch, heads_k)}; "
                f"got {tuple(factor.shape)}"
            )


def _check_options(call: Call) -> None:
    """Numbers, and combinations without a meaning."""
    require_int("num_splits", call.num_splits, 0, 256)
    if call.pack_gqa not in (None, True, False):
        raise TypeError(f"pack_gqa must be True, False or None; got {call.pack_gqa!r}")
    Dropout(probability=call.dropout_p, seed=call.dropout_seed or 0)
    Attention(
        softmax_scale=call.softmax_scale, window=call.window, softcap=call.softcap,
        score_mod=call.extras.score_mod, mask_mod=call.extras.mask_mod,
    )  # fmt: skip
    if call.extras.forward_config is not None:
        call.extras.forward_config.check_dtype(call.dtype)
