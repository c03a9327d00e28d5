"""The dQ kernel: its launch, its load warp and what its warpgroups work with."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from fa4.kit.descriptors import ELEMENTS, OperandTiles
from fa4.kit.scores import scales
from fa4.kit.setup import SWIZZLE_ALIGN, has_role, meet, take_registers
from fa4.kit.signals import Signals, init_signals
from fa4.kit.tiles import KernelProblem, WorkTile, block_rows, locate
from fa4.kit.units import WARP, WARPGROUP
from fa4.kit.views import box_atoms, ending_views, rows_first, swizzled_layout
from fa4.plan.warpgroup_wide import CONSUMERS
from fa4.plan.warpgroup_wide_queries import stages_of
from fa4.sm90.forward.load import TileLoad, fill, key_tiles, query_tiles, start_copy
from fa4.sm90.forward.products import operand_tiles
from fa4.sm90.forward.schedule import heads_of_section
from fa4.sm90.wide.output import StoredRows
from fa4.sm90.wide.products import RowProducts, product_depths
from fa4.sm90.wide.queries_consumer import QueryWork, consume
from fa4.sm90.wide.row_mods import row_score_mods
from fa4.sm90.wide.spec import WideBackwardSpec
from fa4.sm100.backward.workspace import first_tile
from fa4.sm100.forward.mods import Mods


def tile_shapes(spec: WideBackwardSpec) -> dict[str, tuple[int, int, int]]:
    """(rows, columns, stages) of each operand in shared memory; of Q and dO, the warpgroups'."""
    d, dv = spec.pipeline.head_dim, spec.pipeline.head_dim_v
    dims = {"q": d, "do": dv, "k": d, "v": dv}
    return {n: (rows, dims[n], count) for n, (rows, count) in stages_of(spec.pipeline).items()}


@cute.jit
def query_gradients(q, k, v, dout, dq, stats, softmax_scale, softcap, window, longest, lengths,
                    aux, stream, spec: cutlass.Constexpr, trace: cutlass.Constexpr):  # fmt: skip
    """Launch it: a CTA for each 128 queries of a head and each part of their keys."""
    batch, seqlen_q = q.shape[0], q.shape[-3]
    if cutlass.const_expr(spec.packed_q):
        batch, seqlen_q = lengths[0].shape[0] - 1, longest[0]
    heads = q.shape[-2]
    rows = block_rows(spec)
    blocks = (seqlen_q + rows - 1) // rows
    num_tiles, parts = blocks * heads * batch, None
    if cutlass.const_expr(spec.query_parts):
        parts = dq.shape[-2] // heads
        num_tiles *= parts
    width = cutlass.const_expr((spec.head_dim + spec.head_dim_v) * q.element_type.width // 8)
    section = heads_of_section(k.shape[-3] * width, heads * batch)
    sizes = (seqlen_q, k.shape[-3], heads, heads // k.shape[-2], blocks, num_tiles, section)
    shapes: cutlass.Constexpr = tile_shapes(spec)

    def atom(op, tensor, name):
        shape = shapes[name][:2]
        return cpasync.make_tiled_tma_atom(op, tensor, swizzled_layout(*shape), shape)

    loading = cpasync.CopyBulkTensorTileG2SOp()

    def load_queries(tensor, name):
        copy, coordinates = atom(loading, rows_first(tensor, spec.packed_q), name)
        return (copy, None), coordinates

    def load_keys(tensor, name):
        views = ending_views(rows_first(tensor, spec.packed_k), 0, spec.ragged_k)
        return box_atoms(lambda view: atom(loading, view, name), views)

    loads = {
        "q": load_queries(q, "q"),
        "do": load_queries(dout, "do"),
        "k": load_keys(k, "k"),
        "v": load_keys(v, "v"),
    }
    store = (None, dq, dq)
    if cutlass.const_expr(not (spec.ragged_q or spec.query_parts)):
        storing = cpasync.CopyBulkTensorTileS2GOp()
        store = (*atom(storing, rows_first(dq, spec.packed_q), "q"), dq)
    kernel(
        loads, store, stats, scales(spec, softmax_scale, softcap), softmax_scale, aux, sizes,
        window, lengths, parts, spec, trace,
    ).launch(
        grid=(num_tiles, 1, 1),
        block=(spec.queries_plan.warps * WARP, 1, 1),
        # One CTA per SM. Where ptxas cannot tell how many, it ignores setmaxnreg.
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,  # it starts beside the kernel of dK and dV
    )  # fmt: skip


@cute.kernel
def kernel(loads, store, stats, factors, softmax_scale, aux, sizes, window, lengths, parts,
           spec: cutlass.Constexpr, trace: cutlass.Constexpr):  # fmt: skip
    """Set up the barriers, then let every warp run its role."""
    plan: cutlass.Constexpr = spec.queries_plan
    memory = cutlass.memory.SmemAllocator().allocate(plan.bytes_used("smem"), SWIZZLE_ALIGN)
    barriers = cute.recast_ptr(memory + plan.buffer("barriers").start, dtype=Int64)
    signals = Signals(plan, "setup", trace, barriers)
    problem = KernelProblem(spec, *(*sizes, *window, *lengths, None, parts))
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        init_signals(signals)
    if warp == 1:
        for atom in (*(atoms[0] for atoms, _ in loads.values()), store[0]):
            if cutlass.const_expr(atom is not None):
                cpasync.prefetch_descriptor(atom)
    meet(spec.cta_group)
    tile = locate(problem, cute.arch.block_idx()[0])

    if has_role(warp, plan.role("load_keys")):
        take_registers(plan, plan.role("load_keys"))
        sources = {
            name: TileLoad(*(*loads[name], shared_tensor(spec, memory, name))) for name in loads
        }
        load(signals.of("load_keys"), tile, sources)
        # What is launched behind this kernel must find the other one finished, too.
        cute.arch.griddepcontrol_wait()
    if has_role(warp, plan.role("queries0"), plan.role(f"queries{CONSUMERS - 1}")):
        take_registers(plan, plan.role("queries0"))
        number = warp // (WARPGROUP // WARP)
        scale_log2, score_scale = factors
        shared = shared_tensor(spec, memory, "q")[None, None, number]
        work = QueryWork(
            number=number,
            head=tile.head if parts is None else tile.head * parts + tile.split,
            **make_products(spec, memory, number),
            stats=stats,
            stats_tile=first_tile(tile.batch, tile.start_q, problem.blocks, packed=spec.packed_q)
            + tile.block,
            scale_log2=scale_log2,
            softmax_scale=softmax_scale,
            mods=row_score_mods(Mods(spec, score_scale, aux), tile, number),
            output=StoredRows(*(*store, shared, spec.packed_q)),
        )
        consume(signals.of("queries#").numbered(number), tile, work)
    for idle, registers in plan.idle_warps.items():
        if warp == idle:
            cute.arch.setmaxregister_decrease(registers)


@cute.jit
def load(signals: Signals, tile: WorkTile, sources: dict) -> None:
    """Q and dO, counted with the first K and V; K and V, last keys first."""
    if tile.first_row < tile.seqlen_q:
        empty = tile.seqlen_k == 0 if tile.spec.ragged_k else False
        for name, ring in (("q", "k"), ("do", "v")):
            source = sources[name]
            full = signals.expect_more(f"{ring}_full", CONSUMERS * source.num_bytes)
            tiles = query_tiles(source, tile)
            for i in cutlass.range_constexpr(CONSUMERS):
                start_copy(source, tiles[None, None, tile.tile_number(i)], i, full)
        keys, values = signals.ring("k"), signals.ring("v")
        k, v = (key_tiles(sources[name], tile) for name in "kv")
        for j in cutlass.range(tile.kv_tiles, unroll=1):
            number = tile.kv_stop - 1 - j
            fill(signals, "k", sources["k"], k[None, None, number], keys, empty)
            fill(signals, "v", sources["v"], v[None, None, number], values, empty)
            keys, values = keys.next(), values.next()


def shared_tensor(spec: WideBackwardSpec, memory: cute.Pointer, name: str) -> cute.Tensor:
    """(rows, dim, stages) of a buffer of the plan, swizzled."""
    layout = swizzled_layout(*tile_shapes(spec)[name])
    start = memory + spec.queries_plan.buffer(name).start
    pointer = cute.recast_ptr(start, layout.inner, dtype=ELEMENTS[spec.dtype])
    return cute.make_tensor(pointer, layout.outer)


def make_products(spec: WideBackwardSpec, memory: cute.Pointer, number: Int32) -> dict:
    """Products of warpgroup `number`'s rows of Q and dO with K and V, and K over its rows."""
    plan, start = spec.queries_plan, memory.toint().to(Int32)
    depths = product_depths(spec)

    def tiles(name: str, along_rows: bool, stage: Int32 | int = 0) -> OperandTiles:
        rows, dim, _ = tile_shapes(spec)[name]
        stage_bytes = rows * dim * 2
        place = start + (plan.buffer(name).start + stage * stage_bytes)
        return operand_tiles(place, rows, dim, along_rows=along_rows, stage_bytes=stage_bytes,
                             depth=depths[name])  # fmt: skip

    def products(own: str, passing: str) -> RowProducts:
        return RowProducts(tiles(own, False, number), tiles(passing, False), spec.dtype,
                           spec.tile_n)  # fmt: skip

    return {
        "scores": products("q", "k"),
        "upstream": products("do", "v"),
        "key_rows": tiles("k", True),
    }
