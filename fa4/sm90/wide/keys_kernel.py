"""The kernel of dK and dV: its launch, its load warp and what its warpgroups work with."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa4.config import WARPGROUP_ROWS
from fa4.kit.descriptors import OperandTiles, swizzle_bytes
from fa4.kit.scores import scales
from fa4.kit.setup import SWIZZLE_ALIGN, has_role, meet, take_registers
from fa4.kit.signals import Signals, init_signals
from fa4.kit.units import WARP, WARPGROUP
from fa4.plan.warpgroup_wide import TILE_ROWS
from fa4.plan.warpgroup_wide_keys import held_registers
from fa4.sm90.backward.columns import column_address
from fa4.sm90.backward.load import LoadSources, load_rows
from fa4.sm90.backward.mods import score_mods
from fa4.sm90.backward.operands import (
    Shapes,
    TileShape,
    load_atoms,
    make_sources,
    prefetch_descriptors,
    shared_tile,
    store_atoms,
)
from fa4.sm90.backward.order import first_rows, next_rows, query_head
from fa4.sm90.backward.parts import shared_keys
from fa4.sm90.forward.products import operand_tiles
from fa4.sm90.wide.exchange import thread_address
from fa4.sm90.wide.keys_consumer import HalfWork, consume
from fa4.sm90.wide.output import StoredRows
from fa4.sm90.wide.products import RowProducts, product_depths
from fa4.sm90.wide.spec import WideBackwardSpec
from fa4.sm90.wide.tiles import WarpgroupKeys
from fa4.sm100.backward.load import load_keys
from fa4.sm100.backward.tiles import BackwardProblem, KeyTile, call_sizes, locate


def tile_shapes(spec: WideBackwardSpec) -> Shapes:
    """Of each operand."""
    d, dv = spec.pipeline.head_dim, spec.pipeline.head_dim_v
    return {
        "q": TileShape(TILE_ROWS, d, spec.pipeline.q_stages),
        "do": TileShape(TILE_ROWS, dv, spec.pipeline.do_stages),
        "k": TileShape(WARPGROUP_ROWS, d, 0),
        "v": TileShape(WARPGROUP_ROWS, dv, 0),
    }


@cute.jit
def key_gradients(q, k, v, dout, dk, dv, stats, softmax_scale, softcap, window, longest, lengths,
                  aux, stream, spec: cutlass.Constexpr, trace: cutlass.Constexpr):  # fmt: skip
    """Launch it: a CTA for each 64 keys of a KV head."""
    shapes: cutlass.Constexpr = tile_shapes(spec)
    sizes, ctas = call_sizes(q, dk, longest, lengths, WARPGROUP_ROWS)
    loads = load_atoms(spec, shapes, (q, k, v, dout))
    stores = store_atoms(spec, shapes, dv, dk)
    kernel(
        loads, stores, (dv, dk), stats, scales(spec, softmax_scale, softcap), softmax_scale, aux,
        sizes, window, lengths, spec, trace,
    ).launch(
        grid=(ctas, 1, 1),
        block=(spec.keys_plan.warps * WARP, 1, 1),
        # One CTA per SM. Where ptxas cannot tell how many, it ignores setmaxnreg.
        min_blocks_per_mp=1,
        stream=stream,
    )  # fmt: skip


@cute.kernel
def kernel(loads, stores, gradients, stats, factors, softmax_scale, aux, sizes, window, lengths,
           spec: cutlass.Constexpr, trace: cutlass.Constexpr):  # fmt: skip
    """Set up the barriers, then let every warp run its role."""
    plan: cutlass.Constexpr = spec.keys_plan
    memory = cutlass.memory.SmemAllocator().allocate(plan.bytes_used("smem"), SWIZZLE_ALIGN)
    barriers = cute.recast_ptr(memory + plan.buffer("barriers").start, dtype=Int64)
    signals = Signals(plan, "setup", trace, barriers)
    problem = BackwardProblem(spec, *(*sizes, *window, *lengths))
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        init_signals(signals)
    if warp == 1:
        prefetch_descriptors(loads, stores)
    meet(spec.cta_group)
    # The dQ kernel needs nothing of this one: its CTAs may start where no more of these do.
    cute.arch.griddepcontrol_launch_dependents()
    tile = locate(problem, WarpgroupKeys)

    if has_role(warp, plan.role("load_queries")):
        take_registers(plan, plan.role("load_queries"))
        sources = make_sources(spec, plan, tile_shapes(spec), memory, loads, stats)
        load(signals.of("load_queries"), tile, sources)
    if has_role(warp, plan.role("values")):
        take_registers(plan, plan.role("values"))
        work = make_work(spec, memory, tile, factors, aux, (*stores[0], gradients[0]), None)
        consume(signals.of("values").numbered(0), tile, work, True)
    if has_role(warp, plan.role("keys")):
        take_registers(plan, plan.role("keys"))
        stored = (*stores[1], gradients[1])
        work = make_work(spec, memory, tile, factors, aux, stored, softmax_scale)
        consume(signals.of("keys").numbered(1), tile, work, False)
    for idle, registers in plan.idle_warps.items():
        if warp == idle:
            cute.arch.setmaxregister_decrease(registers)


@cute.jit
def load(signals: Signals, tile: KeyTile, sources: LoadSources) -> None:
    """The query tiles of the group's heads, in their order."""
    queries, grads = signals.ring("q"), signals.ring("do")
    trips = tile.trips
    member, row_tile = first_rows(tile)
    if trips > 0:
        keys = shared_keys(tile, sources.q.tensor, sources.k.tensor)
        load_keys(signals, "q_full", sources.k, keys)
        load_keys(signals, "do_full", sources.v, keys)
    for _ in cutlass.range(trips, unroll=1):
        head = query_head(tile, member)
        load_rows(signals, "q", sources.q, sources.lse, tile, head, row_tile, queries)
        load_rows(signals, "do", sources.dout, sources.d, tile, head, row_tile, grads)
        queries, grads = queries.next(), grads.next()
        member, row_tile = next_rows(tile, member, row_tile)


def make_work(
    spec: WideBackwardSpec,
    memory: cute.Pointer,
    tile: KeyTile,
    factors: tuple,
    aux: tuple | None,
    store: tuple,
    output_scale: Float32 | None,
) -> HalfWork:
    """Of the warpgroup that scales its gradient, dK, by output_scale; or of the other one.

    store: first fields of its `StoredRows`.
    """
    of_keys = output_scale is not None
    plan, start = spec.keys_plan, memory.toint().to(Int32)
    scale_log2, score_scale = factors

    depths = product_depths(spec)
    atom, coordinates, tensor = store

    def tiles(name: str, along_rows: bool) -> OperandTiles:
        rows, dim, *_ = tile_shapes(spec)[name]
        place = start + plan.buffer(name).start
        return operand_tiles(place, rows, dim, along_rows=along_rows, stage_bytes=rows * dim * 2,
                             depth=depths[name])  # fmt: skip

    own, passing, summed = ("v", "do", "q") if of_keys else ("k", "q", "do")
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    shared = shared_tile(spec, plan, tile_shapes(spec), memory, "k" if of_keys else "v")
    dim = tile_shapes(spec)[own].cols
    return HalfWork(
        first=RowProducts(
            tiles(own, False),
            tiles(passing, False),
            spec.dtype,
            TILE_ROWS,
            start_own=start + plan.buffer(own).start,
            row_bytes=swizzle_bytes(dim),
            held=held_registers(spec.pipeline, "keys" if of_keys else "values"),
        ),
        summed="dk" if of_keys else "dv",
        rows=tiles(summed, True),
        lse=column_address(start + plan.buffer("lse").start, thread),
        d=column_address(start + plan.buffer("d").start, thread),
        handed=thread_address(start + plan.buffer("p").start, thread),
        scale_log2=scale_log2,
        mods=score_mods(spec, score_scale, aux, tile, Int32(0)),
        output=StoredRows(atom, coordinates, tensor, shared, spec.packed_k),
        output_scale=output_scale,
    )
