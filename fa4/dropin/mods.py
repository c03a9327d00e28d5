"""ALiBi, dense masks and dense biases as score_mod and mask_mod.

One function serves both languages: NumPy calls it with arrays of indices, CuTe-DSL traces it with
one scalar of each. Its tensors come in as aux_tensors, since a kernel reads no closures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from fa4.call.arrays import is_torch, to_numpy

Callback = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Modification:
    """One score_mod, with its derivative, or mask_mod, with the tensors that it reads.

    gradient None: a mask. kernel False: not written in the kernel's language. learned: the bias
    (B or 1, Hq or 1, Sq or 1, Sk or 1) that is added, where its gradient is wanted.
    """

    function: Callback
    gradient: Callback | None = None
    aux: tuple[Any, ...]
    kernel: bool = True
    learned: Any = None

    def for_arrays(self) -> dict[str, Any]:
        """Keywords of `fa4.flash_attn_func` for the reference and the oracle."""
        given = {"aux_tensors": list(self.aux)}
        if self.gradient is None:
            return given | {"mask_mod": self.function}
        return given | {"score_mod": self.function, "score_mod_bwd": self.gradient}

    def for_kernel(self) -> dict[str, Any]:
        """For the kernels. ImportError without CuTe-DSL, NotImplementedError by `kernel`."""
        if not self.kernel:
            raise NotImplementedError(
                "ALiBi with softcap is not in the kernel; impl must be auto, reference or oracle"
            )
        given: dict[str, Any] = {"aux_tensors": list(self.aux)}
        function = _compiled(self.function)
        if self.gradient is None:
            return given | {"mask_mod": function}
        return given | {"score_mod": function, "score_mod_bwd": _compiled(self.gradient)}


@cache
def _compiled(function: Callback) -> Callback:
    """The one CuTe-DSL function made of a Python function: kernels are kept by it."""
    from cutlass import cute

    return cute.jit(function)


def _alibi(score: Any, b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    return score - aux[0][b, h] * abs(j - i - (info.seqlen_k - info.seqlen_q))


def _same(grad: Any, score: Any, b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    return grad


def _capped_alibi(score: Any, b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    return _alibi(aux[1] * np.tanh(score / aux[1]), b, h, i, j, info, aux)


def _capped(grad: Any, score: Any, b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    return grad * (1.0 - np.tanh(score / aux[1]) ** 2)


def _biased(score: Any, b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    return score + aux[0][b, h, i, j]


def _shown(b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    return aux[0][b, h, i, j] != 0


def alibi(slopes: Any, batch: int, heads: int, softcap: float = 0.0) -> Modification:
    """Score of query i and key j minus slope |i + Sk - Sq - j|, after the softcap if there is one.

    slopes: (Hq,) or (B, Hq), an array or tensor; they get no gradient, as in flash_attn 2.
    Source: Press et al., "Train Short, Test Long", 2022, section 3. ValueError for other shapes.
    """
    shape = tuple(slopes.shape)
    if shape not in ((heads,), (batch, heads)):
        raise ValueError(f"alibi_slopes must be ({heads},) or ({batch}, {heads}); got {shape}")
    if is_torch(slopes):
        rows = slopes.detach().float().expand(batch, heads)
    else:
        rows = np.broadcast_to(to_numpy("alibi_slopes", slopes).astype(np.float32), (batch, heads))
    if softcap:
        cap = np.array([softcap], np.float32) if not is_torch(rows) else rows.new_tensor([softcap])
        return Modification(function=_capped_alibi, gradient=_capped, aux=(rows, cap), kernel=False)
    return Modification(function=_alibi, gradient=_same, aux=(rows,))


def dense_mask(mask: Any, shape: tuple[int, int, int, int]) -> Modification:
    """A boolean torch tensor that broadcasts to `shape`, (B, Hq, Sq, Sk): True is visible."""
    import torch

    return Modification(function=_shown, aux=(mask.detach().to(torch.int32).expand(shape),))


def dense_bias(bias: Any, shape: tuple[int, int, int, int]) -> Modification:
    """A floating torch tensor of rank 4 that broadcasts to `shape`, (B, Hq, Sq, Sk), to be added.

    It gets its gradient. What is added is its distance from the row's largest value, which changes
    no probability and keeps the LSE exact: with -3e38 in a whole row, as padding may have it, the
    score is lost in the sum, and in the backward pass every probability would be 1.
    """
    import torch

    wide = torch.float64 if bias.dtype == torch.float64 else torch.float32
    values = bias.detach().to(wide)
    if values.numel():
        top = values.amax(dim=-1, keepdim=True)
        values = values - torch.where(top.isfinite(), top, 0.0)
        # A tile may hold nothing else, and a softmax in base 2 multiplies by 1.44.
        least = torch.finfo(wide).min / 4
        values = torch.where(values.isinf(), values, values.clamp(min=least))
    learned = bias if bias.requires_grad and torch.is_grad_enabled() else None
    return Modification(
        function=_biased, gradient=_same, aux=(values.expand(shape),), learned=learned
    )
