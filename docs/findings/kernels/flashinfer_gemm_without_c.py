"""FlashInfer's gemm_persistent without C multiplies uninitialised memory by 0: NaN stays NaN.

Needs flashinfer-python. Without a GPU: fa4 emulate THIS --fail-on error
"""

import torch
from flashinfer.triton.sm_constraint_gemm import gemm_persistent

a, b = (torch.ones(64, 64, device="cuda").half() for _ in range(2))
poison = [torch.full((64, 64), torch.nan, device="cuda").half() for _ in range(64)]
del poison  # what was freed is given out again, as it is
c = gemm_persistent(a, b)
print(f"{c.isnan().sum().item()} NaN of {c.numel()}; right is 64 everywhere")
