"""Scripts that use torch's `context_parallel`, by changing one import.

    from fa4.distributed import context_parallel        # was torch.distributed.tensor.experimental

    with context_parallel(mesh, buffers=[tokens, labels, cos], buffer_seq_dims=[1, 1, 0]):
        loss = model(tokens, ...); loss.backward()

Inside, the buffers hold this rank's rows, and torch's scaled_dot_product_attention attends to the
rows of all ranks. Call backward inside too, if parts are computed again there (checkpointing).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from fa4.distributed.front import attention, process_group
from fa4.distributed.layout import RowLayout, make_layout

_TORCH_SDPA = torch.nn.functional.scaled_dot_product_attention


class _ShardedSdpa(TorchFunctionMode):
    """Calls of torch's function, by any name, are sharded calls."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch's protocol."""
        kwargs = kwargs or {}
        return self.attend(*args, **kwargs) if func is _TORCH_SDPA else func(*args, **kwargs)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Torch's arguments, (B, heads, rows, dim), of this rank's rows."""
        if attn_mask is not None:
            raise NotImplementedError("attn_mask: sharded calls have causal, window and documents")
        if dropout_p:
            raise NotImplementedError(f"dropout_p must be 0 in a sharded call; got {dropout_p}")
        if query.shape[1] != key.shape[1] and not enable_gqa:
            heads = f"{query.shape[1]} and {key.shape[1]}"
            raise ValueError(f"query and key must have the same heads (enable_gqa); got {heads}")
        tensors = (x.transpose(1, 2) for x in (query, key, value))
        options = {"causal": is_causal, "softmax_scale": scale, **self.options}
        out = attention(*tensors, **options)
        return out.transpose(1, 2)


@contextmanager
def context_parallel(
    mesh: Any = None,
    *,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[torch.Tensor] | None = None,
    layout: str | RowLayout = "zigzag",
    **options: Any,
) -> Iterator[None]:
    """Shard buffers in place, and torch's attention with them; what was sharded comes back after.

    Args:
        mesh: a one-dimensional device mesh, a process group, or None for all ranks.
        buffers, buffer_seq_dims, no_restore_buffers: as torch's: tensors that inside hold this
            rank's rows of the given dimension; those not to be restored.
        layout: a name, or a `RowLayout` of that many rows. options: of `attention`: method, impl,
            window_size, softcap, order.

    Raises ValueError for buffers without dimensions, or of different lengths under one `RowLayout`.
    """
    group = process_group(mesh)
    given, dims = list(buffers or ()), list(buffer_seq_dims or ())
    if len(given) != len(dims):
        raise ValueError(f"buffer_seq_dims must have {len(given)} entries; got {len(dims)}")
    kept = set(map(id, no_restore_buffers or ()))
    saved = [None if id(x) in kept else x.detach().clone() for x in given]
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for x, dim in zip(given, dims, strict=True):
        length = x.shape[dim]
        mine = layout if isinstance(layout, RowLayout) else make_layout(layout, length, ranks)
        _refill(x, mine.shard(x.detach(), rank, dim))
    mode = _ShardedSdpa({"group": group, "layout": layout, **options})
    try:
        torch.nn.functional.scaled_dot_product_attention = mode.attend
        with mode:
            yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = _TORCH_SDPA
        for x, whole in zip(given, saved, strict=True):
            if whole is not None:
                _refill(x, whole)


def _refill(buffer: torch.Tensor, content: torch.Tensor) -> None:
    """Give a buffer another size and content, in place: other names of it see that too."""
    with torch.no_grad():
        buffer.resize_(content.shape).copy_(content)
