"""A Triton kernel that forgets its mask, on a machine without a GPU.

    pip install triton
    fa4 emulate examples/triton_overrun.py

The last program loads and stores behind the ends of both tensors. A GPU usually does so silently;
here the load is named, with its line.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def double(x, y, size: tl.constexpr):
    """y = 2 x, without a look at how many elements there are."""
    i = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(y + i, 2 * tl.load(x + i))


x = torch.randn(1000, device="cuda")
y = torch.empty_like(x)
double[(triton.cdiv(x.numel(), 128),)](x, y, 128)
