"""A tcgen05 matrix product in CuTe-DSL, run on a CPU; then the same without one barrier wait."""

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator
from cutlass.utils.blackwell_helpers import make_smem_layout_a, make_smem_layout_b

from fa4.emulator import EmulationFailed, emulate

TILE, BF16, F32 = (128, 128, 64), cutlass.BFloat16, cutlass.Float32


@cute.kernel
def kernel(mma, loads, tensors, c, layouts, wait: cutlass.Constexpr):
    warp, smem = cute.arch.make_warp_uniform(cute.arch.warp_idx()), SmemAllocator()
    a, b = (smem.allocate_tensor(BF16, x.outer, 1024, x.inner) for x in layouts)
    loaded, done, held = (smem.allocate_array(cutlass.Int64, 1) for _ in range(3))
    held = cute.recast_ptr(held, dtype=cutlass.Int32)
    if warp == 0:
        cute.arch.alloc_tmem(128, held)
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(loaded, 1)
            cute.arch.mbarrier_init(done, 1)
            cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    tmem = cute.arch.retrieve_tmem_ptr(F32, 16, held)
    thread_mma = mma.get_slice(0)
    sums = cute.make_tensor(tmem, mma.make_fragment_C(mma.partition_shape_C(TILE[:2])).layout)
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(loaded, 2 * 128 * 64 * 2)
        parts = thread_mma.partition_A(tensors[0]), thread_mma.partition_B(tensors[1])
        for load, shared, part in zip(loads, (a, b), parts, strict=True):
            target, source = cpasync.tma_partition(
                load,
                0,
                cute.make_layout(1),
                cute.group_modes(shared, 0, 3),
                cute.group_modes(part, 0, 3),
            )
            cute.copy(load, source, target[None, 0], tma_bar_ptr=loaded)
        if cutlass.const_expr(wait):
            cute.arch.mbarrier_wait(loaded, 0)
        left, right = mma.make_fragment_A(a), mma.make_fragment_B(b)
        for k in cutlass.range_constexpr(cute.size(left, mode=[2])):
            mma.set(tcgen05.Field.ACCUMULATE, k > 0)
            cute.gemm(mma, sums, left[None, None, k, 0], right[None, None, k, 0], sums)
        with cute.arch.elect_one():
            tcgen05.commit(done)
    cute.arch.mbarrier_wait(done, 0)
    sums, c = (x[(None, None), 0, 0] for x in (sums, thread_mma.partition_C(c)))
    load = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x128), F32)
    copy = tcgen05.make_tmem_copy(load, sums)
    mine = copy.get_slice(cute.arch.thread_idx()[0])
    registers = cute.make_rmem_tensor(mine.partition_D(c).shape, F32)
    cute.copy(copy, mine.partition_S(sums), registers)
    cute.autovec_copy(registers, mine.partition_D(c))
    cute.arch.barrier()
    if warp == 0:
        cute.arch.dealloc_tmem(tmem, 128)


@cute.jit
def multiply(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, wait: cutlass.Constexpr):
    mma = cute.make_tiled_mma(
        tcgen05.MmaF16BF16Op(
            BF16,
            F32,
            (128, 128, 16),
            tcgen05.CtaGroup.ONE,
            tcgen05.OperandSource.SMEM,
            OperandMajorMode.K,
            OperandMajorMode.K,
        )
    )
    layouts = make_smem_layout_a(mma, TILE, BF16, 1), make_smem_layout_b(mma, TILE, BF16, 1)
    stages = [cute.select(layout, [0, 1, 2]) for layout in layouts]
    op = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
    load_a, a = cute.nvgpu.make_tiled_tma_atom_A(op, a, stages[0], TILE, mma)
    load_b, b = cute.nvgpu.make_tiled_tma_atom_B(op, b, stages[1], TILE, mma)
    kernel(mma, (load_a, load_b), (a, b), c, layouts, wait).launch(
        grid=(1, 1, 1), block=(128, 1, 1)
    )


a, b = torch.randn(128, 64).bfloat16(), torch.randn(128, 64).bfloat16()
c = torch.zeros(128, 128)
with emulate():
    multiply(*(from_dlpack(x, assumed_align=16) for x in (a, b, c)), True)
print("largest error:", (c - a.float() @ b.float().T).abs().max().item())
try:
    with emulate():
        multiply(*(from_dlpack(x, assumed_align=16) for x in (a, b, c)), False)
except EmulationFailed as failure:
    print(failure)
