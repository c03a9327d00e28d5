"""torch's flash attention: rows that are no multiple of 16 bytes apart are not refused."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

q = torch.randn(1, 1, 2, 67, device="cuda").bfloat16()[..., :64]  # rows 134 bytes apart
with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
    found = torch.nn.functional.scaled_dot_product_attention(q, q, q)
with sdpa_kernel(SDPBackend.MATH):
    right = torch.nn.functional.scaled_dot_product_attention(q, q, q)
print(f"found {found[0, 0, 0, :3].tolist()}, right {right[0, 0, 0, :3].tolist()}")
