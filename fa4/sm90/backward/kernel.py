"""The Hopper backward kernel: its warps' roles."""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from fa4.config import WARPGROUP_ROWS
from fa4.kit.descriptors import OperandTiles, swizzle_bytes
from fa4.kit.setup import SWIZZLE_ALIGN, has_role, take_registers
from fa4.kit.signals import CTA_BARRIER, Signals, init_signals
from fa4.kit.units import WARP, WARPGROUP
from fa4.plan.warpgroup_backward import CONSUMERS, STAGES, dq_columns
from fa4.sm90.backward.columns import column_address
from fa4.sm90.backward.consumer import KeyWork, consume
from fa4.sm90.backward.epilogue import GradientTile, KeyGradients
from fa4.sm90.backward.load import load
from fa4.sm90.backward.operands import (
    Shapes,
    TileShape,
    first_buffer,
    make_sources,
    prefetch_descriptors,
    shared_tile,
)
from fa4.sm90.backward.order import WorkList
from fa4.sm90.backward.products import GradientProducts, joined
from fa4.sm90.backward.queue import KeyQueue
from fa4.sm90.backward.reduce import DqReduction, reduce
from fa4.sm90.backward.spec import WarpgroupBackwardSpec
from fa4.sm90.forward.products import operand_tiles
from fa4.sm100.backward.tiles import BackwardProblem


def tile_shapes(spec: WarpgroupBackwardSpec) -> Shapes:
    """Of each operand; stages of k and v: each warpgroup's, one behind the other's."""
    pipeline = spec.pipeline
    places = CONSUMERS * STAGES
    d, dv, rows = pipeline.head_dim, pipeline.head_dim_v, pipeline.tile_m
    return {
        "q": TileShape(rows, d, STAGES),
        "do": TileShape(rows, dv, STAGES),
        "k": TileShape(WARPGROUP_ROWS, pipeline.key_dim, places, pipeline.key_run_bytes),
        "v": TileShape(WARPGROUP_ROWS, dv, CONSUMERS),
        "ds": TileShape(rows, WARPGROUP_ROWS, STAGES),
        # Over dS, of which each warpgroup has as many places for it.
        "dv": TileShape(WARPGROUP_ROWS, dv, places * rows // dv),
        "dk": TileShape(WARPGROUP_ROWS, pipeline.key_dim, places, pipeline.key_run_bytes),
    }


@cute.kernel
def kernel(loads, stores, gradients, stats, dq_accum, turns, drawn, factors, softmax_scale, aux,
           sizes, window, lengths, spec: cutlass.Constexpr, trace: cutlass.Constexpr):  # fmt: skip
    """Set up the barriers, then let every warp run its role."""
    plan: cutlass.Constexpr = spec.plan
    memory = cutlass.memory.SmemAllocator().allocate(plan.bytes_used("smem"), SWIZZLE_ALIGN)
    barriers = cute.recast_ptr(memory + plan.buffer("barriers").start, dtype=Int64)
    signals = Signals(plan, "setup", trace, barriers)
    sizes, count = sizes
    work_list = WorkList(BackwardProblem(spec, *(*sizes, *window, *lengths)), count)
    numbers = cute.recast_ptr(memory + plan.buffer("work").start, dtype=Int32)
    queue = KeyQueue(work_list, drawn, numbers)
    scale_log2, score_scale = factors
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    threads: cutlass.Constexpr = plan.warps * WARP
    if has_role(warp, plan.role("load")):  # it begins at once, the others when there are barriers
        init_signals(signals)
        cute.arch.sync_warp()
        cute.arch.barrier_arrive(barrier_id=CTA_BARRIER, number_of_threads=threads)
    else:
        if warp == 0:
            prefetch_descriptors(loads, stores)
        cute.arch.barrier(barrier_id=CTA_BARRIER, number_of_threads=threads)

    if has_role(warp, plan.role("load")):
        take_registers(plan, plan.role("load"))
        sources = make_sources(spec, plan, tile_shapes(spec), memory, loads, stats)
        sources = replace(sources, gradients=gradients)
        load(signals.of("load"), queue, sources)
    if has_role(warp, plan.role("consumer0"), plan.role("consumer1")):
        take_registers(plan, plan.role("consumer0"))
        number = warp // (WARPGROUP // WARP)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        start = memory.toint().to(Int32)
        work = KeyWork(
            number=number,
            products=make_products(spec, start, number),
            dq=dq_staging(spec, start, number),
            gradients=make_gradients(spec, memory, stores),
            softmax_scale=softmax_scale,
            lse=column_address(start + plan.buffer("lse").start, thread),
            d=column_address(start + plan.buffer("d").start, thread),
            ds=start + plan.buffer("ds0").start + number * ds_step(spec),
            scale_log2=scale_log2,
            score_scale=score_scale,
            aux=aux,
        )
        consume(signals.of("consumer#").numbered(number), queue, work)
    if has_role(warp, plan.role("reduce0"), plan.role("reduce1")):
        take_registers(plan, plan.role("reduce0"))
        number = warp - plan.role("reduce0").warps[0]
        staging = dq_staging(spec, memory.toint().to(Int32), number)
        leaving = make_gradients(spec, memory, stores)
        adding = DqReduction(number, staging, dq_accum, turns, leaving)
        reduce(signals.of("reduce#").numbered(number), queue, adding)
    for idle, registers in plan.idle_warps.items():
        if warp == idle:
            cute.arch.setmaxregister_decrease(registers)


def dq_staging(spec: WarpgroupBackwardSpec, start: Int32, number: Int32) -> Int32:
    """The address of a warpgroup's part of dQ; start: of shared memory."""
    first, second = (spec.plan.buffer(f"dq{i}").start for i in range(CONSUMERS))
    return start + first + number * (second - first)


def ds_step(spec: WarpgroupBackwardSpec) -> int:
    """Bytes from the first warpgroup's dS to the second's."""
    return spec.plan.buffer("ds1").start - spec.plan.buffer("ds0").start


def make_products(spec: WarpgroupBackwardSpec, start: Int32, number: Int32) -> GradientProducts:
    """Descriptors of the operands of warpgroup `number`; start: of shared memory."""
    plan, shapes, pipeline = spec.plan, tile_shapes(spec), spec.pipeline

    cols, cols_v = pipeline.product_dims
    depths = {"q": cols, "k": cols, "do": cols_v, "v": cols_v}

    def tiles(name: str, along_rows: bool, offset: Int32 | int = 0) -> OperandTiles:
        rows, dim, _, run_bytes = shapes[name[:2] if name.startswith("ds") else name]
        place = start + first_buffer(plan, name).start + offset
        return operand_tiles(place, rows, dim, along_rows=along_rows, stage_bytes=rows * dim * 2,
                             depth=depths.get(name), run_bytes=run_bytes)  # fmt: skip

    def both(one: OperandTiles, distance: int) -> OperandTiles:
        return joined(one, one, distance // 16)

    own, k_bytes = WARPGROUP_ROWS * 2, STAGES * WARPGROUP_ROWS * 2 * pipeline.key_dim
    v_bytes = own * pipeline.head_dim_v
    # Which rows of dQ, or which of its columns, are this warpgroup's: a run, or half of one.
    run = number * (WARPGROUP_ROWS * swizzle_bytes(WARPGROUP_ROWS))
    columns = number * column_offset(pipeline.key_run_bytes, pipeline.dq_dim // CONSUMERS)
    of_rows = pipeline.tile_m == CONSUMERS * WARPGROUP_ROWS
    return GradientProducts(
        k=tiles("k", False, number * k_bytes),
        v=tiles("v", False, number * v_bytes),
        q=tiles("q", False),
        do=tiles("do", False),
        q_rows=tiles("q", True),
        do_rows=tiles("do", True),
        ds=both(tiles("ds0", False, run if of_rows else Int32(0)), ds_step(spec)),
        k_rows=both(tiles("k", True, Int32(0) if of_rows else columns), k_bytes),
        dtype=spec.dtype,
        cols=pipeline.product_dims,
        tile_m=pipeline.tile_m,
        dq_cols=dq_columns(pipeline),
    )


def column_offset(run_bytes: int, column: int) -> int:
    """Bytes from the first column of a warpgroup's tile of K to another one."""
    run, inside = divmod(2 * column, run_bytes)
    return run * (WARPGROUP_ROWS * run_bytes) + inside


def make_gradients(
    spec: WarpgroupBackwardSpec,
    memory: cute.Pointer,
    stores: tuple,
) -> KeyGradients:
    """dV and dK by way of the memory of dS and K."""
    ways = (("dv", "ds", spec.head_dim_v), ("dk", "k", spec.head_dim))
    dv, dk = (
        GradientTile(
            atom,
            tensor,
            shared_tile(spec, spec.plan, tile_shapes(spec), memory, name, over),
            dim,
        )
        for (atom, tensor), (name, over, dim) in zip(stores, ways, strict=True)
    )
    return KeyGradients(dv, dk)
