"""flash-attn-4 on Hopper: the LSE is +inf with a sink of 100."""

import torch
from flash_attn.cute import flash_attn_func

q = torch.ones(1, 1, 1, 64, device="cuda", dtype=torch.bfloat16)
sink = torch.full((1,), 100.0, device="cuda", dtype=torch.bfloat16)
out, lse = flash_attn_func(q, q, q, learnable_sink=sink, return_lse=True)
print(f"LSE {lse.item()}; right is log(exp(8) + exp(100)) = 100")
