"""The MMA warp: issues S = Q K^T and O += P V for two Q tiles in ping-pong.

While the softmax warps of one Q tile work on S, the tensor core runs the other tile's products:
PV0, QK0 of the next keys, PV1, QK1 of the next keys.

The whole warp runs the loop, and elects a thread for each product: then the compiler keeps
everything in uniform registers, where the tensor core wants it, and the election costs nothing.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa4.kit.descriptors import OperandTiles, descriptors, multiply, plus
from fa4.kit.ptx_block import PtxBlock
from fa4.kit.rings import Ring
from fa4.kit.schedulers import first_tile, next_tile
from fa4.kit.signals import Signals
from fa4.kit.tiles import KernelProblem, locate
from fa4.kit.units import MMA_DEPTH


class PartOfP(NamedTuple):
    """Steps [start, stop) of PV, which run when `signal` says that their P is stored.

    column: of tensor memory, from the Q tile's first one of P, where theirs lies.
    """

    signal: str
    start: int
    stop: int
    column: int


@dataclass(frozen=True)
class Products:
    """Operands of both products as the tensor core wants them.

    v, s, p, o: by Q tile; the last three are addresses in tensor memory.
    idesc_s, idesc_o: instruction descriptors (PTX ISA 9.7.16.4.2). told: signals of S.
    parts: of P, in the order of their products. cta_group: CTAs that take part; in both, operands
    and sums lie at the same addresses.
    """

    q: OperandTiles
    k: OperandTiles
    v: tuple
    idesc_s: cutlass.Constexpr
    idesc_o: cutlass.Constexpr
    s: tuple
    p: tuple
    o: tuple
    told: cutlass.Constexpr
    parts: cutlass.Constexpr
    cta_group: cutlass.Constexpr


@cute.jit
def mma(signals: Signals, problem: KernelProblem, products: Products) -> None:
    """Every product of the work tiles of this CTA, or of its pair."""
    q_tiles: cutlass.Constexpr = problem.spec.numerics.q_tiles
    index = first_tile(problem)
    ring, tiles_done = signals.ring("kv"), Int32(0)
    turn = Ring.of(1)  # of P and O: a round per KV tile
    while index < problem.num_tiles:
        kv_tiles = locate(problem, index).kv_tiles
        for i in cutlass.range_constexpr(q_tiles):
            signals.numbered(i).wait("q#_full", tiles_done)
            if cutlass.const_expr(i == 0):
                signals.wait("kv_full", ring)
            scores(signals.numbered(i), products, i, ring)
        signals.commit("kv_empty", ring)
        ring = ring.next()
        for j in cutlass.range(1, kv_tiles, unroll=1):
            signals.wait("kv_full", ring)
            keys = ring.next()
            for i in cutlass.range_constexpr(q_tiles):
                values(signals.numbered(i), products, i, ring, turn, j > 1)
                if cutlass.const_expr(i == q_tiles - 1):
                    signals.commit("kv_empty", ring)
                if cutlass.const_expr(i == 0):
                    signals.wait("kv_full", keys)
                scores(signals.numbered(i), products, i, keys)
            signals.commit("kv_empty", keys)
            turn = turn.next()
            ring = keys.next()
        for i in cutlass.range_constexpr(q_tiles):
            signals.numbered(i).commit("q#_empty")
        signals.wait("kv_full", ring)
        for i in cutlass.range_constexpr(q_tiles):
            values(signals.numbered(i), products, i, ring, turn, kv_tiles > 1)
            signals.numbered(i).commit("o#_full")
        signals.commit("kv_empty", ring)
        turn = turn.next()
        ring = ring.next()
        index = next_tile(signals, problem, index, tiles_done)
        tiles_done += 1


def scores(signals: Signals, products: Products, i: int, keys: Ring) -> None:
    """S_i = Q_i K^T from a slot of the ring, and tell the softmax warps when it is there."""
    q, k = products.q, products.k
    code = PtxBlock()
    a = descriptors(code, q.stage(i), q.high, q.steps)
    b = descriptors(code, k.stage(keys.slot), k.high, k.steps)
    sums = ["0"] + ["1"] * (len(b) - 1)
    multiply(code, products.s[i], a, b, products.idesc_s, sums, products.cta_group)
    for name in products.told:
        signals.commit(name)


def values(
    signals: Signals, products: Products, i: int, slot: Ring, turn: Ring, accumulate: Boolean
) -> None:
    """O_i += P_i V (=, for a work tile's first keys); each part of P is waited for."""
    v = products.v[i]
    v_low = v.stage(slot.slot)
    for part in products.parts:
        signals.wait(part.signal, turn)
        code = PtxBlock()
        p = code.read(products.p[i])
        columns = [part.column + n * (MMA_DEPTH // 2) for n in range(part.stop - part.start)]
        a = [f"[{plus(code, p, column)}]" for column in columns]
        b = descriptors(code, v_low, v.high, v.steps[part.start : part.stop])
        sums = ["1"] * len(b)
        if part.start == 0:
            sums[0] = code.read(Int32(accumulate))
        multiply(code, products.o[i], a, b, products.idesc_o, sums, products.cta_group)
