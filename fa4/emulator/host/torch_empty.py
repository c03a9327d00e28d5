"""Tensors that torch allocates without writing them: kernels that read them are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fa4.emulator.host.patches import Replacements
from fa4.emulator.machine.unwritten import fill

# Larger ones, workspaces as a rule, count as written: filling them takes time and memory.
MOST_BYTES = 64 << 20
_FUNCTIONS = ("empty", "empty_like", "empty_strided", "empty_permuted")
_METHODS = ("new_empty", "new_empty_strided")


def empties(torch: Any) -> Replacements:
    """Replacements of the functions that make such tensors."""
    for owner, names in ((torch, _FUNCTIONS), (torch.Tensor, _METHODS)):
        for name in names:
            yield owner, name, _marking(torch, getattr(owner, name))


def _marking(torch: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        tensor = original(*args, **kwargs)
        if type(tensor) is torch.Tensor:
            with torch._C.DisableTorchFunction():
                _mark(torch, tensor)
        return tensor

    return marked


def _mark(torch: Any, tensor: Any) -> None:
    """Marks the memory of a tensor of this process's own memory."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return
    storage = tensor.untyped_storage()
    if 0 < storage.nbytes() <= MOST_BYTES:
        fill(storage.data_ptr(), storage.nbytes())
