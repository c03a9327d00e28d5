"""A tcgen05 matrix product on a CPU, and what the emulator says when a barrier is missing."""

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator
from cutlass.utils.blackwell_helpers import make_smem_layout_a, make_smem_layout_b

from fa4.emulator import EmulationFailed, emulate


@cute.kernel
def kernel(mma, a, b, c, layouts, barrier: cutlass.Constexpr):  # C = A B^T, 128 threads
    thread, smem = cute.arch.thread_idx()[0], SmemAllocator()
    s_a, s_b = (smem.allocate_tensor(a.element_type, x.outer, 1024, x.inner) for x in layouts)
    done, held = smem.allocate_array(cutlass.Int64, 1), smem.allocate_array(cutlass.Int32, 1)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        cute.arch.alloc_tmem(128, held)
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(done, 1)
    cute.arch.barrier()
    for k in cutlass.range_constexpr(64):  # each thread copies its row of A and of B
        s_a[(thread, k % 16), 0, k // 16, 0] = a[thread, k]
        s_b[(thread, k % 16), 0, k // 16, 0] = b[thread, k]
    cute.arch.fence_proxy("async.shared", space="cta")
    if cutlass.const_expr(barrier):
        cute.arch.barrier()
    tmem = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, held)
    sums = cute.make_tensor(tmem, mma.make_fragment_C(mma.partition_shape_C((128, 128))).layout)
    if warp == 0:
        left, right = mma.make_fragment_A(s_a), mma.make_fragment_B(s_b)
        for k in cutlass.range_constexpr(4):
            mma.set(tcgen05.Field.ACCUMULATE, k > 0)
            cute.gemm(mma, sums, left[None, None, k, 0], right[None, None, k, 0], sums)
        with cute.arch.elect_one():
            tcgen05.commit(done)
    cute.arch.mbarrier_wait(done, 0)
    load = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x128), cutlass.Float32)
    copy, sums = tcgen05.make_tmem_copy(load, sums[(None, None), 0, 0]), sums[(None, None), 0, 0]
    mine = copy.get_slice(thread)
    target = mine.partition_D(mma.get_slice(0).partition_C(c)[(None, None), 0, 0])
    registers = cute.make_rmem_tensor(target.shape, cutlass.Float32)
    cute.copy(copy, mine.partition_S(sums), registers)
    cute.autovec_copy(registers, target)
    cute.arch.barrier()
    if warp == 0:
        cute.arch.dealloc_tmem(tmem, 128)


@cute.jit
def multiply(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, barrier: cutlass.Constexpr):
    mma = cute.make_tiled_mma(
        tcgen05.MmaF16BF16Op(
            a.element_type,
            cutlass.Float32,
            (128, 128, 16),
            tcgen05.CtaGroup.ONE,
            tcgen05.OperandSource.SMEM,
            OperandMajorMode.K,
            OperandMajorMode.K,
        )
    )
    tile, kind = (128, 128, 64), a.element_type
    layouts = make_smem_layout_a(mma, tile, kind, 1), make_smem_layout_b(mma, tile, kind, 1)
    kernel(mma, a, b, c, layouts, barrier).launch(grid=(1, 1, 1), block=(128, 1, 1))


a, b, c = torch.randn(128, 64).bfloat16(), torch.randn(128, 64).bfloat16(), torch.zeros(128, 128)
tensors = [from_dlpack(x) for x in (a, b, c)]
with emulate():
    multiply(*tensors, True)
print("error below 1e-4:", (c - a.float() @ b.float().T).abs().max().item() < 1e-4)
try:
    with emulate():
        multiply(*tensors, False)
except EmulationFailed as failure:
    print(failure)
