"""The forward kernel with halves: its warps' roles, and the host function that launches it."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from fa4.kit.setup import (
    SWIZZLE_ALIGN,
    close_down,
    has_role,
    held_address,
    start_up,
    take_registers,
)
from fa4.kit.signals import LEADER, Signals, pair_rank
from fa4.kit.tiles import KernelProblem
from fa4.kit.units import MMA_DEPTH, padded_dim
from fa4.sm100.forward.epilogue import Store, epilogue
from fa4.sm100.forward.host import CallArguments, launch
from fa4.sm100.forward.load import load
from fa4.sm100.forward.mma import PartOfP, mma
from fa4.sm100.forward.mods import Mods
from fa4.sm100.forward.operands import make_operands, make_products, shared_tensor
from fa4.sm100.halves.output import Output
from fa4.sm100.halves.softmax import Half, softmax
from fa4.sm100.halves.spec import HalvesSpec

GROUPS = ("a", "b")


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
    memory = cutlass.memory.SmemAllocator().allocate(plan.bytes_used("smem"), SWIZZLE_ALIGN)
    barriers = cute.recast_ptr(memory + plan.buffer("barriers").start, dtype=Int64)
    signals = Signals(plan, "setup", trace, barriers)
    problem = KernelProblem(spec, *(*sizes, *window, *lengths, None))
    operands = make_operands(spec, mmas, loads, layouts, memory, "q0")
    shared_o = shared_tensor(spec, memory, "o", layouts[3])
    scale_log2, score_scale = factors
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    start_up(signals, warp)

    if has_role(warp, plan.role("load")):
        take_registers(plan, plan.role("load"))
        load(signals.of("load"), problem, *operands)
    if has_role(warp, plan.role("mma")):
        take_registers(plan, plan.role("mma"))
        if pair_rank(spec.cta_group) == LEADER:
            held = cute.make_tensor(held_address(signals), cute.make_layout(1))
            tmem = cute.arch.make_warp_uniform(held[0])
            shared = tuple(
                (cute.make_tensor(x.start, x.layout), x.pitch, x.shift) for x in operands
            )
            products = make_products(spec, mmas, shared, tmem, parts_of_p(spec), GROUPS)
            mma(signals.of("mma"), problem, products)
    if has_role(warp, plan.role("epilogue")):
        take_registers(plan, plan.role("epilogue"))
        epilogue(signals.of("epilogue"), problem, Store(*(*store, shared_o)))
    first, last = plan.role("softmax0a"), plan.role(f"softmax{spec.q_tiles - 1}b")
    if has_role(warp, first, last):
        take_registers(plan, first)
        number = (warp - first.warps[0]) // len(first.warps)
        # Words of their own: found from the warp's number they cost instructions in every step.
        half = cute.arch.make_warp_uniform(number % len(GROUPS))
        i = cute.arch.make_warp_uniform(number // len(GROUPS)) if spec.q_tiles > 1 else 0
        output = Output(
            i=i,
            half=half,
            column=column_of(spec, "o", i) + half * (padded_dim(spec.head_dim_v) // 2),
            cols=padded_dim(spec.head_dim_v) // 2,
            shared=shared_o,
            scale_log2=scale_log2,
            lse=lse,
            sink=sink,
        )
        rows = Half(
            i=i,
            half=half,
            s=column_of_half(spec, "s", i, half),
            p=column_of_half(spec, "p", i, half),
            keys=spec.pipeline.piece,
            split=spec.pipeline.split_columns,
            own=row_places(spec, memory, i, half),
            other=row_places(spec, memory, i, 1 - half),
            scale_log2=scale_log2,
            num_tiles=problem.num_tiles,
            mods=Mods(spec, score_scale, aux),
            output=output,
        )
        softmax(signals.of("softmax#@").numbered(i, half), problem, rows)

    for idle, registers in plan.idle_warps.items():
        if warp == idle:
            cute.arch.setmaxregister_decrease(registers)

    close_down(signals, warp)


def parts_of_p(spec: HalvesSpec) -> tuple[PartOfP, ...]:
    """The halves one after the other, each in what is stored first, and the rest."""
    plan, piece, split = spec.plan, spec.pipeline.piece, spec.pipeline.split_columns
    parts = []
    for number, group in enumerate(GROUPS):
        column = plan.buffer(f"p0{group}").start - plan.buffer("p0a").start
        for name, first, stop in (("full", 0, split), ("last", split, piece)):
            start, end = (number * piece + n for n in (first, stop))
            place = column + first // 2
            parts.append(PartOfP(f"p#{group}_{name}", start // MMA_DEPTH, end // MMA_DEPTH, place))
    return tuple(part for part in parts if part.start < part.stop)


def column_of(spec: HalvesSpec, name: str, i: Int32 | int) -> Int32 | int:
    """The first in tensor memory of what the plan calls `name` with a Q tile's number."""
    starts = [spec.plan.buffer(f"{name}{j}").start for j in range(spec.q_tiles)]
    return starts[0] + (starts[-1] - starts[0]) * i


def column_of_half(spec: HalvesSpec, name: str, i: Int32 | int, half: Int32) -> Int32:
    """The same with the letter of a half behind the number."""
    a, b = (spec.plan.buffer(f"{name}0{group}").start for group in GROUPS)
    later = spec.plan.buffer(f"{name}{spec.q_tiles - 1}a").start
    return a + (later - a) * i + (b - a) * half


def row_places(spec: HalvesSpec, memory: cute.Pointer, i: Int32 | int, half: Int32) -> Int32:
    """Address in shared memory of what a half tells the other one."""
    buffers = [spec.plan.buffer(f"row_max{j}{g}") for j in range(spec.q_tiles) for g in GROUPS]
    pitch = buffers[1].start - buffers[0].start
    start = memory + buffers[0].start
    return Int32(start.toint()) + (i * len(GROUPS) + half) * pitch
