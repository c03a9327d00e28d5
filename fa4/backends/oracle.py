"""The definition in float64, whose results stay float64."""

from __future__ import annotations

from typing import Any

from fa4.backends import AttentionGradients, Saved
from fa4.backends.request import make_request
from fa4.call.arrays import like, to_numpy
from fa4.call.call import Call
from fa4.oracle import attend_batch, differentiate_batch


def supports(call: Call, *, gradient: bool = False) -> str:
    """It computes every call that has a meaning."""
    del call, gradient
    return ""


def forward(call: Call, *, lse: bool = True, gradient: bool = False) -> tuple[Any, Any]:
    """(O, LSE), float64."""
    del lse, gradient  # costs nothing
    request = make_request(call)
    out, found = attend_batch(request.q, request.k, request.v, request.keywords)
    return like(call.q, out), like(call.q, found)


def backward(call: Call, saved: Saved, dout: Any, dlse: Any) -> AttentionGradients:
    """Float64 gradients; O and LSE are computed again, so that nothing saved is needed."""
    del saved
    request = make_request(call)
    upstream = None if dlse is None else to_numpy("dlse", dlse)
    result = differentiate_batch(
        (request.q, request.k, request.v), to_numpy("dout", dout), upstream, request.keywords
    )
    return AttentionGradients(*(x if x is None else like(call.q, x) for x in result))
