"""flash-attn-4 on Hopper: softmax_scale=0, the mean of V, gives NaN."""

import torch
from flash_attn.cute import flash_attn_func

q = torch.ones(1, 2, 1, 64, device="cuda", dtype=torch.bfloat16)
out, *_ = flash_attn_func(q, q, q, softmax_scale=0.0)
print(f"O {out[0, 0, 0, 0].item()}; right is 1")
