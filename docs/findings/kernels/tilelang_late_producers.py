"""TileLang's pipelined GEMM hangs if a producer warp is late.

Needs tilelang and nvcc. Without a GPU: fa4 emulate THIS --arch sm_90a --steer 32
"""

import tilelang
import tilelang.language as T
import torch

M, N, K = 128, 128, 512


@T.prim_func
def gemm(
    A: T.Tensor((M, K), "float16"), B: T.Tensor((K, N), "float16"), C: T.Tensor((M, N), "float16")
):  # fmt: skip
    with T.Kernel(1, 1, threads=128):
        left = T.alloc_shared((M, 64), "float16")
        right = T.alloc_shared((64, N), "float16")
        total = T.alloc_fragment((M, N), "float32")
        T.clear(total)
        for k in T.Pipelined(K // 64, num_stages=3):
            T.copy(A[0, k * 64], left)
            T.copy(B[k * 64, 0], right)
            T.gemm(left, right, total)
        T.copy(total, C[0, 0])


kernel = tilelang.compile(gemm)
torch.manual_seed(0)
a, b = (torch.randn(*size, device="cuda").half() for size in ((M, K), (K, N)))
c = torch.empty(M, N, device="cuda", dtype=torch.float16)
kernel(a, b, c)
exact = a.double() @ b.double()
print(f"largest error {(c.double() - exact).abs().max():.3f} of {exact.abs().max():.0f}")
