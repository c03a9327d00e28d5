"""FlashAttention-4's algorithm in NumPy, in the kernel's order of operations."""

from __future__ import annotations

from typing import Any

from fa4.backends import AttentionGradients, Saved
from fa4.backends.request import make_request
from fa4.call.arrays import like, to_numpy
from fa4.call.call import Call
from fa4.reference import SavedForward, attention_backward, attention_forward


def supports(call: Call, *, gradient: bool = False) -> str:
    """It computes every call that has a meaning."""
    del call, gradient
    return ""


def forward(call: Call, *, lse: bool = True, gradient: bool = False) -> tuple[Any, Any]:
    """(O, LSE)."""
    del lse, gradient  # costs nothing
    request = make_request(call)
    result = attention_forward(
        request.q,
        request.k,
        request.v,
        request.spec,
        request.forward_config,
        packing=request.packing,
    )
    return like(call.q, result.out), like(call.q, result.lse)


def backward(call: Call, saved: Saved, dout: Any, dlse: Any) -> AttentionGradients:
    """AttentionGradients from the saved O and LSE."""
    request = make_request(call)
    result = attention_backward(
        (request.q, request.k, request.v),
        SavedForward(
            out=to_numpy("out", saved.out),
            lse=to_numpy("lse", saved.lse),
            dout=to_numpy("dout", dout),
            dlse=None if dlse is None else to_numpy("dlse", dlse),
            residual=(None if saved.residual is None else to_numpy("out_residual", saved.residual)),
        ),
        request.spec,
        request.backward_config,
        packing=request.packing,
    )
    found = (result.dq, result.dk, result.dv, result.dsink)
    return AttentionGradients(*(x if x is None else like(call.q, x) for x in found))
