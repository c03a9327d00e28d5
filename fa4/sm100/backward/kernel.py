"""The backward kernel: its warps' roles."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa4.plan.backward_single import HALF, dq_over_dp
from fa4.sm100.backward.compute import ROW_BYTES, Columns, compute
from fa4.sm100.backward.epilogue import Gradient, epilogue
from fa4.sm100.backward.load import Source, Sources, load
from fa4.sm100.backward.mma import Product, Products, in_tensor_memory, mma
from fa4.sm100.backward.mods import key_mods
from fa4.sm100.backward.reduce import Reduction, reduce
from fa4.sm100.backward.spec import BackwardSpec
from fa4.sm100.backward.tiles import BackwardProblem, locate
from fa4.sm100.kit.descriptors import ELEMENTS, instruction_descriptor, swizzled_tiles
from fa4.sm100.kit.setup import SWIZZLE_ALIGN, close_down, has_role, start_up
from fa4.sm100.kit.signals import Signals
from fa4.sm100.kit.units import TILE_ROWS, WARPGROUP, padded_dim
from fa4.sm100.kit.views import swizzled_layout


@cute.kernel
def kernel(loads, stores, stats, dq_accum, turns, factors, softmax_scale, aux, sizes, window,
           lengths, spec: cutlass.Constexpr, trace: cutlass.Constexpr):  # fmt: skip
    """Set up shared and tensor memory, then let every warp run its role."""
    plan: cutlass.Constexpr = spec.plan
    memory = cutlass.memory.SmemAllocator().allocate(plan.bytes_used("smem"), SWIZZLE_ALIGN)
    barriers = cute.recast_ptr(memory + plan.buffer("barriers").start, dtype=Int64)
    signals = Signals(plan, "setup", trace, barriers)
    problem = BackwardProblem(spec, *(*sizes, *window, *lengths))
    sources = make_sources(spec, memory, loads, stats)
    scale_log2, score_scale = factors
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    start_up(signals, warp)
    tile = locate(problem)

    if has_role(warp, plan.role("load")):
        cute.arch.setmaxregister_decrease(plan.role("load").registers)
        load(signals.of("load"), tile, sources)
    if has_role(warp, plan.role("mma")):
        cute.arch.setmaxregister_decrease(plan.role("mma").registers)
        mma(signals.of("mma"), tile.trips, make_products(spec, memory))
    if has_role(warp, plan.role("reduce")):
        cute.arch.setmaxregister_increase(plan.role("reduce").registers)
        staging = memory + plan.buffer("dq_staging").start
        reduce(signals.of("reduce"), tile,
               Reduction(plan.buffer("dq").start, staging, dq_accum, turns))  # fmt: skip
    if has_role(warp, plan.role("compute")):
        cute.arch.setmaxregister_increase(plan.role("compute").registers)
        key = tile.first_key + cute.arch.thread_idx()[0] % WARPGROUP
        mods = key_mods(spec, score_scale, aux, tile, key)
        columns = make_columns(spec, memory, warp, scale_log2, problem.blocks)
        compute(signals.of("compute"), tile, columns, mods)
        dv, dk = make_gradients(spec, memory, stores)
        epilogue(signals.of("compute"), tile, dv, dk, softmax_scale)
    for number, registers in plan.idle_warps.items():
        if warp == number:
            cute.arch.setmaxregister_decrease(registers)
    close_down(signals, warp)


def shared_tile(
    spec: BackwardSpec, memory: cute.Pointer, name: str, dim: int, stages: int = 0
) -> cute.Tensor:
    """(128, dim) of a buffer of the plan, swizzled; (128, dim, stages) where stages are given."""
    layout = swizzled_layout(TILE_ROWS, dim, stages)
    start = memory + spec.plan.buffer(name).start
    pointer = cute.recast_ptr(start, layout.inner, dtype=ELEMENTS[spec.dtype])
    return cute.make_tensor(pointer, layout.outer)


def make_sources(
    spec: BackwardSpec, memory: cute.Pointer, loads: tuple, stats: cute.Tensor
) -> Sources:
    """Q, K, V and dO on their way from global to shared memory."""
    d, dv = padded_dim(spec.head_dim), padded_dim(spec.head_dim_v)
    shared = (
        shared_tile(spec, memory, "q", d, spec.plan.buffer("q").stages),
        shared_tile(spec, memory, "k", d),
        shared_tile(spec, memory, "v", dv),
        shared_tile(spec, memory, "do", dv),
    )
    place = cute.recast_ptr(memory + spec.plan.buffer("row_stats").start, dtype=Float32)
    found = (Source(*pair, tile) for pair, tile in zip(loads, shared, strict=True))
    return Sources(*found, stats, place)


def make_products(spec: BackwardSpec, memory: cute.Pointer) -> Products:
    """The five products; K and dS are read along their rows by dQ, Q and dO by dK and dV."""
    plan = spec.plan
    dims = {"q": padded_dim(spec.head_dim), "k": padded_dim(spec.head_dim),
            "v": padded_dim(spec.head_dim_v), "do": padded_dim(spec.head_dim_v),
            "ds": TILE_ROWS}  # fmt: skip

    def operand(name: str, *, along_rows: bool) -> Any:
        buffer = plan.buffer(name)
        return swizzled_tiles(memory + buffer.start, TILE_ROWS, dims[name], along_rows=along_rows,
                              stage_bytes=buffer.size)  # fmt: skip

    def descriptor(n: int, *, a: bool, b: bool) -> int:
        return instruction_descriptor(spec.dtype, TILE_ROWS, n, transpose_a=a, transpose_b=b)

    def column(name: str) -> int:
        return plan.buffer(name).start

    scores = descriptor(TILE_ROWS, a=False, b=False)
    values, keys = (descriptor(dims[name], a=False, b=True) for name in ("do", "q"))
    p, ds = (in_tensor_memory((column(f"{name}0"), HALF)) for name in ("p", "ds"))
    return Products(
        s=Product(operand("k", along_rows=False), operand("q", along_rows=False), scores,
                  column("s")),
        dp=Product(operand("v", along_rows=False), operand("do", along_rows=False), scores,
                   column("dp")),
        dv=Product(p, operand("do", along_rows=True), values, column("dv")),
        dk=Product(ds, operand("q", along_rows=True), keys, column("dk")),
        dq=Product(operand("ds", along_rows=True), operand("k", along_rows=True),
                   descriptor(dims["k"], a=True, b=True), column("dq")),
        dq_over_dp=dq_over_dp(spec.pipeline),
        cta_group=spec.cta_group,
    )  # fmt: skip


def make_columns(
    spec: BackwardSpec, memory: cute.Pointer, warp: Int32, scale_log2: Float32, never: Int32
) -> Columns:
    """A compute warp's half of everything. never: see `stand_apart`."""
    plan = spec.plan
    number = warp // (WARPGROUP // 32)
    key = cute.arch.thread_idx()[0] % WARPGROUP
    ds = Int32((memory + plan.buffer("ds").start).toint())
    stats = Int32((memory + plan.buffer("row_stats").start).toint())
    return Columns(
        s=plan.buffer("s").start + number * HALF,
        dp=plan.buffer("dp").start + number * HALF,
        ds=ds + number * (TILE_ROWS * ROW_BYTES) + key * ROW_BYTES,
        swizzle=key % 8 * 16,
        stats=stats + number * (HALF * 4),
        scale_log2=scale_log2,
        number=number,
        never=never,
    )


def make_gradients(spec: BackwardSpec, memory: cute.Pointer, stores: tuple) -> tuple:
    """dV by way of dO's memory, dK by way of Q's."""
    dv, dk = stores
    d, dim_v = padded_dim(spec.head_dim), padded_dim(spec.head_dim_v)
    return (
        Gradient(*dv, shared_tile(spec, memory, "do", dim_v), spec.plan.buffer("dv").start,
                 spec.head_dim_v),
        Gradient(*dk, shared_tile(spec, memory, "q", d), spec.plan.buffer("dk").start,
                 spec.head_dim),
    )  # fmt: skip
