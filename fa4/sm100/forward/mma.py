"""The MMA warp: issues S = Q K^T and O += P V for two Q tiles in ping-pong.

While the softmax warps of one Q tile work on S, the tensor core runs the other tile's products:
PV0, QK0 of the next keys, PV1, QK1 of the next keys.

The whole warp runs the loop, and elects a thread for each instruction: then the compiler keeps
everything in uniform registers, where the tensor core wants it, and the election costs nothing.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa4.sm100.forward.context import Signals
from fa4.sm100.forward.load import advance, stage_offset
from fa4.sm100.forward.spec import MMA_DEPTH
from fa4.sm100.forward.tiles import Problem, first_tile, locate, next_tile


@dataclass(frozen=True)
class Tiles:
    """Shared-memory descriptors of an operand's tiles (PTX ISA 9.7.16.4.1), in 16-byte units.

    low, high: words of the first stage's. steps: offsets of the steps of 16 along K. pitch, shift:
    from one stage to the next, and what stage 1 lies off.
    """

    low: Int32
    high: Int32
    steps: cutlass.Constexpr
    pitch: cutlass.Constexpr
    shift: cutlass.Constexpr

    def stage(self, number: Int32 | int) -> Int32:
        """The low word of a stage's first step."""
        return self.low + stage_offset(number, self.pitch, self.shift)


@dataclass(frozen=True)
class Products:
    """Operands of both products as the tensor core wants them.

    v, s, p, o: by Q tile; the last three are addresses in tensor memory.
    idesc_s, idesc_o: instruction descriptors (PTX ISA 9.7.16.4.2).
    split: steps of PV that may run before the last part of P is stored. cta_group: CTAs that take
    part; in both, operands and sums lie at the same addresses.
    """

    q: Tiles
    k: Tiles
    v: tuple
    idesc_s: cutlass.Constexpr
    idesc_o: cutlass.Constexpr
    s: tuple
    p: tuple
    o: tuple
    split: cutlass.Constexpr
    cta_group: cutlass.Constexpr


@cute.jit
def mma(signals: Signals, problem: Problem, products: Products) -> None:
    """Every product of the work tiles of this CTA, or of its pair."""
    q_tiles: cutlass.Constexpr = problem.spec.numerics.q_tiles
    stages: cutlass.Constexpr = signals.plan.signal("kv_full").stages
    index = first_tile(problem)
    slot, lap, tiles_done, uses = Int32(0), Int32(0), Int32(0), Int32(0)
    while index < problem.num_tiles:
        kv_tiles = locate(problem, index).kv_tiles
        for i in cutlass.range_constexpr(q_tiles):
            signals.wait(f"q{i}_full", tiles_done)
            if cutlass.const_expr(i == 0):
                signals.wait("kv_full", lap, slot)
            scores(signals, products, i, slot)
        signals.commit("kv_empty", slot)
        slot, lap = advance(slot, lap, stages)
        for j in cutlass.range(1, kv_tiles, unroll=1):
            signals.wait("kv_full", lap, slot)
            next_slot, next_lap = advance(slot, lap, stages)
            for i in cutlass.range_constexpr(q_tiles):
                values(signals, products, i, slot, uses, j > 1)
                if cutlass.const_expr(i == q_tiles - 1):
                    signals.commit("kv_empty", slot)
                if cutlass.const_expr(i == 0):
                    signals.wait("kv_full", next_lap, next_slot)
                scores(signals, products, i, next_slot)
            signals.commit("kv_empty", next_slot)
            uses ^= 1
            slot, lap = advance(next_slot, next_lap, stages)
        for i in cutlass.range_constexpr(q_tiles):
            signals.commit(f"q{i}_empty")
        signals.wait("kv_full", lap, slot)
        for i in cutlass.range_constexpr(q_tiles):
            values(signals, products, i, slot, uses, kv_tiles > 1)
            signals.commit(f"o{i}_full")
        signals.commit("kv_empty", slot)
        uses ^= 1
        slot, lap = advance(slot, lap, stages)
        index = next_tile(signals, problem, index, tiles_done)
        tiles_done += 1


def scores(signals: Signals, products: Products, i: int, slot: Int32) -> None:
    """S_i = Q_i K^T from a slot of the ring, and tell softmax i when it is there."""
    q, k = products.q, products.k
    q_low, k_low = q.stage(i), k.stage(slot)
    for step, (q_step, k_step) in enumerate(zip(q.steps, k.steps, strict=True)):
        _multiply_shared(
            products.s[i],
            (q_low + q_step, q.high),
            (k_low + k_step, k.high),
            products.idesc_s,
            Int32(step > 0),
            products.cta_group,
        )
    signals.commit(f"s{i}_full")


def values(
    signals: Signals, products: Products, i: int, slot: Int32, use: Int32, accumulate: Boolean
) -> None:
    """O_i += P_i V (=, for a work tile's first keys); the last part of P is waited for apart."""
    v = products.v[i]
    v_low = v.stage(slot)
    signals.wait(f"p{i}_full_o{i}_scaled", use)
    for step, v_step in enumerate(v.steps):
        if step == products.split:
            signals.wait(f"p{i}_last", use)
        _multiply_tensor(
            products.o[i],
            products.p[i] + step * (MMA_DEPTH // 2),
            (v_low + v_step, v.high),
            products.idesc_o,
            Int32(accumulate) if step == 0 else Int32(1),
            products.cta_group,
        )


def _multiply_shared(
    target: Int32, a: tuple, b: tuple, idesc: int, accumulate: Int32, cta_group: int
) -> None:
    """tcgen05.mma with A and B in shared memory (PTX ISA 9.7.16.10.9.1)."""
    cute.arch.inline_ptx(
        "{\n.reg .pred e, p;\n.reg .b32 d, i;\n.reg .b64 a, b;\nelect.sync _|e, -1;\n"
        "setp.ne.b32 p, {$r6}, 0;\nmov.b32 d, {$r0};\nmov.b32 i, {$r5};\n"
        "mov.b64 a, {{$r1}, {$r2}};\nmov.b64 b, {{$r3}, {$r4}};\n"
        f"@e tcgen05.mma.cta_group::{cta_group}.kind::f16 [d], a, b, i, p;\n}}",
        read_only_args=[
            Int32(target),
            a[0],
            Int32(a[1]),
            b[0],
            Int32(b[1]),
            Int32(idesc),
            accumulate,
        ],
    )


def _multiply_tensor(
    target: Int32, a: Int32, b: tuple, idesc: int, accumulate: Int32, cta_group: int
) -> None:
    """tcgen05.mma with A in tensor memory."""
    cute.arch.inline_ptx(
        "{\n.reg .pred e, p;\n.reg .b32 d, a, i;\n.reg .b64 b;\nelect.sync _|e, -1;\n"
        "setp.ne.b32 p, {$r5}, 0;\nmov.b32 d, {$r0};\nmov.b32 a, {$r1};\nmov.b32 i, {$r4};\n"
        "mov.b64 b, {{$r2}, {$r3}};\n"
        f"@e tcgen05.mma.cta_group::{cta_group}.kind::f16 [d], [a], b, i, p;\n}}",
        read_only_args=[Int32(target), Int32(a), b[0], Int32(b[1]), Int32(idesc), accumulate],
    )
