"""flash-attn-4 on Hopper: gradients of rows behind seqused_q and seqused_k are left unwritten.

Dao-AILab/flash-attention#2167 says so of the Blackwell kernel; gradients of a whole tensor carry it
on.
"""

import torch
from flash_attn.cute import flash_attn_varlen_func

torch.manual_seed(0)
q, k, v = (torch.randn(2, 8, 1, 32, device="cuda").bfloat16().requires_grad_() for _ in range(3))
used = torch.tensor([3, 5], device="cuda", dtype=torch.int32)
out, *_ = flash_attn_varlen_func(q, k, v, seqused_q=used, seqused_k=used)
poison = [torch.full((n, 8, 1, 32), 96.0, device="cuda").bfloat16() for n in (2,) * 64]
del poison
for name, x in zip("qkv", torch.autograd.grad(out, (q, k, v), torch.ones_like(out)), strict=True):
    print(f"d{name} of a row that is not used: {x[0, 6, 0, :3].tolist()}")
