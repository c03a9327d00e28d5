"""The MMA warp of a pair's leader: the five products of a query tile, for both CTAs.

    S dP dV | S' dK dP' dQ dV' ... | dK dQ

dQ lies over half of S: it waits until the next S is read, and the S after that until it is drained.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa4.kit.rings import Ring
from fa4.kit.signals import Signals
from fa4.sm100.backward.mma import BackwardProducts, afresh, issue


@cute.jit
def mma_pair(signals: Signals, trips: Int32, products: BackwardProducts) -> None:
    """Every product of the work tile. Of what is waited for, `turn` is the tile whose dQ is due."""
    turn, following = Ring.of(1), Ring.of(1)
    if trips > 0:
        signals.wait("q_full", turn)
        _scores(signals, products, 0)
        signals.wait("s_read", turn)
        _gradients(signals, products, turn, 0)
        _values(signals, products, turn, False, 0)
        for trip in cutlass.range(1, trips, unroll=1):
            following, zero = turn.next(), afresh(trip)
            signals.wait("q_full", following)
            signals.wait("dq_empty", turn)
            _scores(signals, products, zero)
            _keys(signals, products, turn, trip > 1, zero)
            _gradients(signals, products, following, zero)
            _queries(signals, products, turn, zero)
            _values(signals, products, following, True, zero)
            turn = following
        signals.commit("dv_full")
        _keys(signals, products, turn, trips > 1, 0)
        signals.commit("dk_full")
        signals.wait("dq_empty", turn)
        _queries(signals, products, turn, 0)


def _scores(signals: Signals, products: BackwardProducts, zero: Int32 | int) -> None:
    """S = K Q^T."""
    issue(products, products.s, zero=zero)
    signals.commit("s_full")
    signals.commit("q_empty")


def _gradients(signals: Signals, products: BackwardProducts, turn: Ring, zero: Int32 | int) -> None:
    """dP = V dO^T."""
    signals.wait("do_full", turn)
    issue(products, products.dp, zero=zero)
    signals.commit("dp_full")
    signals.commit("do_empty")


def _values(
    signals: Signals, products: BackwardProducts, turn: Ring, more: bool, zero: Int32 | int
) -> None:
    """dV += P^T dO."""
    signals.wait("do_t_full", turn)
    signals.wait("p_full", turn)
    issue(products, products.dv, more=more, zero=zero)
    signals.commit("do_t_empty")


def _keys(
    signals: Signals, products: BackwardProducts, turn: Ring, more: Boolean, zero: Int32 | int
) -> None:
    """dK += dS^T Q."""
    signals.wait("q_t_full", turn)
    signals.wait("ds_full", turn)
    issue(products, products.dk, more=more, zero=zero)
    signals.commit("q_t_empty")


def _queries(signals: Signals, products: BackwardProducts, turn: Ring, zero: Int32 | int) -> None:
    """dQ = dS K, once the S that was issued before is read and both CTAs have both parts of dS."""
    signals.wait("s_read", turn.next())
    signals.wait("ds_relayed", turn)
    issue(products, products.dq, zero=zero)
    signals.commit("dq_full")
    signals.commit("ds_empty")
