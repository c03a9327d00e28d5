"""Kernels of a GPU as back ends, other libraries' where they are installed: one file each.

A module of this package has `make(name, device)`, which returns a function on torch tensors with
the conventions of `fa4.flash_attn_func` (see `fa4.testing.torch_function`), and raises ValueError
with one line if its library or device is missing. What it refuses is said by its attributes.
"""

from __future__ import annotations

import importlib

from fa4.testing.contract import Backend

# name: module of this package
ADAPTERS = {
    "torch-sdpa": "sdpa",
    "torch-sdpa-math": "sdpa",
    "torch-sdpa-flash": "sdpa",
    "torch-sdpa-efficient": "sdpa",
    "torch-sdpa-cudnn": "sdpa",
    "flash-attn-2": "flash_attn_2",
    "flash-attn-3": "flash_attn_3",
    "flash-attn-4": "flash_attn_4",
    "xformers": "xformers",
    "flashinfer": "flashinfer",
    "flex-attention": "flex",
    "fa4-sm90": "own_kernels",
    "fa4-sm100": "own_kernels",
}


def load_adapter(name: str, device: str | None = None) -> Backend:
    """The back end of a name in ADAPTERS, on its usual device unless another is given.

    Raises ValueError with one line that says what to install, or that there is no GPU.
    """
    from fa4.testing.torch_function import need_torch, numpy_function

    need_torch(name)
    module = importlib.import_module(f"{__name__}.{ADAPTERS[name]}")
    return Backend.wrap(numpy_function(module.make(name, device)), name)
