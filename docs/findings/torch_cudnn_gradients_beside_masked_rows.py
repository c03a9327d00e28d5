"""torch's cuDNN attention: a row that sees no key spoils dV of the others."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.manual_seed(0)
q, k, v = (torch.randn(1, 1, 2, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))
mask = torch.tensor([[True, True], [False, False]], device="cuda")
for kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH):
    with sdpa_kernel(kernel):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    dv = torch.autograd.grad(out, v, torch.ones_like(out))[0]
    print(f"{kernel.name}: O of the row {out[0, 0, 1, 0]:.3f}, dV {dv[0, 0, :, 0].tolist()}")
