"""Small kernels of what the forward kernel does alike on every GPU: work tiles, rows, rounding.

`compile_neutral` builds them for a target; the tests run them on the emulator, and
lab/hardware/forward_hopper on a Hopper GPU, which has no packed float32: there each packed
instruction becomes the two that it stands for.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.base_dsl.compiler import DumpDir
from cutlass.cute.runtime import make_fake_tensor

from fa4.kit import rowmath
from fa4.kit.masked_rows import keep_range
from fa4.kit.ptx_block import PtxBlock
from fa4.kit.tiles import KernelProblem, heads_per_section, locate
from fa4.sm100.forward.spec import ForwardSpec

COLUMNS = 128
TILE_FIELDS = ("block", "head", "batch", "kv_start", "kv_stop", "whole_start", "whole_stop")
SIZES = ("seqlen_q", "seqlen_k", "heads", "group", "batch", "left", "right", "unused")
ROWS = 256  # rows and work tiles of one launch


@cute.kernel
def tiles_kernel(sizes: cute.Tensor, out: cute.Tensor, spec: cutlass.Constexpr):
    """Work tile `thread` of a call with the sizes of SIZES, as the fields of TILE_FIELDS.

    Threads beyond the last work tile repeat it: the order divides by what is left of the heads.
    """
    thread = cute.arch.thread_idx()[0]
    seqlen_q, seqlen_k, heads, group, batch, left, right, _ = (sizes[i] for i in range(len(SIZES)))
    rows = 128 * spec.numerics.q_tiles
    blocks = (seqlen_q * spec.group + rows - 1) // rows
    num_tiles = blocks * heads * batch
    section = heads_per_section(seqlen_k * ((spec.head_dim + spec.head_dim_v) * 2), heads * batch)
    problem = KernelProblem(
        spec, seqlen_q, seqlen_k, heads, group, blocks, num_tiles, section,
        left if spec.window_left else None, right if spec.window_right else None,
        None, None, None, None, None,
    )  # fmt: skip
    tile = locate(problem, cutlass.min(thread, num_tiles - 1))
    whole_stop, whole_start = tile.whole_tiles(tile.first_row)
    values = (tile.block, tile.head, tile.batch, tile.kv_start, tile.kv_stop)
    for i, value in enumerate((*values, whole_start, whole_stop)):
        out[thread, i] = value


def _write_row(tensor: cute.Tensor, row: Int32, values: list[Any]) -> None:
    for c, value in enumerate(values):
        tensor[row, c] = value


@cute.kernel
def rows_kernel(
    s: cute.Tensor, bounds: cute.Tensor, scale: cute.Tensor, p: cute.Tensor,
    words: cute.Tensor, stats: cute.Tensor, spec: cutlass.Constexpr,
):  # fmt: skip
    """One KV tile of softmax for row `thread`: mask, reference, exponentials, sum, rounding.

    bounds: first and one past the last visible column. stats: old reference in, then new reference,
    alpha and row sum out.
    """
    thread = cute.arch.thread_idx()[0]
    row = [s[thread, c] for c in range(COLUMNS)]
    row = keep_range(row, bounds[thread, 0], bounds[thread, 1])
    most = rowmath.maximum(row, stats[thread, 0])
    highest, log2_alpha = rowmath.new_reference(
        most, stats[thread, 0], scale[0], spec.numerics.rescale_threshold_log2
    )
    split = spec.numerics.exp2
    values, packed = rowmath.exponentials(
        row, scale[0], -(highest * scale[0]), split.emulated_columns(COLUMNS), split.degree,
        spec.dtype,
    )  # fmt: skip
    _write_row(p, thread, values)
    _write_row(words, thread, [word.bitcast(Uint32) for word in packed])
    alpha = cute.math.exp2(log2_alpha, fastmath=True)
    stats[thread, 1], stats[thread, 2] = highest, alpha
    low, high = rowmath.total(rowmath.add_up(values, []), [Float32(0.0)] * 2, alpha)
    stats[thread, 3] = low + high


@cute.jit
def run_tiles(sizes: cute.Tensor, out: cute.Tensor, spec: cutlass.Constexpr):
    """Launch one block."""
    tiles_kernel(sizes, out, spec).launch(grid=(1, 1, 1), block=(ROWS, 1, 1))


@cute.jit
def run_rows(
    s: cute.Tensor, bounds: cute.Tensor, scale: cute.Tensor, p: cute.Tensor,
    words: cute.Tensor, stats: cute.Tensor, spec: cutlass.Constexpr,
):  # fmt: skip
    """Launch one block."""
    rows_kernel(s, bounds, scale, p, words, stats, spec).launch(grid=(1, 1, 1), block=(ROWS, 1, 1))


def compile_neutral(name: str, spec: ForwardSpec, arch: str) -> Any:
    """`cute.compile` of the "tiles" or "rows" kernel; sizes static, parameters plain pointers."""

    def tensor(element: Any, *shape: int) -> Any:
        stride = (shape[1], 1) if len(shape) == 2 else (1,)
        return make_fake_tensor(element, shape, stride=stride, assumed_align=16)

    if name == "tiles":
        function = run_tiles
        arguments = (tensor(Int32, len(SIZES)), tensor(Int32, ROWS, len(TILE_FIELDS)))
    else:
        function = run_rows
        arguments = (
            tensor(Float32, ROWS, COLUMNS), tensor(Int32, ROWS, 2), tensor(Float32, 1),
            tensor(Float32, ROWS, COLUMNS), tensor(Uint32, ROWS, COLUMNS // 2),
            tensor(Float32, ROWS, 4),
        )  # fmt: skip
    with unpacked(arch.startswith("sm_90")), tempfile.TemporaryDirectory() as folder:
        options = (
            cute.EnableTVMFFI(True),
            cute.KeepPTX(True),
            cute.KeepCUBIN(True),
            cute.GPUArch(arch),
            DumpDir(folder),
        )
        return cute.compile[options](function, *arguments, spec)


@contextmanager
def unpacked(active: bool) -> Iterator[None]:
    """Within it, packed float32 instructions are written as two scalar ones."""
    if not active:
        yield
        return
    with mock.patch.object(PtxBlock, "packed", _two_scalars):
        yield


def _two_scalars(code: PtxBlock, opcode: str, *pairs: str) -> str:
    lanes = zip(*(code.halves(pair) for pair in pairs), strict=True)
    return code.pair(*(code.do(f"{opcode}.f32", *operands) for operands in lanes))
