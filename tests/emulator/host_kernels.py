"""Tiny CuTe-DSL programs for the tests of the front door. Importing needs nvidia-cutlass-dsl."""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, tcgen05

THREADS = 128


@cute.kernel
def add_kernel(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < c.shape[0]:
        c[i] = a[i] + b[i]


@cute.kernel
def double_kernel(c: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < c.shape[0]:
        c[i] = c[i] * 2.0


@cute.kernel
def scale_kernel(c: cute.Tensor, factor: cutlass.Float32):
    smem = cutlass.utils.SmemAllocator()
    buffer = smem.allocate_array(cutlass.Float32, THREADS)
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < c.shape[0]:
        buffer[thread] = c[i]
        c[i] = buffer[thread] * factor


@cute.jit
def add(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    blocks = cute.ceil_div(c.shape[0], THREADS)
    add_kernel(a, b, c).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1))


@cute.kernel
def copy_kernel(a: cute.Tensor, c: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < c.shape[0]:
        c[i] = a[i]


@cute.jit
def add_or_copy(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    """c = a + b; b may be None."""
    blocks = cute.ceil_div(c.shape[0], THREADS)
    if cutlass.const_expr(b is None):
        copy_kernel(a, c).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1))
    else:
        add_kernel(a, b, c).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1))


@cute.jit
def double(c: cute.Tensor, table: cute.Tensor):
    double_kernel(c).launch(grid=(3, 1, 1), block=(THREADS, 1, 1))


@cute.jit
def chain(
    a: cute.Tensor,
    b: cute.Tensor,
    c: cute.Tensor,
    factor: cutlass.Float32,
    stream: cuda.CUstream,
):
    """Three kernels: c = (a + b) * 2 * factor; the last may overlap the second."""
    add_kernel(a, b, c).launch(grid=(3, 1, 1), block=(THREADS, 1, 1), stream=stream)
    double_kernel(c).launch(grid=(3, 2, 5), block=(32, 2, 2), stream=stream)
    scale_kernel(c, factor).launch(
        grid=(4, 1, 1),
        block=(THREADS, 1, 1),
        cluster=(2, 1, 1),
        stream=stream,
        use_pdl=True,
        cooperative=True,
    )


@cute.jit
def double_behind(pointer: cute.Pointer, count: cutlass.Int32):
    tensor = cute.make_tensor(pointer, cute.make_layout((count,)))
    double_kernel(tensor).launch(grid=(3, 1, 1), block=(THREADS, 1, 1))


@cute.jit
def too_much_smem(c: cute.Tensor):
    double_kernel(c).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), smem=232_448 + 1)


@cute.kernel
def fetch_kernel(atom: cute.CopyAtom, source: cute.Tensor):
    if cute.arch.thread_idx()[0] == 0:
        cpasync.prefetch_descriptor(atom)


@cute.jit
def fetch(source: cute.Tensor):
    """Makes a TMA descriptor for 64 x 32 boxes with 128-byte swizzle."""
    atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, source.element_type)
    layout = cute.tile_to_shape(atom, (32, 64), order=(0, 1))
    tma, tensor = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), source, layout, (32, 64)
    )
    fetch_kernel(tma, tensor).launch(grid=(1, 1, 1), block=(32, 1, 1))
