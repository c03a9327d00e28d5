"""A kernel of a dozen lines that stands for the real one, to test how kernels are built and kept.

It has the real one's compiling contract, `compile_scale(spec, arch)`, and compiles in a tenth
of a second: out = source * head_dim, through score_mod if the spec has one.
"""

import os
import tempfile
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.base_dsl.compiler import DumpDir
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

THREADS = 32
LOG = "FA4_TEST_COMPILATIONS"  # a file that grows by a byte with every compilation


@cute.jit
def clamp(value):
    """A score_mod with control flow, which CuTe-DSL rewrites."""
    if value > 100.0:
        value = value * 0.0 + 100.0
    return value


@cute.kernel
def scale_kernel(
    source: cute.Tensor,
    out: cute.Tensor,
    factor: cutlass.Constexpr,
    score_mod: cutlass.Constexpr,
):
    index = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if index < cute.size(source):
        value = source[index] * factor
        out[index] = value if cutlass.const_expr(score_mod is None) else score_mod(value)


@cute.jit
def scale(
    source: cute.Tensor,
    out: cute.Tensor,
    extra: cute.Tensor | None,
    factor: cutlass.Constexpr,
    score_mod: cutlass.Constexpr,
    stream: cuda.CUstream,
):
    blocks = cute.ceil_div(cute.size(source), THREADS)
    scale_kernel(source, out, factor, score_mod).launch(
        grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


def compile_scale(spec, arch):
    if path := os.environ.get(LOG):
        with open(path, "ab") as log:
            log.write(b".")
    size = cute.sym_int()
    source, out = (
        make_fake_tensor(cutlass.Float32, (size,), stride=(1,), assumed_align=4) for _ in range(2)
    )
    with tempfile.TemporaryDirectory() as folder:
        options = (
            cute.EnableTVMFFI(True),
            cute.GPUArch(arch),
            cute.KeepPTX(True),
            cute.KeepCUBIN(True),
            DumpDir(folder),
        )
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return cute.compile[options](
            scale, source, out, None, float(spec.head_dim), spec.score_mod, stream
        )


def compilations() -> int:
    """How often this process and those it started have compiled."""
    path = Path(os.environ[LOG])
    return path.stat().st_size if path.exists() else 0
