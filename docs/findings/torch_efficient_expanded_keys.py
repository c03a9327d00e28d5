"""torch's memory-efficient attention: with a mask and expanded K and V, O is wrong.

Reported as pytorch/pytorch#191937, closed for want of a reproduction: 385 keys are 1 beyond a
multiple of 32.
"""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.manual_seed(0)
q, k, v = (torch.randn(1, n, s, 192, device="cuda") for n, s in ((2, 33), (1, 385), (1, 385)))
mask = torch.ones(33, 385, dtype=torch.bool, device="cuda").triu(352).tril(352)
for name, copied in (("expanded", False), ("contiguous", True)):
    k2, v2 = (x.expand(-1, 2, -1, -1) for x in (k, v))
    k2, v2 = (k2.contiguous(), v2.contiguous()) if copied else (k2, v2)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        found = torch.nn.functional.scaled_dot_product_attention(q, k2, v2, attn_mask=mask)
    with sdpa_kernel(SDPBackend.MATH):
        right = torch.nn.functional.scaled_dot_product_attention(q, k2, v2, attn_mask=mask)
    print(f"{name} K and V: largest error {(found - right).abs().max():.1e}")
