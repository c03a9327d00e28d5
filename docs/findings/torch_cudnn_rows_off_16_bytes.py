"""torch's cudnn attention: rows that are no multiple of 16 bytes apart are not refused."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

q = torch.full((1, 1, 2, 11), torch.nan, device="cuda").bfloat16()[..., :8]  # 22 bytes apart
q.copy_(torch.randn(q.shape))
with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
    found = torch.nn.functional.scaled_dot_product_attention(q, q, q)
with sdpa_kernel(SDPBackend.MATH):
    right = torch.nn.functional.scaled_dot_product_attention(q, q, q)
print(f"found {found[0, 0, 0, :3].tolist()}, right {right[0, 0, 0, :3].tolist()}")
