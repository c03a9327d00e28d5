"""The forward kernel: its warps' roles, and the host function that launches it."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from fa4.kit.descriptors import CTA_GROUPS, ELEMENTS
from fa4.kit.schedulers import scheduler
from fa4.kit.scores import scales
from fa4.kit.setup import SWIZZLE_ALIGN, close_down, has_role, held_address, start_up
from fa4.kit.signals import LEADER, Signals, pair_rank
from fa4.kit.tiles import KernelProblem, block_rows, heads_per_section
from fa4.kit.units import WARP, WARPGROUP
from fa4.kit.views import box_atoms, columns_first, ending_views, rows_first
from fa4.plan.forward_layout import split_columns
from fa4.sm100.forward.correction import CorrectionOperands, correction
from fa4.sm100.forward.epilogue import Store, epilogue
from fa4.sm100.forward.load import Operand, load
from fa4.sm100.forward.mma import mma
from fa4.sm100.forward.mods import Mods
from fa4.sm100.forward.operands import (
    kv_shift,
    make_products,
    output_tile,
    product_tiles,
    query_view,
    shared_layouts,
    tiled_mmas,
)
from fa4.sm100.forward.softmax import Rows, softmax
from fa4.sm100.forward.spec import ForwardSpec


@cute.jit
def forward(q, k, v, o, lse, softmax_scale, softcap, window_left, window_right, max_seqlen_q, sink,
            cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, aux, num_sms, stream,
            spec: cutlass.Constexpr, trace: cutlass.Constexpr):  # fmt: skip
    """Launch on tensors (batch, seqlen, heads, dim), or (total, heads, dim) where packed."""
    batch, seqlen_q = q.shape[0], q.shape[-3]
    if cutlass.const_expr(cu_seqlens_q is not None):
        batch, seqlen_q = cu_seqlens_q.shape[0] - 1, max_seqlen_q
    heads = q.shape[-2] // spec.group
    rows = block_rows(spec)
    blocks = (seqlen_q * spec.group + rows - 1) // rows
    num_tiles = blocks * heads * batch
    width = cutlass.const_expr((spec.head_dim + spec.head_dim_v) * q.element_type.width // 8)
    section = heads_per_section(k.shape[-3] * width, heads * batch)
    sizes = (seqlen_q, k.shape[-3], heads, heads // k.shape[-2], blocks, num_tiles, section)
    mmas = tiled_mmas(spec)
    layouts = shared_layouts(spec, mmas)
    qk_tile, pv_tile = product_tiles(spec)
    op = cpasync.CopyBulkTensorTileG2SOp(CTA_GROUPS[spec.cta_group])
    atom = cute.nvgpu.make_tiled_tma_atom_A(op, query_view(q, spec), layouts[0], qk_tile, mmas[0])
    make = cute.nvgpu.make_tiled_tma_atom_B
    loads = (
        ((atom[0], None), atom[1]),
        box_atoms(
            lambda view: make(op, view, layouts[1], qk_tile, mmas[0]),
            ending_views(rows_first(k, spec.packed_k), 0, spec.ragged_k),
        ),
        box_atoms(
            lambda view: make(op, view, layouts[2], pv_tile, mmas[1]),
            ending_views(columns_first(v, spec.packed_k), 1, spec.ragged_k),
        ),
    )
    if cutlass.const_expr(spec.ragged_q):
        store = (None, o)
    else:
        store = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(),
            query_view(o, spec),
            cute.select(layouts[3], [0, 1]),
            output_tile(spec),
        )
    clusters = num_tiles
    if cutlass.const_expr(spec.scheduler == "static"):
        clusters = cutlass.min(num_sms // spec.cta_group, num_tiles)
    kernel(
        mmas, loads, store, layouts, lse, scales(spec, softmax_scale, softcap), aux, sizes,
        (window_left, window_right), sink, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k),
        spec, trace,
    ).launch(
        grid=(clusters * spec.cta_group, 1, 1),
        block=(spec.plan.warps * WARP, 1, 1),
        cluster=(2, 1, 1) if spec.cta_group == 2 else None,
        stream=stream,
    )  # fmt: skip


@cute.kernel
def kernel(mmas, loads, store, layouts, lse, factors, aux, sizes, window, sink, lengths,
           spec: cutlass.Constexpr, trace: cutlass.Constexpr):  # fmt: skip
    """Set up shared and tensor memory, then let every warp run its role."""
    plan: cutlass.Constexpr = spec.plan
    q_tiles: cutlass.Constexpr = spec.numerics.q_tiles
    memory = cutlass.memory.SmemAllocator().allocate(plan.bytes_used("smem"), SWIZZLE_ALIGN)
    barriers = cute.recast_ptr(memory + plan.buffer("barriers").start, dtype=Int64)
    signals = Signals(plan, "setup", trace, barriers)
    response = None
    if cutlass.const_expr(spec.scheduler == "clc"):
        response = memory + plan.buffer("work").start
    problem = KernelProblem(spec, *(*sizes, *window, *lengths, response))
    operands = make_operands(spec, mmas, loads, layouts, memory)
    shared_o = shared_tensor(spec, memory, "o", layouts[3])
    stats = tuple(stats_tensor(spec, memory, i) for i in range(q_tiles))
    scale_log2, score_scale = factors
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    start_up(signals, warp)

    if has_role(warp, plan.role("load")):
        cute.arch.setmaxregister_decrease(plan.role("load").registers)
        load(signals.of("load"), problem, *operands)
    if has_role(warp, plan.role("mma")):
        cute.arch.setmaxregister_decrease(plan.role("mma").registers)
        if pair_rank(spec.cta_group) == LEADER:
            held = cute.make_tensor(held_address(signals), cute.make_layout(1))
            tmem = cute.arch.make_warp_uniform(held[0])
            shared = tuple(
                (cute.make_tensor(x.start, x.layout), x.pitch, x.shift) for x in operands
            )
            mma(signals.of("mma"), problem, make_products(spec, mmas, shared, tmem))
    if cutlass.const_expr(spec.scheduler == "clc"):  # noqa: SIM102
        if has_role(warp, plan.role("scheduler")):
            cute.arch.setmaxregister_decrease(plan.role("scheduler").registers)
            scheduler(signals.of("scheduler"), problem)
    if has_role(warp, plan.role("epilogue")):
        cute.arch.setmaxregister_decrease(plan.role("epilogue").registers)
        epilogue(signals.of("epilogue"), problem, Store(*(*store, shared_o)))
    if has_role(warp, plan.role("correction")):
        cute.arch.setmaxregister_decrease(plan.role("correction").registers)
        columns = [plan.buffer(f"o{i}").start for i in range(q_tiles)]
        outputs = CorrectionOperands(stats, columns, shared_o, scale_log2, lse, sink)
        correction(signals.of("correction"), problem, outputs)
    first, last = plan.role("softmax0"), plan.role(f"softmax{q_tiles - 1}")
    if has_role(warp, first, last):
        cute.arch.setmaxregister_increase(first.registers)
        i = q_tile(warp, spec)
        rows = Rows(
            i=i,
            s=first_column(spec, "s", i),
            p=first_column(spec, "p", i),
            split=split_columns(spec.pipeline),
            stats=stats_tensor(spec, memory, i),
            scale_log2=scale_log2,
            num_tiles=problem.num_tiles,
            mods=Mods(spec, score_scale, aux),
        )
        softmax(signals.of("softmax#").numbered(i), problem, rows)

    for number, registers in plan.idle_warps.items():
        if warp == number:
            cute.arch.setmaxregister_decrease(registers)

    close_down(signals, warp)


def q_tile(warp: Int32, spec: ForwardSpec) -> Int32 | int:
    """The Q tile of a softmax warp."""
    role = spec.plan.role("softmax0")
    return (warp - role.warps[0]) // len(role.warps) if spec.numerics.q_tiles == 2 else 0


def first_column(spec: ForwardSpec, name: str, i: Int32 | int) -> Int32 | int:
    """In tensor memory, of what the plan calls `name` followed by the Q tile's number."""
    starts = [spec.plan.buffer(f"{name}{j}").start for j in range(spec.numerics.q_tiles)]
    return starts[0] + (starts[-1] - starts[0]) * i


def make_operands(
    spec: ForwardSpec, mmas: tuple, loads: tuple, layouts: tuple, memory: cute.Pointer
) -> tuple:
    """Q, K and V on their way from global to shared memory."""
    rank = pair_rank(spec.cta_group)
    slices = mmas[0].get_slice(rank), mmas[0].get_slice(rank), mmas[1].get_slice(rank)
    (rows, keys, depth), (_, values, _) = product_tiles(spec)
    tiles = (rows, depth), (keys, depth), (values, keys)
    operands = []
    shift = kv_shift(spec)
    for number, (name, shift_bytes) in enumerate((("q", 0), ("kv", -shift), ("kv", shift))):
        shared = shared_tensor(spec, memory, name, layouts[number])
        element_bytes = shared.element_type.width // 8
        pitch = spec.plan.buffer(name).size // element_bytes
        operand = Operand(
            atoms=loads[number][0],
            tensor=loads[number][1],
            mma=slices[number],
            tile=tiles[number],
            start=shared.iterator,
            layout=shared.layout,
            pitch=pitch,
            shift=shift_bytes // element_bytes,
        )
        operands.append(operand)
    return tuple(operands)


def shared_tensor(
    spec: ForwardSpec, memory: cute.Pointer, name: str, layout: cute.ComposedLayout
) -> cute.Tensor:
    """A buffer of the plan in shared memory, with the swizzle of `layout`."""
    start = memory + spec.plan.buffer(name).start
    pointer = cute.recast_ptr(start, layout.inner, dtype=ELEMENTS[spec.dtype])
    return cute.make_tensor(pointer, layout.outer)


def stats_tensor(spec: ForwardSpec, memory: cute.Pointer, i: Int32 | int) -> cute.Tensor:
    """Statistics of Q tile i: 128 of log2(alpha) or l, then 128 of m."""
    start = memory + spec.plan.buffer("row_stats").start + i * 2 * WARPGROUP * 4
    return cute.make_tensor(cute.recast_ptr(start, dtype=Float32), cute.make_layout(2 * WARPGROUP))
