"""A function on torch tensors (B, S, H, D) as a back end on NumPy arrays, with its gradients.

Elements are carried bit by bit, strides of views too. The function takes the keywords of
`fa4.flash_attn_func` that its signature names, arrays among them as tensors, and returns `out` or
`(out, lse)`. Gradients, those of a sink and through the LSE included, come from autograd.

Attributes of the function, besides those that `fa4.testing.contract` names: `device`, where it
runs; `backward`, a function on tensors in place of autograd, or None if there are no gradients;
`lse_gradient = False` if nothing flows back through its LSE.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from fa4.call.arrays import like
from fa4.testing.guard import copies_of
from fa4.testing.refusals import named_keywords, readable

_COPIED = ("fa4_dropout", "not_covered", "claims", "numerics", "unsupported", "uses_cuda")


def need_torch(what: str) -> Any:
    """The module torch; ValueError with the pip command if it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise ValueError(f"{what} needs torch: pip install torch") from error
    return torch


def check_device(device: str, what: str) -> str:
    """`device` if torch can use it here, else ValueError."""
    torch = need_torch(what)
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"{what}: torch knows no device {device!r}") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{what} needs a CUDA device; torch {torch.__version__} sees none")
    return device


def numpy_function(function: Callable[..., Any], device: str | None = None) -> Callable[..., Any]:
    """The back end function, with the attributes that the kit reads; see the module.

    Raises ValueError if torch, or the device, is missing.
    """
    name = getattr(function, "__name__", "a torch function")
    device = check_device(device or str(getattr(function, "device", "cpu")), name)
    varlen = getattr(function, "varlen", None)
    if varlen is None and "cu_seqlens_q" in named_keywords(function)[0]:
        varlen = function
    run = _forward(function, device)
    for attribute in _COPIED:
        if hasattr(function, attribute):
            setattr(run, attribute, getattr(function, attribute))
    run.uses_cuda = device.startswith("cuda")  # type: ignore[attr-defined]
    if varlen is not None:
        run.varlen = run if varlen is function else _forward(varlen, device)  # type: ignore[attr-defined]
    own = getattr(function, "backward", ...)
    if own is ...:
        run.backward = _autograd(function, varlen, device)  # type: ignore[attr-defined]
    elif own is not None:
        run.backward = _forward(own, device)  # type: ignore[attr-defined]
    return run


def to_torch(x: np.ndarray, device: str) -> Any:
    """A tensor with the elements and, where torch has them, the strides of `x`.

    Of an array that is kept over several calls, the same tensor each time.
    """
    copies = copies_of(x)
    if copies is None:
        return _to_torch(x, device)
    fresh = _to_torch(x, device)
    kept = copies.setdefault(device, fresh)
    if kept is not fresh:
        kept.copy_(fresh)
    return kept


def _to_torch(x: np.ndarray, device: str) -> Any:
    import torch

    template = torch.empty(0, device=device)
    base = x.base
    strides = [step // x.itemsize for step in x.strides]
    if (
        not isinstance(base, np.ndarray)
        or base.dtype != x.dtype
        or not base.flags.c_contiguous
        or x.flags.c_contiguous
        or min(strides, default=0) < 0
    ):
        return like(template, np.array(x, order="C"))  # a copy: torch warns of read-only memory
    offset = (x.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // x.itemsize
    return torch.as_strided(like(template, np.array(base)), x.shape, strides, offset)


def _tensors(value: Any, device: str) -> Any:
    """Arrays as tensors, also inside tuples and lists; the rest as it is."""
    if isinstance(value, np.ndarray):
        return to_torch(value, device)
    if isinstance(value, (tuple, list)):
        items = [_tensors(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _arrays(result: Any) -> Any:
    """Tensors as arrays; a tuple of results as a tuple."""
    if isinstance(result, (tuple, list)):
        return tuple(_arrays(item) for item in result)
    return readable("a result", result) if hasattr(result, "detach") else result


def _forward(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    def run(*arrays: Any, **options: Any) -> Any:
        import torch

        tensors = [_tensors(x, device) for x in arrays]
        with torch.no_grad():
            result = function(*tensors, **{n: _tensors(x, device) for n, x in options.items()})
        return _arrays(result)

    run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return run


def _autograd(
    function: Callable[..., Any], varlen: Callable[..., Any] | None, device: str
) -> Callable[..., Any]:
    """backward(dout, q, k, v, out, lse, **options), by running the function again."""

    def backward(*arrays: Any, dlse: Any = None, **options: Any) -> tuple[Any, ...]:
        import torch

        packed = any(name.startswith(("cu_seqlens", "seqused", "page")) for name in options)
        chosen = varlen if packed and varlen is not None else function
        names, takes_any = named_keywords(chosen)
        dout = _tensors(arrays[0], device)
        leaves = [_tensors(x, device).detach().requires_grad_() for x in arrays[1:4]]
        if "score_mod_bwd" not in names:
            options.pop("score_mod_bwd", None)
        passed = {name: _tensors(value, device) for name, value in options.items()}
        if "learnable_sink" in passed:
            sink = passed["learnable_sink"]
            wide = torch.promote_types(sink.dtype, leaves[0].dtype)  # its gradient is of its type
            passed["learnable_sink"] = sink.detach().to(wide).requires_grad_()
            leaves.append(passed["learnable_sink"])
        if dlse is not None and ("return_lse" in names or takes_any):
            passed["return_lse"] = True
        with torch.enable_grad():
            result = chosen(*leaves[:3], **passed)
        out, lse = result if isinstance(result, (tuple, list)) else (result, None)
        ends, given = [out], [dout]
        if dlse is not None:
            if lse is None or not lse.requires_grad:
                raise NotImplementedError("its LSE has no gradient")
            ends.append(lse)
            given.append(_tensors(dlse, device).to(lse.dtype))
        grads = torch.autograd.grad(ends, leaves, given)
        return _arrays(grads)

    backward.__signature__ = _backward_signature(function, varlen)  # type: ignore[attr-defined]
    return backward


def _backward_signature(
    function: Callable[..., Any], varlen: Callable[..., Any] | None
) -> inspect.Signature:
    """The keywords of both functions, score_mod_bwd and dlse where they have a meaning."""
    names, takes_any = named_keywords(function)
    if varlen is not None:
        more, any_more = named_keywords(varlen)
        names, takes_any = names | more, takes_any or any_more
    names -= {"q", "k", "v", "return_lse"}
    if "score_mod" in names:
        names |= {"score_mod_bwd"}
    if "return_lse" in named_keywords(function)[0] and getattr(function, "lse_gradient", True):
        names |= {"dlse"}
    kinds = inspect.Parameter
    parameters = [kinds("arrays", kinds.VAR_POSITIONAL)]
    parameters += [kinds(name, kinds.KEYWORD_ONLY) for name in sorted(names)]
    if takes_any:
        parameters.append(kinds("options", kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)
