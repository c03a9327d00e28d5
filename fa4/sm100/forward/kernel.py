"""The forward kernel: its warps' roles, and the host function that launches it."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa4.kit.schedulers import scheduler
from fa4.kit.setup import SWIZZLE_ALIGN, close_down, has_role, held_address, start_up
from fa4.kit.signals import LEADER, Signals, pair_rank
from fa4.kit.tiles import KernelProblem
from fa4.kit.units import WARPGROUP
from fa4.plan.forward_layout import split_columns
from fa4.sm100.forward.correction import CorrectionOperands, correction
from fa4.sm100.forward.epilogue import Store, epilogue
from fa4.sm100.forward.host import CallArguments, launch
from fa4.sm100.forward.load import load
from fa4.sm100.forward.mma import mma
from fa4.sm100.forward.mods import Mods
from fa4.sm100.forward.operands import (
    make_operands,
    make_products,
    parts_of_p,
    shared_tensor,
)
from fa4.sm100.forward.softmax import Rows, softmax
from fa4.sm100.forward.spec import ForwardSpec


@cute.jit
def forward(q, k, v, o, lse, softmax_scale, softcap, window_left, window_right, max_seqlen_q, sink,
            cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, aux, num_sms, stream,
            spec: cutlass.Constexpr, trace: cutlass.Constexpr):  # fmt: skip
    """Launch on tensors (batch, seqlen, heads, dim), or (total, heads, dim) where packed."""
    call = CallArguments(
        q, k, v, o, lse, softmax_scale, softcap, window_left, window_right, max_seqlen_q, sink,
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, aux, num_sms,
    )  # fmt: skip
    launch(kernel, call, stream, spec, trace)


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
            mma(
                signals.of("mma"),
                problem,
                make_products(spec, mmas, shared, tmem, parts_of_p(spec)),
            )
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


def stats_tensor(spec: ForwardSpec, memory: cute.Pointer, i: Int32 | int) -> cute.Tensor:
    """Statistics of Q tile i: 128 of log2(alpha) or l, then 128 of m."""
    start = memory + spec.plan.buffer("row_stats").start + i * 2 * WARPGROUP * 4
    return cute.make_tensor(cute.recast_ptr(start, dtype=Float32), cute.make_layout(2 * WARPGROUP))
