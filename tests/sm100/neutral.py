"""Small kernels of what the forward kernel does alike on every GPU: work tiles, rows, rounding.

`compile_neutral` builds them for a target; the tests run them on the emulator, and
benchmarks/forward_hopper on a Hopper GPU, which has no packed float32: there each packed
instruction becomes the two that it stands for.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.base_dsl.compiler import DumpDir
from cutlass.cute.runtime import make_fake_tensor

from fa4.sm100.forward import rowmath
from fa4.sm100.forward.context import ELEMENTS
from fa4.sm100.forward.spec import ForwardSpec
from fa4.sm100.forward.tiles import Problem, heads_per_section, locate
from fa4.sm100.forward.tmem import pack_words

COLUMNS = 128
TILE_FIELDS = ("block", "head", "batch", "kv_start", "kv_stop", "whole_start", "whole_stop")
SIZES = ("seqlen_q", "seqlen_k", "heads", "group", "batch", "left", "right", "unused")
ROWS = 256  # rows and work tiles of one launch


@cute.kernel
def tiles_kernel(sizes: cute.Tensor, out: cute.Tensor, spec: cutlass.Constexpr):
    """Work tile `thread` of a call with the sizes of SIZES, as the fields of TILE_FIELDS."""
    thread = cute.arch.thread_idx()[0]
    seqlen_q, seqlen_k, heads, group, batch, left, right, _ = (sizes[i] for i in range(len(SIZES)))
    rows = 128 * spec.numerics.q_tiles
    blocks = (seqlen_q * spec.group + rows - 1) // rows
    num_tiles = blocks * heads * batch
    section = heads_per_section(seqlen_k * ((spec.head_dim + spec.head_dim_v) * 2), heads * batch)
    problem = Problem(
        spec, seqlen_q, seqlen_k, heads, group, blocks, num_tiles, section,
        left if spec.window_left else None, right if spec.window_right else None,
        None, None, None, None, None,
    )  # fmt: skip
    tile = locate(problem, thread)
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
    row = rowmath.keep_range(row, bounds[thread, 0], bounds[thread, 1])
    most = rowmath.maximum(row, stats[thread, 0])
    highest, alpha = rowmath.new_reference(
        most, stats[thread, 0], scale[0], spec.numerics.rescale_threshold_log2
    )
    x = rowmath.scaled(row, scale[0], -(highest * scale[0]))
    split = spec.numerics.exp2
    values = rowmath.exponentials(x, split.emulated_columns(COLUMNS), split.degree)
    packed = pack_words(values, ELEMENTS[spec.dtype])
    bits = cute.make_tensor(
        cute.recast_ptr(packed.iterator, dtype=Uint32), cute.make_layout(COLUMNS // 2)
    )
    _write_row(p, thread, values)
    _write_row(words, thread, [bits[c] for c in range(COLUMNS // 2)])
    stats[thread, 1], stats[thread, 2] = highest, alpha
    stats[thread, 3] = rowmath.total(values)


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
    """Within it, packed float32 instructions are traced as two scalar ones."""
    names = ("fma_packed_f32x2", "add_packed_f32x2", "sub_packed_f32x2", "mul_packed_f32x2")
    packed = {name: getattr(cute.arch, name) for name in names}
    if active:
        for name, replacement in _SCALAR.items():
            setattr(cute.arch, name, replacement)
    try:
        yield
    finally:
        for name, function in packed.items():
            setattr(cute.arch, name, function)


def _scalar(instruction: str) -> Any:
    def two(*operands: Any, rnd: str = "rn", ftz: bool = False) -> tuple[Any, Any]:
        name = f"{instruction}.{rnd}{'.ftz' if ftz else ''}.f32"
        arguments = ", ".join(f"{{$r{i}}}" for i in range(len(operands)))
        return tuple(
            cute.arch.inline_ptx(
                f"{name} {{$w0}}, {arguments};",
                write_only_types=[Float32],
                read_only_args=[Float32(operand[lane]) for operand in operands],
            )
            for lane in range(2)
        )

    return two


_SCALAR = {
    "fma_packed_f32x2": _scalar("fma"),
    "add_packed_f32x2": _scalar("add"),
    "sub_packed_f32x2": _scalar("sub"),
    "mul_packed_f32x2": _scalar("mul"),
}
