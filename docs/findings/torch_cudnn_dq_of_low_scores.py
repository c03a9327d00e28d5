"""torch's cuDNN attention: dQ is NaN with a mask, 64 keys beyond a multiple of 128, low scores.

Reported as pytorch/pytorch#196678.
"""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.manual_seed(0)
q, k, v = (torch.randn(1, 1, n, 64, device="cuda").bfloat16() for n in (128, 192, 192))
mask = torch.full((128, 192), -100.0, device="cuda", dtype=torch.bfloat16)
for kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH):
    with sdpa_kernel(kernel):
        out = torch.nn.functional.scaled_dot_product_attention(q.requires_grad_(), k, v, mask)
    dq = torch.autograd.grad(out, q, torch.ones_like(out))[0]
    print(f"{kernel.name}: {dq.isnan().sum()} NaN in dQ")
