"""`with fa4.replace_sdpa():` puts `fa4.sdpa` under every model that calls torch's function.

Two ways lead to torch's function. A call from Python by any name, such as one that was imported
before, is seen by a mode of torch's; what torch's own modules call, such as
torch.nn.MultiheadAttention, is looked up in torch.nn.functional. A part under activation
checkpointing is computed again in the backward pass, which may come after the block, and in another
thread: what was called inside is called again inside a block.
"""

from __future__ import annotations

import threading
from typing import Any

from fa4.dropin.sdpa import sdpa  # first: it says what is missing

# isort: split
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

_TORCH_SDPA = torch.nn.functional.scaled_dot_product_attention
# What torch.utils.checkpoint.checkpoint gives its function to, by use_reentrant=False and True.
_RECOMPUTE, _REENTRANT = "_checkpoint_without_reentrant_generator", "CheckpointFunction"
_TORCH_CHECKPOINTS = {x: getattr(checkpoint, x) for x in (_RECOMPUTE, _REENTRANT)}


class _Entered(threading.local):
    """The implementations of the blocks that this thread is in, the innermost last."""

    def __init__(self) -> None:
        self.impls: list[str] = []


_entered = _Entered()
_lock = threading.Lock()
_blocks = 0  # of all threads


def _look_up(*args: Any, **kwargs: Any) -> Any:
    """What torch.nn.functional has for its function while any thread is in a block."""
    if _entered.impls:
        return sdpa(*args, **kwargs, impl=_entered.impls[-1])
    return _TORCH_SDPA(*args, **kwargs)


def _remember(function: Any) -> Any:
    """The function as it is in the block that this thread is in now, whenever it is called."""
    if not _entered.impls:
        return function
    impl = _entered.impls[-1]

    def inside(*args: Any, **kwargs: Any) -> Any:
        with ReplacedSdpa(impl):
            return function(*args, **kwargs)

    return inside


def _recompute(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What torch.utils.checkpoint has for the first kind while any thread is in a block."""
    return _TORCH_CHECKPOINTS[_RECOMPUTE](_remember(function), *args, **kwargs)


class _Reentrant:
    """And for the second."""

    @staticmethod
    def apply(function: Any, *args: Any) -> Any:
        return _TORCH_CHECKPOINTS[_REENTRANT].apply(_remember(function), *args)


class ReplacedSdpa(TorchFunctionMode):
    """Inside, in this thread, every call of torch's function is a call of `fa4.sdpa`.

    While a mode is entered, torch.nn.MultiheadAttention does not take its way for inference, which
    calls no such function.
    """

    def __init__(self, impl: str) -> None:
        super().__init__()
        self.impl = impl

    def __enter__(self) -> Any:
        """Put the function in place."""
        _entered.impls.append(self.impl)
        _count(1)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        """Put torch's back."""
        super().__exit__(*raised)
        _count(-1)
        _entered.impls.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch's protocol: what a function that was called gives."""
        return (_look_up if func is _TORCH_SDPA else func)(*args, **(kwargs or {}))


def _count(change: int) -> None:
    """One block more, or one less; the last one that ends restores torch's functions."""
    global _blocks
    with _lock:
        _blocks += change
        function = _look_up if _blocks else _TORCH_SDPA
        torch.nn.functional.scaled_dot_product_attention = function
        ours = {_RECOMPUTE: _recompute, _REENTRANT: _Reentrant}
        for name, original in _TORCH_CHECKPOINTS.items():
            setattr(checkpoint, name, ours[name] if _blocks else original)


def replace_sdpa(impl: str = "auto") -> ReplacedSdpa:
    """A context manager: `torch.nn.functional.scaled_dot_product_attention` becomes `fa4.sdpa`.

    In the thread that enters it, under whatever name the function was imported. What `fa4.sdpa`
    refuses is refused; nothing goes back to torch's function silently.
    """
    return ReplacedSdpa(impl)
