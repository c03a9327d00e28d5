"""The MMA warp: issues the five products of a query tile in the order that tensor memory allows.

    S dP dV | S' dK dQ dP' dV' ... | dK dQ

While the compute warps turn dP into dS the tensor core runs dV and the next S; while they turn
that S into P, it runs dK, dQ and the next dP.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa4.kit.descriptors import OperandTiles, constant_or_read, descriptors, multiply, plus
from fa4.kit.ptx_block import PtxBlock
from fa4.kit.rings import Ring
from fa4.kit.signals import Signals


@dataclass(frozen=True)
class TileProduct:
    """One product: where its operands and its sum lie.

    a: shared memory; or tensor memory, the first column and the offsets of its steps. b: shared
    memory. idesc: its instruction descriptor. sum: the first column of tensor memory.
    """

    a: OperandTiles | tuple[int, tuple[int, ...]]
    b: OperandTiles
    idesc: cutlass.Constexpr
    sum: int


@dataclass(frozen=True)
class BackwardProducts:
    """The five products of a query tile. dq_over_dp: dQ lies where the next dP will."""

    s: TileProduct
    dp: TileProduct
    dv: TileProduct
    dk: TileProduct
    dq: TileProduct
    dq_over_dp: cutlass.Constexpr
    cta_group: cutlass.Constexpr


@cute.jit
def mma(signals: Signals, trips: Int32, products: BackwardProducts) -> None:
    """Every product of the work tile."""
    early: cutlass.Constexpr = products.dq_over_dp
    ring, turn = signals.ring("q"), Ring.of(1)
    if trips > 0:
        _scores(signals, products, ring)
        _gradients(signals, products, turn, early)
        _values(signals, products, turn, False)
        for trip in cutlass.range(1, trips, unroll=1):
            following, zero = ring.next(), afresh(trip)
            _scores(signals, products, following, zero)
            signals.wait("ds_full", turn)
            _keys(signals, products, ring, trip > 1, zero)
            _queries(signals, products, turn, not early, zero)
            turn = turn.next()
            _gradients(signals, products, turn, early, zero)
            _values(signals, products, turn, True, zero)
            ring = following
        signals.commit("dv_full")
        signals.wait("ds_full", turn)
        _keys(signals, products, ring, trips > 1)
        signals.commit("dk_full")
        _queries(signals, products, turn, not early)


def _scores(signals: Signals, products: BackwardProducts, ring: Ring, zero: Any = 0) -> None:
    """S = K Q^T."""
    signals.wait("q_full", ring)
    issue(products, products.s, ring.slot, zero=zero)
    signals.commit("s_full")


def _gradients(
    signals: Signals, products: BackwardProducts, turn: Ring, drained: bool, zero: Any = 0
) -> None:
    """dP = V dO^T."""
    signals.wait("do_full", turn)
    if drained:
        signals.wait("dq_empty", turn)
    issue(products, products.dp, zero=zero)
    signals.commit("dp_full")


def _values(
    signals: Signals, products: BackwardProducts, turn: Ring, more: bool, zero: Any = 0
) -> None:
    """dV += P^T dO."""
    signals.wait("p_full", turn)
    issue(products, products.dv, more=more, zero=zero)
    signals.commit("do_empty")


def _keys(
    signals: Signals, products: BackwardProducts, ring: Ring, more: Boolean, zero: Any = 0
) -> None:
    """dK += dS^T Q."""
    issue(products, products.dk, ring.slot, more=more, zero=zero)
    signals.commit("q_empty", ring)


def _queries(
    signals: Signals, products: BackwardProducts, turn: Ring, drained: bool, zero: Any = 0
) -> None:
    """dQ = dS K."""
    if drained:
        signals.wait("dq_empty", turn)
    issue(products, products.dq, zero=zero)
    signals.commit("dq_full")


def issue(
    products: BackwardProducts,
    product: TileProduct,
    stage: Int32 | int = 0,
    more: Boolean | bool = False,
    zero: Any = 0,
) -> None:
    """One product, from a stage of B. more: it is added to the sum so far."""
    code = PtxBlock()
    b = descriptors(code, product.b.stage(stage) + zero, product.b.high, product.b.steps)
    if isinstance(product.a, OperandTiles):
        a = descriptors(code, product.a.low + zero, product.a.high, product.a.steps)
    else:
        first = constant_or_read(code, product.a[0] + zero)
        a = [f"[{plus(code, first, offset)}]" for offset in product.a[1]]
    sums = ["1"] * len(b)
    if more is not True:
        sums[0] = code.read(Int32(more)) if isinstance(more, Boolean) else "0"
    multiply(code, product.sum + zero, a, b, product.idesc, sums, products.cta_group)


def afresh(trip: Int32) -> Int32:
    """0, which the compiler does not know: added to what is constant over the loop.

    40 products have 80 words of descriptors. ptxas would compute them before the loop and then hold
    them in ordinary registers, from which each has to be moved where the tensor core wants it.
    """
    code = PtxBlock()
    return code.trace(code.do("shr.s32", code.read(trip), "31", kind="b32"))[0]
