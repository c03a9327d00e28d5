"""torch's cuDNN attention: O and all gradients are NaN with a scale of 0 or below."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.manual_seed(0)
q, k, v = (torch.randn(1, 1, 2, 8, device="cuda").bfloat16().requires_grad_() for _ in range(3))
for scale in (-0.25, 0.0):
    for kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(kernel):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
        found = (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))
        nan = [x.isnan().any().item() for x in found]
        print(f"{kernel.name}, scale {scale}: NaN in O, dQ, dK and dV: {nan}")
