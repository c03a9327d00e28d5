"""A Helion GEMM, as a user writes it."""

import helion
import helion.language as hl
import torch


@helion.kernel(config=helion.Config(block_sizes=[64, 64, 32]), static_shapes=True)
def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    m, k = x.size()
    _, n = y.size()
    out = torch.empty([m, n], dtype=torch.float32, device=x.device)
    for tile_m, tile_n in hl.tile([m, n]):
        total = hl.zeros([tile_m, tile_n], dtype=torch.float32)
        for tile_k in hl.tile(k):
            total = torch.addmm(total, x[tile_m, tile_k], y[tile_k, tile_n])
        out[tile_m, tile_n] = total
    return out


torch.manual_seed(0)
a, b = (torch.randn(*size, device="cuda").half() for size in ((100, 96), (96, 130)))
exact = a.double() @ b.double()
error = (matmul(a, b).double() - exact).abs().max().item()
assert error < 1e-4, error
print(f"largest error {error:.1e}")
