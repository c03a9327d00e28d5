"""The backward kernel: its warps' roles."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa4.kit.descriptors import ELEMENTS, instruction_descriptor, swizzled_tiles
from fa4.kit.setup import SWIZZLE_ALIGN, close_down, has_role, start_up, take_registers
from fa4.kit.signals import LEADER, Signals
from fa4.kit.units import MMA_DEPTH, TILE_ROWS, WARP, WARPGROUP, padded_dim
from fa4.kit.views import swizzled_layout
from fa4.plan.backward_single import HALF, dq_over_dp
from fa4.plan.work import FRAGMENT
from fa4.sm100.backward.compute import ROW_BYTES, Columns, DsStore, Split, compute
from fa4.sm100.backward.epilogue import Gradient, epilogue
from fa4.sm100.backward.load import TileSource, TileSources, load
from fa4.sm100.backward.load_pair import PairTileSources, load_pair
from fa4.sm100.backward.load_serial import load_serial
from fa4.sm100.backward.mma import BackwardProducts, TileProduct, mma
from fa4.sm100.backward.mma_pair import mma_pair
from fa4.sm100.backward.mma_serial import mma_serial
from fa4.sm100.backward.mods import key_mods
from fa4.sm100.backward.reduce import Reduction, reduce
from fa4.sm100.backward.relay import relay
from fa4.sm100.backward.spec import BackwardSpec
from fa4.sm100.backward.tiles import BackwardProblem, KeyTile, locate


@cute.kernel
def kernel(loads, stores, stats, dq_accum, turns, factors, softmax_scale, aux, sizes, window,
           lengths, spec: cutlass.Constexpr, trace: cutlass.Constexpr):  # fmt: skip
    """Set up shared and tensor memory, then let every warp run its role."""
    plan: cutlass.Constexpr = spec.plan
    memory = cutlass.memory.SmemAllocator().allocate(plan.bytes_used("smem"), SWIZZLE_ALIGN)
    barriers = cute.recast_ptr(memory + plan.buffer("barriers").start, dtype=Int64)
    signals = Signals(plan, "setup", trace, barriers)
    problem = BackwardProblem(spec, *(*sizes, *window, *lengths))
    scale_log2, score_scale = factors
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    start_up(signals, warp)
    tile = locate(problem)

    if has_role(warp, plan.role("load")):
        take_registers(plan, plan.role("load"))
        if cutlass.const_expr(spec.cta_group == 1):
            load(signals.of("load"), tile, make_sources(spec, memory, loads, stats))
        else:
            sources = make_pair_sources(spec, memory, loads, stats, tile)
            if cutlass.const_expr(spec.overlaps_tiles):
                load_pair(signals.of("load"), tile, sources)
            else:
                load_serial(signals.of("load"), tile, sources)
    if has_role(warp, plan.role("mma")):
        take_registers(plan, plan.role("mma"))
        if tile.rank == LEADER:
            products = make_products(spec, memory)
            if cutlass.const_expr(spec.cta_group == 1):
                mma(signals.of("mma"), tile.trips, products)
            elif cutlass.const_expr(spec.overlaps_tiles):
                mma_pair(signals.of("mma"), tile.trips, products)
            else:
                mma_serial(signals.of("mma"), tile.trips, products)
    if cutlass.const_expr(spec.cta_group == 2):  # noqa: SIM102
        if has_role(warp, plan.role("relay")):
            take_registers(plan, plan.role("relay"))
            relay(signals.of("relay"), tile.trips)
    if has_role(warp, plan.role("reduce")):
        take_registers(plan, plan.role("reduce"))
        staging = memory + plan.buffer("dq_staging").start
        reduce(signals.of("reduce"), tile,
               Reduction(plan.buffer("dq").start, staging, dq_accum, turns))  # fmt: skip
    if has_role(warp, plan.role("compute")):
        take_registers(plan, plan.role("compute"))
        key = tile.first_key + cute.arch.thread_idx()[0] % WARPGROUP
        mods = key_mods(spec, score_scale, aux, tile, key)
        numbers = warp // (WARPGROUP // WARP), scale_log2, problem.blocks
        columns = make_columns(spec, memory, signals, tile.rank, numbers)
        compute(signals.of("compute"), tile, columns, mods)
        dv, dk = make_gradients(spec, memory, stores)
        epilogue(signals.of("compute"), tile, dv, dk, softmax_scale)
    for number, registers in plan.idle_warps.items():
        if warp == number:
            cute.arch.setmaxregister_decrease(registers)
    close_down(signals, warp)


def shared_tile(
    spec: BackwardSpec, memory: cute.Pointer, name: str, shape: tuple[int, int], stages: int = 0
) -> cute.Tensor:
    """(rows, dim) of a buffer of the plan, swizzled; (rows, dim, stages) where stages are given."""
    layout = swizzled_layout(*shape, stages)
    start = memory + spec.plan.buffer(name).start
    pointer = cute.recast_ptr(start, layout.inner, dtype=ELEMENTS[spec.dtype])
    return cute.make_tensor(pointer, layout.outer)


def make_sources(
    spec: BackwardSpec, memory: cute.Pointer, loads: tuple, stats: cute.Tensor
) -> TileSources:
    """Q, K, V and dO on their way from global to shared memory."""
    stages = spec.plan.buffer("q").stages if spec.cta_group == 1 else 0
    names = (("q", stages), ("k", 0), ("v", 0), ("do", 0))
    q, k, v, dout = (
        TileSource(atoms, tensor, shared_tile(spec, memory, name, tile_shapes(spec)[name], some))
        for (atoms, tensor), (name, some) in zip(loads, names, strict=True)
    )
    place = cute.recast_ptr(memory + spec.plan.buffer("row_stats").start, dtype=Float32)
    return TileSources(q, k, v, dout, stats, place)


def make_pair_sources(
    spec: BackwardSpec, memory: cute.Pointer, loads: tuple, stats: cute.Tensor, tile: KeyTile
) -> PairTileSources:
    """The same by rows, and Q, dO and K by columns."""
    q_t, do_t, k_t = (
        TileSource(
            atoms, tensor, shared_tile(spec, memory, name, tile_shapes(spec)[name]), tile.rank
        )
        for (atoms, tensor), name in zip(loads[4:], ("q_t", "do_t", "k_t"), strict=True)
    )
    return PairTileSources(make_sources(spec, memory, loads[:4], stats), q_t, do_t, k_t)


def make_products(spec: BackwardSpec, memory: cute.Pointer) -> BackwardProducts:
    """The five products; K and dS are read along their rows by dQ, Q and dO by dK and dV."""
    plan, shapes, group = spec.plan, tile_shapes(spec), spec.cta_group
    split = make_split(spec)
    d, dim_v = shapes["k"][1], shapes["v"][1]
    turned = "_t" if group == 2 else ""

    def operand(name: str, *, along_rows: bool) -> Any:
        buffer = plan.buffer(name)
        return swizzled_tiles(memory + buffer.start, *shapes[name], along_rows=along_rows,
                              stage_bytes=buffer.size)  # fmt: skip

    def descriptor(m: int, n: int, *, a: bool, b: bool) -> int:
        return instruction_descriptor(spec.dtype, m, n, transpose_a=a, transpose_b=b)

    def column(name: str) -> int:
        return plan.buffer(name).start

    def in_tensor_memory(name: str) -> tuple:
        return column(name), tuple(split.word_of(q) for q in range(0, TILE_ROWS, MMA_DEPTH))

    rows = TILE_ROWS * group
    scores = descriptor(rows, TILE_ROWS, a=False, b=False)
    return BackwardProducts(
        s=TileProduct(operand("k", along_rows=False), operand("q", along_rows=False), scores,
                  column("s")),
        dp=TileProduct(operand("v", along_rows=False), operand("do", along_rows=False), scores,
                   column("dp")),
        dv=TileProduct(in_tensor_memory("p0"), operand(f"do{turned}", along_rows=True),
                   descriptor(rows, dim_v, a=False, b=True), column("dv")),
        dk=TileProduct(in_tensor_memory("ds0"), operand(f"q{turned}", along_rows=True),
                   descriptor(rows, d, a=False, b=True), column("dk")),
        dq=TileProduct(operand("ds", along_rows=True), operand(f"k{turned}", along_rows=True),
                   descriptor(TILE_ROWS, d, a=True, b=True), column("dq")),
        dq_over_dp=group == 1 and dq_over_dp(spec.pipeline),
        cta_group=group,
    )  # fmt: skip


def tile_shapes(spec: BackwardSpec) -> dict[str, tuple[int, int]]:
    """Rows and columns of the operands in shared memory.

    dS has the rows of keys. A CTA of a pair has half of the rows of Q and dO for the scores, half
    of their columns (`_t`) for the sums, and dS of its half of the queries, for both KV tiles.
    """
    d, dim_v = padded_dim(spec.head_dim), padded_dim(spec.head_dim_v)
    keys = {"k": (TILE_ROWS, d), "v": (TILE_ROWS, dim_v)}
    if spec.cta_group == 1:
        return keys | {"q": (TILE_ROWS, d), "do": (TILE_ROWS, dim_v), "ds": (TILE_ROWS, TILE_ROWS)}
    return keys | {
        "q": (HALF, d), "do": (HALF, dim_v), "q_t": (TILE_ROWS, d // 2),
        "do_t": (TILE_ROWS, dim_v // 2), "k_t": (2 * TILE_ROWS, d // 2),
        "ds": (2 * TILE_ROWS, HALF),
    }  # fmt: skip


def make_split(spec: BackwardSpec) -> Split:
    """Which queries a compute warpgroup has: by where the plan puts its words of P.

    A half of the tile; or, that the second half of S stays free, the same half of both halves.
    """
    step = spec.plan.buffer("p1").start - spec.plan.buffer("p0").start
    return Split(step, TILE_ROWS // 2 + FRAGMENT - step)


def make_columns(
    spec: BackwardSpec, memory: cute.Pointer, signals: Signals, rank: Int32 | int, numbers: tuple
) -> Columns:
    """What a compute warp works with. numbers: its group, the exponents' scale, and `never`."""
    plan = spec.plan
    group, scale_log2, never = numbers
    key = cute.arch.thread_idx()[0] % WARPGROUP
    start = memory + plan.buffer("ds").start
    swizzle = key % 8 * 16
    if spec.cta_group == 1:
        row = Int32(start.toint()) + group * (TILE_ROWS * ROW_BYTES) + key * ROW_BYTES
        ds = DsStore(row, swizzle)
    else:
        place = start + (rank * TILE_ROWS + key) * ROW_BYTES
        peer = rank ^ 1
        barrier = cute.arch.map_dsmem_ptr(signals.pointer("ds_peer"), peer)
        ds = DsStore(
            Int32(place.toint()), swizzle ^ (group * (ROW_BYTES // 2)),
            Int32(cute.arch.map_dsmem_ptr(place, peer).toint()), Int32(barrier.toint()),
        )  # fmt: skip
    split = make_split(spec)
    first_query = group * split.group_step
    return Columns(
        split=split,
        first_query=first_query,
        first_run=rank,
        s=plan.buffer("s").start + first_query,
        dp=plan.buffer("dp").start + first_query,
        ds=ds,
        stats=Int32((memory + plan.buffer("row_stats").start).toint()) + first_query * 4,
        scale_log2=scale_log2,
        never=never,
    )


def make_gradients(spec: BackwardSpec, memory: cute.Pointer, stores: tuple) -> tuple:
    """dV and dK by way of operands' memory that nobody reads any more."""
    (dv_atom, dv), (dk_atom, dk) = stores
    dv_place, dk_place = ("v", "k") if spec.cta_group == 2 else ("do", "q")
    shapes, plan = tile_shapes(spec), spec.plan
    dv_tile = shared_tile(spec, memory, dv_place, shapes["v"])
    dk_tile = shared_tile(spec, memory, dk_place, shapes["k"])
    return (
        Gradient(dv_atom, dv, dv_tile, plan.buffer("dv").start, spec.head_dim_v),
        Gradient(dk_atom, dk, dk_tile, plan.buffer("dk").start, spec.head_dim),
    )
