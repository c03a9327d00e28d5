"""The MMA warp: issues S = Q K^T and O += P V for two Q tiles in ping-pong.

While the softmax warps of one Q tile work on S, the tensor core runs the other tile's products:
PV0, QK0 of the next keys, PV1, QK1 of the next keys.

The whole warp runs the loop, and elects a thread for each product: then the compiler keeps
everything in uniform registers, where the tensor core wants it, and the election costs nothing.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa4.sm100.kit.descriptors import OperandTiles, descriptors, multiply, plus
from fa4.sm100.kit.ptx_block import PtxBlock
from fa4.sm100.kit.rings import advance
from fa4.sm100.kit.schedulers import first_tile, next_tile
from fa4.sm100.kit.signals import Signals
from fa4.sm100.kit.tiles import KernelProblem, locate
from fa4.sm100.kit.units import MMA_DEPTH


@dataclass(frozen=True)
class Products:
    """Operands of both products as the tensor core wants them.

    v, s, p, o: by Q tile; the last three are addresses in tensor memory.
    idesc_s, idesc_o: instruction descriptors (PTX ISA 9.7.16.4.2).
    split: steps of PV that may run before the last part of P is stored. cta_group: CTAs that take
    part; in both, operands and sums lie at the same addresses.
    """

    q: OperandTiles
    k: OperandTiles
    v: tuple
    idesc_s: cutlass.Constexpr
    idesc_o: cutlass.Constexpr
    s: tuple
    p: tuple
    o: tuple
    split: cutlass.Constexpr
    cta_group: cutlass.Constexpr


@cute.jit
def mma(signals: Signals, problem: KernelProblem, products: Products) -> None:
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
    code = PtxBlock()
    a = descriptors(code, q.stage(i), q.high, q.steps)
    b = descriptors(code, k.stage(slot), k.high, k.steps)
    sums = ["0"] + ["1"] * (len(b) - 1)
    multiply(code, products.s[i], a, b, products.idesc_s, sums, products.cta_group)
    signals.commit(f"s{i}_full")


def values(
    signals: Signals, products: Products, i: int, slot: Int32, use: Int32, accumulate: Boolean
) -> None:
    """O_i += P_i V (=, for a work tile's first keys); the last part of P is waited for apart."""
    v = products.v[i]
    v_low = v.stage(slot)
    parts = range(products.split), range(products.split, len(v.steps))
    for part, signal in zip(parts, (f"p{i}_full_o{i}_scaled", f"p{i}_last"), strict=True):
        if not part:
            continue
        signals.wait(signal, use)
        code = PtxBlock()
        p = code.read(products.p[i])
        a = [f"[{plus(code, p, step * (MMA_DEPTH // 2))}]" for step in part]
        b = descriptors(code, v_low, v.high, v.steps[part.start : part.stop])
        sums = ["1"] * len(b)
        if part.start == 0:
            sums[0] = code.read(Int32(accumulate))
        multiply(code, products.o[i], a, b, products.idesc_o, sums, products.cta_group)
