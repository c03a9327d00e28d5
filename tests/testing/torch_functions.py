"""Functions on torch tensors as back ends: one that is right, and ways to be wrong."""

from __future__ import annotations

from typing import Any

from tests.testing.fakes import dense, packed


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    softcap: float = 0.0,
    learnable_sink: Any = None,
    return_lse: bool = False,
) -> Any:
    """Right, with everything differentiable."""
    window = (None, 0) if causal else (None, None)
    out, lse = dense(q, k, v, window, None, softcap, learnable_sink)
    return (out, lse) if return_lse else out


def varlen(q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any) -> Any:
    """Packed sequences; for `attention.varlen`."""
    return packed(q, k, v, cu_seqlens_q, cu_seqlens_k, (None, None))[0]


attention.varlen = varlen


def detached_lse(q: Any, k: Any, v: Any, *, return_lse: bool = False) -> Any:
    """Names the LSE, but cuts it off."""
    out, lse = attention(q, k, v, return_lse=True)
    return (out, lse.detach()) if return_lse else out


def detached_keys(q: Any, k: Any, v: Any) -> Any:
    """Cuts K off: a wrong gradient, but for autograd's own complaint."""
    return attention(q, k.detach() + 0 * k, v)


def kinds(q: Any, k: Any, v: Any) -> Any:
    """Whether the strides of the views arrived."""
    return v.new_full((*q.shape[:-1], v.shape[-1]), float(not k.is_contiguous()))
