"""Kernels of our own around foreign parts. Importing needs CuTe-DSL and the foreign packages."""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute

from lab.foreign import example

reduce = example("blackwell/reduce.py")

COLUMNS_PER_THREAD = 4


@cute.kernel
def row_maxima_kernel(
    x: cute.Tensor,
    out: cute.Tensor,
    threads_per_row: cutlass.Constexpr[int],
    rows: cutlass.Constexpr[int],
    cluster: cutlass.Constexpr[int],
):
    thread, _, _ = cute.arch.thread_idx()
    block, part, _ = cute.arch.block_idx()
    warps_per_row = threads_per_row // 32
    smem = cutlass.utils.SmemAllocator()
    barrier = smem.allocate_array(cutlass.Int64, 1)
    shape = (rows, (warps_per_row, cluster)) if cluster > 1 else (rows, warps_per_row)
    order = (1, (0, 2)) if cluster > 1 else (1, 0)
    buffer = smem.allocate_tensor(cutlass.Float32, cute.make_ordered_layout(shape, order), 16)
    if cutlass.const_expr(cluster > 1):
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
    row = block * rows + thread // threads_per_row
    first = (part * threads_per_row + thread % threads_per_row) * COLUMNS_PER_THREAD
    mine = cute.make_rmem_tensor((COLUMNS_PER_THREAD,), cutlass.Float32)
    for i in cutlass.range_constexpr(COLUMNS_PER_THREAD):
        mine[i] = x[row, first + i]
    value = reduce.row_reduce(
        mine.load(),
        cute.ReductionOp.MAX,
        threads_per_row,
        buffer,
        barrier,
        cluster,
        -cutlass.Float32.inf,
    )
    if thread % threads_per_row == 0:
        out[row, part] = value


@cute.jit
def row_maxima(
    x: cute.Tensor,
    out: cute.Tensor,
    threads_per_row: cutlass.Constexpr[int],
    rows: cutlass.Constexpr[int],
    cluster: cutlass.Constexpr[int],
    stream: cuda.CUstream,
):
    """out[row, part]: the maximum of the row of x, as each CTA of the cluster has it."""
    row_maxima_kernel(x, out, threads_per_row, rows, cluster).launch(
        grid=(x.shape[0] // rows, cluster, 1),
        block=(threads_per_row * rows, 1, 1),
        cluster=(1, cluster, 1),
        stream=stream,
    )


# Barrier 15, of those that the backward kernel does not use.
_LAST_USE = 15


def ordered_backward(kind):
    """NVIDIA's backward kernel `kind`, whose compute warps wait for its reduce warps at the end."""

    class Ordered(kind):
        @cute.jit
        def compute(self, *arguments):
            kind.compute(self, *arguments)
            self.meet()

        @cute.jit
        def reduce(self, *arguments):
            kind.reduce(self, *arguments)
            self.meet()

        @cute.jit
        def meet(self):
            warps = self.num_compute_warps + self.num_reduce_warps
            cute.arch.barrier(barrier_id=_LAST_USE, number_of_threads=32 * warps)

    return Ordered
