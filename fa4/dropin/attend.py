"""The way of every drop-in call: the public function, with a modification in the right language."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa4.api import flash_attn_func, flash_attn_varlen_func
from fa4.backends import KERNELS, ON_GPU
from fa4.call.arrays import is_torch
from fa4.call.checked import make_call
from fa4.call.choose import choose
from fa4.call.compute import AttentionOutput
from fa4.dropin.mods import Modification

Tensors = tuple[Any, Any, Any]


def attend(
    tensors: Tensors,
    options: dict[str, Any],
    modification: Modification | None = None,
    *,
    varlen: bool = False,
    impl: str = "auto",
    return_lse: bool = False,
) -> Any:
    """`fa4.flash_attn_func` or `fa4.flash_attn_varlen_func` of (q, k, v), and one modification.

    options: keywords of that function without score_mod, mask_mod and aux_tensors. Gradients are
    those of the implementation; that of a bias, which no kernel has, is the reference's also where
    the emulator computed the result, and NotImplementedError on a GPU.
    """
    function: Any = flash_attn_varlen_func if varlen else flash_attn_func
    if modification is None:
        return function(*tensors, **options, impl=impl, return_lse=return_lse)
    if impl == "auto":
        impl = choose(make_call(*tensors, options, varlen=varlen))
        # The kernel only where it has the modification, too.
        impl = impl if modification.kernel or impl not in KERNELS else "reference"
    if modification.learned is not None and _wants_gradient(tensors, options, modification):
        if impl in ON_GPU:
            raise NotImplementedError(
                f"the {impl.upper()} backward kernel has no gradient of a bias: detach it, or use "
                'impl="reference"'
            )
        from fa4.dropin.gradients import attend_with_gradient

        result = attend_with_gradient(tensors, options, modification, varlen=varlen, impl=impl)
        return AttentionOutput(*result) if return_lse else result[0]
    mods = modification.for_kernel() if impl in KERNELS else modification.for_arrays()
    return function(*tensors, **options, **mods, impl=impl, return_lse=return_lse)


def _wants_gradient(tensors: Tensors, options: dict[str, Any], modification: Modification) -> bool:
    """Will autograd record this call?"""
    if not is_torch(tensors[0]):
        return False
    import torch

    given: tuple[Any, ...] = (*tensors, options.get("learnable_sink"), modification.learned)
    return torch.is_grad_enabled() and any(is_torch(x) and x.requires_grad for x in given)


def dropout(probability: float, q: Any) -> dict[str, Any]:
    """Options for dropout with a new seed: of torch's generator for tensors, else of NumPy's."""
    if not probability:
        return {}
    if is_torch(q):
        import torch

        seed = int(torch.randint(2**63 - 1, ()))
    else:
        seed = int(np.random.randint(2**63 - 1))  # noqa: NPY002 - the one that np.random.seed sets
    return {"dropout_p": probability, "dropout_seed": seed}
