"""`with fa4.replace_sdpa():` puts `fa4.sdpa` under every model that calls torch's function.

Two ways lead to torch's function. A call from Python by any name, such as one that was imported
before, is seen by a mode of torch's; what torch's own modules call, such as
torch.nn.MultiheadAttention, is looked up in torch.nn.functional.
"""

from __future__ import annotations

import threading
from typing import Any

from fa4.dropin.sdpa import sdpa  # first: it says what is missing

# isort: split
import torch
from torch.overrides import TorchFunctionMode

_TORCH_SDPA = torch.nn.functional.scaled_dot_product_attention


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
    """One block more, or one less; the last one that ends restores torch's function."""
    global _blocks
    with _lock:
        _blocks += change
        function = _look_up if _blocks else _TORCH_SDPA
        torch.nn.functional.scaled_dot_product_attention = function


def replace_sdpa(impl: str = "auto") -> ReplacedSdpa:
    """A context manager: `torch.nn.functional.scaled_dot_product_attention` becomes `fa4.sdpa`.

    In the thread that enters it, under whatever name the function was imported. What `fa4.sdpa`
    refuses is refused; nothing goes back to torch's function silently.
    """
    return ReplacedSdpa(impl)
