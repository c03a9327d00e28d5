"""flash-attn-4 on Hopper: dQ of row 64 is 0 where there are 65 queries."""

import torch
from flash_attn.cute import flash_attn_func

torch.manual_seed(0)
q, k, v, dout = (torch.randn(1, n, 1, 8, device="cuda").bfloat16() for n in (65, 2, 2, 65))
out, *_ = flash_attn_func(q.requires_grad_(), k, v)
found = torch.autograd.grad(out, q, dout)[0][0, :, 0]
exact = q.detach().double().requires_grad_()
s = (exact[0, :, 0] @ k[0, :, 0].double().T * 8**-0.5).softmax(-1) @ v[0, :, 0].double()
right = torch.autograd.grad(s, exact, dout[0, :, 0].double())[0][0, :, 0]
print(f"largest error of dQ in rows 0 to 63: {(found - right)[:64].abs().max():.3f}")
print(f"row 64: found {found[64, :3].tolist()}, right {right[64, :3].tolist()}")
