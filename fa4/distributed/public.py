"""Blocks by any implementation of the public functions, or by a kernel of somebody else's.

Partial results keep fp32 once two of them were merged; gradients are summed in fp32. float64 stays
float64. On a GPU a merge is one kernel (`merging`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from fa4.call.arrays import is_torch
from fa4.distributed.execute import BlockPart, Tensors, rows_in
from fa4.distributed.plan import Shard, Sizes


class BlockKernel(Protocol):
    """Attention of (B, rows, heads, d), whoever computes it; LSE natural, (B, heads, rows)."""

    def forward(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[Any, Any]:
        """(O, LSE). options: softmax_scale, window_size and softcap of `fa4.flash_attn_func`."""

    def backward(
        self, dout: Any, q: Any, k: Any, v: Any, saved: tuple[Any, Any], options: dict[str, Any]
    ) -> tuple[Any, Any, Any]:
        """(dQ, dK, dV) from the (O, LSE) that it is given, which may be those of more keys."""


@dataclass(frozen=True)
class PublicKernel:
    """`fa4.flash_attn_func` and `fa4.flash_attn_backward` of an implementation."""

    impl: str = "auto"

    def forward(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[Any, Any]:
        """(O, LSE)."""
        from fa4.api import flash_attn_func

        found = flash_attn_func(q, k, v, **options, impl=self.impl, return_lse=True)
        return found.out, found.lse

    def backward(
        self, dout: Any, q: Any, k: Any, v: Any, saved: tuple[Any, Any], options: dict[str, Any]
    ) -> tuple[Any, Any, Any]:
        """(dQ, dK, dV). ValueError for the oracle, which takes no LSE but its own."""
        from fa4.api import flash_attn_backward

        if self.impl == "oracle":
            raise ValueError('impl must be one that takes a given LSE backward; got "oracle"')
        found = flash_attn_backward(dout, q, k, v, *saved, **options, impl=self.impl)
        return found.dq, found.dk, found.dv


@dataclass(frozen=True)
class PublicCalculator:
    """Blocks of the type and place of `like`, which is a torch tensor or a NumPy array."""

    sizes: Sizes
    kernel: BlockKernel
    like: Any
    softmax_scale: float
    softcap: float = 0.0

    def empty(self, piece: Shard) -> Tensors:
        """Uninitialised; of the type that the kind has on the wire."""
        d, dv = self.sizes.head_dim, self.sizes.head_dim_v
        own, wide = self._own, self._wide
        widths = {
            "q": ((d, own),),
            "kv": ((d, own), (dv, own)),
            "o": ((dv, wide), (1, wide)),
            "out": ((dv, own), (1, wide)),
            "g": ((d, own), (dv, own), (1, wide), (dv, own)),
            "dq": ((d, wide),),
            "dkv": ((d, wide), (dv, wide)),
        }[piece.kind]
        shape = (self.sizes.batch, rows_in(piece), len(piece.heads))
        return tuple(self._new((*shape, width), dtype) for width, dtype in widths)

    def zeros(self, piece: Shard) -> Tensors:
        """O = 0 and LSE = -inf; gradients 0."""
        found = self.empty(piece)
        for x in found:
            x[...] = 0
        if piece.kind in ("o", "out"):
            found[1][...] = -float("inf")
        return found

    def attend(self, q: Tensors, kv: Tensors, part: BlockPart) -> Tensors:
        """(O, LSE) of a block, LSE as (B, rows, heads, 1)."""
        out, lse = self.kernel.forward(q[0], kv[0], kv[1], self._options(part))
        return out, lse.swapaxes(1, 2)[..., None]

    def differentiate(
        self, g: Tensors, kv: Tensors, part: BlockPart, wanted: tuple[bool, bool]
    ) -> tuple[Tensors, Tensors]:
        """(dq,) and (dk, dv), by one call for both."""
        q, dout, lse, out = g
        saved = (_contiguous(out), _contiguous(lse[..., 0].swapaxes(1, 2)))
        given = (_contiguous(dout), q, kv[0], kv[1], saved)
        dq, dk, dv = self.kernel.backward(*given, self._options(part))
        return (dq,) if wanted[0] else (), (dk, dv) if wanted[1] else ()

    def accumulate(self, kind: str, into: Tensors, more: Tensors) -> None:
        """Merge or add, in place, with sums in fp32."""
        if kind in ("o", "out"):
            find_merger(into[0], more[0])(*into, *more)
            return
        for x, y in zip(into, more, strict=True):
            x += y

    def widen(self, held: Tensors) -> Tensors:
        """16-bit tensors as fp32."""
        wide = self._wide
        return tuple(
            x if x.dtype == wide else x.to(wide) if is_torch(x) else x.astype(wide) for x in held
        )

    @property
    def _own(self) -> Any:
        return self.like.dtype

    @property
    def _wide(self) -> Any:
        if is_torch(self.like):
            import torch

            return torch.float64 if self.like.dtype == torch.float64 else torch.float32
        import numpy as np

        return np.dtype(np.float64 if self.like.dtype == np.float64 else np.float32)

    def _new(self, shape: tuple[int, ...], dtype: Any) -> Any:
        if is_torch(self.like):
            return self.like.new_empty(shape, dtype=dtype)
        import numpy as np

        return np.empty(shape, dtype)

    def _options(self, part: BlockPart) -> dict[str, Any]:
        return {
            "softmax_scale": self.softmax_scale,
            "window_size": part.block.window,
            "softcap": self.softcap,
        }


def _contiguous(x: Any) -> Any:
    if is_torch(x):
        return x.contiguous()
    import numpy as np

    return np.ascontiguousarray(x)


def find_merger(out: Any, more: Any) -> Callable[..., None]:
    """What merges partial results of their kind and place."""
    if not is_torch(out):
        return _merge_arrays
    if not out.is_cuda:
        return _merge_tensors
    try:
        from fa4.distributed import merging
    except ImportError:  # a torch without Triton
        return _merge_tensors
    return merging.merge if merging.fits(out, more) else _merge_tensors


def _merge_tensors(out: Any, lse: Any, more: Any, more_lse: Any) -> None:
    """out, lse = attention over the keys of both; rows that see none keep 0 and -inf."""
    import torch

    total = torch.logaddexp(lse, more_lse)
    safe = torch.where(total == -float("inf"), 0.0, total)
    merged = out * torch.exp(lse - safe) + more * torch.exp(more_lse - safe)
    out.copy_(merged)
    lse.copy_(total)


def _merge_arrays(out: Any, lse: Any, more: Any, more_lse: Any) -> None:
    import numpy as np

    total = np.logaddexp(lse, more_lse)
    safe = np.where(np.isneginf(total), np.zeros_like(total), total)
    out[...] = (out * np.exp(lse - safe) + more * np.exp(more_lse - safe)).astype(out.dtype)
    lse[...] = total
