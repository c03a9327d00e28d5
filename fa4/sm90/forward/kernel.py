"""The Hopper forward kernel: its warps' roles, and the host function that launches it."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from fa4.kit.descriptors import ELEMENTS, OperandTiles
from fa4.kit.rings import Ring
from fa4.kit.scores import scales
from fa4.kit.setup import SWIZZLE_ALIGN, has_role, meet, take_registers
from fa4.kit.signals import Signals, init_signals
from fa4.kit.tiles import KernelProblem, block_rows
from fa4.kit.units import WARP, WARPGROUP
from fa4.kit.views import box_atoms, ending_views, rows_first, swizzled_layout
from fa4.plan.warpgroup import query_stages
from fa4.plan.warpgroup_packing import ROW_BYTES
from fa4.plan.warpgroup_roles import loaded_values
from fa4.plan.work_queue import PLACES
from fa4.sm90.forward.combine import combine
from fa4.sm90.forward.consumer import ConsumerWork, consume
from fa4.sm90.forward.load import TileLoad, load
from fa4.sm90.forward.output import OutputTile
from fa4.sm90.forward.products import WarpgroupProducts, operand_tiles
from fa4.sm90.forward.schedule import WorkQueue, heads_at_once, heads_of_section
from fa4.sm90.forward.sectors import halves
from fa4.sm90.forward.spec import PERSISTENT, WarpgroupSpec, query_box
from fa4.sm90.forward.transpose import ValueTiles, transpose
from fa4.sm100.forward.mods import Mods
from fa4.sm100.forward.operands import query_view


def tile_shapes(spec: WarpgroupSpec) -> dict[str, tuple[int, int, int]]:
    """(rows, columns, stages) of each operand in shared memory.

    Q's, P's and O's stages are the warpgroups', of Q as often as there are places for it; where
    positions straddle, Q's are the places. Of 8-bit types, V lies transposed in its ring.
    """
    pipeline = spec.pipeline
    (d, dv), tile_n = pipeline.widths, spec.tile_n
    places = query_stages(pipeline, spec.gpu)
    rows, stages = spec.tile_rows, spec.consumers * places
    if spec.straddles:
        rows, stages = spec.query_place.positions * spec.group, places
    return {
        "q": (rows, d, stages),
        "k": (tile_n, d, spec.kv_stages),
        "raw": (tile_n, dv, spec.kv_stages),
        "v": (dv, tile_n, spec.kv_stages) if pipeline.transposes else (tile_n, dv, spec.kv_stages),
        "p": (spec.tile_rows, spec.tile_n, spec.consumers),
        "o": (spec.tile_rows, dv, spec.consumers),
    }


def tile_boxes(spec: WarpgroupSpec) -> dict[str, Any]:
    """Rows and columns of each operand, as TMA moves them."""
    shapes = {name: shape[:2] for name, shape in tile_shapes(spec).items()}
    return shapes | {name: query_box(spec, shapes[name]) for name in "qo"}


@cute.jit
def forward(q, k, v, o, lse, softmax_scale, softcap, window_left, window_right, max_seqlen_q, sink,
            cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, aux, num_sms, stream,
            spec: cutlass.Constexpr, trace: cutlass.Constexpr):  # fmt: skip
    """Launch on tensors (batch, seqlen, heads, dim), or (total, heads, dim) where packed."""
    attend(q, k, v, o, lse, (softmax_scale, softcap), (window_left, window_right), max_seqlen_q,
           sink, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), aux, num_sms, None,
           (None, None, None), stream, spec, trace)  # fmt: skip


@cute.jit
def forward_narrow(
    q, k, v, o, lse, softmax_scale, softcap, window_left, window_right, max_seqlen_q, sink,
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, aux, num_sms,
    q_descale, k_descale, v_descale, stream, spec: cutlass.Constexpr, trace: cutlass.Constexpr,
):  # fmt: skip
    """The same for 8-bit types; factors (batch, KV heads) in float32, None without one."""
    attend(q, k, v, o, lse, (softmax_scale, softcap), (window_left, window_right), max_seqlen_q,
           sink, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), aux, num_sms, None,
           (q_descale, k_descale, v_descale), stream, spec, trace)  # fmt: skip


@cute.jit
def forward_narrow_queue(
    q, k, v, o, lse, softmax_scale, softcap, window_left, window_right, max_seqlen_q, sink,
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, aux, num_sms,
    q_descale, k_descale, v_descale, drawn, stream, spec: cutlass.Constexpr,
    trace: cutlass.Constexpr,
):  # fmt: skip
    """The same with work tiles that are drawn, as of `forward_queue`."""
    attend(q, k, v, o, lse, (softmax_scale, softcap), (window_left, window_right), max_seqlen_q,
           sink, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), aux, num_sms, None,
           (q_descale, k_descale, v_descale), stream, spec, trace, drawn)  # fmt: skip


@cute.jit
def forward_split(q, k, v, o, lse, softmax_scale, softcap, window_left, window_right, max_seqlen_q,
                  sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, aux, num_sms, o_parts,
                  lse_parts, stream, spec: cutlass.Constexpr,
                  trace: cutlass.Constexpr):  # fmt: skip
    """The same in parts of the keys, o_parts (splits, *shape of O) and lse_parts in float32, which
    a second kernel combines."""
    attend(q, k, v, o_parts, lse_parts, (softmax_scale, softcap), (window_left, window_right),
           max_seqlen_q, None, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), aux, num_sms,
           o_parts.shape[0], (None, None, None), stream, spec, trace)  # fmt: skip
    longest = q.shape[-3]
    if cutlass.const_expr(cu_seqlens_q is not None):
        longest = max_seqlen_q
    combine(o_parts, lse_parts, o, lse, sink, longest, cu_seqlens_q, seqused_q, stream, spec)


@cute.jit
def forward_queue(q, k, v, o, lse, softmax_scale, softcap, window_left, window_right, max_seqlen_q,
                  sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, aux, num_sms, drawn,
                  stream, spec: cutlass.Constexpr, trace: cutlass.Constexpr):  # fmt: skip
    """The same with work tiles that are drawn; drawn: one int32, zero."""
    attend(q, k, v, o, lse, (softmax_scale, softcap), (window_left, window_right), max_seqlen_q,
           sink, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), aux, num_sms, None,
           (None, None, None), stream, spec, trace, drawn)  # fmt: skip


@cute.jit
def attend(q, k, v, o, lse, factors, window, max_seqlen_q, sink, lengths, aux, num_sms, splits,
           descales, stream, spec: cutlass.Constexpr, trace: cutlass.Constexpr,
           drawn=None):  # fmt: skip
    """Launch the main kernel; splits: parts of the keys, None where they are not divided."""
    batch, seqlen_q = q.shape[0], q.shape[-3]
    if cutlass.const_expr(lengths[0] is not None):
        batch, seqlen_q = lengths[0].shape[0] - 1, max_seqlen_q
    heads = q.shape[-2] // spec.group
    rows = block_rows(spec)
    blocks = (seqlen_q * spec.group + rows - 1) // rows
    num_tiles = blocks * heads * batch
    if cutlass.const_expr(spec.split):
        num_tiles *= splits
    width = cutlass.const_expr((spec.head_dim + spec.head_dim_v) * q.element_type.width // 8)
    ctas = num_tiles
    if cutlass.const_expr(spec.scheduler in PERSISTENT):
        ctas = cutlass.min(num_sms, num_tiles)
    section = heads_at_once(spec.consumers, ctas)
    if cutlass.const_expr(spec.scheduler in ("lpt", "queue")):
        sharing = heads // k.shape[-2]  # heads of work tiles that read the same keys
        section = heads_of_section(k.shape[-3] * width // sharing, heads * batch)
    found = (halves(k, spec.packed_k) if spec.shifts[0] else None,
             halves(v, spec.packed_k) if spec.shifts[1] else None)  # fmt: skip
    sizes = (seqlen_q, k.shape[-3], heads, heads // k.shape[-2], blocks, num_tiles, section)
    shapes: cutlass.Constexpr = tile_shapes(spec)
    boxes: cutlass.Constexpr = tile_boxes(spec)

    def atom(name, view, op):
        element_bytes = view.element_type.width // 8
        layout = swizzled_layout(*shapes[name][:2], element_bytes=element_bytes,
                                 held=held_rows(spec, name))  # fmt: skip
        return cpasync.make_tiled_tma_atom(op, view, layout, boxes[name])

    loading = cpasync.CopyBulkTensorTileG2SOp()
    queries, coordinates = atom("q", query_view(q, spec), loading)
    loads = (
        ((queries, None), coordinates),
        box_atoms(
            lambda view: atom("k", view, loading),
            ending_views(rows_first(k, spec.packed_k), 0, spec.ragged_k),
        ),
        box_atoms(
            lambda view: atom(loaded_values(spec.pipeline), view, loading),
            ending_views(rows_first(v, spec.packed_k), 0, spec.ragged_k),
        ),
    )
    if cutlass.const_expr(spec.ragged_q or spec.straddles or not spec.pipeline.stages_output):
        store = (None, o)
    else:
        store = atom("o", query_view(o, spec), cpasync.CopyBulkTensorTileS2GOp())
    kernel(
        loads, store, lse, scales(spec, *factors), aux, sizes, window, sink, lengths, splits,
        descales, drawn, found, spec, trace,
    ).launch(
        grid=(ctas, 1, 1),
        block=(spec.plan.warps * WARP, 1, 1),
        # One CTA per SM. Where ptxas cannot tell how many, it ignores setmaxnreg.
        min_blocks_per_mp=1,
        stream=stream,
    )  # fmt: skip


@cute.kernel
def kernel(loads, store, lse, factors, aux, sizes, window, sink, lengths, splits, descales, drawn,
           found, spec: cutlass.Constexpr, trace: cutlass.Constexpr):  # fmt: skip
    """Set up the barriers, then let every warp run its role."""
    plan: cutlass.Constexpr = spec.plan
    memory = cutlass.memory.SmemAllocator().allocate(plan.bytes_used("smem"), SWIZZLE_ALIGN)
    barriers = cute.recast_ptr(memory + plan.buffer("barriers").start, dtype=Int64)
    signals = Signals(plan, "setup", trace, barriers)
    problem = KernelProblem(spec, *(*sizes, *window, *lengths, None, splits))
    scale_log2, score_scale = factors
    queue = WorkQueue(None, None, None)
    if cutlass.const_expr(spec.draws_work):
        numbers = cute.recast_ptr(memory + plan.buffer("work").start, dtype=Int32)
        queue = WorkQueue(drawn, numbers, Ring.of(PLACES))
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        init_signals(signals)
    if warp == 1:
        for atom in (*(atoms[0] for atoms, _ in loads), store[0]):
            if cutlass.const_expr(atom is not None):
                cpasync.prefetch_descriptor(atom)
    meet(spec.cta_group)
    if cutlass.const_expr(spec.split):  # the kernel that combines the parts may be launched
        cute.arch.griddepcontrol_launch_dependents()

    if has_role(warp, plan.role("load")):
        take_registers(plan, plan.role("load"))
        operands = [
            TileLoad(*(*loads[i], shared_tensor(spec, memory, name), found[i // 2]))
            for i, name in enumerate(("q", "k", loaded_values(spec.pipeline)))
        ]
        load(signals.of("load"), problem, *operands, queue)
    if cutlass.const_expr(spec.pipeline.transposes):  # noqa: SIM102
        if has_role(warp, plan.role("transpose")):
            take_registers(plan, plan.role("transpose"))
            start = memory.toint().to(Int32)
            tiles = ValueTiles(
                raw=start + plan.buffer("raw").start,
                transposed=start + plan.buffer("v").start,
                keys=spec.tile_n,
                columns=spec.pipeline.widths[1],
            )
            transpose(signals.of("transpose"), problem, tiles, queue)
    first, last = plan.role("consumer0"), plan.role(f"consumer{spec.consumers - 1}")
    if has_role(warp, first, last):
        take_registers(plan, first)
        number = warp // (WARPGROUP // WARP)
        probabilities = None
        if cutlass.const_expr(spec.p_source == "smem"):
            probabilities = shared_tensor(spec, memory, "p")[None, None, number]
        work = ConsumerWork(
            spec=spec,
            number=number,
            products=make_products(spec, memory, number),
            probabilities=probabilities,
            scale_log2=scale_log2,
            slack=spec.numerics.rescale_threshold_log2 / scale_log2,
            num_tiles=problem.num_tiles,
            mods=Mods(spec, score_scale, aux),
            descales=descales,
            memory=memory.toint().to(Int32),
            queue=queue,
        )
        shared = None
        if cutlass.const_expr(spec.pipeline.stages_output):
            shared = shared_tensor(spec, memory, "o")[None, None, number]
        output = OutputTile(*(*store, shared, scale_log2, lse, sink, found[1]))
        consume(signals.of("consumer#").numbered(number), problem, work, output)
    for idle, registers in plan.idle_warps.items():
        if warp == idle:
            cute.arch.setmaxregister_decrease(registers)


def held_rows(spec: WarpgroupSpec, name: str) -> int | None:
    """Rows of a place of an operand in shared memory, if a copy does not bring all."""
    return spec.query_place.rows if name == "q" and spec.straddles else None


def shared_tensor(spec: WarpgroupSpec, memory: cute.Pointer, name: str) -> cute.Tensor:
    """(rows, dim, stages) of a buffer of the plan, swizzled; of Q from the work tile's first row
    on, where a copy may begin before it."""
    element = ELEMENTS[spec.out_dtype if name == "o" else spec.dtype]
    held = held_rows(spec, name)
    layout = swizzled_layout(*tile_shapes(spec)[name], element_bytes=element.width // 8, held=held)
    start = memory + spec.plan.buffer(name).start
    if held:
        start = start + spec.query_place.lead * ROW_BYTES
    pointer = cute.recast_ptr(start, layout.inner, dtype=element)
    return cute.make_tensor(pointer, layout.outer)


def make_products(spec: WarpgroupSpec, memory: cute.Pointer, number: Int32) -> WarpgroupProducts:
    """Descriptors of warpgroup `number`'s rows of Q, and of K and V."""
    plan, shapes = spec.plan, tile_shapes(spec)
    start = memory.toint().to(Int32)

    def tiles(
        name: str, along_rows: bool, stage: Int32 | int = 0, depth: int | None = None
    ) -> OperandTiles:
        rows, dim, _ = shapes[name]
        stage_bytes = rows * dim * spec.element_bytes
        place = start + (plan.buffer(name).start + stage * stage_bytes)
        if name == "q":  # a place holds all warpgroups' rows
            stage_bytes = plan.buffer(name).size
        if name == "q" and spec.straddles:
            rows = spec.query_place.rows
            first = spec.query_place.lead + stage * spec.tile_rows
            place = start + (plan.buffer(name).start + first * ROW_BYTES)
        return operand_tiles(place, rows, dim, along_rows=along_rows, stage_bytes=stage_bytes,
                             element_bytes=spec.element_bytes, depth=depth)  # fmt: skip

    return WarpgroupProducts(
        q=tiles("q", False, number, spec.pipeline.head_dim),
        k=tiles("k", False, depth=spec.pipeline.head_dim),
        v=tiles("v", not spec.pipeline.transposes),
        p=tiles("p", False, number) if spec.p_source == "smem" else None,
        dtype=spec.dtype,
        tile_n=spec.tile_n,
        values=spec.pipeline.head_dim_v,
    )
